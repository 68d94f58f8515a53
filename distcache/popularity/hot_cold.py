"""Hot batches, whose samples look up hot rows alone, and cold batches of the others."""

from __future__ import annotations

import logging
import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from distcache.comm.link import run_on_all_ranks
from distcache.comm.world import World
from distcache.data.batch import Batch, BatchSlice, JaggedIds, SlicedSource, slice_bounds
from distcache.data.files import digest_of
from distcache.data.samplers import BatchSpans, BlockOrder, SampleSpan, Subset, both
from distcache.errors import ConfigError
from distcache.popularity.curve import Curve, most_frequent, room_for
from distcache.popularity.statistics import Statistics

# -----------------------------------------------------------------------------
# The hot set: the rows that stay cached, so that samples of hot rows alone move nothing.
#
# FAE (Adnan et al., VLDB 2022) trains such samples apart from the others. There hot ids were
# float32, which has no distinct numbers above 2^24; here ids are int64, and a row takes one bit.

_MARGIN, _MOST_MARGIN, _HOMES = 4.0, 0.1, 8
"""Slots left for the uneven share of hot rows that homes have: 4 deviations at 8 homes, at most a
tenth of the slots. The same whatever the number of ranks, and so is the hot set."""

_GRID = 65
"""Points at which numbers of hot rows are tried first."""

COLD_STEPS = (3, 2, 1)
"""Cold batches whose cold rows find room beside the hot rows: those of a step, of the one that
movement runs ahead, and one to spare; fewer where the cache is too small for that."""


