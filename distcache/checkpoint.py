"""Checkpoints: the model folder of a run, from which the same trajectory goes on.

A checkpoint is complete or not there: ranks write into `model.partial/`, which takes the place of
`model/` when all of them are done; an older `model/` stays until then.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from distcache.comm.first import on_first
from distcache.comm.world import World
from distcache.errors import ConfigError, DistcacheError
from distcache.parallel.base import Parallel
from distcache.run.blocks import BlockSavePlanner, CompleteLoadPlanner
from distcache.run.phases import Phase
from distcache.run.shared_folder import require_shared

logger = logging.getLogger(__name__)

FORMAT = 2
"""Version of what a checkpoint holds."""

SLOWEST_BYTES_PER_S = 20 << 20
"""A rank that reads or writes its files slower than this is taken for one that hangs."""

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
    require_shared(world, folder.parent)
    values = mode.state_dict()
    values[TRAINER_KEY] = describe(identity, state)
    values.update(extra or {})
    partial = folder.with_name(folder.name + ".partial")
    on_first(world, lambda: make_room(folder, partial))
    with file_group(world, identity) as group:
        try:
            writer, planner = FileSystemWriter(partial), BlockSavePlanner()
            state_dict_saver.save(
                values, storage_writer=writer, planner=planner, process_group=group
            )
        except CheckpointException as error:
            fail(f"the checkpoint {folder} could not be written", error)
    on_first(world, lambda: swap(folder, partial))
    if world.is_first:
        logger.info("checkpoint at step %s: %s", f"{state.step:,}", folder)


def load(
    path: Path,
    mode: Parallel,
    identity: RunIdentity,
    world: World,
    extra: dict[str, bytes] | None = None,
    same_data: bool = True,
) -> TrainerState:
    """Put the state under `path` (a run folder, or its `model/`) into `mode`; all ranks call this.

    `extra`: names of values of this rank alone, which are put there. `same_data`: whether the data
    must be those of the checkpoint; where they need not be, a warning says what differs.

    Raises ConfigError where there is no checkpoint or it is one of another run, naming both
    values, before anything is changed.
    """
    folder = find(path)
    reader = FileSystemReader(folder)
    header: dict[str, Any] = {TRAINER_KEY: ""}
    values = mode.blank_state() | (extra or {})
    with file_group(world, identity) as group:
        try:
            state_dict_loader.load(header, storage_reader=reader, process_group=group)
            state = check(folder, header[TRAINER_KEY], identity)
            other = other_data(header[TRAINER_KEY], identity)
            if other and same_data:
                raise ConfigError(
                    f"{folder} is a checkpoint of training on other data: {other}. Give the data "
                    "it was made with; if other data are meant, set trainer.resume_data=any, which "
                    "goes on at the same step of these"
                )
            if other and world.is_first:
                logger.warning("resuming on other data than those of %s: %s", folder, other)
            planner = CompleteLoadPlanner(other={TRAINER_KEY})
            state_dict_loader.load(
                values, storage_reader=reader, planner=planner, process_group=group
            )
        except CheckpointException as error:
            fail(f"the checkpoint {folder} does not fit this run", error)
    if extra is not None:
        extra.update({name: values.pop(name) for name in extra})
    mode.load_state_dict(values)
    if world.is_first:
        logger.info("resuming at step %s from %s", f"{state.step:,}", folder)
    return state


@contextmanager
def file_group(world: World, identity: RunIdentity) -> Iterator[dist.ProcessGroup]:
    """A CPU group for the time of reading or writing files, whose patience grows with the tables.

    The ranks wait for the slowest disk, which takes longer than `trainer.timeout_s` for large
    tables; a rank that dies is noticed at once all the same.
    """
    elements = sum(rows * dim for _, rows, dim in identity.tables)
    largest = 3 * 8 * elements  # Adam: weight and two moments, float64
    patience = timedelta(seconds=world.timeout_s + largest / SLOWEST_BYTES_PER_S)
    group: Any = dist.new_group(backend="gloo", timeout=patience)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def describe(identity: RunIdentity, state: TrainerState) -> str:
    """The JSON text that tells whose checkpoint this is and where in the data it stands."""
    epoch, batch = divmod(state.step, identity.steps_per_epoch or state.step + 1)
    return json.dumps(
        {
            "format": FORMAT,
            "run": dataclasses.asdict(identity),
            "step": state.step,
            "data_position": {"epoch": epoch, "batch": batch},
            "loss_digest": state.loss_digest.hex(),
            "phase": state.phase and state.phase.values(),
        }
    )


def check(folder: Path, text: str, identity: RunIdentity) -> TrainerState:
    """The trainer's state of a checkpoint; ConfigError where it does not belong to this run."""
    header = json.loads(text)
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
    wrong += compare_tables([tuple(table) for table in saved["tables"]], list(identity.tables))
    if wrong:
        raise ConfigError(
            f"{folder} is a checkpoint of another run: {'; '.join(wrong)}. Set what it was made "
            "with, or leave trainer.resume out"
        )
    phase = header.get("phase")  # checkpoints of older versions have none
    digest = bytes.fromhex(header["loss_digest"])
    return TrainerState(header["step"], digest, Phase(**phase) if phase else None)


def other_data(text: str, identity: RunIdentity) -> str:
    """In words, how the data of a checkpoint differ from those of `identity`; empty if they do
    not."""
    saved = json.loads(text)["run"]
    was, now = dict(map(tuple, saved["data"])), dict(identity.data)
    if saved["steps_per_epoch"] != identity.steps_per_epoch:
        was["steps of an epoch (data.samples, data.path)"] = saved["steps_per_epoch"]
        now["steps of an epoch (data.samples, data.path)"] = identity.steps_per_epoch
    differ = [key for key in was | now if was.get(key) != now.get(key)]
    shown = ((key, was.get(key, "not set"), now.get(key, "not set")) for key in differ)
    return "; ".join(f"{key} was {old}, is {new}" for key, old, new in shown)


def compare_tables(was: list[tuple], now: list[tuple]) -> list[str]:
    """In words, the first difference between two lists of (name, rows, dim)."""
    if len(was) != len(now):
        return [f"the number of tables was {len(was)}, is {len(now)}"]
    for old, new in zip(was, now, strict=True):
        if old != new:
            return [
                f"a table was {old[0]} with {old[1]} rows x {old[2]}, is {new[0]} with "
                f"{new[1]} rows x {new[2]}"
            ]
    return []


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


def fail(what: str, error: CheckpointException) -> NoReturn:
    """Raise the first rank's failure as an error of this package (theirs is no `Exception`)."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    kind = type(cause) if isinstance(cause, DistcacheError) else DistcacheError
    raise kind(f"{what}: rank {rank}: {cause}") from error
