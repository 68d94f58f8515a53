"""Policies, and which slots of one home may be filled next: lists by score, never a scan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from distcache.errors import ConfigError, unknown_value
from distcache.layout import RowLayout
from distcache.planner.loops import PINNED

# -----------------------------------------------------------------------------
# Which rows leave first: the settings of a policy.

POLICIES = ("lookahead", "lfu", "lru", "frequency", "static")
"""`lookahead`: window-Belady, then `tail`; the others look at no window."""

AUTO = "auto"
RESIDENT = (AUTO, "none")
"""Which tables stay cached: see `Policy.resident`."""

_RESIDENT_SHARE = 8
"""Tables that stay take at most one slot of so many."""

TAILS = ("lru", "lfu", "frequency")
"""How `lookahead` ranks the rows without a use in the window."""

LONGEST = 10**9
"""Most steps of a half-life."""


@dataclass(frozen=True)
class Policy:
    """`name` of `POLICIES`; `tail` of `TAILS`; `half_life`: steps in which the counts of `lfu` lose
    half of their weight (None: chosen from slots and distinct rows); `resident` of `RESIDENT`:
    rows of small tables stay once they are cached (`resident_tables`), or all where each has a
    slot, and leave only where no other row can."""

    name: str = "lookahead"
    tail: str = "lfu"
    half_life: float | None = None
    resident: str = AUTO

    def __post_init__(self) -> None:
        chosen = (("policy", self.name, POLICIES), ("tail", self.tail, TAILS))
        for key, value, known in (*chosen, ("resident", self.resident, RESIDENT)):
            if value not in known:
                raise unknown_value(f"cache.{key}", value, known)
        life = self.half_life
        number = isinstance(life, int | float) and not isinstance(life, bool)
        if life is not None and not (number and 1 <= life <= LONGEST):
            raise ConfigError(
                f"cache.half_life={life} is out of range: give auto, or steps from 1 to {LONGEST}"
            )

    @classmethod
    def of(cls, keys: Any) -> Policy:
        """The policy of a user's settings, which have the keys of group `cache` as attributes."""
        life: Any = None if keys.half_life == AUTO else keys.half_life
        return cls(keys.policy, keys.tail, life, keys.resident)

    def resident_tables(self, offsets: np.ndarray, slots: int) -> list[tuple[int, int]]:
        """From which row on, up to which, those of each table are that stays: the smallest, as long
        as all of them take at most an eighth of `slots`.

        `offsets` int64 `[T + 1]`: the first row of each table, and how many rows all have.
        """
        rows = np.diff(offsets)
        order = np.argsort(rows, kind="stable")
        stay = order[np.cumsum(rows[order]) <= slots // _RESIDENT_SHARE]
        spans = [(int(offsets[table]), int(offsets[table + 1])) for table in stay]
        return spans if self.resident == AUTO else []

    @property
    def uses_window(self) -> bool:
        """Whether the window's next uses decide before scores do."""
        return self.name == "lookahead"

    @property
    def ranking(self) -> str:
        """What ranks rows without a next use: `lru`, `lfu`, `frequency` or `static`."""
        return self.tail if self.uses_window else self.name

    @property
    def needs_popularity(self) -> bool:
        """Whether it reads the popularity class of each row (`cache.statistics`)."""
        return self.ranking in ("frequency", "static")


DEFAULT = Policy()
"""What is used where nothing is said."""

WINDOWS = (8, 16, 32, 64)
"""What `auto` chooses L from. On traces of users and items with half of the rows cached, a window
of 8 fetched 1.3 times what Belady's MIN does, one of 16 and more 1.05 (docs/results/policies.md);
beyond 64 little is left."""

WINDOW_BYTES = 64 << 20
"""Most bytes of ids that a window of `auto` keeps on a rank."""


def auto_lookahead(ids_per_step: float, prefetch: int) -> int:
    """L for `auto`: the largest of `WINDOWS` whose L + P + 1 steps of `ids_per_step` ids of a rank,
    8 bytes each, stay within `WINDOW_BYTES`; the smallest where none does. `prefetch`: P."""
    fits = (w for w in WINDOWS if 8 * ids_per_step * (w + prefetch + 1) <= WINDOW_BYTES)
    return max(fits, default=WINDOWS[0])


# -----------------------------------------------------------------------------
# What a row's score is: the key of the list that it waits in, and among equals its last use.
#
# A ranking learns each use when its step is planned, never before, so it is a pure function of the
# stream and of the decisions so far. Keys are whole numbers from 0; the lowest leave first. A key
# does not change between a row's uses, so nothing has to be looked at again as time goes by.
#
# Window-Belady (Belady 1966, on the known window; BagPipe, SOSP 2023): rows without a use in the
# window leave first, in the order of their keys; then the farthest next use. Slots used in the last
# P steps are *held* and leave only when the others are short, oldest last use first (ScratchPipe,
# ISCA 2022, holds past + current + future rows for the same reason). Pinned rows leave where no
# other row can, those last that the last P steps used. `loops.take` does that.

_PER_OCTAVE = 12
"""Levels of a count for each doubling: neighbours differ by 6 %."""

_KEYS_PER_OCTAVE = 4
"""Keys of the ranking `lfu` for each doubling of a count, or half-life since its last use."""

_SPAN = 16
"""`half_life=None`: a count loses half while as many distinct rows are used as `_SPAN` caches
hold. Longer lives fetch 1 % less while popularity stands still, shorter ones less when it moves."""


class Ranking:
    """Keys of one home's rows: a row that the step learnt last uses has `base` + `ranks[level]`.

    `ranks` int32, by level; `rate`: how much of an octave counts lose a step, in 1 / 2^32, -1 where
    a row's level is no count. This one is `lru`, and `static`, whose pinned rows are nobody's
    business here: all rows have level 0. With `PINNED` + 1 levels it is `frequency`.
    """

    rate, base = -1, 0
    values, factors = np.empty(0, np.int64), np.empty(0, np.int64)
    nearest = np.empty(0, np.uint8)
    """See `loops.count_use`."""

    def __init__(self, levels: int = 1) -> None:
        self.ranks = np.arange(levels, dtype=np.int32)

    @cached_property
    def top(self) -> int:
        """The highest of `ranks`."""
        return int(self.ranks[-1])

    def learn(self, rows: int, step: int) -> tuple:
        """`step`, the next to be planned, uses so many distinct rows. Returns what `forget` wants;
        the last first."""
        return ()

    def forget(self, before: tuple) -> None:
        """Undo the learning of one step."""


class ByCount(Ranking):
    """`lfu`: how often each row has been used, older uses weighing less; one byte per row, which
    outlives the row's stay in the cache.

    A byte is a level on a scale of logarithms (Morris 1978: counting large numbers of events in
    small registers). Counts halve every `half_life` steps. A row's count after t steps without a
    use is count * 2^(-t / half_life), so log2(count) + last use / half_life orders the rows the
    same at any time: that is the key. None: the half-life is `_SPAN` * slots divided by the mean
    number of distinct rows of the steps so far.
    """

    def __init__(self, slots: int, half_life: float | None) -> None:
        self._slots = slots
        self._fixed = None if half_life is None else round(2**32 / half_life)
        self.rate = self._fixed or 0
        self._clock = self._used = self._steps = 0
        self._step = -1
        steps_up = np.arange(256) / _PER_OCTAVE
        uses = (2.0**steps_up - 1) / (2.0 ** (1 / _PER_OCTAVE) - 1)
        self.values = np.rint(256 * uses).astype(np.int64)
        self.factors = np.rint(2.0 ** (28 - np.arange(257) / 256)).astype(np.int64)
        buckets = np.ldexp(1 + np.arange(64 * 32) % 32 / 32, np.arange(64 * 32) // 32)
        nearest = self.values.searchsorted(buckets, "right") - 1
        self.nearest = np.minimum(nearest, PINNED - 1).astype(np.uint8)
        self.ranks = np.zeros(256, np.int32)
        self.ranks[1:] = np.rint(_KEYS_PER_OCTAVE * np.log2(uses[1:]))

    @property
    def base(self) -> int:  # type: ignore[override]
        """See `Ranking`."""
        return self._clock * _KEYS_PER_OCTAVE >> 32

    def learn(self, rows: int, step: int) -> tuple:
        """See `Ranking.learn`."""
        before = (self._used, self._steps, self.rate, self._clock, self._step)
        self._used += rows
        self._steps += 1
        if self._fixed is None:
            self.rate = (self._used << 32) // (_SPAN * self._slots * self._steps)
        passed = step - self._step  # below 0 where a stream was left and another goes on
        self._clock = max(0, self._clock + self.rate * passed)
        self._step = step
        return before

    def forget(self, before: tuple) -> None:
        """See `Ranking.forget`."""
        self._used, self._steps, self.rate, self._clock, self._step = before


def make_ranking(policy: Policy, slots: int, popularity: np.ndarray | None) -> Ranking:
    """The ranking of `policy` for a home with `slots` slots.

    `popularity`: uint8, of each row, or None. Raises ConfigError where the policy needs it and has
    none.
    """
    if policy.needs_popularity and popularity is None:
        key = "tail" if policy.uses_window else "policy"
        raise ConfigError(
            f"cache.{key}={policy.ranking} needs the popularity of rows: give cache.statistics="
            "<folder> made by python -m distcache.analyze or distcache.preprocess"
        )
    if policy.ranking == "lfu":
        return ByCount(slots, policy.half_life)
    return Ranking(PINNED + 1 if policy.ranking == "frequency" else 1)


def grouped(keys: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """`(order [n], starts [groups + 1])`: a stable sort of integer keys in [0, groups)."""
    # NumPy sorts small integers in linear time.
    order = keys.astype(np.min_scalar_type(groups)).argsort(kind="stable")
    return order, np.concatenate(([0], np.bincount(keys, minlength=groups).cumsum()))


# -----------------------------------------------------------------------------
# Popularity of rows, as planners and a warm start take it.

_BLOCK = 1 << 20
"""Rows of a home whose classes are taken at once."""


@dataclass(frozen=True)
class GroupPopularity:
    """The popularity of one group's rows, in memory that the ranks of a node share.

    `classes` uint8 `[V]`: the class of each row, or None; `hot` int64 `[K]`: the rows to lie in the
    cache first, the likeliest first, and -1 where there are fewer.
    """

    classes: np.ndarray | None = None
    hot: np.ndarray | None = None

    def classes_at(self, layout: RowLayout, home: int) -> np.ndarray | None:
        """Return the class of each of a home's rows by its local index, uint8 `[ceil(V / W)]`."""
        if self.classes is None or layout.world_size == 1:
            return self.classes
        classes = np.zeros(layout.local_rows, dtype=np.uint8)
        for start in range(0, layout.local_rows, _BLOCK):
            stop = min(start + _BLOCK, layout.local_rows)
            rows = layout.row(home, np.arange(start, stop))
            exists = rows < layout.rows  # the last index may be of no row
            classes[start:stop][exists] = self.classes[rows[exists]]
        return classes
