"""Checkpoints: the model folder of a run, from which the same trajectory goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import shutil
import struct
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata, planner, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from distcache.comm.link import on_first, together
from distcache.comm.world import World
from distcache.errors import ConfigError, DataError, DistcacheError
from distcache.layout import TableSpec
from distcache.parallel.base import Parallel
from distcache.trainer.schedule import Phase

# -----------------------------------------------------------------------------
# Whether all nodes see one and the same folder, as checkpoints and traces need it.

logger = logging.getLogger(__name__)

PATIENCE_S, _POLL_S = 5.0, 0.1
"""How long a network file system may take to show another node's file, seconds; between looks."""


def blind_ranks(world: World, folder: Path) -> list[int]:
    """The first ranks of the nodes that do not see what rank 0 writes into `folder`, which is
    there; called by all ranks. None on one node."""
    if world.nodes.count == 1:
        return []
    name = f".shared-{on_first(world, lambda: uuid.uuid4().hex)}"
    on_first(world, (folder / name).touch)

    def sees() -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / name).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    seen = together(world, lambda: world.local_rank > 0 or sees())
    on_first(world, lambda: (folder / name).unlink(missing_ok=True))
    return [rank for rank, found in enumerate(seen) if not found]


def check_run_folder(world: World, folder: Path, needed_by: str | None) -> None:
    """Refuse a run folder that is not the same on all nodes where `needed_by` (a key) needs that.

    Else a warning says what will not work. Called by all ranks, once rank 0 has made the folder.
    Raises ConfigError.
    """
    blind = blind_ranks(world, folder)
    if not blind:
        return
    where = (
        f"run.dir={folder} is not the same folder on the node(s) of ranks {blind} as on rank 0's"
    )
    if needed_by is not None:
        raise ConfigError(
            f"{where}, and {needed_by} has all nodes write there: name a folder that all nodes "
            "share (NFS, Lustre ...), the same path on each"
        )
    if world.is_first:
        logger.warning("%s: nothing can be saved should this run be stopped", where)


# -----------------------------------------------------------------------------
# Planners for `torch.distributed.checkpoint`: big tensors in blocks, nothing left unread.

BLOCK_BYTES = 64 << 20
"""About how many bytes one block of a table has in a checkpoint."""


