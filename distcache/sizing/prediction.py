"""Lookups and counters of a training run before it runs: its ids are counted and replayed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from distcache.config.tree import Config
from distcache.data.batch import BatchCheck, BatchSource
from distcache.errors import ConfigError, DataError
from distcache.layout import TableSpec, group_tables
from distcache.planner.victims import AUTO, WINDOWS, Policy, auto_lookahead
from distcache.popularity.curve import COUNT_BYTES, TableCounter, TableProfile
from distcache.popularity.slots import BY_CURVE, PROPORTIONAL, cache_bytes
from distcache.popularity.statistics import Statistics, vocabulary_of
from distcache.replay import Case, GroupCounts, Outcome, popularity_of, replay
from distcache.sizing.resolve import ids_per_step, opens_window, request_of, resolve_prefetch
from distcache.sizing.slots import CacheRequest
from distcache.stopping import StopRequest
from distcache.store.memory import require_memory
from distcache.trace import Trace, record_source

log = logging.getLogger(__name__)

# -----------------------------------------------------------------------------
# A data source read once, ids alone, into counters.

PARTS = 8
"""Parts that the stream is cut into to see drift."""

MANY = 300_000_000
"""Lookups above which `auto` takes a sample."""
_LEAST_SHARE, _MOST_SHARE = 0.01, 0.1


Progress = Callable[[str, int, str], AbstractContextManager[Any]]
"""A progress bar for (stage, total, unit), whose `update(n)` goes n units on."""


@dataclass(frozen=True)
class Counted:
    """Counts of lookups: a profile for each table, over batches of `sizes` (samples -> steps).

    `all_steps`: of the data, or of the run where the data has no end; `stopped_by`: the signal that
    ended the reading early, None for none; `vocabulary`: see `Statistics`.
    """

    profiles: tuple[TableProfile, ...]
    sizes: Mapping[int, int]
    all_steps: int
    stopped_by: int | None
    vocabulary: str

    @property
    def steps(self) -> int:
        """Steps counted."""
        return sum(self.sizes.values())

    @property
    def samples(self) -> int:
        """Samples counted."""
        return sum(size * steps for size, steps in self.sizes.items())

    @property
    def share(self) -> float:
        """Share of the steps that were counted."""
        return self.steps / self.all_steps

    def distinct_per_step(self) -> float:
        """Expected distinct rows of all tables in a global batch; the mean over all `sizes`."""
        return sum(
            steps * profile.curve.expected(profile.counts.lookups / self.samples * size)
            for size, steps in self.sizes.items()
            for profile in self.profiles
        ) / self.steps  # fmt: skip

    @property
    def lookups(self) -> int:
        """All lookups counted."""
        return sum(profile.counts.lookups for profile in self.profiles)

    @property
    def statistics(self) -> Statistics:
        """The counts, as `cache.statistics` reads them."""
        tables = tuple(profile.counts for profile in self.profiles)
        return Statistics(tables, self.vocabulary, self.samples)


def count_source(
    source: BatchSource, check: BatchCheck, steps: int, share: float | None, progress: Progress
) -> Counted:
    """Count the lookups of the training steps [0, `steps`) of `source`, or a `share` of them evenly
    spread (None: see `MANY`), its samples in their own order where it can give them so; `check`: of
    its batches, as in training.

    Ctrl-C ends the reading, not the counting. Raises DataError where nothing is looked up,
    MemoryTooSmallError where the machine lacks the memory.
    """
    reader = getattr(source, "in_file_order", lambda: source)()
    if share is None:
        lookups = len(reader.train_batch(0, 0, 1).ids.values) * steps
        some = min(_MOST_SHARE, max(_LEAST_SHARE, MANY / max(lookups, 1)))
        share = some if lookups > MANY else 1.0
    count = min(steps, math.ceil(round(share * steps, 6)))
    wanted = [(2 * i + 1) * steps // (2 * count) for i in range(count)]
    size = COUNT_BYTES * sum(source.table_rows)
    require_memory(size, "counts of all lookups", "count where the tables fit, or smaller tables")
    pairs = zip(source.features, source.table_rows, strict=True)
    counters = [TableCounter(feature, rows) for feature, rows in pairs]
    part = -(-len(wanted) // PARTS)
    sizes: dict[int, int] = {}
    with progress("count", len(wanted), "step") as bar, StopRequest() as stop:
        for done, step in enumerate(wanted):
            if stop.signal:
                log.warning("stopped: the report is of the %d of %d steps read", done, len(wanted))
                break
            ids = check(reader.train_batch(step, 0, 1)).ids
            size = ids.batch_size
            spans = np.split(ids.values.numpy(), ids.offsets.numpy()[::size][1:-1])
            for counter, values in zip(counters, spans, strict=True):
                counter.add(values)
                if (done + 1) % part == 0:
                    counter.close_part()
            sizes[size] = sizes.get(size, 0) + 1
            bar.update(1)
    samples = sum(size * number for size, number in sizes.items())
    largest = max(sizes, default=0)
    profiles = tuple(TableProfile(c.result(), samples, largest, c.drift) for c in counters)
    if not sum(profile.counts.lookups for profile in profiles):
        raise DataError(
            f"{samples} samples in {sum(sizes.values())} steps look up no id at all: there is "
            "nothing to analyze; see data.path, and data.bag_size of data=synthetic"
        )
    return Counted(profiles, sizes, steps, stop.signal, vocabulary_of(source))


# -----------------------------------------------------------------------------
# What a run will measure, by replaying its ids through the planner that it runs.

_INDEX_BYTES = 12
"""Bytes for a row of a home: 8 in its planner's index, and those of a policy by statistics."""


