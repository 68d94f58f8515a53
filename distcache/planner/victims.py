"""Policies, and which slots of one home may be filled next: lists by score, never a scan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
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

    def learn(self, rows: np.ndarray, previous: np.ndarray, step: int) -> tuple[np.ndarray, Forget]:
        """`step`, the next to be planned, uses the distinct `rows`; `previous`: the steps that
        named them last, -1 for none. Both int32. Returns the rows' levels from now on, and what
        undoes that; the last first."""
        return self.levels_of(rows), _nothing

    def levels_of(self, rows: np.ndarray) -> np.ndarray:
        """The levels of `rows`, uint8; empty where all rows are alike."""
        return self.levels[rows] if len(self.levels) else _NO_LEVELS


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

    def learn(self, rows: np.ndarray, previous: np.ndarray, step: int) -> tuple[np.ndarray, Forget]:
        """See `Ranking.learn`."""
        old, new = np.empty(len(rows), np.uint8), np.empty(len(rows), np.uint8)
        before = (self._used, self._steps, self._rate, self._clock, self._step)

        def forget() -> None:
            self.levels[rows] = old
            self._used, self._steps, self._rate, self._clock, self._step = before

        self._used += len(rows)
        self._steps += 1
        if self._fixed is None:
            self._rate = (self._used << 32) // (_SPAN * self._slots * self._steps)
        passed = step - self._step  # below 0 where a stream was left and another goes on
        self._clock = max(0, self._clock + self._rate * passed)
        self._step = step
        tables = (self._values, self._factors, self.levels, old, new)
        loops.count_uses(rows, self._names, previous, step, self._rate, *tables)
        return new, forget


# -----------------------------------------------------------------------------
# Which slots of one home may be filled next.
#
# Window-Belady (Belady 1966, on the known window; BagPipe, SOSP 2023): rows without a use in the
# window leave first, in the order of a ranking; then the farthest next use. Slots used in the last
# P steps are *held* and leave only when the others are short, oldest last use first (ScratchPipe,
# ISCA 2022, holds past + current + future rows for the same reason). Pinned rows leave where no
# other row can, least recently used first.


_STEPS, _KEYS = 0, 1
"""Kinds of lists."""


class SlotTable:
    """Bookkeeping of one home's slots `0 .. slots - 1` (local numbers) for its `rows` rows.

    `slot_of`: of each row, -1 none; `row`: local row held, -1 free; both int32. `popularity` uint8
    `[rows]` or None: says which rows are `PINNED`, if any. Every slot with a row lies in a list
    (`loops`), so filing and taking cost as much as the rows filed and taken, whatever the size of
    the cache. Rows of a step in the window that it names again wait for their slots until that step
    is planned: 4 bytes each.
    """

    def __init__(
        self,
        rows: int,
        slots: int,
        prefetch: int,
        ranking: Ranking,
        popularity: np.ndarray | None,
    ) -> None:
        self.slots, self.prefetch, self.ranking = slots, prefetch, ranking
        self.slot_of = np.full(rows, -1, dtype=np.int32)
        self.row = np.full(slots, -1, dtype=np.int32)
        self._popularity = popularity
        pins = popularity is not None and bool((popularity == PINNED).any())
        self._classes = popularity if pins and popularity is not None else _NO_LEVELS
        self._free = np.arange(slots, dtype=np.int32)
        self._lists, self._table = 1, np.empty((slots + 3, 4), np.int32)
        self._clear(-1)

    def _clear(self, used_at: int) -> None:
        """Let no slot be in a list, all be last used by `used_at`, and nothing wait to be told."""
        self._table[:] = np.arange(len(self._table))[:, None]
        self._table[:, loops.LAST], self._table[:, loops.NEXT] = used_at, loops.NEVER
        self._spans = [range(0), range(0)]  # steps, and keys, whose lists may have slots
        self._newest = -1
        self._again: dict[int, list[tuple[int, np.ndarray]]] = {}
        self._used: deque[tuple[int, np.ndarray]] = deque()

    # --- what the steps known beyond the planned ones will use -------------------------------

    def refer(self, local: np.ndarray, previous: np.ndarray, planned: int, step: int) -> None:
        """`step`, the newest that is known, names the rows `local`, which `previous` named last.

        Both int32 `[U]`; steps up to `planned` are planned. Rows that one of these named learn it
        now, if they are cached; the others when the step that names them before is planned. Raises
        PlanError where steps do not come in order.
        """
        self._cover(_STEPS, range(planned + 1, step + 1))
        self._newest = step
        later, ends = np.empty_like(local), np.zeros(max(0, step - planned - 1), np.int32)
        known = (self.slot_of, self._classes, self._lists, self._table)
        latest = loops.refer(local, previous, planned, step, *known, later, ends)
        if latest >= 0:
            raise PlanError(f"{latest} is not below {step}: steps come in order")
        start = 0
        for before, stop in enumerate(ends.tolist(), planned + 1):
            if start < stop:
                self._again.setdefault(before, []).append((step, later[start:stop]))
            start = stop

    def look_ahead(self, step: int) -> None:
        """Tell which rows of `step`, whose slots are filled by now, are used again, and when."""
        if step not in self._again:
            return
        uses, rows = zip(*self._again.pop(step), strict=True)
        parts = np.array(uses, np.int32), np.array(list(accumulate(map(len, rows))), np.int32)
        known = (self.slot_of, self._classes, self._lists, self._table)
        loops.tell_parts(np.concatenate(rows), *parts, *known)

    # --- a step is planned --------------------------------------------------------------------

    def look_up(self, local: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The slots of the distinct rows `local` that `step` uses, and which of them to fetch.

        Slots found are held: they cannot leave for this step. All int32.
        """
        slots, fetch = np.empty_like(local), np.empty_like(local)
        misses = loops.look_up(local, self.slot_of, step, self._table, slots, fetch)
        node = self._nodes(_STEPS, np.array([step]))
        self._table[node, : loops.LAST] = node
        return slots, fetch[:misses].copy()

    def fill(
        self, local: np.ndarray, fetch: np.ndarray, filled: np.ndarray, slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Put the rows `local[fetch]` into the slots `filled`, which `take` gave for them;
        `slots[fetch]` is written.

        Returns the slots among them whose rows leave, and those rows.
        """
        left, leaving = np.empty_like(fetch), np.empty_like(fetch)
        own = (self.slot_of, self.row)
        count = loops.fill(local, fetch, filled, *own, slots, left, leaving)
        return left[:count].copy(), leaving[:count].copy()

    def file(self, slots: np.ndarray, levels: np.ndarray, step: int) -> None:
        """File the slots of a step that has been planned, after the window told their next uses
        and the ranking learnt the step, which says the `levels` of their rows."""
        if len(self._classes):
            pinned = self._classes[self.row[slots]] == PINNED
            node = np.array([self.slots], np.int32)
            loops.file_slots(slots[pinned], _NO_LEVELS, node, self._table)
            slots, levels = slots[~pinned], levels[~pinned] if len(levels) else levels
        ranking, base = self.ranking, self.ranking.base
        self._cover(_KEYS, range(base, base + ranking.span))
        nodes = self._nodes(_KEYS, base + ranking.ranks)
        loops.file_slots(slots, levels, nodes, self._table)
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
        self._table[taken[:found], loops.LAST] = step
        keys, steps = self._spans[_KEYS], range(self._newest, step, -1)
        if found < count:  # rows without a use in the window whose hold has ended, lowest first
            nodes = self._nodes(_KEYS, np.arange(keys.start, keys.stop))
            got, latest = loops.leave(step, before, nodes, True, self._table, taken[found:])
            found += got
        if found < count:  # rows with a use in the window whose hold has ended, farthest first
            nodes = self._nodes(_STEPS, np.arange(steps.start, steps.stop, steps.step))
            got, late = loops.leave(step, before, nodes, False, self._table, taken[found:])
            found, latest = found + got, max(latest, late)
        if found < count:
            got, late = self._take_held(step, taken[found:])
            found, latest = found + got, max(latest, late)
        if found < count:  # pinned rows, held or not
            node = np.array([self.slots], np.int32)
            _, late = loops.leave(step, step, node, True, self._table, taken[found:])
            latest = max(latest, late)
        return taken, latest

    def _take_held(self, step: int, out: np.ndarray) -> tuple[int, int]:
        """Shorten holds: oldest last use first, farthest next use first within it."""
        found, latest = 0, -1
        for used_at, slots in self._used:
            if found == len(out) or used_at >= step:
                break
            live = slots[self._table[slots, loops.LAST] == used_at]
            order = np.argsort(-self._table[live, loops.NEXT].astype(np.int64), kind="stable")
            live = live[order[: len(out) - found]]
            self.look_up(self.row[live], step)
            out[found : found + len(live)] = live
            found += len(live)
            latest = used_at if len(live) else latest
        return found, latest

    def restore(self, row: np.ndarray, step: int) -> None:
        """Start again from the rows that the slots really hold (-1: free), none of them held.

        Where rows score the same, the less popular leaves first.
        """
        used_at = step - self.prefetch - 1
        self.row[:] = row
        held = np.flatnonzero(row >= 0).astype(np.int32)
        self.slot_of.fill(-1)
        self.slot_of[row[held]] = held
        self._free = np.flatnonzero(row < 0).astype(np.int32)
        self._clear(used_at)
        if self._popularity is not None:
            held = held[np.argsort(self._popularity[row[held]], kind="stable")]
        self.file(held, self.ranking.levels_of(row[held]), used_at)
        self._used.clear()

    # --- room for lists -----------------------------------------------------------------------

    def _nodes(self, kind: int, numbers: np.ndarray) -> np.ndarray:
        """The nodes, int32, of the lists of these steps or keys."""
        first = self.slots + 1 + kind * self._lists
        return (first + (numbers & (self._lists - 1))).astype(np.int32)

    def _cover(self, kind: int, numbers: range) -> None:
        """Let there be a list for each of these steps or keys, beside those that have slots."""
        known = self._spans[kind] or numbers
        wanted = range(min(known.start, numbers.start), max(known.stop, numbers.stop))
        if len(wanted) > self._lists:
            nodes = self._nodes(kind, np.arange(known.start, known.stop))
            full = np.flatnonzero(self._table[nodes, loops.AFTER] != nodes)
            start = known.start + int(full[0]) if len(full) else numbers.start
            wanted = range(min(start, numbers.start), wanted.stop)
        if len(wanted) > self._lists:
            self._widen(2 * len(wanted))
        self._spans[kind] = wanted

    def _widen(self, lists: int) -> None:
        """Room for so many lists of either kind."""
        spans = [np.arange(span.start, span.stop) for span in self._spans]
        old = np.concatenate([self._nodes(kind, span) for kind, span in enumerate(spans)])
        self._lists = 1 << (lists - 1).bit_length()
        new = np.concatenate([self._nodes(kind, span) for kind, span in enumerate(spans)])
        known = self._table
        full = known[old, loops.AFTER] != old
        old, new = old[full], new[full]
        self._table = np.repeat(np.arange(self.slots + 1 + 2 * self._lists, dtype=np.int32), 4)
        self._table = self._table.reshape(-1, 4)
        self._table[: self.slots + 1] = known[: self.slots + 1]
        self._table[new] = known[old]
        self._table[known[old, loops.AFTER], loops.BEFORE] = new
        self._table[known[old, loops.BEFORE], loops.AFTER] = new


def grouped(keys: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """`(order [n], starts [groups + 1])`: a stable sort of integer keys in [0, groups)."""
    # NumPy sorts small integers in linear time.
    order = keys.astype(np.min_scalar_type(groups)).argsort(kind="stable")
    return order, np.concatenate(([0], np.bincount(keys, minlength=groups).cumsum()))
