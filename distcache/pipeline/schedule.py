"""Stages are data: what each does, to which step, on which stream; schedules loop over them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from distcache.coordinator import Agreement
from distcache.pipeline.planning import PlannedStep


@dataclass
class InFlight:
    """One step on its way through the stages; each stage fills in what the next ones read."""

    planned: PlannedStep
    gathered: list[Tensor | None] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None
    logits: Tensor | None = None
    stop: bool = False
    agreement: Agreement | None = None


@dataclass(frozen=True)
class Stage:
    """A named part of a step: `run` does it, `stream` says where it may run when overlapped."""

    name: str
    stream: str
    run: Callable[[InFlight], None]


class StageClock:
    """Host seconds spent in each stage, and how many steps they belong to."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps = 0

    def add(self, name: str, seconds: float) -> None:
        """Add the time of one stage of one step."""
        self.seconds[name] += seconds

    def mean_ms(self) -> dict[str, float]:
        """Milliseconds per step of each stage."""
        return {name: 1e3 * total / max(1, self.steps) for name, total in self.seconds.items()}


class SerialSchedule:
    """One step after the other, one stage after the other: the slow twin of every overlap."""

    def __init__(self, stages: tuple[Stage, ...], clock: StageClock) -> None:
        self.stages, self.clock = stages, clock

    def run(self, step: InFlight, timed: bool = True) -> Any:
        """Take `step` through all stages."""
        for stage in self.stages:
            started = time.perf_counter()
            stage.run(step)
            if timed:
                self.clock.add(stage.name, time.perf_counter() - started)
        if timed:
            for name, seconds in step.planned.seconds.items():
                self.clock.add(name, seconds)
            self.clock.steps += 1
