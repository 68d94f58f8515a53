"""A click stream of any shape, drawn from counters: unlimited, learnable, sliceable.

Everything about sample i is a hash of (seed, i, feature, position in the bag), so any rank draws
any slice by itself, in any order, from any thread, and nothing repeats unless asked to. Ids are
Zipf-distributed by a closed-form inverse, for tables of any size and any exponent >= 0. Labels come
from a planted teacher: every (table, id) has a hidden effect, a hash, and every dense feature a
hidden slope; their sum is a logit, and a label is drawn with its probability. A model that learnt
all of it would reach an AUC of about 0.79; most of it hangs on dense features and popular ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distcache.data.batch import Batch, BatchSlice, JaggedIds, SlicedSource
from distcache.data.samplers import (
    GOLDEN,
    SampleOrder,
    Subset,
    hash_counters,
    key_of,
    keys_of,
    mix64,
)

NORMAL_STD = 2 / 3**0.5
"""Standard deviation of `normal_from_bits`."""


def uniform_from_bits(bits: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) with 53 random bits from uint64 `bits`."""
    return (bits >> np.uint64(11)).view(np.int64) * 2.0**-53


def normal_from_bits(bits: np.ndarray) -> np.ndarray:
    """float64, nearly normal, mean 0, deviation `NORMAL_STD`, from uint64 `bits`.

    The sum of four 16-bit lanes: multiples of 2^-15 in (-4, 4), exact in float32 too, so that
    sums of such numbers do not depend on their order.
    """
    low_lanes = np.uint64(0x0000FFFF0000FFFF)
    lanes = bits & low_lanes
    lanes += (bits >> np.uint64(16)) & low_lanes
    sums = (lanes & np.uint64(0xFFFFFFFF)) + (lanes >> np.uint64(32))
    mean = 131070  # of the sum of four uniform 16-bit numbers
    return (sums.view(np.int64) - mean) * 2.0**-15


HEAD_RANKS = 4096
"""Ranks that expectations count one by one; the tail beyond them is binned logarithmically."""
_BIN_RATIO = 1.01