def require_index(tables: Sequence[TableSpec], worlds: Sequence[int]) -> None:
    """Raise MemoryTooSmallError where a replay on some of so many ranks lacks the memory: its
    planners are made one after the other, each over all rows of a home."""
    groups = [sum(tables[at].rows for at in members) for members in group_tables(tables)]
    rows = -(-max(groups) // min(worlds))
    what = f"a planner of a replay, whose home has {rows:,} rows"
    way_out = "analyze where they fit, for more ranks (analyze.world_sizes), or smaller tables"
    require_memory(_INDEX_BYTES * rows, what, way_out)


_LATE = 4
"""The last one of so many parts of a replay stands for the steps after it."""


@dataclass(frozen=True)
class Sizes:
    """Bytes and slots of the cache of a `request`; `statistics` of its tables share out its slots
    where `cache.split=by_curve`."""

    request: CacheRequest
    statistics: Statistics | None = None

    @property
    def members(self) -> list[list[int]]:
        """The tables of each group."""
        return group_tables(self.request.tables)

    @property
    def rows(self) -> int:
        """V of all groups."""
        return sum(rows for rows, _, _ in self.request.groups(1))

    @property
    def row_bytes(self) -> list[int]:
        """Bytes of a row and its optimizer state, by group."""
        item = self.request.itemsize
        return [(dim + state) * item for _, dim, state in self.request.groups(1)]

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return self.bytes_of([rows for rows, _, _ in self.request.groups(1)])

    def bytes_of(self, slots: Sequence[int], world_size: int = 1) -> int:
        """Bytes of slots of each group on one of so many ranks."""
        return cache_bytes(slots, self.request.groups(world_size), self.request.itemsize)

    def slots(self, size: float, world_size: int) -> tuple[int, ...]:
        """Slots per rank for a share of the rows (at most 1), or for rows; by rows where the split
        by curves refuses so few."""
        ratio, rows = (size, None) if size <= 1 else (None, min(int(size), self.rows))
        keys = replace(self.request.keys, ratio=ratio, rows=rows, bytes=None)
        if keys.split == BY_CURVE and self.statistics is not None:
            with suppress(ConfigError):
                by_curve = replace(self.request, keys=keys)
                return by_curve.plan(world_size, self.statistics).slots
        plain = replace(self.request, keys=replace(keys, split=PROPORTIONAL))
        return plain.plan(world_size, None).slots


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
    known = statistics if config.cache.split == BY_CURVE else None  # others do not go by it
    return request_of(config, tables, source).plan(world_size, known).slots


class RecordedRun:
    """The first steps of a run, recorded once, and what any case comes to over the whole run.

    A run of more steps than were recorded goes on as the last quarter of them did: too low where
    new rows still become fewer, too high where the cache was not full yet.
    """

    def __init__(self, traces: Sequence[Trace], steps: int) -> None:
        """`steps`: of the run. Policies that rank rows by statistics get those of the traces."""
        self.traces, self.steps = list(traces), steps
        self.classes = popularity_of(self.traces)
        self.recorded = int(traces[0].training.sum())
        self._late = list[Trace]()
        for trace in traces if self.recorded < steps else ():  # its last steps alone counted
            trained = np.cumsum(trace.training)
            first = trained[-1] - max(1, trained[-1] // _LATE)
            late = trace.training & (trained > first)
            homes = next(iter(trace.homes.values()))
            ids = sum(int(home.counts[np.repeat(late, home.distinct)].sum()) for home in homes)
            self._late.append(replace(trace, training=late, ids=ids))

    @property
    def distinct_per_step(self) -> float:
        """Distinct rows of a training step, the mean over those recorded."""
        total = 0
        for trace in self.traces:
            homes = next(iter(trace.homes.values()))
            total += sum(int(home.distinct[trace.training].sum()) for home in homes)
        return total / self.recorded

    def estimate(self, case: Case) -> Outcome:
        """Return the expected outcome of the run in `case`; its counts may be no whole numbers.

        More slots than a home has rows in the trace change nothing, and are not made.
        """
        world = case.world_size
        named = [max(len(home.names) for home in t.of_world(world)) for t in self.traces]
        slots = (min(s, world * most) for s, most in zip(case.slots, named, strict=True))
        small = replace(case, slots=tuple(max(count, 1) for count in slots))
        whole = replay(self.traces, [small], self.classes)[0]
        groups = whole.groups
        if self._late and whole.refused is None:
            late = replay(self._late, [small], self.classes)[0]
            times = (self.steps - self.recorded) / late.steps
            found = []
            for one, other in zip(groups, late.groups, strict=True):
                # Once the cache is full, as many rows leave as come.
                more = vars(other) | {"written_back": other.fetched}
                counts = {name: own + times * more[name] for name, own in vars(one).items()}
                found.append(GroupCounts(**counts))
            groups = tuple(found)
        return replace(whole, case=case, steps=self.steps, groups=groups)


def record_run(
    source: BatchSource,
    check: BatchCheck,
    order: Iterable[tuple[str, int]],
    worlds: Sequence[int],
    most_lookups: int,
    progress: Callable[[int], object],
    stop: StopRequest,
) -> list[Trace]:
    """The traces of a run's first batches, evaluations among them, of about `most_lookups` lookups
    of training steps; of fewer where `stop` ends the recording. `order`: kind and index of each
    batch of the run; `check`: as for `count_source`."""
    each = max(1, len(source.train_batch(0, 0, 1).ids.values))
    count = max(_LATE, math.ceil(most_lookups / each))

    def goes_on(batch: tuple[str, int]) -> bool:
        kind, index = batch
        wanted = kind != "train" or index < (_LATE if stop.signal else count)
        progress(int(wanted))
        return wanted

    batches = takewhile(goes_on, order)
    return record_source(source, check.tables, worlds, batches, check=check)


def configured_case(
    config: Config,
    source: BatchSource,
    tables: Sequence[TableSpec],
    slots: Sequence[int],
    world_size: int,
) -> Case:
    """The case of a run with these slots; `auto` as it is where memory is no matter."""
    cache, batch = config.cache, config.data.global_batch_size
    prefetch, lookahead = resolve_prefetch(config, source, tables, slots), cache.lookahead
    if lookahead == AUTO:
        ids = ids_per_step(source, tables, batch, world_size)
        lookahead = auto_lookahead(ids, prefetch) if opens_window(config) else WINDOWS[0]
    return Case(Policy.of(cache), tuple(slots), lookahead, prefetch, world_size)