class BlockSavePlanner(DefaultSavePlanner):
    """Writes plain tensors in blocks of rows.

    A table that several ranks hold (shared memory, or copies) is one set of blocks, each written
    once by one of them, so that the ranks share even a single table evenly. The storage layer
    copies a view before it writes it, and reads a stored piece whole: blocks bound both to
    `block_bytes`, where a whole table would be in memory twice.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__()
        self.block_bytes = block_bytes

    def create_local_plan(self) -> planner.SavePlan:
        """The default plan with every big plain tensor split into blocks."""
        plan = super().create_local_plan()
        items = [block for item in plan.items for block in split(item, self.block_bytes)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: planner.WriteItem) -> torch.Tensor | io.BytesIO:
        """The rows of one block, or what the default planner says."""
        value, data = self.state_dict[write_item.index.fqn], write_item.tensor_data
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)  # no DTensor, no ShardedTensor
        if data is None or write_item.type is not planner.WriteItemType.SHARD or not plain:
            return super().resolve_data(write_item)
        return value.detach().narrow(0, data.chunk.offsets[0], data.chunk.sizes[0])


def split(item: planner.WriteItem, block_bytes: int) -> Iterator[planner.WriteItem]:
    """The blocks of an item of a plan; the item itself unless it is a plain tensor beyond one."""
    data = item.tensor_data
    plain = item.type is planner.WriteItemType.TENSOR and data is not None
    count, *rest = data.size if plain and data.size else (0,)
    row_bytes = torch.Size(rest).numel() * data.properties.dtype.itemsize if count else 1
    step = max(1, block_bytes // max(row_bytes, 1))
    if step >= count:
        yield item
        return
    for start in range(0, count, step):
        offsets = torch.Size([start, *[0] * len(rest)])
        sizes = torch.Size([min(step, count - start), *rest])
        chunk = metadata.ChunkStorageMetadata(offsets, sizes)
        yield planner.WriteItem(
            index=metadata.MetadataIndex(item.index.fqn, offsets),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(chunk, data.properties, data.size),
        )


class CompleteLoadPlanner(DefaultLoadPlanner):
    """Refuses to load when the checkpoint holds a value that no rank asks for, but its header.

    The default planner refuses the reverse, a value asked for that is not there. Ranks may ask
    for different values: those that share memory need to read it only once.
    """

    def create_global_plan(self, global_plan: list[planner.LoadPlan]) -> list[planner.LoadPlan]:
        """Raises ConfigError naming what would be left unread."""
        wanted = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        stored = self.metadata.state_dict_metadata if self.metadata else {}
        unread = sorted(
            name
            for name, value in stored.items()
            if name not in wanted | {TRAINER_KEY}
            and not (isinstance(value, metadata.TensorStorageMetadata) and value.size.numel() == 0)
        )
        if unread:
            more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
            raise ConfigError(
                f"the checkpoint holds values that this run does not have: {', '.join(unread[:5])}"
                f"{more}; resume with the settings it was made with"
            )
        return super().create_global_plan(global_plan)


# -----------------------------------------------------------------------------
# Digests that tell whether two runs have the same bits.

DIGEST_BLOCK_BYTES = 16 << 20
"""About how many bytes of a table are read and hashed at a time."""

BEAT_BYTES = 1 << 30
"""After so many bytes the ranks meet, so that none waits for rank 0 longer than its timeout."""

AUTO_BYTES = 4 << 30
"""`run.digest=auto` hashes the state when all tables together have at most this many bytes."""


def chain_loss(previous: bytes, loss: float) -> bytes:
    """d(t) = SHA-256(d(t-1), bits of the loss as little-endian float64); d before step 0 is empty.

    Chained, so that one digest speaks for every loss up to its step.
    """
    return hashlib.sha256(previous + struct.pack("<d", loss)).digest()


def wants_state_digest(choice: str, tables: Sequence[TableSpec], dtype: torch.dtype) -> bool:
    """Whether `run.digest` (`true`, `false` or `auto`) asks for the state digest."""
    if choice.lower() != "auto":
        return choice.lower() == "true"
    return sum(table.rows * table.dim for table in tables) * dtype.itemsize <= AUTO_BYTES


def state_digest(
    mode: Parallel, tables: Sequence[TableSpec], dtype: torch.dtype, world: World
) -> str:
    """SHA-256 over every table's weights in original id order, then the dense parameters in order.

    Hashed are the values' bytes in `dtype`, row after row; nothing else. Call after `flush`, on
    all ranks; every rank gets the hexadecimal digest.
    """
    sha, hashed = hashlib.sha256(), 0

    def update(values: Tensor) -> None:
        sha.update(values.detach().to("cpu", dtype).reshape(-1).contiguous().numpy().data)

    for index, table in enumerate(tables):
        rows = max(1, DIGEST_BLOCK_BYTES // (table.dim * dtype.itemsize))
        for start in range(0, table.rows, rows):
            block = mode.table_block(index, start, min(start + rows, table.rows))
            hashed += rows * table.dim * dtype.itemsize
            if hashed >= BEAT_BYTES:
                dist.barrier(group=world.host_group)
                hashed = 0
            if world.is_first:
                if block is None:
                    raise DistcacheError(f"rank 0 got no rows of table {table.name!r} to hash")
                update(block)
    for parameter in mode.dense_state().values():
        if world.is_first:
            update(parameter)
    return on_first(world, sha.hexdigest)


# -----------------------------------------------------------------------------
# Checkpoints: the model folder of a run, from which the same trajectory goes on.
#
# A checkpoint is complete or not there: ranks write into `model.partial/`, which takes the place of
# `model/` when all of them are done; an older `model/` stays until then.

FORMAT = 2
"""Version of what a checkpoint holds."""

SLOWEST_BYTES_PER_S = 20 << 20
"""A rank that reads or writes its files slower than this is taken for one that hangs."""

CHECKSUMS = "checksums.json"
"""Beside a checkpoint's files: the bytes and SHA-256 of each, by name."""

