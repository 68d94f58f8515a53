"""Which rows leave first: the settings of a policy, and the scores that it ranks rows by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from distcache.errors import ConfigError
from distcache.layout import RowLayout
from distcache.planner import loops

# -----------------------------------------------------------------------------
# Which rows leave first: the settings of a policy, as plain values. `victims` carries them out.

POLICIES = ("lookahead", "lfu", "lru", "frequency", "static")
"""`lookahead`: window-Belady, then `tail`; the others look at no window."""

TAILS = ("lru", "lfu", "frequency")
"""How `lookahead` ranks the rows without a use in the window."""

PINNED = 255
"""Popularity class of a row that leaves only where no other can."""

LONGEST = 10**9
"""Most steps of a half-life."""


@dataclass(frozen=True)
class Policy:
    """`name` of `POLICIES`; `tail` of `TAILS`; `admission`: whether a row that comes in leaves
    first unless it scores above the row that would leave otherwise; `half_life`: steps in which
    the counts of `lfu` lose half of their weight (None: chosen from slots and distinct rows)."""

    name: str = "lookahead"
    tail: str = "lfu"
    admission: bool = False
    half_life: float | None = None

    def __post_init__(self) -> None:
        for key, value, known in (("policy", self.name, POLICIES), ("tail", self.tail, TAILS)):
            if value not in known:
                raise ConfigError(f"cache.{key}={value} is unknown: choose {' or '.join(known)}")
        life = self.half_life
        number = isinstance(life, int | float) and not isinstance(life, bool)
        if life is not None and not (number and 1 <= life <= LONGEST):
            raise ConfigError(
                f"cache.half_life={life} is out of range: give auto, or steps from 1 to {LONGEST}"
            )

    @classmethod
    def of(cls, name: str, tail: str, admission: bool, half_life: float | str) -> Policy:
        """The policy of a user's settings, where a half-life may be `auto`."""
        life: Any = None if half_life == "auto" else half_life
        return cls(name, tail, admission, life)

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


# -----------------------------------------------------------------------------
# What a row's score is: the key of the bucket that it waits in, and among equals its last use.
#
# A ranking learns each use when its step is planned, never before, so it is a pure function of the
# stream and of the decisions so far. Keys are whole numbers from 0; the lowest leave first. A key
# does not change between a row's uses, so nothing has to be looked at again as time goes by.

_PER_OCTAVE = 12
"""Levels of a count for each doubling: neighbours differ by 6 %."""

_KEYS_PER_OCTAVE = 4
"""Keys of the ranking `lfu` for each doubling of a count, or half-life since its last use."""

_SPAN = 16
"""`half_life=None`: a count loses half while as many distinct rows are used as `_SPAN` caches
hold. Longer lives fetch 1 % less while popularity stands still, shorter ones less when it moves."""


Forget = Callable[[], None]
"""Undoes the learning of one step."""


class Ranking(Protocol):
    """Scores of one home's rows (local numbers, int32). `span`: keys of one step; 1: all alike."""

    span: int

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps for all rows of the home, beside their popularity."""
        ...

    def learn(self, rows: np.ndarray, previous: np.ndarray, step: int) -> Forget:
        """`step`, the next to be planned, uses the distinct `rows`; `previous`: the steps that
        named them last, -1 for none. Both int32. Returns what undoes that; the last first."""
        ...

    @property
    def base(self) -> int:
        """The lowest key that a row used by the step learnt last may have."""
        ...

    def keys(self, rows: np.ndarray) -> np.ndarray:
        """Keys of rows that the step learnt last uses, less `base`: int32 in [0, `span`)."""
        ...

    def before(self, rows: np.ndarray, previous: np.ndarray, step: int) -> np.ndarray:
        """Keys (int64 `[n]`) that rows have when `step` has not been learnt yet; -1: not known."""
        ...


def make_ranking(policy: Policy, rows: int, slots: int, popularity: np.ndarray | None) -> Ranking:
    """The ranking of `policy` for a home with `rows` rows and `slots` slots.

    `popularity`: uint8 `[rows]`, or None. Raises ConfigError where the policy needs it.
    """
    if popularity is not None and (popularity.dtype != np.uint8 or popularity.shape != (rows,)):
        raise ConfigError(
            f"popularity is {popularity.dtype} of shape {popularity.shape}: give a class, uint8, "
            f"for each of the home's {rows} rows"
        )
    if policy.needs_popularity and popularity is None:
        key = "tail" if policy.uses_window else "policy"
        raise ConfigError(
            f"cache.{key}={policy.ranking} needs the popularity of rows: give cache.statistics="
            "<folder> made by python -m distcache.analyze or distcache.preprocess"
        )
    if policy.ranking == "lfu":
        return ByCount(rows, slots, policy.half_life)
    if policy.ranking == "frequency" and popularity is not None:
        return ByClass(popularity)
    return ByLastUse()


def home_popularity(layout: RowLayout, home: int, popularity: np.ndarray) -> np.ndarray:
    """The home's part, uint8 `[local rows]`, of the classes of all rows (uint8 `[V]`)."""
    rows = layout.row(home, np.arange(layout.local_rows, dtype=np.int64))
    found = popularity[np.minimum(rows, layout.rows - 1)]
    found[rows >= layout.rows] = 0
    return found


