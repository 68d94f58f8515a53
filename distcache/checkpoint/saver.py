"""Checkpoints of a run: written beside training if the mode can, and removed by age and metric."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcache.checkpoint import files
from distcache.checkpoint.manifest import Manifest, rests_on
from distcache.checkpoint.state import Start, TrainerState, capture
from distcache.comm.link import run_on_rank0
from distcache.comm.world import World
from distcache.engine.full_tables import Snapshot
from distcache.engine.gradients import BUSY, SAVE
from distcache.errors import ConfigError, DataError, DistcacheError, PeerError
from distcache.parallel.base import Parallel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keeping:
    """Schedule and retention of checkpoints.

    `every`: steps or seconds between two, as of `checks.cadence`; `newest`: number of the newest
    that are kept; `best`: metric by which the best one is kept too (None: no metric);
    `whole_every`: one of so many is whole, the others have only the rows that changed since.
    """

    every: tuple[int | None, float | None] = (None, None)
    newest: int = 1
    best: str | None = None
    whole_every: int = 1


_NICE = 10
"""Niceness of the thread that writes beside training. It gets about a tenth of a contended core;
not less, since it may hold Python's lock, for which training waits."""


class _WriteThread(threading.Thread):
    """Thread that writes one checkpoint.

    `error`: exception of `work`, if any; `on_success`: to be called in the training thread after
    the checkpoint has been written.
    """

    def __init__(
        self,
        state: TrainerState,
        work: Callable[[], None],
        on_success: Callable[[], None],
        snapshot: Snapshot,
    ) -> None:
        super().__init__(name="distcache-checkpoint", daemon=True)
        self.state = state
        self.snapshot = snapshot
        self.on_success = on_success
        self.error: Exception | None = None
        self._work = work

    def run(self) -> None:
        os.nice(_NICE)  # on Linux, of this thread only
        try:
            self._work()
        except Exception as error:  # the training thread reports it
            self.error = error


