"""The slow NumPy twins of the planner's compiled loops: same names, arguments and results."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from distcache.errors import PlanError
from distcache.planner.loops import _FIRST, _HALF, _OLDEST, _SECOND, _SOME, _TOP, NEVER
from distcache.planner.policy import PINNED
from distcache.planner.victims import Ranking

_DIGIT = 16
"""Bits that NumPy's stable sort takes by radix."""


def name_rows(
    local: np.ndarray,
    position: np.ndarray,
    step: int,
    distinct: np.ndarray,
    previous: np.ndarray,
    labels: np.ndarray,
) -> int:
    """See `loops.name_rows`."""
    outside = (local < 0) | (local >= len(position))
    if outside.any():
        return -1 - int(outside.argmax())
    before = position[local]
    first, labels[:] = by_index(local, position)
    count = len(first)
    distinct[:count] = local[first]
    previous[:count] = before[first]
    position[distinct[:count]] = step
    return count


def find_rows(rows: np.ndarray, table: np.ndarray, distinct: np.ndarray, labels: np.ndarray) -> int:
    """See `loops.find_rows`."""
    first, labels[:] = by_hash(rows)
    distinct[: len(first)] = rows[first]
    return len(first)


def group(keys: np.ndarray, low: int, order: np.ndarray, starts: np.ndarray) -> int:
    """See `loops.group`."""
    groups = len(starts) - 1
    of = np.maximum(keys.astype(np.int64) - low, 0)
    if (of >= groups).any():
        return -1 - int((of >= groups).argmax())
    order[:] = _stable_order(of, groups)
    starts[0] = 0
    np.cumsum(np.bincount(of, minlength=groups), out=starts[1:])
    return groups


def look_up(
    local: np.ndarray,
    slot_of: np.ndarray,
    last_use: np.ndarray,
    next_use: np.ndarray,
    step: int,
    slots: np.ndarray,
    fetch: np.ndarray,
) -> int:
    """See `loops.look_up`."""
    slots[:] = slot_of[local]
    cached = slots >= 0
    held = slots[cached]
    last_use[held] = step
    next_use[held] = NEVER
    missed = np.flatnonzero(~cached)
    fetch[: len(missed)] = missed
    return len(missed)


def fill(
    local: np.ndarray,
    fetch: np.ndarray,
    filled: np.ndarray,
    slot_of: np.ndarray,
    row_of: np.ndarray,
    slots: np.ndarray,
    evict_slots: np.ndarray,
    evict_rows: np.ndarray,
) -> int:
    """See `loops.fill`."""
    old, arriving = row_of[filled], local[fetch]
    leaves = old >= 0
    count = int(leaves.sum())
    evict_slots[:count] = filled[leaves]
    evict_rows[:count] = old[leaves]
    slot_of[old[leaves]] = -1
    slot_of[arriving] = filled
    row_of[filled] = arriving
    slots[fetch] = filled
    return count


def count_uses(
    rows: np.ndarray,
    names: np.ndarray,
    previous: np.ndarray,
    step: int,
    rate: int,
    values: np.ndarray,
    factors: np.ndarray,
    counts: np.ndarray,
) -> None:
    """See `loops.count_uses`."""
    age = np.minimum(step - previous.astype(np.int64), _OLDEST) * rate
    place, rest = (age >> 24) & 255, age & 0xFFFFFF
    factor = factors[place] - (((factors[place] - factors[place + 1]) * rest) >> 24)
    value = (((values[counts[rows]] * factor) >> 28) >> np.minimum(age >> 32, 62)) + 256
    low = np.searchsorted(values, value, side="right") - 1
    named = names[rows] if len(names) else rows
    key = (named.astype(np.uint64) << _HALF) ^ np.uint64(step)
    key = (key ^ (key >> _HALF)) * _FIRST
    key = (key ^ (key >> _SOME)) * _SECOND
    chance = ((key ^ (key >> _HALF)) >> _TOP).astype(np.int64)
    next_up = np.minimum(low + 1, 255)
    gap = values[next_up] - values[low]
    up = (low < 255) & ((value - values[low]) << 24 > chance * gap)
    counts[rows] = np.where(up, next_up, low)


def order_ids(
    labels: np.ndarray,
    lookup: np.ndarray,
    positions: np.ndarray,
    starts: np.ndarray,
    order: np.ndarray,
    touched: np.ndarray,
    segments: np.ndarray,
) -> int:
    """See `loops.order_ids`."""
    total = len(starts) - 2
    positions[:] = lookup[labels] if len(lookup) else labels
    outside = (positions < 0) | (positions >= total)
    if outside.any():
        return -1 - int(outside.argmax())
    order[:] = _stable_order(positions, total)
    occurrences = np.bincount(positions, minlength=total)
    starts[0] = 0
    np.cumsum(occurrences, out=starts[1 : total + 1])
    starts[total + 1] = starts[total]
    found = np.flatnonzero(occurrences)
    touched[: len(found)] = found
    segments[: len(found)] = starts[found]
    segments[len(found)] = len(labels)
    return len(found)


