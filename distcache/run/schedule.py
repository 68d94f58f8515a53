"""Which batches a run trains and evaluates on, in which order: a pure function of the settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from distcache.data.batch import Batch, BatchSource
from distcache.errors import ConfigError
from distcache.run.phases import Phase


@dataclass(frozen=True)
class Schedule:
    """Training steps [first_step, steps), and evaluations of `eval_batches` batches in between.

    `steps` None: until the data ends. `eval_every`: training steps between evaluations; None: only
    at the end. Steps are counted from 0 across epochs and across resumed processes, so evaluations
    fall on the same steps.
    """

    first_step: int
    steps: int | None
    eval_every: int | None
    eval_batches: int

    @property
    def nothing_to_train(self) -> bool:
        """Whether all steps are done."""
        return self.steps is not None and self.first_step >= self.steps

    def evaluates_after(self, step: int) -> bool:
        """Whether an evaluation follows training step `step`."""
        if self.eval_batches == 0:
            return False
        done = step + 1
        return done == self.steps or (self.eval_every is not None and done % self.eval_every == 0)

    def order(self) -> Iterator[tuple[str, int]]:
        """(`train`, step) and (`eval`, index) in order; evaluations use the same batches."""
        if self.nothing_to_train and self.eval_batches:
            yield from (("eval", index) for index in range(self.eval_batches))
        steps = count(self.first_step) if self.steps is None else range(self.first_step, self.steps)
        for step in steps:
            yield "train", step
            if self.evaluates_after(step):
                yield from (("eval", index) for index in range(self.eval_batches))

    def batches(self, source: BatchSource, rank: int, world_size: int) -> Iterator[Batch]:
        """This rank's slices, drawn when they are asked for."""
        for kind, index in self.order():
            draw = source.train_batch if kind == "train" else source.eval_batch
            yield draw(index, rank, world_size)

    def streams(self, source: BatchSource, rank: int, world_size: int) -> Iterator[Iterator[Batch]]:
        """Streams of batches; what one of them holds may depend on the results of those before."""
        yield self.batches(source, rank, world_size)

    def position(self, step: int) -> Phase | None:
        """Where training stands after `step` steps, beyond that number."""
        return None

    def learn(self, step: int, loss: float | None) -> Phase | None:
        """`position` after an evaluation after `step` steps gave `loss`, the mean log loss."""
        return None


def make_schedule(
    source: BatchSource, first_step: int, steps: int | None, eval_every: int | None, eval_steps: int
) -> Schedule:
    """The schedule of `trainer.steps`, `eval_every` and `eval_steps` over `source`.

    `steps` None is one epoch; more than an epoch repeats it. At most as many batches are
    evaluated as are held out. Raises ConfigError for an unlimited source without `steps`.
    """
    if steps is None:
        steps = source.steps_per_epoch
    if steps is None:
        raise ConfigError(
            "trainer.steps is null (one epoch), but the data is unlimited: set trainer.steps or "
            "data.samples"
        )
    held_out = source.eval_batches
    return Schedule(
        first_step=first_step,
        steps=steps,
        eval_every=eval_every,
        eval_batches=eval_steps if held_out is None else min(eval_steps, held_out),
    )
