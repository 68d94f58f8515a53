"""A data source read once, ids alone, into counters; and what a whole run would look up."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from distcache.data.batch import Batch, BatchCheck, BatchSource
from distcache.errors import DataError
from distcache.layout import TableSpec
from distcache.popularity.counters import DENSE_BYTES, TableCounter, make_counters
from distcache.popularity.curve import TableProfile, profile_of
from distcache.popularity.statistics import Statistics, vocabulary_of
from distcache.store.memory import require_memory
from distcache.trainer.trainer import StopRequest

log = logging.getLogger(__name__)

PARTS = 8
"""Parts that the stream is cut into to see drift."""

MANY = 300_000_000
"""Lookups above which `auto` takes a sample."""
_LEAST_SHARE, _MOST_SHARE = 0.01, 0.1


class Bar(Protocol):
    """What a progress bar offers."""

    def update(self, n: float = 1) -> object:
        """Go `n` units on."""


Progress = Callable[[str, int, str], AbstractContextManager[Bar]]
"""A progress bar for (stage, total, unit)."""


class CheckedSource:
    """A batch source whose ids all lie inside their tables, as training checks them."""

    def __init__(self, source: BatchSource, tables: Sequence[TableSpec], on_bad_id: str) -> None:
        self._source = source
        self._check = BatchCheck(tables, source.features, on_bad_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def train_batch(self, step: int, rank: int, world_size: int) -> Batch:
        """See `BatchSource.train_batch`."""
        return self._check(self._source.train_batch(step, rank, world_size))

    def eval_batch(self, index: int, rank: int, world_size: int) -> Batch:
        """See `BatchSource.eval_batch`."""
        return self._check(self._source.eval_batch(index, rank, world_size))

    def in_file_order(self) -> CheckedSource:
        """The same with the samples in their own order, where the source can give them so."""
        make = getattr(self._source, "in_file_order", None)
        if make is None:
            return self
        other = CheckedSource.__new__(CheckedSource)
        other._source, other._check = make(), self._check
        return other

    @property
    def keeps_order(self) -> bool:
        """Whether `in_file_order` gives the order of the files."""
        return hasattr(self._source, "in_file_order")


@dataclass(frozen=True)
class Counted:
    """What was counted: a profile for each table, over batches of these `sizes` (samples -> steps).

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
        total = 0.0
        for size, steps in self.sizes.items():
            for profile in self.profiles:
                lookups = profile.counts.lookups / self.samples * size
                total += steps * profile.curve.expected(lookups)
        return total / self.steps

    @property
    def lookups(self) -> int:
        """All lookups counted."""
        return sum(profile.counts.lookups for profile in self.profiles)

    @property
    def statistics(self) -> Statistics:
        """The counts, as `cache.statistics` reads them."""
        tables = tuple(profile.counts for profile in self.profiles)
        return Statistics(tables, self.vocabulary, self.samples, self.share)


def sampled_steps(source: BatchSource, steps: int, share: float | None) -> list[int]:
    """Which of `steps` steps are counted: evenly spread ones, `share` of them (None: see `MANY`).

    Raises DataError where the first batches look nothing up at all.
    """
    if share is None:
        lookups = len(source.train_batch(0, 0, 1).ids.values) * steps
        share = 1.0
        if lookups > MANY:
            share = min(_MOST_SHARE, max(_LEAST_SHARE, MANY / lookups))
    count = min(steps, math.ceil(round(share * steps, 6)))
    return [(2 * i + 1) * steps // (2 * count) for i in range(count)] if count < steps else [
        *range(steps)
    ]  # fmt: skip


def count_source(
    source: CheckedSource, steps: int, share: float | None, memory: int, progress: Progress
) -> Counted:
    """Count the lookups of the training steps [0, `steps`) of `source`, or a sample of them.

    At most about `memory` bytes of counts. Ctrl-C ends the reading, not the counting. Raises
    DataError where nothing is looked up, MemoryTooSmallError where the machine lacks the memory.
    """
    reader = source.in_file_order()
    wanted = sampled_steps(reader, steps, share)
    exact = DENSE_BYTES * sum(source.table_rows)
    require_memory(min(memory, exact), "counts of all lookups", "lower analyze.memory")
    counters = make_counters(source.features, source.table_rows, memory)
    part = -(-len(wanted) // PARTS)
    sizes: dict[int, int] = {}
    with progress("count", len(wanted), "step") as bar, StopRequest() as stop:
        for done, step in enumerate(wanted):
            if stop.requested:
                log.warning("stopped: the report is of the %d of %d steps read", done, len(wanted))
                break
            batch = reader.train_batch(step, 0, 1)
            add_batch(counters, batch)
            size = batch.ids.batch_size
            sizes[size] = sizes.get(size, 0) + 1
            if (done + 1) % part == 0:
                _close_parts(counters)
            bar.update(1)
    _close_parts(counters)
    samples = sum(size * number for size, number in sizes.items())
    largest = max(sizes, default=0)
    profiles = tuple(profile_of(counter, samples, largest) for counter in counters)
    if not sum(profile.counts.lookups for profile in profiles):
        raise DataError(
            f"{samples} samples in {sum(sizes.values())} steps look up no id at all: there is "
            "nothing to analyze; see data.path, and data.bag_size of data=synthetic"
        )
    return Counted(profiles, sizes, steps, stop.signal, vocabulary_of(source))


def add_batch(counters: Sequence[TableCounter], batch: Batch) -> None:
    """Count a batch's ids, of which feature f is read by table f."""
    values, offsets = batch.ids.values.numpy(), batch.ids.offsets.numpy()
    size = batch.ids.batch_size
    for feature, counter in enumerate(counters):
        counter.add(values[offsets[feature * size] : offsets[(feature + 1) * size]])


def _close_parts(counters: Sequence[TableCounter]) -> None:
    for counter in counters:
        counter.close_part()
