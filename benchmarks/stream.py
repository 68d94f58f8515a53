"""Contenders that go through one stream of batches, a step at a time, in turns."""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import Record
from benchmarks.turns import medians, ratio_record, spread, take_turns
from distcache.comm.world import World
from distcache.data.batch import Batch, BatchSource
from distcache.errors import ConfigError

log = logging.getLogger("distcache.benchmarks.stream")

_SETTLE_S = 0.25
"""Pause before a turn, in which the planning thread of the one before comes to rest."""


Feed = Iterator[Batch]


class BatchBank:
    """One rank's training batches, in memory from `fill` on until every feed has given them out:
    they are made in advance, outside the timed turns."""

    def __init__(self, source: BatchSource, rank: int, world_size: int) -> None:
        self._draw = lambda step: source.train_batch(step, rank, world_size)
        self._batches: dict[int, Batch] = {}
        self._read: list[int] = []
        self._lock = threading.Lock()

    def feed(self) -> Feed:
        """A new reader, from step 0 on, for one thread; make all of them before the first `fill`.

        Where it comes to a batch that is not there yet it draws it itself.
        """
        self._read.append(0)
        return self._batches_of(len(self._read) - 1)

    def _batches_of(self, reader: int) -> Feed:
        while True:
            yield self._take(self._read[reader])
            self._read[reader] += 1

    def fill(self, steps: int) -> None:
        """Draw batches until the first `steps` steps are there."""
        for step in range(min(self._read), steps):
            self._take(step)
        with self._lock:
            for step in [step for step in self._batches if step < min(self._read)]:
                del self._batches[step]

    def _take(self, step: int) -> Batch:
        with self._lock:
            if step not in self._batches:
                self._batches[step] = self._draw(step)
            return self._batches[step]


_AHEAD = 2
"""Steps that the host may be ahead of a GPU."""


