"""Contenders that train over one stream of batches, some steps at a time, in turns."""

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
from hydra.errors import HydraException, MissingConfigException
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import Record, medians, ratio_record, spread, take_turns
from distcache.cli.compose import checked_config, compose_overrides
from distcache.comm.world import World, close_world, open_world
from distcache.config.tree import Config
from distcache.data.batch import Batch, BatchSource
from distcache.data.criteo_folder import TERABYTE_ROWS
from distcache.errors import ConfigError

log = logging.getLogger("distcache.benchmarks.turns")

SIZES = {
    "kaggle": (),
    "small": ("data.table_rows=[20000,5000,1000,200,10,3]", "cache.ratio=0.1"),
    "terabyte": (f"data.table_rows={list(TERABYTE_ROWS)}",),
}
"""Hydra overrides by the value of `size`; `kaggle` has Criteo Kaggle's 26 tables (33,762,577 rows)
and `terabyte` Criteo Terabyte's (204,184,588 rows); `small` is for tests."""

SETTLE_S = 0.25
"""Pause before a turn, in which the threads of the contender before it come to rest."""

STEPS_AHEAD = 2
"""Steps that the host may be ahead of a GPU."""

Feed = Iterator[Batch]


def compose_setting(size: str, overrides: Sequence[str]) -> Config:
    """Return the checked configuration of a size; later overrides win. Raises ConfigError."""
    base = ("experiment=quickstart", "cache.lookahead=8", "cache.prefetch=1", *SIZES[size])
    try:
        text = compose_overrides([*base, *overrides])
    except (HydraException, MissingConfigException) as error:
        raise ConfigError(str(error).strip().replace("\n", " ")) from error
    return checked_config(text)


@contextmanager
def opened_world(*arguments: Any) -> Iterator[World]:
    """Open this process's world with the arguments of `open_world`, and close it at the end."""
    world = open_world(*arguments)
    try:
        yield world
        close_world(world)
    finally:
        close_world(world, orderly=False)


class BatchBank:
    """The training batches of one rank, drawn in advance, outside the timed turns.

    A batch stays in memory until every feed has read it.
    """

    def __init__(self, source: BatchSource, rank: int, world_size: int) -> None:
        self._source = source
        self._shard = (rank, world_size)
        self._batches: dict[int, Batch] = {}
        self._next_steps: list[int] = []  # by feed
        self._lock = threading.Lock()

    def feed(self) -> Feed:
        """Return a new reader from step 0 on, for one thread.

        Make all feeds before the first `fill`. A feed draws a batch that is not there yet.
        """
        self._next_steps.append(0)
        return self._read(len(self._next_steps) - 1)

    def _read(self, feed: int) -> Feed:
        while True:
            yield self._batch(self._next_steps[feed])
            self._next_steps[feed] += 1

    def fill(self, steps: int) -> None:
        """Draw the first `steps` batches of the stream that are not there yet."""
        oldest = min(self._next_steps)
        for step in range(oldest, steps):
            self._batch(step)
        with self._lock:
            for step in [step for step in self._batches if step < oldest]:
                del self._batches[step]

    def _batch(self, step: int) -> Batch:
        with self._lock:
            if step not in self._batches:
                self._batches[step] = self._source.train_batch(step, *self._shard)
            return self._batches[step]


class Pace:
    """Keeps the host at most `STEPS_AHEAD` steps ahead of a GPU, like the package's own modes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._issued: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """Note that a step has been issued, and wait for an earlier one."""
        if self._device.type != "cuda":
            return
        done = torch.cuda.Event()
        done.record()
        self._issued.append(done)
        if len(self._issued) > STEPS_AHEAD:
            self._issued.popleft().synchronize()


@contextmanager
def device_work(steps: int) -> Iterator[dict[str, float]]:
    """Yield a dict that has the device's work when the block ends, by torch's profiler.

    Milliseconds per step: `kernels_ms` with at least one kernel at work, and `busy_ms` with a
    kernel or a copy, on any stream. `gap_ms`: the longest time without a kernel. The profiler slows
    the host, so gaps are longer than without it; the work takes as long.
    """
    work: dict[str, float] = {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield work
    copies: list[tuple[float, float]] = []
    kernels: list[tuple[float, float]] = []
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            is_copy = event.name.startswith(("Memcpy", "Memset"))
            spans = copies if is_copy else kernels
            spans.append((event.time_range.start, event.time_range.end))
    kernel_us, gap_us = union(kernels)
    busy_us, _ = union(kernels + copies)
    work["kernels_ms"] = 1e-3 * kernel_us / steps
    work["busy_ms"] = 1e-3 * busy_us / steps
    work["gap_ms"] = 1e-3 * gap_us


def union(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the length of the union of spans (start, end) and the longest gap between them."""
    covered = 0.0
    gap = 0.0
    end = min((start for start, _ in spans), default=0.0)
    for start, stop in sorted(spans):
        gap = max(gap, start - end)
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered, gap


