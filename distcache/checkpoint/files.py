"""Folders of checkpoints: made, written, found and read by all ranks together.

Used by training runs (`checkpoint.state`, `checkpoint.saver`) and by `distcache.save` and
`distcache.load` (`checkpoint.loop`).
"""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from distcache.checkpoint.manifest import FORMAT, MANIFEST, METADATA, Manifest
from distcache.checkpoint.reader import BlockReader
from distcache.checkpoint.writer import BlockSavePlanner, BlockWriter
from distcache.comm.link import Waiting, on_first, together
from distcache.comm.world import World
from distcache.engine.whole import Snapshot
from distcache.errors import ConfigError, DataError, DistcacheError

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""The folder of a run that has its checkpoints, each of them a folder `step_<steps done>`."""


SLOWEST_BYTES_PER_S = 20 << 20
"""A rank that reads or writes its files slower than this is taken for one that hangs."""

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


def write_checkpoint(
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


def differences(was: Mapping[str, Any], now: Mapping[str, Any], none: str) -> str:
    """In words, where they differ, and in how many more places; `none`: what has no value."""
    shown = ((key, was.get(key, none), now.get(key, none)) for key in {**was, **now})
    found = [f"{key} was {old}, is {new}" for key, old, new in shown if old != new]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return "; ".join(found[:5]) + more
