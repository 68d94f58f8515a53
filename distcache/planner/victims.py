"""Policies, and which slots of one home may be filled next: lists by score, never a scan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from distcache.errors import ConfigError, PlanError
from distcache.planner import loops
from distcache.planner.loops import PINNED

# -----------------------------------------------------------------------------
# Which rows leave first: the settings of a policy.

POLICIES = ("lookahead", "lfu", "lru", "frequency", "static")
"""`lookahead`: window-Belady, then `tail`; the others look at no window."""

TAILS = ("lru", "lfu", "frequency")
"""How `lookahead` ranks the rows without a use in the window."""

LONGEST = 10**9
"""Most steps of a half-life."""


@dataclass(frozen=True)
class Policy:
    """`name` of `POLICIES`; `tail` of `TAILS`; `half_life`: steps in which the counts of `lfu` lose
    half of their weight (None: chosen from slots and distinct rows)."""

    name: str = "lookahead"
    tail: str = "lfu"
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
    def of(cls, name: str, tail: str, half_life: float | str) -> Policy:
        """The policy of a user's settings, where a half-life may be `auto`."""
        life: Any = None if half_life == "auto" else half_life
        return cls(name, tail, life)

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

_PER_OCTAVE = 12
"""Levels of a count for each doubling: neighbours differ by 6 %."""

_KEYS_PER_OCTAVE = 4
"""Keys of the ranking `lfu` for each doubling of a count, or half-life since its last use."""

_SPAN = 16
"""`half_life=None`: a count loses half while as many distinct rows are used as `_SPAN` caches
hold. Longer lives fetch 1 % less while popularity stands still, shorter ones less when it moves."""

_NO_LEVELS, _NO_NAMES = np.empty(0, np.uint8), np.empty(0, np.int32)

Forget = Callable[[], None]
"""Undoes the learning of one step."""


class Ranking:
    """Scores of one home's rows (local numbers, int32): of these, all alike, with one key.

    That is `lru`, and `static`, whose pinned rows are nobody's business here. A row that the step
    learnt last uses has the key `base` + `ranks[levels[row]]`. `levels` uint8 `[rows]`, empty: all
    rows are alike; `ranks` int32, by level; `span`: ranks there may be; `base`: the lowest key;
    `nbytes`: what it keeps for all rows of the home, beside their popularity.
    """

    nbytes = 0

    def __init__(self, levels: np.ndarray = _NO_LEVELS, span: int = 1) -> None:
        self.levels, self.span = levels, span
        self.ranks = np.arange(span, dtype=np.int32)

    @property
    def base(self) -> int:
        """The lowest key that a row used by the step learnt last may have."""
        return 0

    def learn(self, rows: np.ndarray, previous: np.ndarray, step: int) -> Forget:
        """`step`, the next to be planned, uses the distinct `rows`; `previous`: the steps that
        named them last, -1 for none. Both int32. Returns what undoes that; the last first."""
        return _nothing


def _nothing() -> None:
    """Nothing was learnt."""