def find_sorted(
    rows: np.ndarray, known: np.ndarray, starts: np.ndarray, shift: int, found: np.ndarray
) -> int:
    """See `loops.find_sorted`."""
    if len(known) == 0:
        found[:] = -1
        return 0
    place = np.minimum(np.searchsorted(known, rows), len(known) - 1)
    there = known[place] == rows
    found[:] = np.where(there, place, -1)
    return int(there.sum())


def divide(
    values: np.ndarray,
    bound: int,
    index: np.ndarray,
    items: np.ndarray,
    ends: np.ndarray,
    above: np.ndarray,
    others: np.ndarray,
    counts: np.ndarray,
) -> int:
    """See `loops.divide`."""
    chosen = (values[index] if len(items) else values) > bound
    all_items = items[index] if len(items) else np.arange(len(chosen))
    count = int(chosen.sum())
    above[:count] = all_items[chosen]
    others[: len(chosen) - count] = all_items[~chosen]
    totals = np.concatenate(([0], np.cumsum(chosen)))
    counts[:] = np.diff(totals[np.concatenate(([0], ends))])
    return count


def _stable_order(keys: np.ndarray, limit: int) -> np.ndarray:
    """A stable argsort of `keys` (int64, in [0, limit)), 16 bits at a time."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    shift = _DIGIT
    while limit > 1 << shift:
        digit = (keys >> shift).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
        shift += _DIGIT
    return order


# -----------------------------------------------------------------------------
# Distinct rows of a batch in first-occurrence order.

_MULTIPLIER = np.uint64(0xD1342543DE82EF95)


def by_unique(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reference body: `(distinct rows [U], inverse [n])` by sorting."""
    values, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return values[order], rank[inverse.reshape(-1)]


