"""What a training run will measure, by replaying its ids through the planner that it runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from distcache.config.tree import Config
from distcache.data.batch import BatchSource
from distcache.errors import ConfigError
from distcache.layout import TableSpec, group_tables
from distcache.optim import row_update
from distcache.planner.policy import Policy
from distcache.popularity.slots import BY_CURVE, cache_bytes, cache_slots, plan_slots
from distcache.popularity.statistics import Statistics
from distcache.replay import Case, Outcome, popularity_of, replay
from distcache.trace import Trace, record_source
from distcache.trainer.build import dtype_of
from distcache.trainer.plan_cache import (
    AUTO,
    LOOKAHEAD,
    PREFETCH,
    budget_of,
    expected_rows,
    prefetch_that_slots_hold,
    shares_state,
    slot_state,
)
from distcache.trainer.schedule import Schedule
from distcache.trainer.trainer import StopRequest

log = logging.getLogger(__name__)

_LATE = 4
"""The last one of so many parts of a replay stands for the steps after it."""


@dataclass(frozen=True)
class Estimate:
    """What a run of `steps` steps is expected to measure in a case; None where it is `refused`.

    `hit_rate`: of distinct rows; `hit_rate_lookups`: of lookups, both as in `summary.json`;
    `distinct`, `fetched`, `written_back`: rows over the run.
    """

    case: Case
    steps: int
    refused: str | None = None
    hit_rate: float | None = None
    hit_rate_lookups: float | None = None
    distinct: float | None = None
    fetched: float | None = None
    written_back: float | None = None


@dataclass(frozen=True)
class Sizes:
    """Bytes and slots of a model's tables. `groups`: (V, D, S) of each group; `itemsize`: bytes of
    an element; `shared`: each rank has a share of the state of its slots (`shares_state`)."""

    groups: tuple[tuple[int, int, int], ...]
    members: tuple[tuple[int, ...], ...]
    itemsize: int
    by_curve: Callable[[float | None, int | None, int], tuple[int, ...]] | None = None
    shared: bool = False

    @classmethod
    def of(
        cls, config: Config, tables: Sequence[TableSpec], statistics: Statistics | None = None
    ) -> Sizes:
        """Those of the tables with the optimizer of `config`; with `cache.split=by_curve` slots are
        shared out by `statistics` of them."""
        update = row_update(config.optim.name, 0.0)
        members = tuple(tuple(group) for group in group_tables(tables))
        groups = []
        for group in members:
            dim = tables[group[0]].dim
            groups.append((sum(tables[i].rows for i in group), dim, update.state_width(dim)))
        shared = shares_state(config)
        found = cls(tuple(groups), members, dtype_of(config).itemsize, shared=shared)
        if config.cache.split != BY_CURVE or statistics is None:
            return found

        def by_curve(ratio: float | None, rows: int | None, world: int) -> tuple[int, ...]:
            cache = replace(config.cache, ratio=ratio, rows=rows, bytes=None)
            return slots_of(replace(config, cache=cache), tables, world, statistics)

        return replace(found, by_curve=by_curve)

    @property
    def rows(self) -> int:
        """V of all groups."""
        return sum(rows for rows, _, _ in self.groups)

    @property
    def row_bytes(self) -> list[int]:
        """Bytes of a row and its optimizer state, by group."""
        return [(dim + state) * self.itemsize for _, dim, state in self.groups]

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return self.bytes_of([rows for rows, _, _ in self.groups])

    def bytes_of(self, slots: Sequence[int], world_size: int = 1) -> int:
        """Bytes of slots of each group on one of so many ranks."""
        homes = world_size if self.shared else 1
        groups = [(rows, dim, -(-state // homes)) for rows, dim, state in self.groups]
        return cache_bytes(slots, groups, self.itemsize)

    def slots(self, size: float, world_size: int) -> tuple[int, ...]:
        """Slots per rank for a share of the rows (at most 1), or for rows; by rows where the split
        by curves refuses so few."""
        ratio, rows = (size, None) if size <= 1 else (None, min(int(size), self.rows))
        if self.by_curve is not None:
            with suppress(ConfigError):
                return self.by_curve(ratio, rows, world_size)
        found = cache_slots(rows, ratio, None, self.groups, self.itemsize, world_size)
        return tuple(found)


def slots_of(
    config: Config,
    tables: Sequence[TableSpec],
    world_size: int,
    statistics: Statistics | None,
    source: object = None,
) -> tuple[int, ...]:
    """Slots per rank of each group that the configuration gives a run, with `cache.split`.

    `statistics`: of `tables`, in order, read where the split goes by them; `source`: of batches,
    which may know its rows. Raises ConfigError for a split that training would refuse.
    """
    expected = expected_rows(config, source, tables)
    budget = budget_of(config, dtype_of(config).itemsize, world_size, expected)
    split = config.cache.split
    known = statistics if split == BY_CURVE else None  # others do not go by it
    widths = slot_state(config, tables, world_size)
    return plan_slots(tables, widths, budget, split, known).slots


class Prediction:
    """The first steps of a run, recorded once, and what any case comes to over the whole run.

    A run of more steps than were recorded goes on as the last quarter of them did: too low where
    new rows still become fewer, too high where the cache was not full yet.
    """

    def __init__(
        self,
        traces: Sequence[Trace],
        steps: int,
    ) -> None:
        """`steps`: of the run. Policies that rank rows by statistics get those of the traces."""
        self.traces, self.steps = list(traces), steps
        self.classes = popularity_of(self.traces)
        self.recorded = int(traces[0].training.sum())
        self._late = [] if self.recorded >= steps else [_late(trace) for trace in traces]

    @property
    def distinct_per_step(self) -> float:
        """Distinct rows of a training step, the mean over those recorded."""
        total = 0
        for trace in self.traces:
            homes = next(iter(trace.homes.values()))
            total += sum(int(home.distinct[trace.training].sum()) for home in homes)
        return total / self.recorded

    def estimate(self, case: Case) -> Estimate:
        """What the run comes to in `case`.

        More slots than a home has rows in the trace change nothing, and are not made.
        """
        world = case.world_size
        named = [max(len(home.names) for home in t.of_world(world)) for t in self.traces]
        slots = (min(s, world * most) for s, most in zip(case.slots, named, strict=True))
        small = replace(case, slots=tuple(max(count, 1) for count in slots))
        whole = replay(self.traces, [small], self.classes)[0]
        if whole.refused is not None:
            return Estimate(case, self.steps, whole.refused)
        if not self._late:
            return _estimate(case, self.steps, whole, None, 0.0)
        late = replay(self._late, [small], self.classes)[0]
        return _estimate(case, self.steps, whole, late, (self.steps - self.recorded) / late.steps)


def _estimate(
    case: Case, steps: int, whole: Outcome, late: Outcome | None, times: float
) -> Estimate:
    """The counts of `whole` with `times` those of `late`, as rates."""

    def total(name: str, of_late: str | None = None) -> float:
        rest = 0.0 if late is None else times * getattr(late, of_late or name)
        return getattr(whole, name) + rest

    distinct, ids, fetched = total("distinct"), total("ids"), total("fetched")
    return Estimate(
        case,
        steps,
        None,
        1 - fetched / distinct,
        total("lookups_hit") / ids,
        distinct,
        fetched,
        total("written_back", "fetched"),  # once the cache is full, as many leave as come
    )


def _late(trace: Trace) -> Trace:
    """The trace with its last training steps alone counted."""
    trained = np.cumsum(trace.training)
    first = trained[-1] - max(1, trained[-1] // _LATE)
    late = trace.training & (trained > first)
    homes = next(iter(trace.homes.values()))
    ids = sum(int(home.counts[np.repeat(late, home.distinct)].sum()) for home in homes)
    return replace(trace, training=late, ids=ids)


def record_run(
    source: BatchSource,
    tables: Sequence[TableSpec],
    schedule: Schedule,
    worlds: Sequence[int],
    most_lookups: int,
    progress: Callable[[int], object],
    stop: StopRequest,
) -> list[Trace]:
    """The traces of a run's first batches, evaluations among them, of about `most_lookups` lookups
    of training steps; of fewer where `stop` ends the recording."""
    each = max(1, len(source.train_batch(0, 0, 1).ids.values))
    count = max(_LATE, math.ceil(most_lookups / each))
    order = _first(schedule, count, stop)
    return record_source(source, tables, worlds, order, lambda _: progress(1))


def _first(schedule: Schedule, count: int, stop: StopRequest) -> Iterator[tuple[str, int]]:
    """The batches of the first `count` training steps, with the evaluations that follow them."""
    for kind, index in schedule.order():
        if kind == "train" and (index >= count or (stop.requested and index >= _LATE)):
            return
        yield kind, index


def configured_case(
    config: Config,
    source: BatchSource,
    tables: Sequence[TableSpec],
    slots: Sequence[int],
    world_size: int,
) -> Case:
    """The case of a run with these slots; `auto` as it is where memory is no matter."""
    cache = config.cache
    prefetch, lookahead = cache.prefetch, cache.lookahead
    if prefetch == AUTO:
        prefetch = min(PREFETCH, prefetch_that_slots_hold(source, tables, config, slots))
    if lookahead == AUTO:
        lookahead = LOOKAHEAD
    policy = Policy.of(cache.policy, cache.tail, cache.half_life)
    return Case(policy, tuple(slots), lookahead, prefetch, world_size)
