"""The turns of the step's bench: who takes part, warm-up, timed steps, and the records."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Sequence
from itertools import combinations
from types import TracebackType

import numpy as np
import torch
import torch.distributed as dist

from distcache.bench.contenders import Contender
from distcache.bench.report import Record
from distcache.bench.spread import ratios, rotated, spread
from distcache.bench.step_batches import BatchBank
from distcache.comm.world import World
from distcache.errors import ConfigError

log = logging.getLogger("distcache.bench.step")

_SETTLE_S = 0.25
"""Pause before a turn, in which the planning thread of the one before comes to rest."""


class Turns:
    """Contenders that train in turns, in rotating order, each all steps of the stream."""

    def __init__(self, contenders: Sequence[Contender], bank: BatchBank, world: World) -> None:
        self.contenders = {contender.name: contender for contender in contenders}
        self.bank, self.world = bank, world
        self.records: list[Record] = []
        self._trained, self._warmed = 0, 0
        self._steady = False
        self._ahead = max(contender.ahead for contender in contenders)

    def __enter__(self) -> Turns:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bank.finish()
        for contender in self.contenders.values():
            contender.close()

    def warm_up(self, least: int, most: int) -> None:
        """Train until every contender is in its steady state, from `least` to `most` steps."""
        while self._trained < most and not (self._trained >= least and self._steady):
            steps = min(least, most - self._trained)
            self._prepare(steps)
            for contender in self.contenders.values():
                for _ in range(steps):
                    contender.step()
            self._trained += steps
            unsteady = [not contender.steady() for contender in self.contenders.values()]
            flag = torch.tensor([int(any(unsteady))])
            dist.all_reduce(flag, group=self.world.host_group)
            self._steady = not flag.item()
        self._warmed = self._trained
        log.info("warm after %d steps", self._trained)
        if not self._steady:
            log.warning("no steady eviction after warmup_most=%d steps: give more", most)

    def take(self, repetition: int, lead: int, steps: int) -> None:
        """A turn of every contender over the same batches; a record for each."""
        self._prepare(lead + steps)
        for name in rotated(list(self.contenders), repetition):
            record = {"kind": "turn", "mode": name, "repetition": repetition}
            self.records.append(record | self._turn(self.contenders[name], lead, steps))
        self._trained += lead + steps

    def _prepare(self, steps: int) -> None:
        self.bank.fill(self._trained + steps + self._ahead)
        for contender in self.contenders.values():
            contender.prepare(steps)
        gc.collect()

    def _turn(self, contender: Contender, lead: int, steps: int) -> Record:
        """Milliseconds from the end of one step to the end of the next, and of each stage."""
        time.sleep(_SETTLE_S)
        for _ in range(lead):
            contender.step()
        self._synchronise()
        before, rows, sent = contender.stage_seconds(), contender.rows(), contender.sent()
        hidden_before = contender.hidden_seconds()
        marks, losses = [time.perf_counter()], []
        for step in range(steps):
            losses.append(contender.step())
            if step == steps - 1:
                self._synchronise()
            marks.append(time.perf_counter())
        loss = losses[-1]()
        if not math.isfinite(loss):
            raise ConfigError(
                f"modes={contender.name}: the loss is {loss} after {self._trained + steps} steps, "
                "so its steps say nothing: lower optim.embedding_lr and optim.dense_lr"
            )
        after = contender.stage_seconds()
        stages = {key: 1e3 * (after[key] - before.get(key, 0.0)) / steps for key in after}
        after = contender.hidden_seconds()
        hidden = {key: 1e3 * (after[key] - hidden_before.get(key, 0.0)) / steps for key in after}
        step_ms = (1e3 * np.diff(marks)).tolist()
        moved = {key: (count - rows[key]) / steps for key, count in contender.rows().items()}
        return {
            "step_ms": step_ms,
            "stage_ms": stages,
            "stage_hidden_ms": hidden,
            "rows_per_step": moved,
            "sent_per_step": self._mean_sent(contender, sent, steps),
            "loss": loss,
        }

    def _mean_sent(self, contender: Contender, before: dict[str, int], steps: int) -> Record:
        """Bytes per step since `before`, the mean over ranks."""
        after = contender.sent()
        sent = torch.tensor([after[key] - before[key] for key in after], dtype=torch.float64)
        if self.world.size > 1 and after:
            dist.all_reduce(sent, group=self.world.host_group)
        means = (sent / self.world.size / steps).tolist()
        return dict(zip(after, means, strict=True))

    def _synchronise(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        if self.world.size > 1:
            dist.barrier(group=self.world.host_group)

    def summarise(self) -> list[Record]:
        """All records: turns, one per mode, one per pair of modes. Called by all ranks."""
        modes = [self._mode_record(contender) for contender in self.contenders.values()]
        medians = {record["mode"]: record["turn_medians_ms"] for record in modes}
        pairs = [_pair_record(first, second, medians) for first, second in combinations(medians, 2)]
        return [*self.records, *modes, *pairs]

    def _mode_record(self, contender: Contender) -> Record:
        turns = [record for record in self.records if record["mode"] == contender.name]
        return {
            "kind": "mode",
            "mode": contender.name,
            "world_size": self.world.size,
            "nodes": self.world.nodes.count,
            "step_ms": spread([value for turn in turns for value in turn["step_ms"]]),
            "turn_medians_ms": [float(np.median(turn["step_ms"])) for turn in turns],
            "stage_ms": _medians([turn["stage_ms"] for turn in turns]),
            "stage_hidden_ms": _medians([turn["stage_hidden_ms"] for turn in turns]),
            "loss": turns[-1]["loss"],
            "warmup_steps": self._warmed,
            "rows_per_step": _mean([turn["rows_per_step"] for turn in turns]),
            "sent_per_step": _mean([turn["sent_per_step"] for turn in turns]),
            "steady_eviction": contender.steady(),
            **contender.summary(),
        }


def _medians(values: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each key."""
    names = dict.fromkeys(name for value in values for name in value)
    return {name: float(np.median([v[name] for v in values if name in v])) for name in names}


def _mean(values: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each key."""
    return {key: sum(value[key] for value in values) / len(values) for key in values[0]}


def _pair_record(first: str, second: str, medians: dict[str, list[float]]) -> Record:
    """Ratio of two modes' median step, one value per repetition."""
    values = ratios(medians[first], medians[second])
    return {
        "kind": "ratio",
        "numerator": first,
        "denominator": second,
        "repetitions": values,
        "ratio": spread(values),
    }