def by_index(rows: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions by a scratch array `position` int32 `[>= max(rows) + 1]`, which it overwrites.

    Returns `(first [U], inverse [n])`: indices of first occurrences, ascending, and for each id
    the rank of its row among them. NumPy keeps the last of repeated assignments, so the batch is
    written back to front.
    """
    indices = np.arange(len(rows), dtype=np.int32)
    position[rows[::-1]] = indices[::-1]
    representative = position[rows]
    is_first = representative == indices
    rank = np.cumsum(is_first, dtype=np.int32)
    rank -= 1
    return np.flatnonzero(is_first), rank[representative]


def by_hash(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same by a hash table of about 4 n entries, whatever the number of rows.

    Returns `(first [U], inverse [n])`. In each round the ids that are still open write their index
    to their bucket; those that find their own row there are done, the others (another row won the
    bucket) try another bucket in the next round.
    """
    count = len(rows)
    if count == 0:
        return np.empty(0, np.int64), np.empty(0, np.int32)
    bits = max(4, int(4 * count - 1).bit_length())
    shift = np.uint64(64 - bits)
    table = np.empty(1 << bits, dtype=np.int32)
    representative = np.empty(count, dtype=np.int32)
    open_ids = np.arange(count, dtype=np.int32)
    multiplier = _MULTIPLIER
    while len(open_ids):
        keys = rows[open_ids]
        with np.errstate(over="ignore"):
            buckets = ((keys.astype(np.uint64) + np.uint64(1)) * multiplier) >> shift
            multiplier = multiplier * np.uint64(0x2545F4914F6CDD1D) | np.uint64(1)
        buckets = buckets.astype(np.int64)
        table[buckets[::-1]] = open_ids[::-1]
        winner = table[buckets]
        done = rows[winner] == keys
        representative[open_ids[done]] = winner[done]
        open_ids = open_ids[~done]
    is_first = representative == np.arange(count, dtype=np.int32)
    rank = np.cumsum(is_first, dtype=np.int32)
    rank -= 1
    return np.flatnonzero(is_first), rank[representative]


# -----------------------------------------------------------------------------
# Belady's MIN over a whole trace, as it is defined.


def belady(
    starts: np.ndarray,
    numbers: np.ndarray,
    counts: np.ndarray,
    rows: int,
    slots: int,
    out: np.ndarray,
) -> None:
    """`replay.belady`: in every step the farthest next uses leave. Writes `out` int64 `[steps, 3]`.

    `next_use` of a row and the place of its last use rank it; both are looked up, not linked.
    """
    steps = len(starts) - 1
    next_use = np.full(rows, steps, np.int64)
    used_at = np.full(rows, -1, np.int64)  # index of the last use in `numbers`, -1: not cached
    uses = np.repeat(np.arange(steps), np.diff(starts))
    order = np.lexsort((uses, numbers))
    following = np.full(len(numbers), steps, np.int64)
    same = numbers[order[1:]] == numbers[order[:-1]]
    following[order[:-1][same]] = uses[order[1:][same]]
    for step in range(steps):
        here = np.arange(starts[step], starts[step + 1])
        named = numbers[here]
        hit = used_at[named] >= 0
        out[step, 0] = np.count_nonzero(~hit)
        out[step, 1] = counts[here][hit].sum()
        used_at[named] = -1
        others = np.flatnonzero(used_at >= 0)
        leave = max(0, len(others) + len(named) - slots)
        last = np.lexsort((-used_at[others], -next_use[others]))[:leave]
        used_at[others[last]] = -1
        out[step, 2] = leave
        used_at[named], next_use[named] = here, following[here]


# -----------------------------------------------------------------------------
# What decides the order in which slots are filled again, as dictionaries of lists.


class Queue:
    """`victims.Queue`."""

    def __init__(self, last_use: np.ndarray, next_use: np.ndarray, ranking: Ranking) -> None:
        self._last_use, self._next_use, self._ranking = last_use, next_use, ranking
        self.clear()

    def clear(self) -> None:
        self._lists: dict[int, list[tuple[int, int]]] = defaultdict(list)

    @property
    def hints(self) -> int:
        return sum(map(len, self._lists.values()))

    def file(self, slots: np.ndarray, step: int, row_of: np.ndarray) -> None:
        ranking = self._ranking
        for slot in slots[self._next_use[slots] == NEVER].tolist():
            rank = ranking.ranks[ranking.levels[row_of[slot]]] if len(ranking.levels) else 0
            self._lists[ranking.base + int(rank)].append((slot, step))

    def leave(self, step: int, before: int, out: np.ndarray) -> tuple[int, int]:
        found, latest = [], -1
        for key in sorted(self._lists):
            kept = []
            for slot, used in self._lists[key]:
                if self._last_use[slot] != used or self._next_use[slot] != NEVER:
                    continue
                if len(found) < len(out) and used < before:
                    found.append(slot)
                    latest = max(latest, used)
                else:
                    kept.append((slot, used))
            self._lists[key] = kept
        out[: len(found)] = found
        self._last_use[found] = step
        return len(found), latest


class Window:
    """`victims.Window`."""

    def __init__(
        self,
        slot_of: np.ndarray,
        classes: np.ndarray,
        last_use: np.ndarray,
        next_use: np.ndarray,
    ) -> None:
        self._slot_of, self._classes = slot_of, classes
        self._last_use, self._next_use = last_use, next_use
        self.clear()

    def clear(self) -> None:
        self._soon: dict[int, list[int]] = defaultdict(list)
        self._again: dict[int, list[tuple[np.ndarray, int]]] = defaultdict(list)

    def refer(self, local: np.ndarray, previous: np.ndarray, planned: int, step: int) -> None:
        if len(previous) and previous.max() >= step:
            raise PlanError(f"{previous.max()} is not below {step}: steps come in order")
        self._tell(local[previous <= planned], step)
        for before in np.unique(previous[previous > planned]).tolist():
            self._again[before].append((local[previous == before], step))

    def look_ahead(self, step: int) -> None:
        for rows, use in self._again.pop(step, ()):
            self._tell(rows, use)
        self._soon.pop(step, None)

    def _tell(self, rows: np.ndarray, use: int) -> None:
        if len(self._classes):
            rows = rows[self._classes[rows] != PINNED]
        slots = self._slot_of[rows]
        slots = slots[slots >= 0]
        self._next_use[slots] = use
        self._soon[use] += slots.tolist()

    def leave(self, step: int, before: int, out: np.ndarray) -> tuple[int, int]:
        found: list[int] = []
        for use in sorted(self._soon, reverse=True):
            if len(found) == len(out) or use <= step:
                break
            waiting = [
                slot for slot in dict.fromkeys(self._soon[use]) if self._next_use[slot] == use
            ]
            leaves = [slot for slot in waiting if self._last_use[slot] < before]
            leaves = leaves[: len(out) - len(found)]
            self._soon[use] = [slot for slot in waiting if slot not in leaves]
            found += leaves
        out[: len(found)] = found
        latest = int(self._last_use[found].max()) if found else -1
        self._last_use[found], self._next_use[found] = step, NEVER
        return len(found), latest
