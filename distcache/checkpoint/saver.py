"""When a run writes checkpoints, beside training where the mode can, and which of them are kept."""

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
from distcache.comm.link import on_first, together
from distcache.comm.world import World
from distcache.engine.gradients import BUSY, SAVE
from distcache.engine.whole import Snapshot
from distcache.errors import DataError, DistcacheError, PeerError
from distcache.parallel.base import Parallel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keeping:
    """`every`: steps or seconds from one to the next, as of `checks.cadence`; `newest`: how many
    are kept, and beside them the best by the metric `best` (None: by none); `whole_every`: one of
    so many is whole, and the others have the rows alone that changed since that."""

    every: tuple[int | None, float | None] = (None, None)
    newest: int = 1
    best: str | None = None
    whole_every: int = 1


_NICE = 10
"""How much the thread that writes beside training stands back where both want a core: a tenth of it
is left to it. It must get on, for it may hold Python's lock, which training waits for."""


class _Job(threading.Thread):
    """Writes one checkpoint. `error`: why it did not; `written`: to be called where it did."""

    def __init__(
        self,
        state: TrainerState,
        work: Callable[[], None],
        written: Callable[[], None],
        snapshot: Snapshot,
    ) -> None:
        super().__init__(name="distcache-checkpoint", daemon=True)
        self.state, self.snapshot, self._work, self.written = state, snapshot, work, written
        self.error: Exception | None = None

    def run(self) -> None:
        os.nice(_NICE)  # on Linux, of this thread alone
        try:
            self._work()
        except Exception as error:  # told by the training thread
            self.error = error