class Contender:
    """A training loop over the batches of its own feed."""

    name: str
    steps_ahead: int = 0
    """Steps of the stream that it reads before it trains them."""

    def prepare(self, steps: int) -> None:
        """Do the data loader's work for the next `steps` steps, outside the timed part."""

    def step(self) -> Callable[[], float] | None:
        """Train one step; return a function of its loss, the mean over the global batch.

        The function waits for the device. None: the contender does not train.
        """
        raise NotImplementedError

    def meters(self) -> dict[str, Mapping[str, float]]:
        """Return running sums by meter and name; a turn's record has their means per step.

        `stage_ms`: milliseconds of each stage; `stage_hidden_ms`: the part of them that training
        did not wait for. Other meters are averaged over the ranks, such as `rows_per_step` and
        `sent_per_step` (bytes by category).
        """
        return {}

    def is_steady(self) -> bool:
        """Return True if the last step cost as much as all later ones will."""
        return True

    def summary(self) -> Record:
        """Return further values of this contender's record; called by all ranks."""
        return {}

    def close(self) -> None:
        """Release threads and tables."""


class Turns:
    """Contenders in turns, in rotating order, each through all steps of the stream."""

    def __init__(
        self, contenders: Sequence[Contender], world: World, bank: BatchBank | None = None
    ) -> None:
        """Take the contenders; `bank` has their batches."""
        self.contenders = {contender.name: contender for contender in contenders}
        self.bank = bank
        self.world = world
        self._steps_done = 0
        self._steps_ahead = max(contender.steps_ahead for contender in contenders)

    def close(self) -> None:
        """Close all contenders."""
        for contender in self.contenders.values():
            contender.close()

    def warm_up(self, minimum: int, maximum: int) -> None:
        """Train from `minimum` to `maximum` steps, until every contender is steady."""
        steady = False
        while self._steps_done < maximum and not (self._steps_done >= minimum and steady):
            steps = min(minimum, maximum - self._steps_done)
            self._prepare(steps)
            for contender in self.contenders.values():
                for _ in range(steps):
                    contender.step()
            unsteady = any(not contender.is_steady() for contender in self.contenders.values())
            steady = not self._sum_over_ranks([float(unsteady)])[0]
        log.info("warm after %d steps", self._steps_done)
        if not steady:
            log.warning("no steady eviction after %d steps of warm-up: allow more", maximum)

    def run(self, repetitions: int, lead: int, steps: int) -> list[Record]:
        """Time turns of `steps` steps over the same batches, after `lead` untimed ones each.

        Return a record for each turn, each contender and each pair. Called by all ranks.
        """
        records: list[Record] = []

        def turn(name: str, repetition: int) -> Record:
            record = {"kind": "turn", "mode": name, "repetition": repetition}
            records.append(record | self._time_turn(self.contenders[name], lead, steps))
            return records[-1]

        turns = take_turns(
            {name: partial(turn, name) for name in self.contenders},
            repetitions,
            lambda: self._prepare(lead + steps),
        )
        modes = [self._mode_record(self.contenders[name], part) for name, part in turns.items()]
        values = {record["mode"]: record["turn_medians_ms"] for record in modes}
        pairs = [ratio_record(*pair, values) for pair in combinations(values, 2)]
        return [*records, *modes, *pairs]

    def profile(self, name: str, steps: int) -> dict[str, float]:
        """Return the device's work in further steps of one contender; see `device_work`."""
        self._prepare(steps)
        with device_work(steps) as work:
            for _ in range(steps):
                self.contenders[name].step()
            self._synchronize()
        return work

    def _prepare(self, steps: int) -> None:
        """Make the next `steps` batches, which all contenders will train."""
        self._steps_done += steps
        if self.bank is not None:
            self.bank.fill(self._steps_done + self._steps_ahead)
        for contender in self.contenders.values():
            contender.prepare(steps)
        gc.collect()

    def _time_turn(self, contender: Contender, lead: int, steps: int) -> Record:
        """Return milliseconds from the end of each step to the end of the next, and the meters."""
        time.sleep(SETTLE_S)
        for _ in range(lead):
            contender.step()
        self._synchronize()
        before = contender.meters()
        times = [time.perf_counter()]
        for step in range(steps):
            read_loss = contender.step()
            if step == steps - 1:
                self._synchronize()
            times.append(time.perf_counter())
        loss = 0.0 if read_loss is None else read_loss()
        if not math.isfinite(loss):
            raise ConfigError(
                f"modes={contender.name}: the loss is {loss} after {self._steps_done} steps: "
                "lower optim.embedding_lr and optim.dense_lr"
            )
        record: Record = {"step_ms": (1e3 * np.diff(times)).tolist(), "loss": loss}
        for meter, sums in contender.meters().items():
            means = [(sums[key] - before[meter].get(key, 0.0)) / steps for key in sums]
            if not meter.startswith("stage_"):
                means = [total / self.world.size for total in self._sum_over_ranks(means)]
            record[meter] = dict(zip(sums, means, strict=True))
        return record

    def _sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Return the sums over ranks; all ranks call this with as many values."""
        total = torch.tensor(values, dtype=torch.float64)
        if self.world.size > 1 and len(values):
            dist.all_reduce(total, group=self.world.host_group)
        return total.tolist()

    def _synchronize(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        if self.world.size > 1:
            dist.barrier(group=self.world.host_group)

    def _mode_record(self, contender: Contender, turns: Sequence[Record]) -> Record:
        """Return the record of one contender, from its turns."""
        record: Record = {
            "kind": "mode",
            "mode": contender.name,
            "world_size": self.world.size,
            "step_ms": spread([ms for turn in turns for ms in turn["step_ms"]]),
            "turn_medians_ms": [float(np.median(turn["step_ms"])) for turn in turns],
            "loss": turns[-1]["loss"],
            "is_steady": contender.is_steady(),
        }
        for meter in contender.meters():
            record[meter] = medians([turn[meter] for turn in turns])
        return record | contender.summary()