def make_ranking(
    policy: Policy,
    rows: int,
    slots: int,
    popularity: np.ndarray | None,
    names: np.ndarray = _NO_NAMES,
) -> Ranking:
    """The ranking of `policy` for a home with `rows` rows and `slots` slots.

    `popularity`: uint8 `[rows]`, or None; `names` int32 `[rows]`: the numbers by which `lfu` hashes
    rows, empty: their own. Raises ConfigError where the policy needs popularity and has none.
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
        return ByCount(rows, slots, policy.half_life, names)
    if policy.ranking == "frequency" and popularity is not None:
        return Ranking(popularity, PINNED + 1)
    return Ranking()


class ByCount(Ranking):
    """`lfu`: how often each row has been used, older uses weighing less; one byte per row, which
    outlives the row's stay in the cache.

    A byte is a level on a scale of logarithms (Morris 1978: counting large numbers of events in
    small registers). Counts halve every `half_life` steps. A row's count after t steps without a
    use is count * 2^(-t / half_life), so log2(count) + last use / half_life orders the rows the
    same at any time: that is the key. None: the half-life is `_SPAN` * slots divided by the mean
    number of distinct rows of the steps so far. `names`: see `make_ranking`.
    """

    def __init__(
        self, rows: int, slots: int, half_life: float | None, names: np.ndarray = _NO_NAMES
    ) -> None:
        self.levels, self._names, self._slots = np.zeros(rows, np.uint8), names, slots
        self._fixed = None if half_life is None else round(2**32 / half_life)
        self._rate = self._fixed or 0
        self._clock = self._used = self._steps = 0
        self._step = -1
        steps_up = np.arange(256) / _PER_OCTAVE
        uses = (2.0**steps_up - 1) / (2.0 ** (1 / _PER_OCTAVE) - 1)
        self._values = np.rint(256 * uses).astype(np.int64)
        self._factors = np.rint(2.0 ** (28 - np.arange(257) / 256)).astype(np.int64)
        self.ranks = np.zeros(256, np.int32)
        self.ranks[1:] = np.rint(_KEYS_PER_OCTAVE * np.log2(uses[1:]))
        self.span, self.nbytes = int(self.ranks[-1]) + 1, self.levels.nbytes

    @property
    def base(self) -> int:
        """See `Ranking.base`."""
        return self._clock * _KEYS_PER_OCTAVE >> 32

    def learn(self, rows: np.ndarray, previous: np.ndarray, step: int) -> Forget:
        """See `Ranking.learn`."""
        levels = self.levels[rows]
        before = (self._used, self._steps, self._rate, self._clock, self._step)

        def forget() -> None:
            self.levels[rows] = levels
            self._used, self._steps, self._rate, self._clock, self._step = before

        self._used += len(rows)
        self._steps += 1
        if self._fixed is None:
            self._rate = (self._used << 32) // (_SPAN * self._slots * self._steps)
        passed = step - self._step  # below 0 where a stream was left and another goes on
        self._clock = max(0, self._clock + self._rate * passed)
        self._step = step
        tables = (self._values, self._factors, self.levels)
        loops.count_uses(rows, self._names, previous, step, self._rate, *tables)
        return forget


# -----------------------------------------------------------------------------
# What compiled loops write: memory that grows where a step needs more.

_HINTS = 4
"""Entries for each slot beyond which those that hold no longer are dropped."""


class Queue:
    """Slots in the order in which their rows leave: by key, the lowest first, then by the step that
    used them last, the oldest first.

    Entries are hints: a slot that has been used, wanted or emptied since is passed over when its
    turn comes, and dropped for good once hints outnumber the slots. So filing and taking cost as
    much as the rows filed and taken, whatever the size of the cache. `last_use`, `next_use`: those
    of every slot, which tell whether a hint holds: the slot was last used when it was filed, and no
    step in the window wants it. At most about 50 bytes for each slot.
    """

    def __init__(self, last_use: np.ndarray, next_use: np.ndarray, ranking: Ranking) -> None:
        self._last_use, self._next_use, self._ranking = last_use, next_use, ranking
        self._where = np.empty(ranking.span, np.int32)
        self.clear()

    @property
    def hints(self) -> int:
        """Entries, outdated ones among them."""
        return int(self._state[loops.HINTS])

    def clear(self) -> None:
        """Forget all."""
        self._state = np.array([0, -1, 0, 0], np.int64)
        self._keys, self._ends = np.empty(0, np.int64), np.empty((0, 4), np.int32)
        self._entries, self._link = np.empty((0, 2), np.int32), np.empty(0, np.int32)

    def file(self, slots: np.ndarray, step: int, row_of: np.ndarray) -> None:
        """File those of `slots` (int32) that nobody wants, last used by `step`, no earlier than
        those filed before, by the scores of their rows (`row_of`, by slot)."""
        ranking, state = self._ranking, self._state
        if self.hints + len(slots) > _HINTS * len(self._last_use):
            loops.tidy(self._last_use, self._next_use, *self._lists)
        chunks = len(slots) // loops.CHUNK + 2 * ranking.span
        if state[loops.LEFT] < chunks or len(self._keys) < state[loops.LISTS] + ranking.span:
            self._grow(chunks)
        scores = (self._next_use, row_of, ranking.levels, ranking.ranks)
        scratch = (self._where, np.empty(len(slots), np.int32))
        loops.file_slots(slots, step, ranking.base, *scores, *self._lists, *scratch)

    def leave(self, step: int, before: int, out: np.ndarray) -> tuple[int, int]:
        """Take at most `len(out)` slots for `step`; see `loops.leave`."""
        return loops.leave(step, before, self._last_use, self._next_use, *self._lists, out)

    @property
    def _lists(self) -> tuple[np.ndarray, ...]:
        return self._keys, self._ends, self._entries, self._link, self._state

    def _grow(self, chunks: int) -> None:
        """Room for so many chunks more, and for as many lists as there are ranks."""
        have, state = len(self._link), self._state
        new = max(chunks, have // 2)
        self._entries = _longer(self._entries, (have + new) * loops.CHUNK)
        self._link = _longer(self._link, have + new)
        self._link[have:] = np.arange(have + 1, have + new + 1)
        self._link[-1] = state[loops.FREE]  # what was free before follows
        state[loops.FREE] = have
        state[loops.LEFT] += new
        lists = 2 * (int(state[loops.LISTS]) + self._ranking.span)
        self._keys, self._ends = _longer(self._keys, lists), _longer(self._ends, lists)


def _longer(values: np.ndarray, length: int) -> np.ndarray:
    """The same with room for `length` entries."""
    found = np.empty((max(length, len(values)), *values.shape[1:]), values.dtype)
    found[: len(values)] = values
    return found


class Window:
    """The uses that the steps known beyond the planned ones will make; see `loops.refer`.

    `slot_of`: of every row; `classes`: of every row where some are pinned, or none; `last_use`,
    `next_use`: of every slot, the last of them written. Memory: 12 bytes for each distinct row of
    each step in the window, at most twice that.
    """

    def __init__(
        self,
        slot_of: np.ndarray,
        classes: np.ndarray,
        last_use: np.ndarray,
        next_use: np.ndarray,
    ) -> None:
        self._rows_of, self._uses = (slot_of, classes, next_use), (last_use, next_use)
        self._begin, self._end = np.zeros(1, np.int64), 0
        self._soon, self._again = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self._slots, self._rows, self._steps = (np.zeros(1, np.int32) for _ in range(3))
        self._parts: deque[tuple[int, int]] = deque()  # steps, and where their parts start
        self._newest = -1

    def clear(self) -> None:
        """Forget all."""
        self._parts.clear()
        self._newest = -1

    def refer(self, local: np.ndarray, previous: np.ndarray, planned: int, step: int) -> None:
        """`step`, the newest that is known, names the rows `local`, which `previous` named last.

        Both int32 `[U]`; steps up to `planned` are planned. Raises PlanError where steps do not
        come in order.
        """
        self._open(step, len(local), planned)
        told = loops.refer(local, previous, planned, step, *self._rows_of, *self._rings)
        if told < 0:
            raise PlanError(f"{previous[-1 - told]} is not below {step}: steps come in order")

    def look_ahead(self, step: int) -> None:
        """Tell which rows of `step`, whose slots are filled by now, are used again, and when."""
        loops.look_ahead(step, *self._rows_of, *self._rings)

    def leave(self, step: int, before: int, out: np.ndarray) -> tuple[int, int]:
        """Take at most `len(out)` slots for `step`; see `loops.leave_farthest`."""
        rings = (self._begin, self._soon, self._slots)
        return loops.leave_farthest(step, self._newest, before, *self._uses, *rings, out)

    @property
    def _rings(self) -> tuple[np.ndarray, ...]:
        return self._begin, self._soon, self._again, self._slots, self._rows, self._steps

    def _open(self, step: int, rows: int, planned: int) -> None:
        """Make room for a step of so many distinct rows, when those up to `planned` are planned."""
        while self._parts and self._parts[0][0] <= planned:
            self._parts.popleft()
        if step - planned > len(self._begin):
            size = 1 << (step - planned - 1).bit_length()
            known = np.array([step for step, _ in self._parts], np.int64)
            steps = (self._begin, self._soon, self._again)
            self._begin, self._soon, self._again = (_larger(ring, size, known) for ring in steps)
        start = self._parts[0][1] if self._parts else self._end
        if self._end + rows - start > len(self._slots):
            size = 1 << (self._end + rows - start - 1).bit_length()
            known = np.arange(start, self._end)
            parts = (self._slots, self._rows, self._steps)
            self._slots, self._rows, self._steps = (_larger(ring, size, known) for ring in parts)
        at = step & (len(self._begin) - 1)
        self._begin[at], self._soon[at], self._again[at] = self._end, 0, 0
        self._parts.append((step, self._end))
        self._newest, self._end = step, self._end + rows


def _larger(ring: np.ndarray, size: int, known: np.ndarray) -> np.ndarray:
    """A ring of `size` places with what `ring` has at the places `known`, which wrap in both."""
    found = np.zeros(size, ring.dtype)
    found[known & (size - 1)] = ring[known & (len(ring) - 1)]
    return found


# -----------------------------------------------------------------------------
# Which slots of one home may be filled next.
#
# Window-Belady (Belady 1966, on the known window; BagPipe, SOSP 2023): rows without a use in the
# window leave first, in the order of a ranking; then the farthest next use. Slots used in the last
# P steps are *held* and leave only when the others are short, oldest last use first (ScratchPipe,
# ISCA 2022, holds past + current + future rows for the same reason). Pinned rows leave where no
# other row can, least recently used first.


class SlotTable:
    """Bookkeeping of one home's slots `0 .. slots - 1` (local numbers) for its `rows` rows.

    `slot_of`: of each row, -1 none; `row`: local row held, -1 free; `last_use`, `next_use`: steps;
    all int32. `popularity` uint8 `[rows]` or None: says which rows are `PINNED`, if any.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        prefetch: int,
        ranking: Ranking,
        popularity: np.ndarray | None = None,
    ) -> None:
        self.slots, self.prefetch, self.ranking = slots, prefetch, ranking
        self.slot_of = np.full(rows, -1, dtype=np.int32)
        self.row = np.full(slots, -1, dtype=np.int32)
        self.last_use = np.full(slots, -1, dtype=np.int32)
        self.next_use = np.full(slots, loops.NEVER, dtype=np.int32)
        self._popularity = popularity
        pins = popularity is not None and bool((popularity == PINNED).any())
        self._classes = popularity if pins and popularity is not None else _NO_LEVELS
        self._free = np.arange(slots, dtype=np.int32)
        self._idle = Queue(self.last_use, self.next_use, ranking)
        self._pinned = Queue(self.last_use, self.next_use, Ranking())
        self.window = Window(self.slot_of, self._classes, self.last_use, self.next_use)
        self._used: deque[tuple[int, np.ndarray]] = deque()

    def look_up(self, local: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The slots of the distinct rows `local` that `step` uses, and which of them to fetch.

        Slots found are held: they cannot leave for this step. All int32.
        """
        slots, fetch = np.empty(len(local), np.int32), np.empty(len(local), np.int32)
        uses = (self.slot_of, self.last_use, self.next_use)
        misses = loops.look_up(local, *uses, step, slots, fetch)
        return slots, fetch[:misses].copy()

    def fill(
        self, local: np.ndarray, fetch: np.ndarray, filled: np.ndarray, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Put the rows `local[fetch]` into the slots `filled`, which `take` gave for them.

        Returns the slots among them whose rows leave, and those rows.
        """
        evicted, leaving = np.empty(len(fetch), np.int32), np.empty(len(fetch), np.int32)
        count = loops.fill(local, fetch, filled, self.slot_of, self.row, slots, evicted, leaving)
        return evicted[:count].copy(), leaving[:count].copy()

    def file(self, slots: np.ndarray, step: int) -> None:
        """File the slots of a step that has been planned, after the window told their next uses
        and the ranking learnt the step."""
        if len(self._classes):
            pinned = self._classes[self.row[slots]] == PINNED
            self._pinned.file(slots[pinned], step, self.row)
            slots = slots[~pinned]
        self._idle.file(slots, step, self.row)
        self._used.append((step, slots))
        while self._used[0][0] < step - self.prefetch:
            self._used.popleft()

    def take(self, count: int, step: int) -> tuple[np.ndarray, int]:
        """`count` slots to hold for the misses of `step`, and the latest last use among them (-1:
        none).

        The caller has checked that the step's distinct rows fit, so enough slots are not its own.
        """
        taken = np.empty(count, np.int32)
        found, latest, before = min(count, len(self._free)), -1, step - self.prefetch
        taken[:found], self._free = self._free[:found], self._free[found:]
        self.last_use[taken[:found]] = step
        if found < count:  # rows without a use in the window whose hold has ended, lowest first
            got, latest = self._idle.leave(step, before, taken[found:])
            found += got
        if found < count:  # rows with a use in the window whose hold has ended, farthest first
            got, late = self.window.leave(step, before, taken[found:])
            found, latest = found + got, max(latest, late)
        if found < count:
            got, late = self._take_held(step, taken[found:])
            found, latest = found + got, max(latest, late)
        if found < count:  # pinned rows, held or not
            _, late = self._pinned.leave(step, step, taken[found:])
            latest = max(latest, late)
        return taken, latest

    def _take_held(self, step: int, out: np.ndarray) -> tuple[int, int]:
        """Shorten holds: oldest last use first, farthest next use first within it."""
        found, latest = 0, -1
        for used_at, slots in self._used:
            if found == len(out) or used_at >= step:
                break
            live = slots[self.last_use[slots] == used_at]
            order = np.argsort(-self.next_use[live].astype(np.int64), kind="stable")
            live = live[order[: len(out) - found]]
            self.last_use[live], self.next_use[live] = step, loops.NEVER
            out[found : found + len(live)] = live
            found += len(live)
            latest = used_at if len(live) else latest
        return found, latest

    def restore(self, row: np.ndarray, step: int) -> None:
        """Start again from the rows that the slots really hold (-1: free), none of them held.

        Where rows score the same, the less popular leaves first.
        """
        used_at = step - self.prefetch - 1
        self.row[:], self.last_use[:], self.next_use[:] = row, used_at, loops.NEVER
        held = np.flatnonzero(row >= 0).astype(np.int32)
        self.slot_of.fill(-1)
        self.slot_of[row[held]] = held
        self._free = np.flatnonzero(row < 0).astype(np.int32)
        self._used.clear()
        self.window.clear()
        self._idle.clear()
        self._pinned.clear()
        if self._popularity is not None:
            held = held[np.argsort(self._popularity[row[held]], kind="stable")]
        if len(self._classes):
            pinned = self._classes[row[held]] == PINNED
            self._pinned.file(held[pinned], used_at, self.row)
            held = held[~pinned]
        self._idle.file(held, used_at, self.row)
