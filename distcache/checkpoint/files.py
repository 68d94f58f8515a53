"""Folders of checkpoints, which all ranks make, write and read together.

Used by training runs (`checkpoint.state`, `checkpoint.saver`) and by `distcache.save` and
`distcache.load` (`checkpoint.loop`).
"""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from distcache.checkpoint.manifest import FORMAT, MANIFEST, METADATA, Manifest, list_first
from distcache.checkpoint.reader import BlockReader
from distcache.checkpoint.writer import BlockSavePlanner, BlockWriter
from distcache.comm.link import Waiting, run_on_all_ranks, run_on_rank0
from distcache.comm.world import World
from distcache.engine.full_tables import Snapshot
from distcache.errors import ConfigError, DataError, DistcacheError

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""Folder in a run folder that has its checkpoints, each in a folder `step_<steps done>`."""

SLOWEST_BYTES_PER_S = 20 << 20
"""A rank that reads or writes its files more slowly is taken for one that hangs."""

PATIENCE_S = 5.0
"""Seconds that a network file system may take to show another node's file."""

_POLL_S = 0.1
"""Seconds between two looks for another node's file."""

T = TypeVar("T")


def local_result(world: World, work: Callable[[], T]) -> T:
    """Return the result of `work` on this rank. If it raises on any rank, raise on every rank."""
    results: list[T] = []
    run_on_all_ranks(world, lambda: results.append(work()))
    return results[0]


# --------------------------------------------------------------------------------------------------
# Folders that all nodes share.


def blind_ranks(world: World, folder: Path) -> list[int]:
    """Return the first ranks of the nodes that do not see files of rank 0 in `folder`, which
    exists on rank 0. All ranks call this. The list is empty on one node."""
    if world.nodes.count == 1:
        return []
    name = f".shared-{run_on_rank0(world, lambda: uuid.uuid4().hex)}"
    run_on_rank0(world, (folder / name).touch)

    def is_visible() -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / name).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    visible = run_on_all_ranks(world, lambda: world.local_rank > 0 or is_visible())
    run_on_rank0(world, lambda: (folder / name).unlink(missing_ok=True))
    return [rank for rank, is_seen in enumerate(visible) if not is_seen]


def check_run_folder(world: World, folder: Path, needed_by: str | None) -> None:
    """Check that a run folder is the same on all nodes. All ranks call this after rank 0 has made
    the folder.

    `needed_by`: a key that needs one folder on all nodes; None: log a warning instead. Raises
    ConfigError.
    """
    blind = blind_ranks(world, folder)
    if not blind:
        return
    problem = (
        f"run.dir={folder} is not the same folder on the node(s) of ranks {blind} as on rank 0's"
    )
    if needed_by is not None:
        raise ConfigError(
            f"{problem}, and {needed_by} has all nodes write there: name a folder that all nodes "
            "share (NFS, Lustre ...), the same path on each"
        )
    if world.is_first:
        logger.warning("%s: nothing can be saved should this run be stopped", problem)


# --------------------------------------------------------------------------------------------------
# Writing.


def max_table_bytes(shapes: Iterable[tuple[int, int]]) -> int:
    """Return an upper bound of the bytes of tables, `(rows, width)` each, with optimizer state:
    weights and Adam's two states in float64."""
    return sum(3 * 8 * rows * width for rows, width in shapes)


@contextmanager
def file_world(world: World, nbytes: int) -> Iterator[World]:
    """Yield `world` with a CPU group of its own for files of at most `nbytes` bytes.

    All ranks call this. The group may be used from another thread than the main one. Its timeout
    grows with `nbytes`, since ranks wait for the slowest disk, which takes longer than
    `trainer.timeout_s` for large tables. A rank that dies is noticed at once all the same.
    """
    if world.host_group is None:  # a single process
        yield world
        return
    timeout = timedelta(seconds=world.timeout_s + nbytes / SLOWEST_BYTES_PER_S)
    ranks = dist.get_process_group_ranks(world.host_group)
    group: Any = dist.new_group(
        ranks,
        backend="gloo",
        timeout=timeout,
        # Processes outside of this world do not call this.
        use_local_synchronization=len(ranks) < dist.get_world_size(),
    )
    files = replace(world, host_group=group)
    # A rank that left early would disturb those that still join.
    run_on_all_ranks(files, lambda: None)
    try:
        yield files
    finally:
        dist.destroy_process_group(group)


@contextmanager
def _translate_errors(problem: str, world: World) -> Iterator[None]:
    """Raise errors of DCP as errors of this package, the same on all ranks.

    `problem`: beginning of the message. Raises PeerError if a rank went away.
    """
    try:
        yield
    except RuntimeError as error:  # of gloo; DCP gathers errors of the ranks themselves
        raise Waiting(world, "the host group", "a checkpoint's files").explain(error) from error
    except CheckpointException as error:  # a BaseException
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        kind = type(cause) if isinstance(cause, DistcacheError) else DistcacheError
        # A DataError names the folder itself.
        text = str(cause) if kind is DataError else f"{problem}: rank {rank}: {cause}"
        raise kind(text) from error


