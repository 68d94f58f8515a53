"""Checkpoints: a folder for a step of a run, from which the same trajectory goes on."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import struct
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata, planner, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from distcache.comm.link import Waiting, on_first, together
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.engine.whole import CHANGED, ChangedRows, Snapshot
from distcache.errors import ConfigError, DataError, DistcacheError
from distcache.layout import TableSpec
from distcache.parallel.base import Parallel
from distcache.popularity.hot_cold import Phase
from distcache.trainer.manifest import (
    FORMAT,
    MANIFEST,
    METADATA,
    TABLES,
    BlockReader,
    BlockWriter,
    Manifest,
    as_bytes,
)

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
# How `torch.distributed.checkpoint` writes: big tensors in blocks.

BLOCK_BYTES = 16 << 20
"""About how many bytes one block of a table has in a checkpoint: few enough that the allocator
keeps their memory from one to the next (glibc: below 32 MiB), for fresh pages cost as much as the
checksum."""

_REST = 4.0
"""Beside training a block that took t seconds of a core is followed by so many times t of rest: it
shares caches and memory with training, also where a core is free for it."""


_PLAIN = (Tensor, torch.nn.Parameter, ChangedRows)
"""What is written in blocks: no DTensor, no ShardedTensor."""


class BlockSavePlanner(DefaultSavePlanner):
    """Writes plain tensors in blocks of rows.

    A table that several ranks hold (shared memory, or copies) is one set of blocks, each written
    once by one of them, so that the ranks share even a single table evenly. The storage layer
    copies a view before it writes it, and reads a stored piece whole: blocks bound both to
    `BLOCK_BYTES`, where a whole table would be in memory twice.
    """

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        """By the thread that writes; `snapshot`: where tables are read, that go on changing."""
        super().__init__()
        self._snapshot, self._used = snapshot, time.thread_time()

    def create_local_plan(self) -> planner.SavePlan:
        """The default plan with every big plain tensor split into blocks."""
        plan, items = super().create_local_plan(), list[planner.WriteItem]()
        for item in plan.items:
            is_plain = type(self.state_dict[item.index.fqn]) in _PLAIN
            items += split(item, BLOCK_BYTES) if is_plain else [item]
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: planner.WriteItem) -> Any:
        """The rows of one block, or what the default planner says."""
        name, data = write_item.index.fqn, write_item.tensor_data
        value, of = self.state_dict[name], name if name.startswith(TABLES) else None
        if type(value) not in _PLAIN or data is None or not data.chunk.sizes:
            return super().resolve_data(write_item)
        start, count = data.chunk.offsets[0], data.chunk.sizes[0]
        if isinstance(value, ChangedRows):
            of, ids = value.of, value.ids[start - value.first :][:count]
            value = value.read(ids)
        else:
            ids, value = np.arange(start, start + count), value.detach().narrow(0, start, count)
        if self._snapshot is None or of is None:
            return value
        self._snapshot.hurry.wait(_REST * (time.thread_time() - self._used))
        self._used = time.thread_time()
        return self._snapshot.block(of, ids, value)


def split(item: planner.WriteItem, block_bytes: int) -> Iterator[planner.WriteItem]:
    """The blocks of a tensor's item of a plan; the item itself where it is no more than one."""
    data = item.tensor_data
    count, *rest = data.chunk.sizes if data is not None and data.chunk.sizes else (0,)
    row_bytes = torch.Size(rest).numel() * data.properties.dtype.itemsize if count else 1
    step = max(1, block_bytes // max(row_bytes, 1))
    if step >= count:
        yield item
        return
    for start in range(0, count, step):
        offsets = torch.Size([data.chunk.offsets[0] + start, *[0] * len(rest)])
        sizes = torch.Size([min(step, count - start), *rest])
        chunk = metadata.ChunkStorageMetadata(offsets, sizes)
        yield planner.WriteItem(
            index=metadata.MetadataIndex(item.index.fqn, offsets),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(chunk, data.properties, data.size),
        )


# -----------------------------------------------------------------------------
# Digests that tell whether two runs have the same bits.

AUTO_BYTES = 4 << 30
"""`run.digest=auto` hashes the state when all tables together have at most this many bytes."""


def chain_loss(previous: bytes, loss: float) -> bytes:
    """d(t) = SHA-256(d(t-1), bits of the loss as little-endian float64); d before step 0 is empty.

    Chained, so that one digest speaks for every loss up to its step.
    """
    return hashlib.sha256(previous + struct.pack("<d", loss)).digest()


_PENDING = 256
"""Losses that a chain leaves for later at most."""


class LossChain:
    """`chain_loss` over all losses so far; hashes many at once, not one between two steps."""

    def __init__(self, digest: bytes = b"") -> None:
        self._digest, self._pending = digest, list[float]()

    def add(self, loss: float) -> None:
        """Go on with the loss of one more step."""
        self._pending.append(loss)
        if len(self._pending) == _PENDING:
            self.digest()

    def digest(self) -> bytes:
        """That of all losses so far."""
        for loss in self._pending:
            self._digest = chain_loss(self._digest, loss)
        self._pending.clear()
        return self._digest


def state_digest(
    choice: str, mode: Parallel, tables: Sequence[TableSpec], dtype: torch.dtype, world: World
) -> str | None:
    """SHA-256 over every table's weights in original id order, then the dense parameters in order;
    None where `choice`, `run.digest` (`true`, `false` or `auto`), does not ask for it.

    Hashed are the values' bytes in `dtype`, row after row; nothing else. Call after `flush`, on
    all ranks; every rank gets the hexadecimal digest. `world`: of `file_world`.
    """
    whole = sum(table.rows * table.dim for table in tables) * dtype.itemsize
    if choice == "false" or (choice == "auto" and whole > AUTO_BYTES):
        return None
    sha = hashlib.sha256()

    def update(values: Tensor) -> None:
        sha.update(values.detach().to("cpu", dtype).reshape(-1).contiguous().numpy().data)

    for index, table in enumerate(tables):
        rows = max(1, BLOCK_BYTES // (table.dim * dtype.itemsize))
        for start in range(0, table.rows, rows):
            block = mode.table_block(index, start, min(start + rows, table.rows))
            if world.is_first:
                if block is None:
                    raise DistcacheError(f"rank 0 got no rows of table {table.name!r} to hash")
                update(block)
    for parameter in mode.dense_state().values():
        if world.is_first:
            update(parameter)
    return on_first(world, sha.hexdigest)


# -----------------------------------------------------------------------------
# What a checkpoint and the run that resumes it have in common.

SLOWEST_BYTES_PER_S = 20 << 20
"""A rank that reads or writes its files slower than this is taken for one that hangs."""

CHECKPOINTS = "checkpoints"
"""The folder of a run that has its checkpoints, each of them a folder `step_<steps done>`."""

ONE_FORMAT = frozenset({"data", "resident", "host"})
"""Modes that write the same values and so read one another's checkpoints."""

HYBRID_HAS = frozenset({"sgd", "adagrad", "rowwise_adagrad"})
"""Optimizers whose rows have the same state in `hybrid` as in the modes of `ONE_FORMAT`."""


Identity = Mapping[str, Any]
"""What a checkpoint and the run that resumes it have in common: what `KEYS` has, and

`tables`: (name, rows, dim) of each, and the dtype of weights that have one of their own;
`steps_per_epoch`: training steps of an epoch, or None;
`data`: the pairs of the source's `identity`, sorted.
"""

KEYS = {
    "mode": "parallel.mode",
    "world_size": "torchrun --nproc-per-node",
    "dtype": "trainer.dtype",
    "optimizer": "optim",
    "seed": "trainer.seed",
    "global_batch_size": "data.global_batch_size",
}
"""Where a user sets each of these."""


def most_bytes(identity: Identity) -> int:
    """Of all tables and their state, at most: Adam's in float64."""
    return sum(3 * 8 * rows * dim for _, rows, dim, *_ in identity["tables"])


@dataclass(frozen=True)
class TrainerState:
    """Where training stands: `step` steps are done; `loss_digest` chains their losses; `phase`:
    among hot and cold batches, where these come apart; `batch`: this rank's slice of the last of
    these steps, where this process ran it."""

    step: int = 0
    loss_digest: bytes = b""
    phase: Phase | None = None
    batch: Batch | None = field(default=None, compare=False)

    def header(self) -> dict[str, Any]:
        """The state as JSON values, for a manifest."""
        phase = self.phase and vars(self.phase)
        return {"step": self.step, "loss_digest": self.loss_digest.hex(), "phase": phase}


@dataclass(frozen=True)
class Start:
    """Where a run begins: at `state`, which the checkpoint in `folder` has; at the beginning where
    there is none."""

    state: TrainerState = TrainerState()
    folder: Path | None = None
    manifest: Manifest | None = None


@contextmanager
def file_world(world: World, nbytes: int) -> Iterator[World]:
    """`world` with a CPU group of its own for reading and writing files, of `nbytes` at most, also
    from another thread than the main one, whose patience grows with these; by all ranks.

    The ranks wait for the slowest disk, which takes longer than `trainer.timeout_s` for large
    tables; a rank that dies is noticed at once all the same.
    """
    if world.host_group is None:  # of a process alone
        yield world
        return
    patience = timedelta(seconds=world.timeout_s + nbytes / SLOWEST_BYTES_PER_S)
    ranks = dist.get_process_group_ranks(world.host_group)
    some = len(ranks) < dist.get_world_size()  # the others do not call this
    how: Any = {"timeout": patience, "use_local_synchronization": some}
    group: Any = dist.new_group(ranks, backend="gloo", **how)
    files = replace(world, host_group=group)
    together(files, lambda: None)  # a rank that leaves early would end those that still join
    try:
        yield files
    finally:
        dist.destroy_process_group(group)


@contextmanager
def _told(fails: str, world: World) -> Iterator[None]:
    """What fails on the first rank inside is raised on all as an error of this package, which
    begins with `fails`; PeerError where a rank went away."""
    try:
        yield
    except RuntimeError as error:  # of gloo: what a rank itself cannot do, DCP gathers
        raise Waiting(world, "the host group", "a checkpoint's files").explain(error) from error
    except CheckpointException as error:  # which is no `Exception`
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        kind = type(cause) if isinstance(cause, DistcacheError) else DistcacheError
        is_damaged = kind is DataError  # which says where
        raise kind(str(cause) if is_damaged else f"{fails}: rank {rank}: {cause}") from error


# -----------------------------------------------------------------------------
# Saving.


def captured(
    mode: Parallel, extra: Mapping[str, bytes], beside: bool, since: int | None = None
) -> dict[str, Any]:
    """What a checkpoint has of `mode`, after a flush, as tensors, and the `extra` values of this
    rank; by all ranks. `beside`: as of now, however it changes, but for the tables; `since`: of
    these the rows alone, where that is less, that changed since this mark."""
    found: dict[str, Any] = {}
    for name, value in (mode.state_dict(since) | dict(extra)).items():
        if not isinstance(value, Tensor | ChangedRows):
            value = as_bytes(value)
        elif beside and not name.startswith((TABLES, CHANGED)):
            value = value.detach().cpu().clone()
        found[name] = value
    return found


def make_room(world: World, folder: Path) -> None:
    """Make `folder`, empty, for a checkpoint; called by all ranks. Raises DistcacheError where not
    all nodes see it."""

    def make() -> None:
        try:
            remove(folder)
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise DistcacheError(f"{folder} cannot be made: {error.strerror}") from error

    on_first(world, make)
    if blind := blind_ranks(world, folder):
        on_first(world, lambda: remove(folder))
        raise DistcacheError(
            f"not saved: {folder} is not the same folder on the node(s) of ranks {blind} as on "
            "rank 0's; give one that all nodes share"
        )


def remove(folder: Path) -> None:
    """Remove a checkpoint, or what is there of one; at no time a part of it is taken for one."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def save(
    folder: Path,
    values: Mapping[str, Any],
    header: Mapping[str, Any],
    world: World,
    snapshot: Snapshot | None = None,
) -> None:
    """Write `values`, of `captured`, to `folder`, of `make_room`; a checkpoint when this returns.

    `world`: of `file_world`, by all ranks, each in one thread; `header`: JSON values; `snapshot`:
    where tables are read, that go on changing. Raises DistcacheError when a rank cannot write;
    nothing is left in the folder then.
    """
    started = time.monotonic()
    writer, blocks = BlockWriter(folder), BlockSavePlanner(snapshot)

    def is_good() -> None:
        if snapshot is not None and (error := snapshot.error) is not None:
            raise DistcacheError(f"rows that changed meanwhile could not be kept: {error}")

    try:
        with _told(f"the checkpoint {folder} could not be written", world):
            state_dict_saver.save(
                dict(values), storage_writer=writer, planner=blocks, process_group=world.host_group
            )
        together(world, is_good)  # all ranks have read what they write
        on_first(world, lambda: Manifest({"format": FORMAT, **header}, writer.files).write(folder))
    except DistcacheError:
        if world.is_first:
            remove(folder)
        raise
    if world.is_first:
        took = time.monotonic() - started
        logger.info("checkpoint at step %s: %s, in %.1f s", f"{header['step']:,}", folder, took)


# -----------------------------------------------------------------------------
# Finding and loading.


def finished(path: Path) -> list[Path]:
    """Return the checkpoints in `path`, complete or damaged, the newest step first.

    `path`: a run folder, its `checkpoints/`, or one checkpoint.
    """
    if any((path / name).is_file() for name in (MANIFEST, METADATA)):
        return [path]
    steps = [*path.glob(f"{CHECKPOINTS}/step_*/{MANIFEST}"), *path.glob(f"step_*/{MANIFEST}")]
    by_step = {(len(own.parent.name), own.parent.name): own.parent for own in steps}
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def find(path: Path) -> Path:
    """The newest checkpoint that `path` is or has. Raises ConfigError where there is none."""
    if folders := finished(path):
        return folders[0]
    if not path.exists():
        raise ConfigError(f"trainer.resume={path}: there is no such folder")
    found = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else ["a file"]
    raise ConfigError(
        f"trainer.resume={path} holds no complete checkpoint (found: "
        f"{', '.join(found[:8]) or 'nothing'}); give a run folder, or one of its {CHECKPOINTS}/"
    )


@contextmanager
def naming_intact(folder: Path, world: World | None = None) -> Iterator[None]:
    """Add to a DataError about the checkpoint `folder` the name of an intact one beside it.

    `world`: of `file_world`, where all ranks raise the error; None: this process is alone.
    """
    try:
        yield
    except DataError as error:

        def intact() -> Path | None:
            return intact_beside(folder)

        other = intact() if world is None else on_first(world, intact)
        if other is not None:
            error.args = (f"{error}; intact beside it is {other}",)
        raise


def intact_beside(folder: Path) -> Path | None:
    """The newest other checkpoint beside `folder` whose blocks, and those of the one that it rests
    on, are as they were written; None where there is none. Reads them."""
    for other in finished(folder.resolve().parent):
        if other.name == folder.name:
            continue
        with suppress(DataError):
            manifest = Manifest.read(other)
            manifest.verify(other)
            if manifest.base is not None:
                manifest.base[1].verify(manifest.base[0])
            return folder.parent / other.name
    return None


def compare(folder: Path, identity: Identity, world: World, same_data: bool = True) -> Start:
    """The checkpoint in `folder`, its run compared with `identity`; all ranks call this, before
    they make tables. `world`: of `file_world`.

    `same_data`: whether the data must be those of the checkpoint; where they need not be, a warning
    says what differs. Raises ConfigError where it is one of another run, naming both values, and
    DataError where it is damaged as far as its list of files tells; what these hold is compared
    with their checksums when it is loaded.
    """
    manifest: Manifest = on_first(world, lambda: Manifest.read(folder))
    saved = manifest.header
    check(folder, saved, identity)
    epoch = "steps of an epoch (data.samples, data.path)"
    was = dict(map(tuple, saved["run"]["data"])) | {epoch: saved["run"]["steps_per_epoch"]}
    now = dict(identity["data"]) | {epoch: identity["steps_per_epoch"]}
    other = differences(was, now, "not set")
    if other and same_data:
        raise ConfigError(
            f"{folder} is a checkpoint of training on other data: {other}. Give the data it was "
            "made with; if other data are meant, set trainer.resume_data=any, which goes on at the "
            "same step of these"
        )
    if other and world.is_first:
        logger.warning("resuming on other data than those of %s: %s", folder, other)
    phase = None if other else saved["phase"]  # other data have other phases
    digest = bytes.fromhex(saved["loss_digest"])
    state = TrainerState(saved["step"], digest, Phase(**phase) if phase else None)
    return Start(state, folder, manifest)


def load(start: Start, mode: Parallel, world: World, extra: dict[str, bytes] | None = None) -> None:
    """Put the checkpoint of `start`, of `compare`, into `mode`; all ranks call this, with a world
    of `file_world`.

    `extra`: names of values of this rank alone, which are put there. Raises ConfigError for values
    that one of checkpoint and run does not have, before anything is changed, and DataError where a
    block is not as it was written: then the mode is nobody's, until another load.
    """
    folder, manifest, readers = start.folder, start.manifest, list[BlockReader]()
    if folder is None or manifest is None:
        return
    together(world, lambda: readers.append(BlockReader(folder, manifest)))
    (reader,), values = readers, mode.blank_state() | (extra or {})
    given = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    tensors = {name: value for name, value in values.items() if name not in given}
    fill(reader, tensors, given, world)

    def read() -> None:
        for name, blank in given.items():
            data = reader.whole(name).numpy().tobytes()
            given[name] = data if isinstance(blank, bytes) else json.loads(data)

    together(world, read)
    if extra is not None:
        extra.update({name: given.pop(name) for name in extra})
    mode.load_state_dict(tensors | given)
    if world.is_first:
        logger.info("read step %s from %s", f"{start.state.step:,}", folder)


def fill(
    reader: BlockReader, tensors: dict[str, Tensor], others: Iterable[str], world: World
) -> None:
    """Read `tensors`, by name, in place; called by all ranks. `others`: names of values that this
    rank reads otherwise. Raises what `load` says.

    Ranks may ask for different values: those that share memory need to read it only once. DCP
    refuses a value that is asked for and not there; here is the reverse.
    """
    known = set[str]().union(*together(world, lambda: {*tensors, *others}))
    stored = reader.values.state_dict_metadata
    unread = sorted(
        name
        for name in stored.keys() - known
        if not isinstance(own := stored[name], metadata.TensorStorageMetadata) or own.size.numel()
    )
    if unread:
        more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
        raise ConfigError(
            f"the checkpoint {reader.path} holds values that this run does not have: "
            f"{', '.join(unread[:5])}{more}; resume with the settings it was made with"
        )
    with _told(f"the checkpoint {reader.path} does not fit this run", world):
        state_dict_loader.load(tensors, storage_reader=reader, process_group=world.host_group)


def check(folder: Path, header: Mapping[str, Any], identity: Identity) -> None:
    """Raise ConfigError where a checkpoint, by its header, does not belong to this run."""
    if "run" not in header:
        raise ConfigError(f"{folder} is a checkpoint of a loop: it is read by distcache.load")
    saved, optimizer = header["run"], identity["optimizer"]
    modes = {saved["mode"], identity["mode"]}
    alike = modes <= ONE_FORMAT or optimizer in HYBRID_HAS
    free = ("mode", "world_size") if alike else ()
    found = [
        {key: run[name] for name, key in KEYS.items() if name not in free}
        | {f"model.{key}": value for key, value in run["model"].items()}
        | {"the number of tables": len(run["tables"])}
        | {
            f"table {number}": " ".join(["{} with {} rows x {}".format(*own), *own[3:]])
            for number, own in enumerate(run["tables"])
        }
        for run in (saved, identity)
    ]
    wrong = [differences(*found, "not there")]
    moved = len(modes) > 1 or saved["world_size"] != identity["world_size"]
    if "hybrid" in modes and not alike and moved:
        wrong.append(
            f"optim={optimizer} has another state of rows in hybrid than elsewhere, and "
            f"only {', '.join(sorted(HYBRID_HAS))} go on in another mode or number of ranks"
        )
    if any(wrong):
        raise ConfigError(
            f"{folder} is a checkpoint of another run: {'; '.join(filter(None, wrong))}. Set what "
            "it was made with, or begin anew by trainer.resume=never with another run.dir (from "
            "its weights by trainer.init_from)"
        )


def differences(was: Mapping[str, Any], now: Mapping[str, Any], none: str) -> str:
    """In words, where they differ, and in how many more places; `none`: what has no value."""
    shown = ((key, was.get(key, none), now.get(key, none)) for key in {**was, **now})
    found = [f"{key} was {old}, is {new}" for key, old, new in shown if old != new]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return "; ".join(found[:5]) + more