class ZipfTables:
    """Popularity of the rows of T tables: rank k in [0, N) has the mass of x^-a on [k+.5, k+1.5).

    That integrated distribution follows (k + 1)^-a closely and has a closed-form inverse, for
    a = 0 (uniform) and a = 1 too. Ranks become ids by an affine bijection of each table's own,
    so that popular ids lie scattered and differ between tables.
    """

    def __init__(self, table_rows: Sequence[int], exponent: float, seed: int) -> None:
        self.rows = np.array(table_rows, dtype=np.uint64)
        self._power = 1.0 - exponent
        spans = np.log(2.0 * self.rows + 1.0)
        # Inverse: x = .5 * (1 + u * scale)^(1 / power); at power 0, x = .5 * exp(u * scale).
        self._scale = spans if self._power == 0 else np.expm1(self._power * spans)
        maps = [_affine(int(n), key_of(seed, index)) for index, n in enumerate(table_rows)]
        self._multiplier = np.array([multiplier for multiplier, _ in maps], dtype=np.uint64)
        self._shift = np.array([shift for _, shift in maps], dtype=np.uint64)

    def draw_ids(self, uniforms: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Ids int64 `[n]` from `uniforms` float64 `[n]`, the first `counts[0]` of table 0, ...

        float64 throughout: float32 has no distinct numbers for ranks above 2^24.
        """
        values = uniforms * np.repeat(self._scale, counts)
        if self._power != 0:
            np.log1p(values, out=values)
            values *= 1.0 / self._power
        np.exp(values, out=values)
        values -= 1.0
        values *= 0.5
        # Rounding may reach rank N once in 2^50 draws; the modulo below takes it to rank 0.
        ranks = values.astype(np.int64).view(np.uint64)
        rows = np.repeat(self.rows, counts)
        ranks *= np.repeat(self._multiplier, counts)
        ranks += np.repeat(self._shift, counts)
        ranks %= rows
        return ranks.view(np.int64)

    def ids_of_ranks(self, table: int, ranks: np.ndarray) -> np.ndarray:
        """Ids int64 of the rows that are `ranks`-th (from 0) in popularity."""
        ids = ranks.astype(np.uint64) * self._multiplier[table] + self._shift[table]
        return (ids % self.rows[table]).view(np.int64)

    def mass_below(self, table: int, ranks: np.ndarray) -> np.ndarray:
        """Probability float64 that a lookup falls on a rank below each of `ranks` (0 to N)."""
        spans = np.log(2.0 * ranks + 1.0)
        if self._power != 0:
            spans = np.expm1(self._power * spans)
        return spans / self._scale[table]

    def head(self, table: int) -> np.ndarray:
        """Probabilities float64 of the first min(N, `HEAD_RANKS`) ranks of a table."""
        edges = np.arange(min(int(self.rows[table]), HEAD_RANKS) + 1)
        return np.diff(self.mass_below(table, edges))

    def expected_distinct(self, table: int, lookups: int) -> float:
        """Expected distinct rows of a table among `lookups` independent lookups."""
        if lookups <= 0:
            return 0.0
        mass, widths = self.bins(table)
        with np.errstate(divide="ignore"):
            missed = lookups * np.log1p(-mass)
        return float(np.sum(-np.expm1(missed) * widths))

    def bins(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """Ranks in bins of like popularity, the most popular first: the mean probability of a row
        of each bin, float64 `[k]`, and its rows, int64 `[k]`."""
        rows = int(self.rows[table])
        head = min(rows, HEAD_RANKS)  # single ranks first, then bins that grow by `_BIN_RATIO`
        steps = math.ceil(math.log(rows / head) / math.log(_BIN_RATIO))
        tail = np.minimum(np.floor(head * _BIN_RATIO ** np.arange(1, steps + 1)), rows)
        edges = np.unique(np.concatenate((np.arange(head + 1), tail.astype(np.int64), [rows])))
        widths = np.diff(edges)
        return np.clip(np.diff(self.mass_below(table, edges)) / widths, 0.0, 1.0), widths


def _affine(rows: int, key: int) -> tuple[int, int]:
    """Multiplier coprime to `rows` and shift of the bijection rank -> id; products fit 63 bits."""
    bound = max(1, min(rows, (1 << 62) // rows))
    multiplier = 1 + key % bound
    while math.gcd(multiplier, rows) != 1:
        multiplier = 1 + multiplier % bound
    return multiplier, (key >> 32) % rows


DENSE_STD = 0.8
"""Standard deviation that the dense features bring to the logit."""
IDS_STD = 1.0
"""Standard deviation that all ids together bring to the logit."""
BASE_RATE = 0.27
"""Share of positive labels."""
_MEAN_SQUARE_WEIGHT = 13 / 12


class Teacher:
    """Logits of samples from their ids and dense features.

    `bag_sizes`: fixed or mean ids per bag of each table; `weighted`: whether ids have weights
    (uniform in [0.5, 1.5)), which then multiply the effects.
    """

    def __init__(
        self,
        tables: ZipfTables,
        bag_sizes: Sequence[float],
        dense_features: int,
        weighted: bool,
        seed: int,
    ) -> None:
        count = len(bag_sizes)
        self._keys = keys_of(count, seed, 0)
        self._centre = np.zeros(count)
        self._scale = np.zeros(count)
        for table, size in enumerate(bag_sizes):
            centre, variance = self._moments(tables, table)
            variance *= size * (_MEAN_SQUARE_WEIGHT if weighted else 1.0)
            self._centre[table] = centre
            if variance > 1e-6:
                self._scale[table] = IDS_STD / np.sqrt(count * variance)
        slopes = normal_from_bits(keys_of(dense_features, seed, 1))
        norm = float(np.sqrt(np.sum(slopes**2))) * NORMAL_STD
        self._slopes = slopes * (DENSE_STD / norm if norm > 0 else 0.0)
        ids_variance = IDS_STD**2 * np.count_nonzero(self._scale) / count
        dense_variance = DENSE_STD**2 if norm > 0 else 0.0
        self._bias = _bias_for(BASE_RATE, float(np.sqrt(ids_variance + dense_variance)))

    def probabilities(
        self, ids: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None, dense: np.ndarray
    ) -> np.ndarray:
        """Probability float64 `[b]` of a positive label.

        `ids` int64 `[n]` lie feature-major in bags of `lengths` int64 `[F, b]`; `weights` float64
        `[n]` or None; `dense` float64 `[b, F_dense]`.
        """
        counts = lengths.sum(axis=1)
        effects = self._effects(ids, np.repeat(self._keys, counts))
        effects -= np.repeat(self._centre, counts)
        if weights is not None:
            effects *= weights
        # Effects and weights are multiples of powers of two, so bag sums are exact in any order;
        # features are added one by one, so that a sample's bits do not depend on its slice.
        bags = _bag_sums(effects, lengths)
        logits = np.full(lengths.shape[1], self._bias)
        for scale, bag in zip(self._scale, bags, strict=True):
            logits += scale * bag
        for slope, column in zip(self._slopes, np.ascontiguousarray(dense.T), strict=True):
            logits += slope * column
        return 1.0 / (1.0 + np.exp(-logits))

    def _effects(self, ids: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Hidden effects float64 `[n]` of ids int64 `[n]`, before centring and scaling."""
        return normal_from_bits(hash_counters(ids.view(np.uint64), keys))

    def _moments(self, tables: ZipfTables, table: int) -> tuple[float, float]:
        """Mean (a multiple of 2^-15) and variance of a table's effect over its lookups."""
        mass = tables.head(table)
        head = self._effects(
            tables.ids_of_ranks(table, np.arange(len(mass))), self._keys[table : table + 1]
        )
        tail = max(0.0, 1.0 - float(mass.sum()))
        mean = round(float(mass @ head) * 2**15) / 2**15
        return mean, float(mass @ (head - mean) ** 2) + tail * NORMAL_STD**2


def _bag_sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sums float64 `[F, b]` of `values` `[n]` over bags of `lengths` `[F, b]`."""
    if values.size == lengths.size and np.all(lengths == 1):
        return values.reshape(lengths.shape)
    bags = np.repeat(np.arange(lengths.size), lengths.ravel())
    return np.bincount(bags, weights=values, minlength=lengths.size).reshape(lengths.shape)


def _bias_for(rate: float, std: float) -> float:
    """The bias at which a normal logit of deviation `std` has the mean probability `rate`."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    weights = weights / weights.sum()
    low, high = -20.0, 20.0
    for _ in range(60):
        bias = (low + high) / 2
        mean = float(weights @ (1.0 / (1.0 + np.exp(-(bias + std * nodes)))))
        low, high = (bias, high) if mean < rate else (low, bias)
    return (low + high) / 2


_SAMPLE, _BAG, _LENGTH, _VALUE, _WEIGHT, _DENSE, _LABEL, _ZIPF, _TEACHER, _ORDER = range(10)
"""Purposes: the second element of a key's path, after the seed."""


@dataclass(frozen=True)
class SyntheticSpec:
    """What the stream looks like.

    `table_rows`: rows of each table, read by one feature each; `bag_size`: ids per bag, an int is
    fixed, a float the mean of Poisson lengths, a sequence gives one per table; `zipf`: exponent
    a >= 0 of the ids; `weighted`: a weight in [0.5, 1.5) per id; `samples` of an epoch and
    `eval_samples` held out (None: unlimited, never repeating); `global_batch_size`: B;
    `dtype`: torch.float32 or torch.float64, of dense features, labels and weights.
    """

    table_rows: Sequence[int]
    bag_size: float | Sequence[float] = 1
    zipf: float = 1.05
    weighted: bool = False
    samples: int | None = None
    eval_samples: int | None = None
    dense_features: int = 13
    global_batch_size: int = 2048
    seed: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def bag_sizes(self) -> tuple[float, ...]:
        """Ids per bag of each table: an int is fixed, a float a mean."""
        if isinstance(self.bag_size, Sequence):
            return tuple(self.bag_size)
        return (self.bag_size,) * len(self.table_rows)


class SyntheticSource(SlicedSource):
    """The `BatchSource` of a `SyntheticSpec`; features are `cat_0`, `cat_1`, ...

    Held-out samples have counters of their own, which training never reaches.
    """

    first_held_out = 1 << 62

    def __init__(self, spec: SyntheticSpec) -> None:
        self.spec = spec
        self.table_rows = tuple(int(rows) for rows in spec.table_rows)
        self.features = tuple(f"cat_{index}" for index in range(len(self.table_rows)))
        self.dense_features = spec.dense_features
        keys = ("bag_size", "zipf", "weighted", "samples", "dense_features")
        self.identity = {f"data.{key}": str(getattr(spec, key)) for key in keys}
        self.vocabulary = f"synthetic, zipf {spec.zipf}, seed {spec.seed}"  # fix which ids are hot
        super().__init__(spec.samples, spec.eval_samples, spec.global_batch_size)
        self.order = SampleOrder(spec.samples, key_of(spec.seed, _ORDER))
        self._tables = ZipfTables(self.table_rows, spec.zipf, key_of(spec.seed, _ZIPF))
        sizes = spec.bag_sizes
        self._teacher = Teacher(
            self._tables, sizes, spec.dense_features, spec.weighted, key_of(spec.seed, _TEACHER)
        )
        self._fixed = np.array([s if isinstance(s, int) else 0 for s in sizes], dtype=np.int64)
        self._poisson = {i: _poisson_cdf(s) for i, s in enumerate(sizes) if isinstance(s, float)}
        self._bag_keys = keys_of(len(sizes), spec.seed, _BAG)[:, None]
        self._length_keys = keys_of(len(sizes), spec.seed, _LENGTH)
        self._dense_keys = keys_of(spec.dense_features, spec.seed, _DENSE)

    def lookups_per_sample(self, table: int) -> float:
        """Mean ids that a sample looks up in `table`."""
        return float(self.spec.bag_sizes[table])

    def expected_distinct(self, table: int, lookups: int) -> float:
        """Expected distinct rows of `table` among `lookups` ids of it."""
        return self._tables.expected_distinct(table, lookups)

    def take(self, samples: np.ndarray, part: BatchSlice) -> Batch:
        """See `SlicedSource.take`."""
        keys = hash_counters(samples.view(np.uint64), key_of(self.spec.seed, _SAMPLE))
        dense = normal_from_bits(hash_counters(keys[:, None], self._dense_keys))
        lengths = self._lengths(keys)
        ids, weights = self._bags(keys, lengths)
        chances = self._teacher.probabilities(ids, lengths, weights, dense)
        draws = uniform_from_bits(hash_counters(keys, key_of(self.spec.seed, _LABEL)))
        values, bags = torch.from_numpy(ids), torch.from_numpy(lengths.ravel())
        floats = None if weights is None else self._floats(weights)
        jagged = JaggedIds.of_lengths(self.features, values, bags, floats)
        return part.batch(self._floats(dense), jagged, self._floats(draws < chances))

    def ids_of(self, samples: np.ndarray, epoch: int) -> JaggedIds:
        """See `SlicedSource.ids_of`; without weights."""
        keys = hash_counters(samples.view(np.uint64), key_of(self.spec.seed, _SAMPLE))
        lengths = self._lengths(keys)
        values = torch.from_numpy(self._bags(keys, lengths)[0])
        return JaggedIds.of_lengths(self.features, values, torch.from_numpy(lengths.ravel()), None)

    def order_of(self, chosen: Subset, which: int) -> SampleOrder:
        """See `SlicedSource.order_of`."""
        return SampleOrder(chosen.count, key_of(self.spec.seed, _ORDER, which))

    def _lengths(self, keys: np.ndarray) -> np.ndarray:
        """Ids of each bag, int64 `[F, b]`, from sample keys `[b]`."""
        lengths = np.repeat(self._fixed[:, None], len(keys), axis=1)
        for table, cdf in self._poisson.items():
            draws = uniform_from_bits(hash_counters(keys, self._length_keys[table]))
            lengths[table] = np.searchsorted(cdf, draws, side="right")
        return lengths

    def _bags(self, keys: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Ids int64 `[n]` and weights float64 `[n]` or None of the bags of `lengths` `[F, b]`."""
        flat = lengths.ravel()
        ends = np.cumsum(flat)
        bits = np.repeat(hash_counters(keys, self._bag_keys).ravel(), flat)
        place = np.arange(len(bits)) - np.repeat(ends - flat, flat)
        bits += place.view(np.uint64) * np.uint64(GOLDEN)
        mix64(bits)
        ids = self._tables.draw_ids(uniform_from_bits(bits), lengths.sum(axis=1))
        if not self.spec.weighted:
            return ids, None
        # 23 bits: the same exact numbers in float32 and float64, below 1.5 in both.
        draws = hash_counters(bits, key_of(self.spec.seed, _WEIGHT)) >> np.uint64(41)
        return ids, draws.view(np.int64) * 2.0**-23 + 0.5

    def _floats(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.spec.dtype)


def _poisson_cdf(mean: float) -> np.ndarray:
    """P(length <= k) for k = 0, 1, ..., far enough that the rest is beyond float64."""
    last = int(mean + 12 * math.sqrt(mean) + 30)
    logs = [
        k * math.log(mean) - mean - math.lgamma(k + 1) if mean > 0 else -k * math.inf
        for k in range(1, last + 1)
    ]
    return np.cumsum(np.exp([-mean, *logs]))