class Saver(AbstractContextManager):
    """The checkpoints of a run, in `checkpoints/` of its folder.

    All ranks call each method between the same steps, except for `asks`. `last`: the state of the
    newest checkpoint in this folder that this process wrote or resumed from.
    """

    def __init__(
        self,
        place: tuple[Path, Start],
        mode: Parallel,
        world: World,
        header: Mapping[str, Any],
        own_state: Callable[[TrainerState], Mapping[str, bytes]],
        keeping: Keeping,
    ) -> None:
        """`place`: the run folder, and where the run began; `world`: of `files.file_world`;
        `header`: entries of every manifest that describe the run; `own_state`: returns values of
        this rank at a state, by names that no other rank uses."""
        run_dir, start = place
        self.folder = run_dir / files.CHECKPOINTS
        self.world = world
        is_here = (
            start.folder is not None and start.folder.resolve().parent == self.folder.resolve()
        )
        self.last = start.state if is_here else None
        self._mode = mode
        self._header = dict(header)
        self._own_state = own_state
        self._keeping = keeping
        self._thread: _WriteThread | None = None
        # The newest whole checkpoint of this process, the mark that was taken with it, and the
        # number of checkpoints of this process that rest on it.
        self._base: tuple[Path, int] | None = None
        self._resting = 0
        self._last_time = time.monotonic()
        self._is_due = False
        self._has_warned = False
        self._best: float | None = run_on_rank0(
            world, lambda: best_of(self.folder, keeping.best)[0]
        )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error wait as long as other ranks may take; after a second Ctrl-C not at all.
        self.wait(None if kind is None else self.world.timeout_s * issubclass(kind, Exception))

    def asks(self, done: int) -> tuple[int, bool]:
        """Return the bits that this rank sends to the others with the step that makes it `done`,
        and True if a checkpoint is scheduled after so many steps.

        Also completes a checkpoint that has been written meanwhile.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        steps, seconds = self._keeping.every
        is_scheduled = steps is not None and done % steps == 0
        if seconds is not None and self.world.is_first:  # one clock for all ranks
            self._is_due |= time.monotonic() - self._last_time >= seconds
        self._is_due |= is_scheduled
        is_writing = self._thread is not None and self._thread.is_alive()
        return SAVE * self._is_due | BUSY * is_writing, is_scheduled

    def hurry(self) -> None:
        """Finish the checkpoint that is being written without rests, since another one is due."""
        if self._thread is None:
            return
        self._thread.snapshot.hurry.set()
        if not self._has_warned and self.world.is_first:
            self._has_warned = True
            logger.warning(
                "a checkpoint is due, but the one of step %s is still being written: it waits; "
                "raise trainer.checkpoint_every",
                f"{self._thread.state.step:,}",
            )

    def is_best(self, metrics: Mapping[str, float | None]) -> bool:
        """Return True if these metrics, equal on all ranks, are better than those of every
        checkpoint."""
        name = self._keeping.best
        value = None if name is None else metrics[name]
        if name is None or value is None or not _is_better(name, value, self._best):
            return False
        self._best = value
        return True

    def write(
        self, state: TrainerState, metrics: Mapping[str, float | None], periodic: bool = True
    ) -> None:
        """Write a checkpoint of `state`, the current state of the mode, with its `metrics`.

        `periodic`: training continues afterwards. Such a checkpoint is written in the background
        if the mode can, and an error is logged instead of raised.
        """
        self.wait()
        self._last_time = time.monotonic()
        self._is_due = False
        if state == self.last:
            if not periodic:  # an earlier run may have ended before it removed old checkpoints
                run_on_rank0(self.world, lambda: prune(self.folder, self._keeping))
            return
        self._mode.flush()
        try:
            self._begin(state, metrics, periodic)
        except PeerError:
            raise
        except DistcacheError as error:
            if not periodic:
                if self.world.is_first:  # also removes old rows that arrived during a removal
                    prune(self.folder, self._keeping)
                raise
            self._report(state, error)

    def _begin(
        self, state: TrainerState, metrics: Mapping[str, float | None], periodic: bool
    ) -> None:
        """Write a checkpoint, or start the thread that does."""
        folder = self.folder / f"step_{state.step:08d}"
        world = self.world
        own_values = files.local_result(world, lambda: self._own_state(state))
        files.make_checkpoint_folder(world, folder)
        # Old rows are kept in the checkpoint's folder, so that they are removed with it if this
        # process is killed.
        snapshot = self._mode.snapshot(folder) if periodic else None
        base, since = self._choose_base(folder)
        values = capture(self._mode, own_values, snapshot is not None, since)
        header = self._header | state.header() | {"metrics": dict(metrics)} | base
        mark: int | None = None
        if since is None and self._keeping.whole_every > 1:
            self._base = None
            mark = self._mode.mark()

        def work() -> None:
            files.write_checkpoint(folder, values, header, world, snapshot)
            run_on_rank0(world, lambda: prune(self.folder, self._keeping))

        def on_success() -> None:
            self.last = state
            self._resting = 0 if since is None else self._resting + 1
            if mark is not None:
                self._base = (folder, mark)

        if snapshot is None:
            work()
            on_success()
        else:
            self._thread = _WriteThread(state, work, on_success, snapshot)
            self._thread.start()

    def _choose_base(self, folder: Path) -> tuple[dict[str, Any], int | None]:
        """Return the manifest's entry `base` for a checkpoint in `folder`, and the mark since which
        changed rows are written; no entry and None if it has to be whole. All ranks call this."""
        if self._base is None or self._resting + 1 >= self._keeping.whole_every:
            return {}, None
        base_folder, mark = self._base

        def describe() -> dict[str, Any]:
            with suppress(DataError, ConfigError):  # somebody may have removed it
                crc32 = Manifest.read(base_folder).crc32
                return {"base": {"folder": base_folder.name, "crc32": crc32}}
            return {}

        entry = {} if base_folder == folder else run_on_rank0(self.world, describe)
        return entry, mark if entry else None

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until no checkpoint is being written, at most `limit_s` seconds."""
        thread = self._thread
        self._thread = None
        if thread is None:
            return
        thread.snapshot.hurry.set()
        thread.join(limit_s)
        thread.snapshot.close()
        if thread.error is None and not thread.is_alive():
            thread.on_success()
        else:
            error = thread.error or TimeoutError("the other ranks do not end")
            self._report(thread.state, error)

    def _report(self, state: TrainerState, error: Exception) -> None:
        if self.world.is_first:
            logger.warning("no checkpoint at step %s: %s", f"{state.step:,}", error)


# --------------------------------------------------------------------------------------------------
# Retention, on rank 0.


def _is_better(name: str, value: float, best: float | None) -> bool:
    return best is None or (value > best if name == "eval_auc" else value < best)


def best_of(folder: Path, name: str | None) -> tuple[float | None, Path | None]:
    """Return the best value of metric `name` among the checkpoints in `folder`, and the newest
    checkpoint that has it."""
    best: float | None = None
    best_folder: Path | None = None
    for checkpoint in files.find_checkpoints(folder) if name is not None else ():
        with suppress(DataError, ConfigError):
            value = Manifest.read(checkpoint).header.get("metrics", {}).get(name)
            if value is not None and _is_better(name, value, best):
                best = value
                best_folder = checkpoint
    return best, best_folder


def prune(folder: Path, keeping: Keeping) -> None:
    """Remove the checkpoints in `folder` that are not kept, and unfinished ones.

    A checkpoint on which a kept one rests is kept, and so is any that is newer than the oldest of
    the `keeping.newest` readable ones.
    """
    kept = {best_of(folder, keeping.best)[1]}
    count = 0
    for checkpoint in files.find_checkpoints(folder):
        if count < keeping.newest or checkpoint in kept:
            kept.add(checkpoint)
            with suppress(DataError, ConfigError):  # an unreadable one is not counted
                kept.add(rests_on(checkpoint))
                Manifest.read(checkpoint)
                count += 1
    # The newest first, so that no checkpoint is removed before those that rest on it.
    for checkpoint in sorted(folder.glob("step_*"), reverse=True):
        if checkpoint not in kept:
            with suppress(OSError):  # it is tried again with the next checkpoint
                files.remove_checkpoint(checkpoint)
