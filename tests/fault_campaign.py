"""Ranks that are killed at drawn points of training, of checkpoints and of resuming, each time with
the bits of a run that nobody killed.

    python tests/fault_campaign.py [points=500] [seed=0] [out=docs/results/faults.md]

A point is a rank, a place of the code, which of its calls, and when in it: before, after, or some
microseconds inside. The rank is killed there (SIGKILL), the others have to end by themselves, and
the same command goes on with `trainer.resume=auto`; in one of three that is killed too. Then all
has to be as if nothing had happened: digests, `metrics.jsonl`, the checkpoints that are kept, and
no process, memory or half checkpoint is left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from ranks import End, Job, run_ranks
from scenarios import SmallNet
from toy_parallel import TABLES, ToyParallel, ToySource, toy_run

from distcache.checkpoint import files, manifest, saver, state, writer
from distcache.checkpoint.manifest import BlockFile, Manifest
from distcache.checkpoint.reader import BlockReader
from distcache.checkpoint.writer import BlockWriter
from distcache.cli.run import describe_environment, machine_text
from distcache.comm.rendezvous import cause_of
from distcache.comm.world import close_world, open_world
from distcache.engine.full_tables import Snapshot
from distcache.engine.groups import Placement
from distcache.engine.planning import StreamPlanner
from distcache.engine.step import stage_scope
from distcache.models import initialise
from distcache.optim import row_update
from distcache.parallel.cached import CachedParallel, CachedSettings
from distcache.store.old_rows import OldRows
from distcache.trainer import trainer

TIMEOUT_S = 40.0
"""`trainer.timeout_s` of the runs, and no survivor may take as long: a death is seen at once."""

PLACES: dict[str, tuple[Any, str]] = {
    "forward": (SmallNet, "forward"),
    "backward": (torch.Tensor, "backward"),
    "ingest": (StreamPlanner, "_ask"),
    "plan_exchange": (StreamPlanner, "_exchanged"),
    "load": (StreamPlanner, "_deciding"),
    "plan": (StreamPlanner, "_planned"),
    "a checkpoint's folder": (files, "make_checkpoint_folder"),
    "its dense state": (saver, "capture"),
    "old rows": (OldRows, "_append"),
    "a block's old rows": (Snapshot, "block"),
    "a block": (BlockFile, "write"),
    "fsync of a file": (BlockFile, "__exit__"),
    "fsync of the folder": (writer, "sync_folder"),
    "fsync of the manifest": (manifest, "sync_folder"),
    "list of values": (BlockWriter, "finish"),
    "manifest": (Manifest, "write"),
    "removal": (files, "remove_checkpoint"),
    "pruning": (saver, "prune"),
    "comparing": (state, "require_same_run"),
    "reading a block": (BlockReader, "_load_stored"),
    "reading": (trainer, "load_checkpoint"),
}
"""Where a rank can die beside the stages that `engine.step.stage_scope` surrounds."""

HOT = (np.arange(6), np.arange(3))
CASES = {
    "replicated": (28, Placement()),
    "sharded": (28, Placement("sharded")),
    "mixed": (28, Placement("mixed", "replicated", HOT)),
    "home": (28, Placement("replicated", "home")),
}
"""Slots and placement of the runs."""

STEPS, EVERY = 14, 3


class Death(NamedTuple):
    """At which call of a place a rank dies, counted from 1; `after_us`: microseconds after it has
    begun, -1: before it, -2: after it."""

    rank: int
    place: str
    call: int
    after_us: int


@dataclass(frozen=True)
class Point:
    """A run of `size` ranks and those that are killed in it, one after the other."""

    case: str
    size: int
    delay: int
    waits: bool
    whole_every: int = 1
    deaths: tuple[Death, ...] = ()


class Killed(ToyParallel):
    """The toy mode with any placement; with `waits` no step is trained beside a checkpoint."""

    def __init__(self, world, point: Point) -> None:
        slots, placement = CASES[point.case]
        settings = CachedSettings("data", (slots,), 3, 2, dtype=torch.float64)
        settings = replace(settings, placement=placement, result_delay=point.delay)
        model = initialise(SmallNet(3, 8), 0, torch.float64)
        parts = (TABLES, ToySource.features, model, row_update("adam"), settings)
        CachedParallel.__init__(self, world, *parts)
        self.stop_after, self.closed, self.waits = None, 0, point.waits

    def train_step(self, step, asks=0):
        result = super().train_step(step, asks)
        for thread in threading.enumerate():
            if thread.name == "distcache-checkpoint":
                thread.join(30 if self.waits else 0.004)  # some steps beside it
        return result


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Watch:
    """Counts the calls of all places in this process from now on, and ends it at one of them."""

    def __init__(self, death: Death | None) -> None:
        self.calls: Counter[str] = Counter()
        self._death = death
        for place, (owner, name) in PLACES.items():
            setattr(owner, name, self._around(place, getattr(owner, name)))
        self._stages()

    def _begin(self, place: str) -> bool:
        """Whether the rank dies after this call."""
        self.calls[place] += 1
        death = self._death
        if death is None or (place, self.calls[place]) != (death.place, death.call):
            return False
        if death.after_us == -1:
            die()
        elif death.after_us >= 0:
            threading.Timer(death.after_us * 1e-6, die).start()
        return death.after_us == -2

    def _around(self, place: str, body: Callable) -> Callable:
        def called(*arguments: Any, **named: Any) -> Any:
            dies = self._begin(place)
            try:
                return body(*arguments, **named)
            finally:
                if dies:
                    die()

        return called

    def _stages(self) -> None:
        enter, leave, dying = stage_scope.__enter__, stage_scope.__exit__, threading.local()

        def entered(stage: Any) -> None:
            enter(stage)
            dying.now = self._begin(stage._stage.name)

        def left(stage: Any, *error: Any) -> None:
            leave(stage, *error)
            if dying.now:
                die()

        stage_scope.__enter__, stage_scope.__exit__ = entered, left


def train(rank: int, size: int, home: str, point: Point, death: Death | None) -> dict[str, Any]:
    """A run in the folder `home`, gone on with where it holds one, with the end that a command
    gives it; `death`: of some rank."""
    calls = Watch(death if death and death.rank == rank else None).calls
    world, began = open_world("cpu", "gloo", TIMEOUT_S), time.monotonic()
    keys = {"trainer__steps": STEPS, "trainer__checkpoint_every": EVERY, "trainer__log_every": 1}
    keys |= {"trainer__keep_checkpoints": 2, "trainer__resume": "auto"}
    keys |= {"trainer__checkpoint_whole_every": point.whole_every}
    mode, error, found = Killed(world, point), None, ("", "")
    try:
        done = toy_run(world, Path(home), mode, ToySource(), **keys)
        found = (done.summary["loss_digest"], done.summary["state_digest"])
    except Exception as caught:
        error = caught
        cause_of(world.store, rank, error)
    close_world(world, orderly=error is None)
    took = time.monotonic() - began
    return {"digests": found, "error": error and repr(error), "took": took, "calls": calls}


def whole_steps(folder: Path) -> list[int]:
    """The steps of a run's checkpoints; each has its files as they were written."""
    for path in files.find_checkpoints(folder):
        Manifest.read(path).verify(path)
    return sorted(int(path.name[5:]) for path in files.find_checkpoints(folder))