TRAINER_KEY = "trainer"
"""Name, beside the mode's values, of the JSON text with `RunIdentity` and `TrainerState`."""

ONE_FORMAT = frozenset({"data", "resident", "host"})
"""Modes that write the same values and so read one another's checkpoints."""


@dataclass(frozen=True)
class RunIdentity:
    """What a checkpoint and the run that resumes it have in common.

    `tables`: (name, rows, dim) of each; `steps_per_epoch`: training steps of an epoch, or None;
    `data`: the pairs of the source's `identity`, sorted.
    """

    mode: str
    world_size: int
    dtype: str
    optimizer: str
    seed: int
    global_batch_size: int
    steps_per_epoch: int | None
    tables: tuple[tuple[str, int, int], ...]
    data: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TrainerState:
    """Where training stands: `step` steps are done; `loss_digest` chains their losses; `phase`:
    among hot and cold batches, where these come apart."""

    step: int = 0
    loss_digest: bytes = b""
    phase: Phase | None = None


KEYS = {
    "mode": "parallel.mode",
    "world_size": "torchrun --nproc-per-node",
    "dtype": "trainer.dtype",
    "optimizer": "optim",
    "seed": "trainer.seed",
    "global_batch_size": "data.global_batch_size",
}
"""Where a user sets each field of `RunIdentity`."""


def save(
    folder: Path,
    mode: Parallel,
    identity: RunIdentity,
    state: TrainerState,
    world: World,
    extra: Mapping[str, bytes] | None = None,
) -> None:
    """Write the whole state of a run to `folder`; all ranks call this, after `mode.flush()`.

    `extra`: values of this rank alone, under names that no other rank has.

    Raises DistcacheError when a rank cannot write; an older checkpoint is then still in place.
    """
    on_first(world, lambda: folder.parent.mkdir(parents=True, exist_ok=True))
    if blind := blind_ranks(world, folder.parent):  # before anything is written there
        raise DistcacheError(
            f"not saved: {folder.parent} is not the same folder on the node(s) of ranks {blind} as "
            "on rank 0's; set run.dir to one that all nodes share"
        )
    started = time.monotonic()
    values = mode.state_dict()
    header = {"format": FORMAT, "run": dataclasses.asdict(identity), "step": state.step}
    header |= {"loss_digest": state.loss_digest.hex(), "phase": state.phase and vars(state.phase)}
    values[TRAINER_KEY] = json.dumps(header)
    values.update(extra or {})
    partial = folder.with_name(folder.name + ".partial")
    on_first(world, lambda: make_room(folder, partial))
    with file_group(world, identity, f"the checkpoint {folder} could not be written") as group:
        writer, blocks = FileSystemWriter(partial), BlockSavePlanner()
        state_dict_saver.save(values, storage_writer=writer, planner=blocks, process_group=group)
        found = file_digests(partial, files_of(partial), world, group)
        on_first(world, lambda: (partial / CHECKSUMS).write_text(json.dumps(found, indent=1)))
    on_first(world, lambda: swap(folder, partial))
    if world.is_first:
        took = time.monotonic() - started
        logger.info("checkpoint at step %s: %s, in %.1f s", f"{state.step:,}", folder, took)