class Pace:
    """Lets the host be no more steps ahead of a GPU than the package's own modes are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._issued: deque[torch.cuda.Event] = deque()

    def keep(self) -> None:
        """A step has been issued."""
        if self._device.type != "cuda":
            return
        done = torch.cuda.Event()
        done.record()
        self._issued.append(done)
        if len(self._issued) > _AHEAD:
            self._issued.popleft().synchronize()


@contextmanager
def device_work(device: torch.device, steps: int) -> Iterator[dict[str, float]]:
    """Milliseconds a step in which the device is at work, by torch's profiler, once it is over.

    `kernels_ms`: in which at least one kernel runs; `busy_ms`: a kernel or a copy, on any stream;
    `gap_ms`: the longest time without a kernel, in all steps together. The profiler slows the
    host, so gaps are longer than without it; what the device does takes as long. On a CPU kernels
    are torch's operators.
    """
    gpu = device.type == "cuda"
    found: dict[str, float] = {}
    activity = ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        yield found
    kind = DeviceType.CUDA if gpu else DeviceType.CPU
    events = [e for e in seen.events() or () if e.device_type == kind and not e.is_user_annotation]
    spans = {
        copies: [
            (e.time_range.start, e.time_range.end)
            for e in events
            if copies or not e.name.startswith(("Memcpy", "Memset"))
        ]
        for copies in (False, True)
    }
    (kernels, gap), (busy, _) = (union(spans[copies]) for copies in (False, True))
    found |= {"kernels_ms": 1e-3 * kernels / steps, "busy_ms": 1e-3 * busy / steps}
    found["gap_ms"] = 1e-3 * gap


def union(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """How long at least one of the spans (start, end) lasts, and the longest gap between them."""
    covered = gap = 0.0
    end = min((start for start, _ in spans), default=0.0)
    for start, stop in sorted(spans):
        gap = max(gap, start - end)
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered, gap


class Contender:
    """Somebody who goes through the batches of a feed of its own."""

    name: str
    ahead: int = 0
    """Steps of the stream that it reads before it goes through them."""

    def prepare(self, steps: int) -> None:
        """Make ready, outside the timed part, what a data loader would: the next `steps` steps."""

    def step(self) -> Callable[[], float] | None:
        """One step; what gives its loss, mean over the global batch, where it trains.

        On a GPU the host may be two steps ahead of the device; asking for the loss waits for it.
        """
        raise NotImplementedError

    def meters(self) -> dict[str, Mapping[str, float]]:
        """Sums so far by name; a turn's record has their means per step. `stage_ms` and, of it,
        `stage_hidden_ms` that training did not wait for; as means over ranks, `rows_per_step`:
        `distinct`, `misses` of all homes and `evictions` of one, `sent_per_step`: bytes by
        category, and what else there is."""
        return {}

    def steady(self) -> bool:
        """Whether the last step was like all that follow."""
        return True

    def summary(self) -> dict[str, Any]:
        """Values of the record of this contender; called by all ranks."""
        return {}

    def close(self) -> None:
        """Let go of threads and tables."""


class Turns:
    """Contenders in turns, in rotating order, each through all steps of the stream."""

    def __init__(
        self, contenders: Sequence[Contender], world: World, bank: BatchBank | None = None
    ) -> None:
        """`bank`: where they have their batches from."""
        self.contenders = {contender.name: contender for contender in contenders}
        self.bank, self.world = bank, world
        self._done, self._warmed = 0, 0
        self._ahead = max(contender.ahead for contender in contenders)

    def close(self) -> None:
        """Let go of all contenders."""
        for contender in self.contenders.values():
            contender.close()

    def warm_up(self, least: int, most: int) -> None:
        """Go on until every contender is in its steady state, from `least` to `most` steps."""
        steady = False
        while self._done < most and not (self._done >= least and steady):
            steps = min(least, most - self._done)
            self._prepare(steps)
            for contender in self.contenders.values():
                for _ in range(steps):
                    contender.step()
            unsteady = [not contender.steady() for contender in self.contenders.values()]
            flag = torch.tensor([int(any(unsteady))])
            dist.all_reduce(flag, group=self.world.host_group)
            steady = not flag.item()
        self._warmed = self._done
        log.info("warm after %d steps", self._done)
        if not steady:
            log.warning("no steady eviction after %d steps of warm-up: allow more", most)

    def take(self, repetitions: int, lead: int, steps: int) -> list[Record]:
        """Turns of every contender over the same batches: a record for each turn, one for each
        contender and one for each pair of them. Called by all ranks."""
        records: list[Record] = []

        def turn(name: str, repetition: int) -> Record:
            found = {"kind": "turn", "mode": name, "repetition": repetition}
            records.append(found | self._turn(self.contenders[name], lead, steps))
            return records[-1]

        found = take_turns(
            {name: partial(turn, name) for name in self.contenders},
            repetitions,
            lambda repetition: self._prepare(lead + steps),
        )
        modes = [self._mode_record(self.contenders[name], turns) for name, turns in found.items()]
        values = {record["mode"]: record["turn_medians_ms"] for record in modes}
        pairs = [ratio_record(*pair, values) for pair in combinations(values, 2)]
        return [*records, *modes, *pairs]

    def at_work(self, name: str, steps: int) -> dict[str, float]:
        """What the device does in steps of one contender that no turn has; see `device_work`."""
        self._prepare(steps)
        with device_work(self.world.device, steps) as found:
            for _ in range(steps):
                self.contenders[name].step()
            self._synchronise()
        return found

    def go(self, name: str, steps: int) -> None:
        """Let one contender do some steps alone."""
        self._prepare(steps)
        for _ in range(steps):
            self.contenders[name].step()

    def _prepare(self, steps: int) -> None:
        """Make the next `steps` batches, which all contenders will go through."""
        self._done += steps
        if self.bank is not None:
            self.bank.fill(self._done + self._ahead)
        for contender in self.contenders.values():
            contender.prepare(steps)
        gc.collect()

    def _turn(self, contender: Contender, lead: int, steps: int) -> Record:
        """Milliseconds from the end of one step to the end of the next, and the meters' means."""
        time.sleep(_SETTLE_S)
        for _ in range(lead):
            contender.step()
        self._synchronise()
        before = contender.meters()
        marks, losses = [time.perf_counter()], []
        for step in range(steps):
            losses.append(contender.step())
            if step == steps - 1:
                self._synchronise()
            marks.append(time.perf_counter())
        loss = losses[-1]() if losses[-1] is not None else 0.0
        if not math.isfinite(loss):
            raise ConfigError(
                f"modes={contender.name}: the loss is {loss} after {self._done} steps, "
                "so its steps say nothing: lower optim.embedding_lr and optim.dense_lr"
            )
        found = {
            meter: {key: (sums[key] - before[meter].get(key, 0.0)) / steps for key in sums}
            for meter, sums in contender.meters().items()
        }
        for meter in found:
            if not meter.startswith("stage_"):
                found[meter] = self._mean_of_ranks(found[meter])
        return {"step_ms": (1e3 * np.diff(marks)).tolist(), **found, "loss": loss}

    def _mean_of_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        """The mean over ranks of each value; all ranks have the same keys, and call this."""
        of_all = torch.tensor(list(values.values()), dtype=torch.float64)
        if self.world.size > 1 and values:
            dist.all_reduce(of_all, group=self.world.host_group)
        return dict(zip(values, (of_all / self.world.size).tolist(), strict=True))

    def _synchronise(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        if self.world.size > 1:
            dist.barrier(group=self.world.host_group)

    def _mode_record(self, contender: Contender, turns: Sequence[Record]) -> Record:
        def of_turns(key: str, mean: bool = False) -> dict[str, float]:
            found = [turn.get(key, {}) for turn in turns]
            if not mean:
                return medians(found)
            return {name: sum(of[name] for of in found) / len(found) for name in found[0]}

        return {
            "kind": "mode",
            "mode": contender.name,
            "world_size": self.world.size,
            "nodes": self.world.nodes.count,
            "step_ms": spread([value for turn in turns for value in turn["step_ms"]]),
            "turn_medians_ms": [float(np.median(turn["step_ms"])) for turn in turns],
            "stage_ms": of_turns("stage_ms"),
            "stage_hidden_ms": of_turns("stage_hidden_ms"),
            "loss": turns[-1]["loss"],
            "warmup_steps": self._warmed,
            "rows_per_step": of_turns("rows_per_step", mean=True),
            "sent_per_step": of_turns("sent_per_step", mean=True),
            "steady_eviction": contender.steady(),
            **contender.summary(),
        }
