"""Hot batches, whose samples look up hot rows alone, and cold batches of the others.

The idea is FAE's (Adnan et al., VLDB 2022). Here every sample is in one batch of an epoch, both
kinds are shuffled anew in each, and samples are classified by whole arrays.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from distcache.comm.agree import together
from distcache.comm.world import World
from distcache.data.batch import Batch, slice_bounds
from distcache.data.read_ahead import ReadAhead
from distcache.data.samplers import BatchSpans, BlockOrder, SampleSpan
from distcache.data.slices import BatchSlice, SampleOrdering, SlicedSource
from distcache.data.subset import Subset, both
from distcache.errors import ConfigError
from distcache.popularity.hot import HotSet

logger = logging.getLogger(__name__)

HOT, COLD = "hot", "cold"
_CHUNK = 1 << 15
"""Samples that are classified at once; a multiple of 64."""
_BAR_SAMPLES = 4_000_000
"""A progress bar is shown for at least so many samples."""


@dataclass(frozen=True)
class BatchPlace:
    """Global batch `number` of a `kind`, `hot` or `cold`, in `epoch`."""

    epoch: int
    kind: str
    number: int


class KindSamples:
    """The samples of one kind in an epoch, in an order of (seed, epoch)."""

    def __init__(self, source: SlicedSource, kind: str, chosen: Subset) -> None:
        self.chosen = chosen
        self.spans = BatchSpans(chosen.count, source.batch_size)
        self.order: SampleOrdering = source.order_of(chosen, 1 if kind == HOT else 2)
        self._ahead: ReadAhead | None = None
        if isinstance(self.order, BlockOrder) and chosen.count:

            def hint(start: int, stop: int) -> None:
                first, last = chosen.at(np.array([start, stop - 1])).tolist()
                source.will_need(first, last + 1)

            self._ahead = ReadAhead(self.order, hint)

    @property
    def batches(self) -> int:
        """Global batches of the epoch; the last one may be ragged."""
        return self.spans.per_epoch or 0

    def samples(self, span: SampleSpan, low: int, high: int) -> np.ndarray:
        """Samples [low, high) of the global batch `span`, int64."""
        if self._ahead is not None:
            self._ahead.reach(span.epoch, span.start, span.stop)
        # Some orders sort a whole batch: slices are taken after that.
        places = self.order.positions(span.epoch, span.start, span.stop)
        return self.chosen.at(places[low:high])


@dataclass(frozen=True)
class HotColdEpoch:
    """What an epoch holds of both kinds."""

    kinds: dict[str, KindSamples]

    @property
    def sizes(self) -> tuple[int, int]:
        """Hot and cold global batches."""
        return self.kinds[HOT].batches, self.kinds[COLD].batches

    @property
    def share(self) -> float:
        """Hot samples as a share of all."""
        hot, cold = (self.kinds[kind].chosen.count for kind in (HOT, COLD))
        return hot / (hot + cold)


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
        self._epochs: dict[int, HotColdEpoch] = {}
        self.features, self.table_rows = source.features, source.table_rows
        self.dense_features = source.dense_features
        self._warn(self.epoch(0))

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
        return sum(self.epoch(0).sizes)

    @property
    def eval_batches(self) -> int | None:
        """See `BatchSource.eval_batches`."""
        return self.source.eval_batches

    def eval_batch(self, index: int, rank: int, world_size: int) -> Batch:
        """See `BatchSource.eval_batch`."""
        return self.source.eval_batch(index, rank, world_size)

    def train_batch(self, step: int, rank: int, world_size: int) -> Batch:
        """See `BatchSource.train_batch`: the hot batches of each epoch, then the cold ones."""
        epoch, left = 0, step
        while left >= sum(self.epoch(epoch).sizes):
            left -= sum(self.epoch(epoch).sizes)
            epoch += 1
        hot = self.epoch(epoch).sizes[0]
        place = BatchPlace(epoch, HOT, left) if left < hot else BatchPlace(epoch, COLD, left - hot)
        return self.batch(place, step, rank, world_size)

    def batch(self, place: BatchPlace, step: int, rank: int, world_size: int) -> Batch:
        """This rank's slice of the global batch at `place`, which is training step `step`."""
        samples = self.epoch(place.epoch).kinds[place.kind]
        inside = samples.spans.locate(place.number)
        span = SampleSpan(place.epoch, inside.start, inside.stop)
        low, high = slice_bounds(span.size, rank, world_size)
        part = BatchSlice("train", step, span, low, high, place.kind)
        return self.source.take(samples.samples(span, low, high), part)

    def epoch(self, number: int) -> HotColdEpoch:
        """The samples of both kinds in an epoch; the last two epochs are remembered."""
        key = number if self.source.ids_vary else 0
        known = self._epochs.get(key)
        if known is None:
            for old in [e for e in self._epochs if e < key - 1]:
                del self._epochs[old]
            kinds = zip((HOT, COLD), both(self._classified(key), self._samples), strict=True)
            known = HotColdEpoch({k: KindSamples(self.source, k, chosen) for k, chosen in kinds})
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
        found = together(world, lambda: classify(self.source, self.hot, epoch, part, self._show))
        return np.concatenate(found)

    @property
    def _samples(self) -> int:
        return self.source.samples_per_epoch or 0

    def _warn(self, epoch: HotColdEpoch) -> None:
        if not self._show:
            return
        chosen = [epoch.kinds[kind].chosen for kind in (HOT, COLD)]
        logger.info(
            "%s of %s samples are hot (%.2f %%): %s hot and %s cold batches of an epoch; %s hot "
            "rows, %.1f MB to find them and the samples",
            f"{chosen[0].count:,}",
            f"{self._samples:,}",
            100 * epoch.share,
            *(f"{size:,}" for size in epoch.sizes),
            f"{self.hot.rows:,}",
            (sum(one.nbytes for one in chosen) + self.hot.nbytes) / 1e6,
        )
        if not all(epoch.sizes):
            logger.warning(
                "data.batching=hot_cold: all samples are %s, and so are all batches: nothing is "
                "gained over data.batching=as_is",
                HOT if epoch.sizes[0] else "cold (raise cache.rows, cache.ratio or data.hot_rows)",
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
    quiet = not show or samples < _BAR_SAMPLES
    often = 0.2 if sys.stderr.isatty() else 10.0
    with tqdm(
        total=samples,
        desc="hot samples",
        unit="sample",
        unit_scale=True,
        disable=quiet,
        mininterval=often,
        maxinterval=often,
    ) as bar:
        for start in range(0, samples, _CHUNK):
            some = np.arange(first + start, min(first + start + _CHUNK, last), dtype=np.int64)
            after = first + start + len(some)
            source.will_need(after, min(after + _CHUNK, last))
            packed = np.packbits(hot.samples(source.ids_of(some, epoch)), bitorder="little")
            bits[start // 8 : start // 8 + len(packed)] = packed
            bar.update(len(some))
    return bits.view(np.uint64)