def memory() -> set[str]:
    """Names in shared memory that are this package's."""
    return {name for name in os.listdir("/dev/shm") if "distcache" in name}


def lines(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of each line of `metrics.jsonl`."""
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in found]


def check_survivors(ends: list[End], death: Death) -> float:
    """Seconds that the longest survivor took; AssertionError where one did not end in order."""
    took = 0.0
    for rank, end in enumerate(ends):
        if rank == death.rank and end.value is None:
            assert end.exitcode == -signal.SIGKILL, end
            continue
        assert end.exitcode == 0 and isinstance(end.value, dict), end
        if ends[death.rank].value is None:  # else the run had ended before
            told = str(end.value["error"])
            assert "PeerError" in told or end.value["digests"][0], told
            assert f"rank {death.rank}" in told or end.value["digests"][0], told
        took = max(took, end.value["took"])
    return took


def endure(point: Point, folder: Path, whole: dict[str, Any]) -> tuple[int, list[int], float]:
    """Go through the deaths of a point and to its end: how many ranks died, the steps of the
    newest checkpoints then, and the longest that a survivor took. AssertionError where anything
    differs from `whole`, the run of the same kind that nobody killed."""
    before, died, stood, longest = memory(), 0, [], 0.0
    for death in point.deaths:
        ends = Job(train, point.size, str(folder), point, death).ends(2 * TIMEOUT_S)
        longest = max(longest, check_survivors(ends, death))
        died += ends[death.rank].value is None
        stood.append(max([0, *whole_steps(folder)]))
    for found in run_ranks(train, point.size, str(folder), point, None):
        assert found["digests"] == whole["digests"], found
    assert lines(folder) == whole["lines"], lines(folder)
    kept = whole_steps(folder)  # where none is trained beside them: those that are due
    rests = point.whole_every > 1  # then one on which these rest may be there too
    assert kept[-1] == STEPS and len(kept) <= 2 + rests, kept
    assert not point.waits or kept[-2:] == [STEPS - STEPS % EVERY, STEPS], kept
    left = {path.name for path in folder.glob("checkpoints/*")}
    assert left == {f"step_{step:08d}" for step in whole_steps(folder)}, left
    names = {f"__{rank}_0.distcp" for rank in range(point.size)} | {".metadata", "manifest.json"}
    for path in folder.glob("checkpoints/*"):
        found = {entry.name for entry in path.iterdir() if entry.name.count(".") != 2}
        assert found <= names, found  # beside old rows of a rank that died when it was finished
    assert memory() == before, memory()
    return died, stood, longest


def never_stopped(folder: Path, point: Point) -> dict[str, Any]:
    """Digests, lines and calls by rank of a run of the kind of `point`."""
    ends = run_ranks(train, point.size, str(folder), point, None)
    assert ends[0]["error"] is None, ends
    calls = [end["calls"] for end in ends]
    return {"digests": ends[0]["digests"], "lines": lines(folder), "calls": calls}


def drawn(count: int, seed: int, home: Path) -> Iterator[tuple[Point, Path, dict[str, Any]]]:
    """Points with a folder, and the run of their kind that nobody killed.

    Each place is as likely as any other, however often it is called.
    """
    rng, whole = random.Random(seed), dict[Point, dict[str, Any]]()
    for number in range(count):
        size = rng.choice([1, 2, 2, 2, 3])
        late, waits, every = rng.choice([0, 2]), rng.random() < 0.5, rng.choice([1, 3])
        kind = Point(rng.choice(list(CASES)), size, late, waits, every)
        if kind not in whole:
            whole[kind] = never_stopped(home / f"whole-{len(whole)}", kind)
        deaths = []
        for _ in range(rng.choice([1, 1, 2])):
            rank = rng.randrange(size)
            calls = whole[kind]["calls"][rank] | Counter({"reading": 1, "reading a block": 3})
            place = rng.choice(sorted(calls))
            when = rng.choice([-1, -2, int(10 ** rng.uniform(0, 3.5))])
            deaths.append(Death(rank, place, rng.randint(1, calls[place]), when))
        yield replace(kind, deaths=tuple(deaths)), home / f"run-{number}", whole[kind]


def main(words: list[str]) -> int:
    """Draw points, print what they came to, write the report; 1 where one failed."""
    given = dict(word.split("=", 1) for word in words)
    count, seed = int(given.get("points", 500)), int(given.get("seed", 0))
    places, died, longest, failed, began = Counter(), 0, 0.0, [], time.monotonic()
    with TemporaryDirectory(prefix="distcache-faults-") as home:
        for number, (point, folder, whole) in enumerate(drawn(count, seed, Path(home))):
            try:
                dead, stood, took = endure(point, folder, whole)
                died, longest = died + dead, max(longest, took)
                places.update(death.place for death in point.deaths)
                print(f"{number} {point}: {dead} died, stood at {stood}", flush=True)
            except Exception as error:
                failed.append(f"{point}: {type(error).__name__}: {error}")
                print(f"{number} FAILED {failed[-1]}", flush=True)
    if out := given.get("out"):
        text = report(count, seed, places, (died, longest, time.monotonic() - began), failed)
        Path(out).write_text(text)
    print(f"{count} points, {died} killed, failed: {len(failed)}")
    return int(bool(failed))


def report(
    count: int,
    seed: int,
    places: Counter[str],
    came_to: tuple[int, float, float],
    failed: list[str],
) -> str:
    """The report of a campaign, as Markdown; `came_to`: ranks killed, longest end, all seconds."""
    died, longest, seconds = came_to
    rows = "\n".join(f"| {place} | {places[place]} |" for place in sorted(places))
    bad = "\n".join(f"* {text}" for text in failed) or "None."
    return f"""# Ranks killed at random points

`python tests/fault_campaign.py points={count} seed={seed}`: runs of {STEPS} steps with 1 to 3
ranks, all placements, losses read at once or two steps later, a checkpoint every {EVERY} steps,
written beside training, each or one of three whole. At each point a rank is killed (SIGKILL)
before, in or after a call of a place, all drawn; the others end by themselves, and the run goes on
with `trainer.resume=auto`. A point holds when digests and losses in `metrics.jsonl` are those of a
run that nobody killed, every checkpoint that was there after a kill has its checksums, no more are
kept than asked for, and no process, memory or half checkpoint is left. (A finished one may still
have files of old rows beside its own, of a rank that died in the same moment: they go with it.)

{machine_text(describe_environment(1))}

{count} points, {sum(places.values())} kills planned, {died} met (a run that is gone on with may end
before its second one), {len(failed)} points failed; the longest that a survivor ran, from its start
on, was {longest:.1f} s; {seconds:.0f} s in all.

| place | kills |
|---|---:|
{rows}

## Points that failed

{bad}
"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