class HotSet:
    """The `hot_rows[t]` most frequent rows of each table, one bit a row (V / 8 bytes)."""

    def __init__(self, statistics: Statistics, hot_rows: Sequence[int]) -> None:
        rows = np.array(statistics.table_rows, dtype=np.int64)
        self.table_rows = statistics.table_rows
        self._offsets = np.concatenate(([0], np.cumsum((rows + 7) // 8 * 8)))
        self._bits = np.zeros(int(self._offsets[-1]) // 8, dtype=np.uint8)
        pairs = zip(statistics.tables, hot_rows, strict=True)
        chosen = [table.order[:count] for table, count in pairs]
        for table, start, ids in zip(statistics.tables, self._offsets[:-1], chosen, strict=True):
            mask = np.zeros(table.rows, dtype=bool)
            mask[ids] = True
            packed = np.packbits(mask, bitorder="little")
            self._bits[start // 8 : start // 8 + len(packed)] = packed
        self.hot_rows: tuple[int, ...] = tuple(map(len, chosen))

    @property
    def rows(self) -> int:
        """Hot rows of all tables."""
        return sum(self.hot_rows)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._bits.nbytes

    @property
    def named(self) -> str:
        """How many rows are hot, and which, in short."""
        return f"{self.rows} ({digest_of(self._bits)[:12]})"

    def has(self, table: int, ids: np.ndarray) -> np.ndarray:
        """Whether each of `ids` int64 `[n]` is a hot row of `table`; bool.

        An id outside the table is not: whoever checks the batch says what becomes of it.
        """
        inside = ids.view(np.uint64) < np.uint64(self.table_rows[table])
        at = np.where(inside, ids, 0) + self._offsets[table]
        bits = self._bits[at >> 3] >> (at & 7).astype(np.uint8)
        return (bits & 1).astype(bool) & inside

    def samples(self, ids: JaggedIds) -> np.ndarray:
        """Which of the samples of `ids` look up hot rows alone; bool `[b]`.

        A sample whose bags are all empty does. Feature f reads table f.
        """
        values, offsets = ids.values.numpy(), ids.offsets.numpy()
        values = values.astype(np.int64, copy=False)
        hot = np.ones(ids.batch_size, dtype=bool)
        for feature in range(len(ids.features)):
            first = feature * ids.batch_size
            edges = offsets[first : first + ids.batch_size + 1]
            found = self.has(feature, values[edges[0] : edges[-1]])
            if (np.diff(edges) == 1).all():
                hot &= found
                continue
            cold = np.concatenate(([0], np.cumsum(~found)))  # cold ids before each place
            hot &= np.diff(cold[edges - edges[0]]) == 0
        return hot


def rows_that_fit(curves: Sequence[Curve], slots: int, batch: int) -> list[int]:
    """Hot rows of each of the tables that share `slots` slots, beside the rows of cold batches.

    `batch`: samples of a global batch. Taken greedily by frequency, as many as leave room for the
    cold rows that `COLD_STEPS` cold batches are expected to look up; none where none fits.
    """
    margin = min(room_for(0.0, _HOMES * slots, _MARGIN), _MOST_MARGIN * slots)
    room = int(slots - margin)
    distinct = int(sum(curve.distinct for curve in curves))
    if distinct <= room:
        return most_frequent(curves, distinct)
    grid = np.linspace(min(room, distinct), 0, _GRID, dtype=np.int64)[:-1].tolist()
    for steps in COLD_STEPS:

        def full(rows: int, steps: int = steps) -> bool:
            cold = expected_cold(curves, most_frequent(curves, rows), batch)
            return rows + steps * cold > room

        # More hot rows leave fewer cold ones: few may not fit where more do. So the most are found
        # on a grid, from above, and then between two of its points.
        above = min(room, distinct) + 1
        for low in grid:
            if not full(low):
                return most_frequent(
                    curves, low + bisect_left(range(low + 1, above), True, key=full)
                )
            above = low
    return [0] * len(curves)


def expected_cold(curves: Sequence[Curve], hot_rows: Sequence[int], batch: int) -> float:
    """About how many distinct cold rows a cold batch of `batch` samples looks up.

    All lookups of a cold row come in cold samples. Of these there are as many as if the lookups of
    a sample were cold independently of one another, and at least as many as the table with the
    most cold lookups says.
    """
    cold = [curve.below(hot) for curve, hot in zip(curves, hot_rows, strict=True)]
    pairs = list(zip(curves, cold, strict=True))
    least, all_samples, hot_share = 0.0, 0.0, 1.0
    for curve, rows in pairs:
        lookups, colder = (float((curve.counts * of).sum()) for of in (curve.rows, rows))
        if lookups:
            least = max(least, colder / max(1.0, curve.per_sample))
            all_samples = max(all_samples, lookups / curve.per_sample)
            hot_share *= (1 - colder / lookups) ** curve.per_sample
    samples = max(least, all_samples * (1 - hot_share))
    if samples < 1:
        return 0.0
    share = min(batch, samples) / samples
    return float(sum((rows * -np.expm1(-c.counts * share)).sum() for c, rows in pairs))


# -----------------------------------------------------------------------------
# Every sample is in one batch of an epoch, both kinds are shuffled anew in each (unlike FAE's), and
# samples are classified by whole arrays.

logger = logging.getLogger(__name__)

HOT, COLD = "hot", "cold"
_CHUNK = 1 << 15
"""Samples that are classified at once; a multiple of 64."""
_BAR_SAMPLES = 4_000_000
"""A progress bar is shown for at least so many samples."""


class KindSamples:
    """The samples of one kind in an epoch, in an order of (seed, epoch)."""

    def __init__(self, source: SlicedSource, kind: str, chosen: Subset) -> None:
        self.chosen = chosen
        self.spans = BatchSpans(chosen.count, source.batch_size)
        self.order = source.order_of(chosen, 1 if kind == HOT else 2)
        if isinstance(self.order, BlockOrder):

            def hint(start: int, stop: int) -> None:
                first, last = chosen.at(np.array([start, stop - 1])).tolist()
                source.will_need(first, last + 1)

            self.order.hint = hint

    def samples(self, span: SampleSpan, low: int, high: int) -> np.ndarray:
        """Samples [low, high) of the global batch `span`, int64."""
        return self.chosen.at(self.order.slice(span, low, high))


class HotColdSource:
    """`source` in hot and cold batches; a `BatchSource` too, hot ones first.

    What it is asked for beyond batches and identity is `source`'s own. Where the ids of a sample
    differ between epochs (sampled negatives), each epoch is classified when it begins. Raises
    ConfigError for a source whose samples cannot be read one by one, or without an end.
    """

    def __init__(
        self, source: SlicedSource, hot: HotSet, show: bool = False, world: World | None = None
    ) -> None:
        """`show`: whether this rank says what it finds; `world`: ranks that each classify a part of
        the samples (None: this one all). Called by all of them, and so is the first `epoch` of
        each number."""
        if not isinstance(source, SlicedSource) or source.samples_per_epoch is None:
            raise ConfigError(
                "data.batching=hot_cold needs data with a known number of samples, read in any "
                "order: give data.samples=<samples of an epoch> to data=synthetic, or use "
                "data.batching=as_is"
            )
        self.source, self.hot, self._show, self._world = source, hot, show, world
        self._samples = source.samples_per_epoch
        self._epochs: dict[int, dict[str, KindSamples]] = {}
        self._warn()

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # asked for before there is one, by copy and pickle
            raise AttributeError(name)
        return getattr(self.source, name)

    @property
    def identity(self) -> Mapping[str, str]:
        """See `BatchSource.identity`."""
        own = {"data.batching": "hot_cold", "data.hot_rows": self.hot.named}
        return dict(self.source.identity) | own

    @property
    def steps_per_epoch(self) -> int:
        """Training steps of the first epoch; others may have one more or less."""
        return sum(self.sizes(0))

    @property
    def share(self) -> float:
        """Of all samples of the first epoch, those that are hot."""
        return self.epoch(0)[HOT].chosen.count / self._samples

    def sizes(self, epoch: int) -> tuple[int, int]:
        """Hot and cold global batches of an epoch."""
        hot, cold = (own.spans.per_epoch or 0 for own in self.epoch(epoch).values())
        return hot, cold

    def train_batch(self, step: int, rank: int, world_size: int) -> Batch:
        """See `BatchSource.train_batch`: the hot batches of each epoch, then the cold ones."""
        epoch, left = 0, step
        while left >= sum(self.sizes(epoch)):
            left -= sum(self.sizes(epoch))
            epoch += 1
        hot, _ = self.sizes(epoch)
        kind, number = (HOT, left) if left < hot else (COLD, left - hot)
        return self.batch((epoch, kind, number), step, rank, world_size)

    def batch(self, place: tuple[int, str, int], step: int, rank: int, world_size: int) -> Batch:
        """This rank's slice of the global batch at `place`, which is training step `step`: epoch,
        kind (`hot` or `cold`), and number of the batch among those of its kind."""
        epoch, kind, number = place
        samples = self.epoch(epoch)[kind]
        inside = samples.spans.locate(number)
        span = SampleSpan(epoch, inside.start, inside.stop)
        low, high = slice_bounds(span.size, rank, world_size)
        part = BatchSlice("train", step, span, low, high, kind)
        return self.source.take(samples.samples(span, low, high), part)

    def epoch(self, number: int) -> dict[str, KindSamples]:
        """The samples of an epoch, the hot and the cold ones; the last two are remembered."""
        key = number if self.source.ids_vary else 0
        known = self._epochs.get(key)
        if known is None:
            for old in [e for e in self._epochs if e < key - 1]:
                del self._epochs[old]
            kinds = zip((HOT, COLD), both(self._classified(key), self._samples), strict=True)
            known = {kind: KindSamples(self.source, kind, chosen) for kind, chosen in kinds}
            self._epochs[key] = known
        return known

    def _classified(self, epoch: int) -> np.ndarray:
        """`classify` of all samples, of which each rank does a part."""
        world = self._world
        if world is None or world.size == 1:
            return classify(self.source, self.hot, epoch, show=self._show)
        words = (self._samples + 63) // 64
        low, high = (64 * at for at in slice_bounds(words, world.rank, world.size))
        part = (low, min(high, self._samples))
        found = run_on_all_ranks(
            world, lambda: classify(self.source, self.hot, epoch, part, self._show)
        )
        return np.concatenate(found)

    def _warn(self) -> None:
        if not self._show:
            return
        chosen, (hot, cold) = [own.chosen for own in self.epoch(0).values()], self.sizes(0)
        megabytes = (sum(one.nbytes for one in chosen) + self.hot.nbytes) / 1e6
        logger.info(
            f"{chosen[0].count:,} of {self._samples:,} samples are hot ({100 * self.share:.2f} %):"
            f" {hot:,} hot and {cold:,} cold batches of an epoch; {self.hot.rows:,} hot rows, "
            f"{megabytes:.1f} MB to find them and the samples"
        )
        if not (hot and cold):
            logger.warning(
                "data.batching=hot_cold: all samples are %s, and so are all batches: nothing is "
                "gained over data.batching=as_is",
                HOT if hot else "cold (raise cache.rows, cache.ratio or data.hot_rows)",
            )


def classify(
    source: SlicedSource,
    hot: HotSet,
    epoch: int,
    part: tuple[int, int] | None = None,
    show: bool = False,
) -> np.ndarray:
    """Which training samples look up hot rows alone, one bit each, uint64 as in `Subset`.

    One pass over the ids of the samples as they are in `epoch`. `part`: samples [start, stop) only,
    from a multiple of 64 on; `show`: with a progress bar.
    """
    first, last = part or (0, source.samples_per_epoch or 0)
    samples = max(last - first, 0)
    bits = np.zeros((samples + 63) // 64 * 8, dtype=np.uint8)
    often = 0.2 if sys.stderr.isatty() else 10.0
    how = {"unit": "sample", "unit_scale": True, "mininterval": often, "maxinterval": often}
    quiet = not show or samples < _BAR_SAMPLES
    with tqdm(total=samples, desc="hot samples", disable=quiet, **how) as bar:
        for start in range(0, samples, _CHUNK):
            some = np.arange(first + start, min(first + start + _CHUNK, last), dtype=np.int64)
            after = first + start + len(some)
            source.will_need(after, min(after + _CHUNK, last))
            packed = np.packbits(hot.samples(source.ids_of(some, epoch)), bitorder="little")
            bits[start // 8 : start // 8 + len(packed)] = packed
            bar.update(len(some))
    return bits.view(np.uint64)


# -----------------------------------------------------------------------------
# Hot and cold phases of an epoch: how long each is, and what the held-out loss does to that.
#
# The shuffle scheduler of FAE (Adnan et al., VLDB 2022): a share r of the hot batches, then as much
# of the cold ones, and so on. Where the held-out loss rises over a phase, r is halved; after
# `STEADY_FALLS` falls in a row it is doubled.

STEADY_FALLS = 4
"""Consecutive falls of the held-out loss after which the rate is doubled."""

Sizes = Callable[[int], tuple[int, int]]
"""Hot and cold batches of an epoch."""


@dataclass(frozen=True)
class Phase:
    """State of the phases of hot and cold batches; part of a checkpoint.

    `hot`, `cold`: trained batches of `epoch`; `kind`: kind of this phase, empty before the first;
    `left`: batches that remain in it; `until`: share of the epoch's batches of each kind that are
    trained when this phase and its partner have ended; `rate`: r; `falls`: consecutive falls of
    the held-out loss; `loss`: the last held-out loss; `due`: the phase has ended and its
    evaluation has not been used yet.
    """

    rate: float
    epoch: int = 0
    hot: int = 0
    cold: int = 0
    kind: str = ""
    left: int = 0
    until: float = 0.0
    falls: int = 0
    loss: float | None = None
    due: bool = False

    def forward(self, batches: int = 1) -> Phase:
        """Return the state after `batches` more batches of this phase, 1 to `left`."""
        left = self.left - batches
        done = getattr(self, self.kind) + batches
        return replace(self, left=left, due=left == 0, **{self.kind: done})

    def next(self, sizes: Sizes) -> Phase:
        """Return the next phase that is not empty, of the same or the next epoch."""
        phase = self
        while True:
            hot, cold = sizes(phase.epoch)
            if phase.kind == HOT and phase.cold < (end := math.ceil(phase.until * cold)):
                return replace(phase, kind=COLD, left=end - phase.cold, due=False)
            if (phase.hot, phase.cold) == (hot, cold):
                phase = replace(phase, epoch=phase.epoch + 1, hot=0, cold=0, kind="", until=0.0)
                continue
            until = phase.until + phase.rate
            phase = replace(phase, until=1.0 if until > 1 - 1e-9 else until, kind=HOT)
            if phase.hot < (end := math.ceil(phase.until * hot)):
                return replace(phase, left=end - phase.hot, due=False)

    def learn(self, loss: float | None, least: float) -> Phase:
        """Return the state after the evaluation at the end of this phase.

        `loss`: the held-out loss; None leaves the rate as it is. The rate is not lowered below
        `least`, nor raised above 1.
        """
        if loss is None:
            return replace(self, due=False)
        rate = self.rate
        falls = self.falls
        if self.loss is not None and loss > self.loss:
            rate = max(rate / 2, min(rate, least))
            falls = 0
        elif self.loss is not None and loss < self.loss:
            falls += 1
            if falls == STEADY_FALLS:
                rate = min(2 * rate, 1.0)
                falls = 0
        return replace(self, rate=rate, falls=falls, loss=loss, due=False)