def make_checkpoint_folder(world: World, folder: Path) -> None:
    """Make `folder`, empty, for a checkpoint. All ranks call this.

    Raises DistcacheError if not all nodes see it.
    """

    def make() -> None:
        try:
            remove_checkpoint(folder)
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise DistcacheError(f"{folder} cannot be made: {error.strerror}") from error

    run_on_rank0(world, make)
    blind = blind_ranks(world, folder)
    if blind:
        run_on_rank0(world, lambda: remove_checkpoint(folder))
        raise DistcacheError(
            f"not saved: {folder} is not the same folder on the node(s) of ranks {blind} as on "
            "rank 0's; give one that all nodes share"
        )


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, or an unfinished one."""
    # The manifest first, so that a rest of the files is never taken for a checkpoint.
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def write_checkpoint(
    folder: Path,
    values: Mapping[str, Any],
    header: Mapping[str, Any],
    world: World,
    snapshot: Snapshot | None = None,
) -> None:
    """Write `values`, tensors by name, to `folder`, of `make_checkpoint_folder`.

    All ranks call this, each in one thread. `header`: JSON values for the manifest; `world`: of
    `file_world`; `snapshot`: source of the tables' rows if training continues meanwhile. Raises
    DistcacheError if a rank cannot write; then the folder is removed.
    """
    start = time.monotonic()
    writer = BlockWriter(folder)
    save_planner = BlockSavePlanner(snapshot)

    def check_snapshot() -> None:
        if snapshot is not None and (error := snapshot.error) is not None:
            raise DistcacheError(f"rows that changed meanwhile could not be kept: {error}")

    try:
        with _translate_errors(f"the checkpoint {folder} could not be written", world):
            state_dict_saver.save(
                dict(values),
                storage_writer=writer,
                planner=save_planner,
                process_group=world.host_group,
            )
        # After all ranks have read the rows that they write.
        run_on_all_ranks(world, check_snapshot)
        manifest_header = {"format": FORMAT, **header}
        run_on_rank0(world, lambda: Manifest(manifest_header, writer.files).write(folder))
    except DistcacheError:
        if world.is_first:
            remove_checkpoint(folder)
        raise
    if world.is_first:
        seconds = time.monotonic() - start
        logger.info("checkpoint at step %s: %s, in %.1f s", f"{header['step']:,}", folder, seconds)


# --------------------------------------------------------------------------------------------------
# Finding and reading.


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints in `path`, complete or damaged, the newest step first.

    `path`: a run folder, its `checkpoints/`, or one checkpoint.
    """
    if any((path / name).is_file() for name in (MANIFEST, METADATA)):
        return [path]
    steps = [*path.glob(f"{CHECKPOINTS}/step_*/{MANIFEST}"), *path.glob(f"step_*/{MANIFEST}")]
    # By length first: numbers of more than eight digits follow shorter ones.
    by_step = {(len(file.parent.name), file.parent.name): file.parent for file in steps}
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def newest_checkpoint(path: Path, key: str = "trainer.resume") -> Path:
    """Return the newest checkpoint in `path`, which a user gave as `key`.

    Raises ConfigError if there is none.
    """
    if folders := find_checkpoints(path):
        return folders[0]
    if not path.exists():
        raise ConfigError(f"{key}={path}: there is no such folder")
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else ["a file"]
    raise ConfigError(
        f"{key}={path} holds no complete checkpoint (found: "
        f"{', '.join(names[:8]) or 'nothing'}); give a run folder, or one of its {CHECKPOINTS}/"
    )


@contextmanager
def suggest_intact(folder: Path, world: World | None = None) -> Iterator[None]:
    """Add the name of an intact checkpoint beside `folder` to a DataError about `folder`.

    `world`: of `file_world`, if all ranks raise the error; None: in this process only.
    """
    try:
        yield
    except DataError as error:

        def find_intact() -> Path | None:
            return _intact_neighbor(folder)

        other = find_intact() if world is None else run_on_rank0(world, find_intact)
        if other is not None:
            error.args = (f"{error}; intact beside it is {other}",)
        raise


def _intact_neighbor(folder: Path) -> Path | None:
    """Return the newest other checkpoint beside `folder` that is intact, together with the one
    that it rests on; None if there is none. Reads the files."""
    for other in find_checkpoints(folder.resolve().parent):
        if other.name == folder.name:
            continue
        with suppress(DataError, ConfigError):
            manifest = Manifest.read(other)
            manifest.verify(other)
            if manifest.base is not None:
                base_folder, base = manifest.base
                base.verify(base_folder)
            return folder.parent / other.name
    return None


def read_values(
    reader: BlockReader, tensors: dict[str, Tensor], others: Iterable[str], world: World
) -> None:
    """Read `tensors`, by name, in place. All ranks call this.

    `others`: names of values that this rank reads in another way. Ranks may ask for different
    values: of those that share memory, one reads it. Raises ConfigError if values of the
    checkpoint are missing here, before anything is changed (DCP itself refuses the opposite);
    DataError for a damaged block.
    """
    known = set[str]().union(*run_on_all_ranks(world, lambda: {*tensors, *others}))
    stored = reader.values.state_dict_metadata
    unread = sorted(
        name
        for name in stored.keys() - known
        if not isinstance(value := stored[name], metadata.TensorStorageMetadata)
        or value.size.numel()
    )
    if unread:
        raise ConfigError(
            f"the checkpoint {reader.path} holds values that this run does not have: "
            f"{list_first(unread)}; resume with the settings it was made with"
        )
    with _translate_errors(f"the checkpoint {reader.path} does not fit this run", world):
        state_dict_loader.load(tensors, storage_reader=reader, process_group=world.host_group)


def differences(before: Mapping[str, Any], now: Mapping[str, Any], missing: str) -> str:
    """Return the first five differences of two mappings in words, and the number of the others.

    `missing`: text for a key that one of them lacks. The result is empty if they are equal.
    """
    pairs = ((key, before.get(key, missing), now.get(key, missing)) for key in {**before, **now})
    return list_first([f"{key} was {old}, is {new}" for key, old, new in pairs if old != new], "; ")
