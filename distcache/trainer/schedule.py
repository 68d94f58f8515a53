"""Which batches a run trains and evaluates on, in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.data.batch import Batch, BatchSource
from distcache.errors import ConfigError
from distcache.layout import TableSpec, group_tables
from distcache.popularity.curve import Curve, most_frequent
from distcache.popularity.hot_cold import HotColdSource, HotSet, Phase, Sizes, rows_that_fit
from distcache.popularity.statistics import Statistics
from distcache.sizing.resolve import read_checked, request_of


@dataclass
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
        """Whether an evaluation, which may be of no batches, follows training step `step`."""
        done = step + 1
        return done == self.steps or (self.eval_every is not None and done % self.eval_every == 0)

    def order(self) -> Iterator[tuple[str, int]]:
        """(`train`, step) and (`eval`, index) in order; evaluations use the same batches."""
        if self.nothing_to_train:
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

    def forward(self) -> Phase | None:
        """Where training stands after one step more, beyond the number of steps."""
        return None

    def learn(self, loss: float | None) -> Phase | None:
        """The same after an evaluation that gave `loss`, the mean log loss."""
        return None


def make_schedule(
    source: BatchSource,
    first_step: int,
    steps: int | None,
    eval_every: int | None,
    eval_steps: int | str,
) -> Schedule:
    """Return the schedule of `trainer.steps`, `eval_every` and `eval_steps` over `source`.

    `steps` None is one epoch; more than an epoch repeats it. `eval_steps`: `all` held-out batches,
    or at most so many. Raises ConfigError for `all` of a stream without an end.
    """
    held_out = source.eval_batches
    if eval_steps == "all":
        if held_out is None:
            raise ConfigError(
                "trainer.eval_steps=all, but the held-out samples of this source have no end: "
                "give a number of batches"
            )
        eval_steps = held_out
    return Schedule(
        first_step=first_step,
        steps=source.steps_per_epoch if steps is None else steps,
        eval_every=eval_every,
        eval_batches=eval_steps if held_out is None else min(eval_steps, held_out),
    )


# -----------------------------------------------------------------------------
# The schedule of hot and cold phases: one stream of batches for each, for the next one depends on
# the held-out loss that this one led to.


@dataclass
class PhasedSchedule(Schedule):
    """A `Schedule` that also evaluates after each phase, where anything is evaluated.

    The end of a phase is a fence: its stream ends, window and movement drain, and the next stream
    begins when all ranks know the loss. `phase`: after the steps that were told; `sizes`: of
    epochs.
    """

    phase: Phase
    sizes: Sizes

    def forward(self) -> Phase:
        """See `Schedule.forward`: in the current phase or at its end."""
        self.phase = self.phase.forward()
        return self.phase

    def begin(self) -> Phase:
        """The phase that goes on, or else the next one, which begins."""
        if not self.phase.left:
            self.phase = self.phase.next(self.sizes)
        return self.phase

    def learn(self, loss: float | None) -> Phase:
        """See `Schedule.learn`: the rate that the next phase has, where an evaluation was due."""
        if self.phase.due:  # a phase shorter than an evaluation: these would take most of the time
            least = max(self.eval_batches, 1) / max(self.sizes(self.phase.epoch))
            self.phase = self.phase.learn(loss, least)
        return self.phase

    def streams(self, source: Any, rank: int, world_size: int) -> Iterator[Iterator[Batch]]:
        """See `Schedule.streams`: a phase with the evaluation after it, or the rest of one."""
        step, steps = self.first_step, self.steps
        if self.eval_batches and (self.nothing_to_train or self.phase.due):
            yield self._evaluation(source, rank, world_size)
        while steps is None or step < steps:
            phase = self.begin()
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
            place = (phase.epoch, phase.kind, first + step)
            yield source.batch(place, step, rank, world_size)
            ends = step + 1 == start + phase.left
            if ends or self.evaluates_after(step):
                yield from self._evaluation(source, rank, world_size)

    def _evaluation(self, source: Any, rank: int, world_size: int) -> Iterator[Batch]:
        for index in range(self.eval_batches):
            yield source.eval_batch(index, rank, world_size)


def arrange(
    config: Config, world: World, source: BatchSource, tables: Sequence[TableSpec]
) -> BatchSource:
    """`source` as `data.batching` says; called by all ranks, which come to the same.

    The hot set depends on the keys of `cache`, not on the mode, so that all modes see the same
    samples. Raises ConfigError where the statistics or `data.hot_rows` do not fit.
    """
    if config.data.batching == "as_is":
        return source
    statistics: Any = read_checked(config, tables, source)  # there are some, or it was refused
    hot = HotSet(statistics, choose(config, world, statistics, tables))
    return HotColdSource(source, hot, show=world.is_first, world=world)  # type: ignore[arg-type]


def choose(
    config: Config, world: World, statistics: Statistics, tables: Sequence[TableSpec]
) -> list[int]:
    """How many of the most frequent rows of each table are hot: `data.hot_rows`."""
    curves = [Curve.of(table, statistics.samples) for table in statistics.tables]
    groups, wanted = group_tables(tables), config.data.hot_rows

    def slots_of(ranks: int) -> tuple[int, ...]:
        return request_of(config, tables).plan(ranks, statistics).slots

    if wanted == "auto":
        found = [0] * len(tables)  # the same at every number of ranks
        for members, count in zip(groups, slots_of(1), strict=True):
            own = [curves[index] for index in members]
            hot = rows_that_fit(own, count, config.data.global_batch_size)
            for index, rows in zip(members, hot, strict=True):
                found[index] = rows
        return found
    rows = sum(statistics.table_rows)
    found = most_frequent(curves, round(wanted * rows) if isinstance(wanted, float) else wanted)
    cached = config.parallel.mode == "data"
    rooms = slots_of(world.size) if cached else [rows + 1] * len(groups)
    for members, room in zip(groups, rooms, strict=True):
        hot = sum(found[index] for index in members)
        if room <= hot < sum(tables[index].rows for index in members):
            raise ConfigError(
                f"data.hot_rows: {hot} hot rows of the tables of width {tables[members[0]].dim} "
                f"leave no room for cold ones in {room} slots: give fewer, auto, or a larger "
                "cache.rows (or cache.ratio, cache.bytes)"
            )
    return found