def compare(
    path: Path, identity: RunIdentity, world: World, same_data: bool = True
) -> TrainerState:
    """The state of training under `path` (a run folder, or its `model/`), every file verified and
    its run compared with `identity`; all ranks call this, before they make tables.

    `same_data`: whether the data must be those of the checkpoint; where they need not be, a warning
    says what differs. Raises ConfigError where there is no checkpoint or it is one of another run,
    naming both values, and DataError where a file of it is damaged.
    """
    folder = find(path)
    header: dict[str, Any] = {TRAINER_KEY: ""}
    with file_group(world, identity, f"the checkpoint {folder} cannot be read") as group:
        verify_files(folder, world, group)
        reader = FileSystemReader(folder)
        state_dict_loader.load(header, storage_reader=reader, process_group=group)
    saved = json.loads(header[TRAINER_KEY])
    check(folder, saved, identity)
    other = other_data(saved["run"], identity)
    if other and same_data:
        raise ConfigError(
            f"{folder} is a checkpoint of training on other data: {other}. Give the data it was "
            "made with; if other data are meant, set trainer.resume_data=any, which goes on at the "
            "same step of these"
        )
    if other and world.is_first:
        logger.warning("resuming on other data than those of %s: %s", folder, other)
    # The phase is one of these data; checkpoints of older versions have none.
    phase = None if other else saved.get("phase")
    digest = bytes.fromhex(saved["loss_digest"])
    return TrainerState(saved["step"], digest, Phase(**phase) if phase else None)


def load(
    path: Path,
    mode: Parallel,
    identity: RunIdentity,
    world: World,
    state: TrainerState,
    extra: dict[str, bytes] | None = None,
) -> None:
    """Put the checkpoint under `path`, of which `compare` has returned `state`, into `mode`; all
    ranks call this.

    `extra`: names of values of this rank alone, which are put there. Raises ConfigError for values
    that one of checkpoint and run does not have, before anything is changed.
    """
    folder = find(path)
    values = mode.blank_state() | (extra or {})
    with file_group(world, identity, f"the checkpoint {folder} does not fit this run") as group:
        reader, whole = FileSystemReader(folder), CompleteLoadPlanner()
        state_dict_loader.load(values, storage_reader=reader, planner=whole, process_group=group)
    if extra is not None:
        extra.update({name: values.pop(name) for name in extra})
    mode.load_state_dict(values)
    if world.is_first:
        logger.info("resuming at step %s from %s", f"{state.step:,}", folder)


def files_of(folder: Path) -> list[str]:
    """The names of a checkpoint's files, but for that of their checksums, sorted."""
    return sorted(e.name for e in folder.iterdir() if e.is_file() and e.name != CHECKSUMS)


