"""What is known of one table's lookups: the numbers of a report, made from its counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distcache.popularity.counters import TableCounter
from distcache.popularity.curve import CountCurve, curve_of
from distcache.popularity.drift import Drift
from distcache.popularity.sketch import Bitmap
from distcache.popularity.statistics import TableCounts
from distcache.popularity.zipf_fit import ZipfFit, fit_zipf

TOP_SHARES = (0.001, 0.01, 0.015, 0.05, 0.1)
"""Shares of a table's rows whose share of the lookups is reported."""


@dataclass(frozen=True)
class TableProfile:
    """One table's lookups.

    `counts`, and their `curve`; `fit` of Zipf's law; `drift` over the parts of the stream;
    `distinct_error`: standard error of the distinct rows, as a share (0: exact); `batch_lookups`:
    lookups of a global batch; `count_bytes`: memory that counting took.
    """

    counts: TableCounts
    curve: CountCurve
    fit: ZipfFit
    drift: Drift
    distinct_error: float
    batch_lookups: float
    count_bytes: int

    @property
    def exact(self) -> bool:
        """Whether every row was counted."""
        return self.counts.ids is None

    @property
    def unused(self) -> bool:
        """Whether nothing looked anything up."""
        return self.counts.lookups == 0

    @property
    def single(self) -> bool:
        """Whether all ids are equal."""
        return self.counts.lookups > 0 and self.counts.distinct == 1 and self.counts.rows > 1

    @property
    def alike(self) -> bool:
        """Whether rows differ by no more than chance."""
        return self.curve.alike(self.counts.rows)

    def top(self, share: float) -> float:
        """Share of the lookups on this share of the table's rows, the most frequent ones."""
        return self.curve.top_share(math.ceil(share * self.counts.rows))

    def distinct_per_batch(self, world_size: int = 1) -> float:
        """Expected distinct rows of a rank's slice of a batch; of the global batch at 1."""
        return self.curve.expected_distinct(self.batch_lookups / world_size)

    def values(self, world_sizes: Sequence[int]) -> dict[str, object]:
        """All of it as JSON values."""
        counts, drift = self.counts, self.drift
        return {
            "feature": counts.feature,
            "rows": counts.rows,
            "lookups": counts.lookups,
            "distinct": counts.distinct,
            "distinct_standard_error": self.distinct_error,
            "exact": self.exact,
            "count_error": counts.error,
            "count_bytes": self.count_bytes,
            "top_shares": {str(share): self.top(share) for share in TOP_SHARES},
            "zipf": vars(self.fit),
            "rows_alike": self.alike,
            "lookups_per_batch": self.batch_lookups,
            "distinct_per_batch": {str(w): self.distinct_per_batch(w) for w in world_sizes},
            "drift": {
                "hot_rows": drift.hot_rows,
                "own": drift.own,
                "next": drift.next,
                "far": drift.far,
                "kept": drift.kept(),
                "kept_far": drift.kept_far(),
            },
        }


def profile_of(counter: TableCounter, samples: int, batch: int) -> TableProfile:
    """The profile of what `counter` counted in `samples` samples, for global batches of `batch`."""
    counts = counter.result()
    seen = getattr(counter, "seen", None)
    error = 0.0 if seen is None or isinstance(seen, Bitmap) else seen.relative_error
    curve = curve_of(counts)
    return TableProfile(
        counts=counts,
        curve=curve,
        fit=fit_zipf(curve, counts.rows),
        drift=counter.drift,
        distinct_error=error,
        batch_lookups=counts.lookups / max(samples, 1) * batch,
        count_bytes=counter.bytes,
    )