def _nothing() -> None:
    """Nothing was learnt."""


class ByLastUse:
    """`lru`, and `static`, whose pinned rows are nobody's business here: one key for all."""

    span, base, nbytes = 1, 0, 0

    def learn(self, rows: np.ndarray, previous: np.ndarray, step: int) -> Forget:
        """Nothing but the last use counts."""
        return _nothing

    def keys(self, rows: np.ndarray) -> np.ndarray:
        """See `Ranking.keys`."""
        return np.zeros(len(rows), np.int32)

    def before(self, rows: np.ndarray, previous: np.ndarray, step: int) -> np.ndarray:
        """See `Ranking.before`."""
        return np.zeros(len(rows), np.int64)


class ByClass:
    """`frequency`: the popularity class of a row, as the statistics have it."""

    span, base, nbytes = PINNED + 1, 0, 0

    def __init__(self, popularity: np.ndarray) -> None:
        self._popularity = popularity

    def learn(self, rows: np.ndarray, previous: np.ndarray, step: int) -> Forget:
        """Classes are known beforehand."""
        return _nothing

    def keys(self, rows: np.ndarray) -> np.ndarray:
        """See `Ranking.keys`."""
        return self._popularity[rows].astype(np.int32)

    def before(self, rows: np.ndarray, previous: np.ndarray, step: int) -> np.ndarray:
        """See `Ranking.before`."""
        return self._popularity[rows].astype(np.int64)


class ByCount:
    """`lfu`: how often each row has been used, older uses weighing less; one byte per row, which
    outlives the row's stay in the cache.

    A byte is a level on a scale of logarithms (Morris 1978: counting large numbers of events in
    small registers). Counts halve every `half_life` steps. A row's count after t steps without a
    use is count * 2^(-t / half_life), so log2(count) + last use / half_life orders the rows the
    same at any time: that is the key. None: the half-life is `_SPAN` * slots divided by the mean
    number of distinct rows of the steps so far.
    """

    def __init__(self, rows: int, slots: int, half_life: float | None) -> None:
        self._counts = np.zeros(rows, np.uint8)
        self._slots = slots
        self._fixed = None if half_life is None else round(2**32 / half_life)
        self._rate = self._fixed or 0
        self._clock = self._used = self._steps = 0
        self._step = -1
        levels = np.arange(256) / _PER_OCTAVE
        uses = (2.0**levels - 1) / (2.0 ** (1 / _PER_OCTAVE) - 1)
        self._values = np.rint(256 * uses).astype(np.int64)
        self._factors = np.rint(2.0 ** (28 - np.arange(257) / 256)).astype(np.int64)
        self._ranks = np.zeros(256, np.int32)
        self._ranks[1:] = np.rint(_KEYS_PER_OCTAVE * np.log2(uses[1:]))
        self.span = int(self._ranks[-1]) + 1

    @property
    def nbytes(self) -> int:
        """See `Ranking.nbytes`."""
        return self._counts.nbytes

    def learn(self, rows: np.ndarray, previous: np.ndarray, step: int) -> Forget:
        """See `Ranking.learn`."""
        counts = self._counts[rows]
        before = (self._used, self._steps, self._rate, self._clock, self._step)

        def forget() -> None:
            self._counts[rows] = counts
            self._used, self._steps, self._rate, self._clock, self._step = before

        self._used += len(rows)
        self._steps += 1
        if self._fixed is None:
            self._rate = (self._used << 32) // (_SPAN * self._slots * self._steps)
        passed = step - self._step  # below 0 where a stream was left and another goes on
        self._clock = max(0, self._clock + self._rate * passed)
        self._step = step
        loops.count_uses(
            rows, previous, step, self._rate, self._values, self._factors, self._counts
        )
        return forget

    @property
    def base(self) -> int:
        """See `Ranking.base`."""
        return self._clock * _KEYS_PER_OCTAVE >> 32

    def keys(self, rows: np.ndarray) -> np.ndarray:
        """See `Ranking.keys`."""
        return self._ranks[self._counts[rows]]

    def before(self, rows: np.ndarray, previous: np.ndarray, step: int) -> np.ndarray:
        """See `Ranking.before`."""
        counts = self._counts[rows]
        used_at = self._clock - (self._step - previous.astype(np.int64)) * self._rate
        keys = self._ranks[counts] + (used_at * _KEYS_PER_OCTAVE >> 32)
        return np.where(counts > 0, np.maximum(keys, 0), -1)
