"""Which slots of one home may be filled next: buckets by score and next use, never a scan."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

import numpy as np

from distcache.planner import loops
from distcache.planner.loops import NEVER, distinct_rows, grouped
from distcache.planner.policy import PINNED, Ranking

# -----------------------------------------------------------------------------
# Slots in the order in which their rows leave: a bucket for each key, first in, first out.
#
# Entries are hints: a slot that has been used, wanted or emptied since is passed over when its
# turn
# comes, and dropped for good once hints outnumber the slots. So filing and taking cost as much as
# the rows filed and taken, whatever the size of the cache.

LEAVES_FIRST = -1
"""Key of the rows that leave before all others; keys of rankings start at 0."""

_HINTS = 4
"""Hints for each slot beyond which outdated ones are dropped."""


class _Bucket:
    """Slots filed and the steps that they were last used by, in the order of these steps; int32."""

    def __init__(self) -> None:
        self.slots, self.steps = np.empty(8, np.int32), np.empty(8, np.int32)
        self.start = self.stop = 0

    def __len__(self) -> int:
        return self.stop - self.start

    def append(self, slots: np.ndarray, step: int | np.ndarray) -> None:
        start = self.stop
        self.stop = stop = start + len(slots)
        if stop > len(self.slots):
            self._grow(start, len(slots))
            start, stop = self.stop - len(slots), self.stop
        self.slots[start:stop] = slots
        self.steps[start:stop] = step

    def _grow(self, stop: int, count: int) -> None:
        """Move the entries before `stop` to the front, with room for `count` more and some."""
        kept = stop - self.start
        for name in ("slots", "steps"):
            new = np.empty(max(8, 3 * (kept + count) // 2), np.int32)
            new[:kept] = getattr(self, name)[self.start : stop]
            setattr(self, name, new)
        self.start, self.stop = 0, kept + count


class Buckets:
    """Slots by key, the lowest first, then by the step that used them last, the oldest first.

    `last_use`, `next_use`: those of every slot, which tell whether a hint still holds: the slot
    was last used when it was filed, and no step in the window wants it. At most about 50 bytes for
    each slot.
    """

    def __init__(self, last_use: np.ndarray, next_use: np.ndarray) -> None:
        self._last_use, self._next_use = last_use, next_use
        self._buckets: dict[int, _Bucket] = {}
        self._keys: list[int] = []
        self._hints = 0

    @property
    def hints(self) -> int:
        """Entries, outdated ones among them."""
        return self._hints

    def clear(self) -> None:
        """Forget all."""
        self._buckets, self._keys, self._hints = {}, [], 0

    def file(self, key: int, slots: np.ndarray, step: int) -> None:
        """`slots` (int32), last used by `step`, no earlier than those filed before, have `key`."""
        self.file_all([key], slots, [0, len(slots)], step)

    def file_all(self, keys: list[int], slots: np.ndarray, bounds: list[int], step: int) -> None:
        """The same for several keys: `slots[bounds[i]:bounds[i + 1]]` have `keys[i]`."""
        buckets = self._buckets
        for key, start, stop in zip(keys, bounds, bounds[1:], strict=False):
            if stop == start:
                continue
            bucket = buckets.get(key)
            if bucket is None:
                bucket = buckets[key] = _Bucket()
                heapq.heappush(self._keys, key)
            bucket.append(slots[start:stop], step)
        self._hints += bounds[-1] - bounds[0]
        if self._hints > _HINTS * len(self._last_use):
            self._compact()

    def take(self, most: int, before: int) -> list[np.ndarray]:
        """At most `most` of the slots that were last used before step `before`, next to leave
        first; they are filed no longer."""
        out: list[np.ndarray] = []
        waiting = []
        while most and self._keys:
            key = heapq.heappop(self._keys)
            bucket = self._buckets[key]
            for slots in self._read(bucket, most, before):
                out.append(slots)
                most -= len(slots)
            if len(bucket):
                waiting.append(key)
            else:
                del self._buckets[key]
        for key in waiting:
            heapq.heappush(self._keys, key)
        return out

    def _read(self, bucket: _Bucket, most: int, before: int) -> Iterator[np.ndarray]:
        """Take from one bucket, in parts, so that what is read is in proportion to what leaves."""
        while most and len(bucket) and bucket.steps[bucket.start] < before:
            found, read = self._live(bucket, most, 2 * most + 64, before)
            bucket.start += read
            self._hints -= read
            if len(found):
                yield found
                most -= len(found)

    def _live(self, bucket: _Bucket, most: int, among: int, before: int) -> tuple[np.ndarray, int]:
        """At most `most` of the first `among` entries that still hold and were last used before
        `before`; how many entries that took."""
        part = slice(bucket.start, min(bucket.stop, bucket.start + among))
        slots, steps = bucket.slots[part], bucket.steps[part]
        found = np.empty(min(most, len(slots)), np.int32)
        count, read = loops.live(slots, steps, self._last_use, self._next_use, before, found)
        return found[:count].copy(), read

    def lowest(self) -> tuple[int, int] | None:
        """Key and last use of the slot that leaves next, but for those that leave first; None
        where there is no other."""
        aside = []
        found = None
        while self._keys and found is None:
            key = self._keys[0]
            bucket = self._buckets[key]
            if key == LEAVES_FIRST:
                aside.append(heapq.heappop(self._keys))
            elif self._drop_outdated(bucket):
                found = key, int(bucket.steps[bucket.start])
            else:
                del self._buckets[heapq.heappop(self._keys)]
        for key in aside:
            heapq.heappush(self._keys, key)
        return found

    def _drop_outdated(self, bucket: _Bucket) -> bool:
        """Drop the entries before the first that holds; whether there is one."""
        among = 64
        while len(bucket):
            found, read = self._live(bucket, 1, among, NEVER)
            read -= len(found)
            bucket.start += read
            self._hints -= read
            if len(found):
                return True
            among *= 2
        return False

    def _compact(self) -> None:
        """Drop every outdated hint (amortised: as many were filed since the last time)."""
        for key in list(self._buckets):
            bucket = self._buckets.pop(key)
            slots, _ = self._live(bucket, len(bucket), len(bucket), NEVER)
            if len(slots):
                self._buckets[key] = kept = _Bucket()
                kept.append(slots, self._last_use[slots])
        self._keys = sorted(self._buckets)
        self._hints = sum(map(len, self._buckets.values()))


# -----------------------------------------------------------------------------
# Which slots of one home may be filled next: buckets by score and next use, never a scan.
#
# Window-Belady (Belady 1966, on the known window; BagPipe, SOSP 2023): rows without a use in the
# window leave first, in the order of a ranking; then the farthest next use. Slots used in the last
# P steps are *held* and leave only when the others are short, oldest last use first (ScratchPipe,
# ISCA 2022, holds past + current + future rows for the same reason). Pinned rows leave where no
# other row can, least recently used first.
#
# Admission (TinyLFU, Einziger et al. 2017): a row that comes in leaves before all others, once its
# hold ends, unless it scored higher than the row that leaves next even before this use.


class SlotTable:
    """Bookkeeping of one home's slots `0 .. slots - 1` (local numbers).

    `row`: local row held, -1 free; `last_use`, `next_use`: steps. 16 bytes per slot with scratch.
    Entries in the buckets are hints: each is checked against these arrays when it is taken.
    `popularity` uint8 `[local rows]` or None: says which rows are `PINNED`, if any.
    """

    def __init__(
        self, slots: int, prefetch: int, ranking: Ranking, popularity: np.ndarray | None = None
    ) -> None:
        self.slots = slots
        self.prefetch = prefetch
        self.ranking = ranking
        self.row = np.full(slots, -1, dtype=np.int32)
        self.last_use = np.full(slots, -1, dtype=np.int32)
        self.next_use = np.full(slots, NEVER, dtype=np.int32)
        self._popularity = popularity
        self._pins = popularity is not None and bool((popularity == PINNED).any())
        self._scratch = np.full(slots, -1, dtype=np.int32)
        self._free = np.arange(slots, dtype=np.int32)
        self._idle = Buckets(self.last_use, self.next_use)
        self._pinned = Buckets(self.last_use, self.next_use)
        self._soon: dict[int, list[np.ndarray]] = {}
        self._used: deque[tuple[int, np.ndarray]] = deque()

    def look_up(
        self, local: np.ndarray, slot_of: np.ndarray, step: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The slots of the distinct rows `local` that `step` uses, and which of them to fetch.

        Slots found are held: they cannot leave for this step. All int32; `slot_of`: the slot of
        every row, -1 for none.
        """
        slots, fetch = np.empty(len(local), np.int32), np.empty(len(local), np.int32)
        misses = loops.look_up(local, slot_of, self.last_use, self.next_use, step, slots, fetch)
        return slots, fetch[:misses].copy()

    def fill(
        self,
        local: np.ndarray,
        fetch: np.ndarray,
        filled: np.ndarray,
        slot_of: np.ndarray,
        slots: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Put the rows `local[fetch]` into the slots `filled`, which `take` gave for them.

        Returns the slots among them whose rows leave, and those rows.
        """
        evicted, leaving = np.empty(len(fetch), np.int32), np.empty(len(fetch), np.int32)
        count = loops.fill(local, fetch, filled, slot_of, self.row, slots, evicted, leaving)
        return evicted[:count].copy(), leaving[:count].copy()

    def wanted(self, rows: np.ndarray, slot_of: np.ndarray, step: int) -> None:
        """The window says that these rows, as far as cached, are next used by `step`."""
        if self._pins:
            rows = rows[~self._pinned_among(rows)]
        slots = np.empty(len(rows), np.int32)
        count = loops.want(rows, slot_of, self.next_use, step, slots)
        if count:
            self._soon.setdefault(step, []).append(slots[:count].copy())

    def _pinned_among(self, rows: np.ndarray) -> np.ndarray:
        if self._popularity is None:
            return np.zeros(len(rows), bool)
        return self._popularity[rows] == PINNED

    def refused(self, local: np.ndarray, previous: np.ndarray, step: int) -> np.ndarray:
        """Which of the rows that `step` fetches do not score above the row that leaves next.

        Called when `take` has given their slots and the ranking has not learnt the step yet.
        `previous`: the steps that named the rows last. Nobody is refused while slots are free.
        """
        lowest = None if len(self._free) else self._idle.lowest()
        if lowest is None:
            return np.zeros(len(local), bool)
        keys = self.ranking.before(local, previous, step)
        return (keys < lowest[0]) | ((keys == lowest[0]) & (previous <= lowest[1]))

    def used(self, slots: np.ndarray, step: int, leave_first: np.ndarray | None = None) -> None:
        """File the slots of a step that has been planned, after `wanted` told their next uses and
        the ranking learnt the step; `leave_first`, bool, for each: whether it is not admitted."""
        self._soon.pop(step, None)
        if self._pins:
            pinned = self._pinned_among(self.row[slots])
            self._pinned.file(0, slots[pinned], step)
            slots = slots[~pinned]
            leave_first = None if leave_first is None else leave_first[~pinned]
        admitted = slots
        if leave_first is not None:
            self._idle.file(LEAVES_FIRST, self._not_wanted(slots[leave_first]), step)
            admitted = slots[~leave_first]
        self._file(self._not_wanted(admitted), step)
        self._used.append((step, slots))
        while self._used and self._used[0][0] < step - self.prefetch:
            self._used.popleft()

    def _not_wanted(self, slots: np.ndarray) -> np.ndarray:
        found = np.empty(len(slots), np.int32)
        return found[: loops.idle(slots, self.next_use, found)]

    def _file(self, slots: np.ndarray, step: int) -> None:
        """Put idle slots, last used by `step`, into the buckets of their keys."""
        base, span = self.ranking.base, self.ranking.span
        if span == 1:
            self._idle.file(base, slots, step)
            return
        order, starts = grouped(self.ranking.keys(self.row[slots]), 0, span)
        found = np.flatnonzero(np.diff(starts))
        bounds = [*starts[found].tolist(), len(slots)]
        self._idle.file_all((found + base).tolist(), slots[order], bounds, step)

    def take(self, count: int, step: int) -> tuple[np.ndarray, int]:
        """`count` slots to hold for the misses of `step`, and the latest last use among them (-1:
        none).

        The caller has checked that the step's distinct rows fit, so enough slots are not its own.
        """
        parts: list[np.ndarray] = []
        taken, self._free = self._free[:count], self._free[count:]
        self.last_use[taken] = step
        parts.append(taken)
        need = count - len(taken)
        latest = -1
        sources = (self._take_idle, self._take_farthest, self._take_held, self._take_pinned)
        for source in sources:
            if need == 0:
                break
            for slots in source(need, step):
                latest = max(latest, int(self.last_use[slots].max()))
                self.last_use[slots] = step
                self.next_use[slots] = NEVER
                parts.append(slots)
                need -= len(slots)
        return np.concatenate(parts), latest

    def _take_idle(self, need: int, step: int) -> list[np.ndarray]:
        """Rows without a use in the window whose hold has ended, lowest score first."""
        return self._idle.take(need, step - self.prefetch)

    def _take_farthest(self, need: int, step: int) -> list[np.ndarray]:
        """Rows with a use in the window whose hold has ended, farthest next use first."""
        out = []
        for use in sorted(self._soon, reverse=True):
            if need == 0 or use <= step:
                break
            slots = np.concatenate(self._soon[use])
            slots = slots[self.next_use[slots] == use]
            # A slot filled anew for the same next use is filed twice.
            slots, _, _ = distinct_rows(slots, self._scratch, -1)
            leaves = np.flatnonzero(self.last_use[slots] < step - self.prefetch)[:need]
            chosen = slots[leaves]
            self._soon[use] = [np.delete(slots, leaves)]
            if len(chosen):
                out.append(chosen)
                need -= len(chosen)
        return out

    def _take_held(self, need: int, step: int) -> list[np.ndarray]:
        """Shorten holds: oldest last use first, farthest next use first within it."""
        out = []
        for used_at, slots in self._used:
            if need == 0:
                break
            if used_at >= step:
                continue
            live = slots[self.last_use[slots] == used_at]
            live = live[np.argsort(-self.next_use[live].astype(np.int64), kind="stable")][:need]
            if len(live):
                out.append(live)
                need -= len(live)
        return out

    def _take_pinned(self, need: int, step: int) -> list[np.ndarray]:
        """Rows that leave where no other can, least recently used first."""
        return self._pinned.take(need, step)

    def restore(self, row: np.ndarray, step: int) -> None:
        """Start again from the rows that the slots really hold (-1: free), none of them held.

        Where rows score the same, the less popular leaves first.
        """
        held = row >= 0
        self.row[:] = row
        self.last_use[:] = step - self.prefetch - 1
        self.next_use[:] = NEVER
        self._free = np.flatnonzero(~held).astype(np.int32)
        self._soon, self._used = {}, deque()
        self._idle.clear()
        self._pinned.clear()
        occupied = np.flatnonzero(held).astype(np.int32)
        if self._popularity is not None:
            classes = self._popularity[row[occupied]]
            order = np.argsort(classes, kind="stable")
            occupied, classes = occupied[order], classes[order]
            pinned = classes == PINNED
            self._pinned.file(0, occupied[pinned], step - self.prefetch - 1)
            occupied = occupied[~pinned]
        self._file(occupied, step - self.prefetch - 1)