def file_digests(
    folder: Path, names: Sequence[str], world: World, group: dist.ProcessGroup
) -> dict[str, tuple[int, str]]:
    """(bytes, hexadecimal SHA-256) of the files `names` of `folder`; called by all ranks, which
    share the reading. Raises DistcacheError on all of them for a file that cannot be read."""
    mine: dict[str, tuple[int, str]] = {}
    failure = ""
    try:
        for name in names[world.rank :: world.size]:
            with open(folder / name, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                mine[name] = (file.tell(), digest)
    except OSError as error:
        failure = f"rank {world.rank} cannot read the checkpoint's file {name}: {error}"
    parts: list[Any] = [None] * world.size
    dist.all_gather_object(parts, (mine, failure), group=group)
    if failures := [said for _, said in parts if said]:
        raise DistcacheError(failures[0])
    return {name: value for found, _ in parts for name, value in found.items()}


def verify_files(folder: Path, world: World, group: dist.ProcessGroup) -> None:
    """Raise DataError naming the files of a checkpoint that are not as they were written.

    Called by all ranks, which share the reading. A checkpoint of an older version has no
    checksums: one warning.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        if world.is_first:
            logger.warning("%s has no %s: its files are taken as they are", folder, CHECKSUMS)
        return
    way_out = "resume from another checkpoint, or from a copy of this one"
    try:
        written = {name: (size, sha) for name, (size, sha) in json.loads(path.read_text()).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}): {way_out}") from error
    missing = sorted(name for name in written if not (folder / name).is_file())
    if missing:
        raise DataError(
            f"the checkpoint {folder} lacks {missing[0]}, which {CHECKSUMS} lists: {way_out}"
        )
    found = file_digests(folder, sorted(written), world, group)
    wrong = [name for name in sorted(written) if tuple(found[name]) != written[name]]
    if wrong:
        raise DataError(
            f"the checkpoint {folder} is damaged: {', '.join(wrong)} (of {len(written)} files) "
            f"not as written, by size or checksum in {CHECKSUMS}: {way_out}"
        )


@contextmanager
def file_group(world: World, identity: RunIdentity, fails: str) -> Iterator[dist.ProcessGroup]:
    """A CPU group for the time of reading or writing files, whose patience grows with the tables.

    The ranks wait for the slowest disk, which takes longer than `trainer.timeout_s` for large
    tables; a rank that dies is noticed at once all the same. What fails on the first rank is raised
    on all as an error of this package, which begins with `fails`.
    """
    elements = sum(rows * dim for _, rows, dim in identity.tables)
    largest = 3 * 8 * elements  # Adam: weight and two moments, float64
    patience = timedelta(seconds=world.timeout_s + largest / SLOWEST_BYTES_PER_S)
    group: Any = dist.new_group(backend="gloo", timeout=patience)
    try:
        yield group
    except CheckpointException as error:  # which is no `Exception`
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        kind = type(cause) if isinstance(cause, DistcacheError) else DistcacheError
        raise kind(f"{fails}: rank {rank}: {cause}") from error
    finally:
        dist.destroy_process_group(group)


def check(folder: Path, header: Mapping[str, Any], identity: RunIdentity) -> None:
    """Raise ConfigError where a checkpoint, by its header, does not belong to this run."""
    if header["format"] != FORMAT:
        raise ConfigError(
            f"{folder} has checkpoint format {header['format']}, this version reads {FORMAT}: "
            "resume with the version that wrote it"
        )
    saved, wrong = header["run"], []
    for name, key in KEYS.items():
        was, now = saved[name], getattr(identity, name)
        if was != now and not (name == "mode" and {was, now} <= ONE_FORMAT):
            wrong.append(f"{key} was {was}, is {now}")
    before, after = [tuple(table) for table in saved["tables"]], list(identity.tables)
    if len(before) != len(after):
        wrong.append(f"the number of tables was {len(before)}, is {len(after)}")
    elif before != after:
        old, new = next(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
        wrong.append("a table was {} with {} rows x {}, is {} with {} rows x {}".format(*old, *new))
    if wrong:
        raise ConfigError(
            f"{folder} is a checkpoint of another run: {'; '.join(wrong)}. Set what it was made "
            "with, or leave trainer.resume out"
        )


def other_data(saved: Mapping[str, Any], identity: RunIdentity) -> str:
    """In words, how the data of the `saved` run differ from those of `identity`; empty if they do
    not."""
    epoch = "steps of an epoch (data.samples, data.path)"
    was = dict(map(tuple, saved["data"])) | {epoch: saved["steps_per_epoch"]}
    now = dict(identity.data) | {epoch: identity.steps_per_epoch}
    differ = [key for key in was | now if was.get(key) != now.get(key)]
    shown = ((key, was.get(key, "not set"), now.get(key, "not set")) for key in differ)
    return "; ".join(f"{key} was {old}, is {new}" for key, old, new in shown)


def find(path: Path) -> Path:
    """The checkpoint folder that `path` is or holds."""
    for folder in (path, path / "model", path / "model.old", path.with_name(path.name + ".old")):
        if (folder / ".metadata").is_file():
            return folder
    if not path.exists():
        raise ConfigError(f"trainer.resume={path}: there is no such folder")
    found = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else ["a file"]
    raise ConfigError(
        f"trainer.resume={path} holds no complete checkpoint (found: "
        f"{', '.join(found[:8]) or 'nothing'}); give a run folder, or its model/"
    )


def make_room(folder: Path, partial: Path) -> None:
    """Remove an unfinished checkpoint, and finish a swap that was cut short."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    old = folder.with_name(folder.name + ".old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def swap(folder: Path, partial: Path) -> None:
    """Put the complete `partial` in the place of `folder`.

    Between the two renames the older checkpoint is `model.old/`, which `find` knows.
    """
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
