"""The schedule of hot and cold phases: one stream of batches for each, for the next one depends on
the held-out loss that this one led to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distcache.data.batch import Batch
from distcache.data.hot_cold import BatchPlace, HotColdSource
from distcache.run.phases import Phase, PhaseClock, phase_at
from distcache.run.schedule import Schedule


@dataclass(frozen=True)
class PhasedSchedule(Schedule):
    """A `Schedule` that also evaluates after each phase, where anything is evaluated.

    The end of a phase is a fence: its stream ends, window and movement drain, and the next stream
    begins when all ranks know the loss. `clock`: where training stands; it lets no phase become
    shorter than an evaluation, or that would take most of the time.
    """

    clock: PhaseClock

    @classmethod
    def of(
        cls, plain: Schedule, source: HotColdSource, phase: Phase | None, rate: float
    ) -> PhasedSchedule:
        """`plain` in phases, from `phase` on, as far as it fits `source`; None: the one that
        `plain.first_step` steps at `rate` lead to."""

        def sizes(epoch: int) -> tuple[int, int]:
            return source.epoch(epoch).sizes

        first = plain.first_step
        phase = phase.within(sizes) if phase is not None else phase_at(first, rate, sizes)
        return cls(**vars(plain), clock=PhaseClock(phase, first, sizes, plain.eval_batches))

    def position(self, step: int) -> Phase:
        """See `Schedule.position`."""
        return self.clock.at(step)

    def learn(self, step: int, loss: float | None) -> Phase:
        """See `Schedule.learn`: the rate that the next phase has."""
        return self.clock.learn(step, loss)

    def streams(self, source: Any, rank: int, world_size: int) -> Iterator[Iterator[Batch]]:
        """See `Schedule.streams`: a phase with the evaluation after it, or the rest of one."""
        step, steps = self.first_step, self.steps
        if self.eval_batches and (self.nothing_to_train or self.position(step).due):
            yield self._evaluation(source, rank, world_size)
        while steps is None or step < steps:
            phase = self.clock.begin(step)
            stop = step + phase.left if steps is None else min(step + phase.left, steps)
            yield self._phase(source, (step, stop, phase), rank, world_size)
            step = stop

    def _phase(
        self, source: Any, part: tuple[int, int, Phase], rank: int, world_size: int
    ) -> Iterator[Batch]:
        """Training steps [start, stop), which begin at `phase`, with evaluations."""
        start, stop, phase = part
        first = getattr(phase, phase.kind) - start
        for step in range(start, stop):
            place = BatchPlace(phase.epoch, phase.kind, first + step)
            yield source.batch(place, step, rank, world_size)
            ends = step + 1 == start + phase.left
            if self.eval_batches and (ends or self.evaluates_after(step)):
                yield from self._evaluation(source, rank, world_size)

    def _evaluation(self, source: Any, rank: int, world_size: int) -> Iterator[Batch]:
        for index in range(self.eval_batches):
            yield source.eval_batch(index, rank, world_size)