class Saver(AbstractContextManager):
    """The checkpoints of a run, in `checkpoints/` of its folder; every method is called by all
    ranks between the same steps, but for `asks`.

    `last`: the state of the newest that this process wrote or went on from in this folder.
    """

    def __init__(
        self,
        where: tuple[Path, Start],
        mode: Parallel,
        world: World,
        header: Mapping[str, Any],
        own_state: Callable[[TrainerState], Mapping[str, bytes]],
        keeping: Keeping,
    ) -> None:
        """`where`: the run folder, and what the run began with; `world`: of
        `files.file_world`; `header`: what every manifest says of the run; `own_state`: values
        of this rank alone at a state, by unique names."""
        run_dir, begun = where
        self.folder = run_dir / files.CHECKPOINTS
        here = begun.folder is not None and begun.folder.resolve().parent == self.folder.resolve()
        self.last = begun.state if here else None
        self._mode, self.world, self._header = mode, world, dict(header)
        self._own_state, self._keeping = own_state, keeping
        self._job: _Job | None = None
        self._base: tuple[Path, int] | None = None
        """The newest whole checkpoint of this process, and the mark that was taken with it."""
        self._resting = 0
        """How many of this process rest on it."""
        self._began, self._due, self._told = time.monotonic(), False, False
        self._best: float | None = on_first(world, lambda: best_of(self.folder, keeping.best)[0])

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error for as long as others may take, at a second Ctrl-C not at all.
        self.wait(None if kind is None else self.world.timeout_s * issubclass(kind, Exception))

    def asks(self, done: int) -> tuple[int, bool]:
        """What this rank tells the others with the step that makes it `done`: bits; and whether a
        checkpoint falls on that number. Lets go of one that has been written meanwhile."""
        if self._job is not None and not self._job.is_alive():
            self.wait()
        steps, seconds = self._keeping.every
        falls_on = steps is not None and done % steps == 0
        if seconds is not None and self.world.is_first:  # one clock for all
            self._due |= time.monotonic() - self._began >= seconds
        self._due |= falls_on
        bits = SAVE * self._due | BUSY * (self._job is not None and self._job.is_alive())
        return bits, falls_on

    def hurry(self) -> None:
        """Write what is being written without rests, for another one is due."""
        if self._job is None:
            return
        self._job.snapshot.hurry.set()
        if not self._told and self.world.is_first:
            self._told = True
            logger.warning(
                "a checkpoint is due, but the one of step %s is still being written: it waits; "
                "raise trainer.checkpoint_every",
                f"{self._job.state.step:,}",
            )

    def is_best(self, metrics: Mapping[str, float | None]) -> bool:
        """Whether these metrics, which all ranks have, are better than those of any checkpoint."""
        name = self._keeping.best
        value = None if name is None else metrics[name]
        if name is None or value is None or not _better(name, value, self._best):
            return False
        self._best = value
        return True

    def write(
        self, state: TrainerState, metrics: Mapping[str, float | None], periodic: bool = True
    ) -> None:
        """Write a checkpoint of `state`, at which the mode stands; a `periodic` one, after which
        steps follow, in the background where the mode can, and where that fails training goes on.

        `metrics`: of this state.
        """
        self.wait()
        self._began, self._due = time.monotonic(), False
        if state == self.last:
            if not periodic:  # the run before this one may have ended before it came to that
                on_first(self.world, lambda: prune(self.folder, self._keeping))
            return
        self._mode.flush()
        try:
            self._begin(state, metrics, periodic)
        except PeerError:
            raise
        except DistcacheError as error:
            if not periodic:
                if self.world.is_first:  # also of old rows that came while one was removed
                    prune(self.folder, self._keeping)
                raise
            self._say(state, error)

    def _begin(
        self, state: TrainerState, metrics: Mapping[str, float | None], periodic: bool
    ) -> None:
        folder, world, mode = self.folder / f"step_{state.step:08d}", self.world, self._mode
        own = dict[str, bytes]()
        together(world, lambda: own.update(self._own_state(state)))
        files.make_room(world, folder)
        # The old rows lie in the checkpoint's folder: what a killed run leaves goes with that.
        snapshot = mode.snapshot(folder) if periodic else None
        base, since = self._rests_on(folder)
        values = capture(mode, own, snapshot is not None, since)
        header = self._header | state.header() | {"metrics": dict(metrics)} | base
        mark: int | None = None
        if since is None and self._keeping.whole_every > 1:
            self._base, mark = None, mode.mark()

        def work() -> None:
            files.write_checkpoint(folder, values, header, world, snapshot)
            on_first(world, lambda: prune(self.folder, self._keeping))

        def written() -> None:
            self.last, self._resting = state, 0 if since is None else self._resting + 1
            if mark is not None:
                self._base = folder, mark

        if snapshot is None:
            work()
            written()
        else:
            self._job = _Job(state, work, written, snapshot)
            self._job.start()

    def _rests_on(self, folder: Path) -> tuple[dict[str, Any], int | None]:
        """What the manifest of a new checkpoint says of the whole one on which it rests, and the
        mark of that; nothing where it is to be whole itself. By all ranks."""
        if self._base is None or self._resting + 1 >= self._keeping.whole_every:
            return {}, None
        where, mark = self._base

        def told() -> dict[str, Any]:
            with suppress(DataError):  # somebody removed it
                return {"base": {"folder": where.name, "crc32": Manifest.read(where).crc32}}
            return {}

        base = {} if where == folder else on_first(self.world, told)
        return base, mark if base else None

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until nothing is being written, `limit_s` seconds at most."""
        job, self._job = self._job, None
        if job is None:
            return
        job.snapshot.hurry.set()
        job.join(limit_s)
        job.snapshot.close()
        if job.error is None and not job.is_alive():
            job.written()
        else:
            self._say(job.state, job.error or TimeoutError("the other ranks do not end"))

    def _say(self, state: TrainerState, error: Exception) -> None:
        if self.world.is_first:
            logger.warning("no checkpoint at step %s: %s", f"{state.step:,}", error)


# -----------------------------------------------------------------------------
# Which checkpoints are kept; on rank 0.


def _better(name: str, value: float, than: float | None) -> bool:
    return than is None or (value > than if name == "eval_auc" else value < than)


def best_of(folder: Path, name: str | None) -> tuple[float | None, Path | None]:
    """The best value of a metric among the checkpoints of `folder`, and the newest that has it."""
    best: float | None = None
    where: Path | None = None
    for own in files.finished(folder) if name is not None else ():
        with suppress(DataError):
            value = Manifest.read(own).header.get("metrics", {}).get(name)
            if value is not None and _better(name, value, best):
                best, where = value, own
    return best, where


def prune(folder: Path, keeping: Keeping) -> None:
    """Remove the checkpoints of `folder` but those that are kept and those that these rest on, and
    what was not finished. Of those that are newer than the oldest kept one none is removed."""
    kept, count = {best_of(folder, keeping.best)[1]}, 0
    for own in files.finished(folder):
        if count < keeping.newest or own in kept:
            kept.add(own)
            with suppress(DataError):  # one that nobody can read is not counted
                kept.add(rests_on(own))
                Manifest.read(own)
                count += 1
    for own in sorted(folder.glob("step_*"), reverse=True):  # none before what rests on it
        if own not in kept:
            with suppress(OSError):  # it stays, then
                files.remove(own)
