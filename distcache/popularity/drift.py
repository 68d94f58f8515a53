"""How the most frequent rows of one part of a stream serve the parts after it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

HOT_SHARE, SEEN_SHARE = 0.01, 0.1
"""A hot set is the first share of the table's rows, at most the second one of those that the first
part looks up (the others are there by chance), and at least one row."""


@dataclass
class Drift:
    """Shares of the lookups of consecutive parts that fall on hot sets, for a table of `rows`.

    `own[i]`: of part i, on its own hot set; `next[i]`: of part i + 1, on that of part i; `far[i]`:
    of part i, on that of the first part. `hot_rows`: rows of a hot set. Popularity that stays as it
    is gives `next` and `far` alike; both are a little below `own`, as a hot set fits its own part's
    chance as well.
    """

    rows: int
    own: list[float] = field(default_factory=list)
    next: list[float] = field(default_factory=list)
    far: list[float] = field(default_factory=list)
    hot_rows: int = 0
    _first: np.ndarray | None = None
    _last: np.ndarray | None = None

    def add(self, ids: np.ndarray, counts: np.ndarray, lookups: int) -> None:
        """The next part: distinct `ids`, ascending, their counts, and all its lookups."""
        if not self.hot_rows:
            most = min(HOT_SHARE * self.rows, SEEN_SHARE * len(ids))
            self.hot_rows = max(1, math.ceil(most))
        hot = ids
        if len(ids) > self.hot_rows:
            hot = np.sort(ids[np.argpartition(-counts, self.hot_rows - 1)[: self.hot_rows]])
        self.own.append(_share(hot, ids, counts, lookups))
        if self._last is not None:
            self.next.append(_share(self._last, ids, counts, lookups))
        if self._first is None:
            self._first = hot
        self.far.append(_share(self._first, ids, counts, lookups))
        self._last = hot

    def kept(self) -> float | None:
        """What the hot set of one part serves in the next, as a share of what the next part's own
        serves; the mean over the parts, None for fewer than two."""
        return _ratio(self.next, self.own[1:])

    def kept_far(self) -> float | None:
        """The same of the first part's hot set in the last part."""
        return _ratio(self.far[-1:], self.own[-1:]) if len(self.own) > 1 else None


def _share(hot: np.ndarray, ids: np.ndarray, counts: np.ndarray, lookups: int) -> float:
    """Share of the lookups on `hot` (ascending)."""
    if not len(ids):
        return 0.0
    at = np.minimum(np.searchsorted(ids, hot), len(ids) - 1)
    return float(counts[at[ids[at] == hot]].sum()) / lookups


def _ratio(parts: list[float], wholes: list[float]) -> float | None:
    pairs = [(part, whole) for part, whole in zip(parts, wholes, strict=True) if whole > 0]
    return sum(part / whole for part, whole in pairs) / len(pairs) if pairs else None
