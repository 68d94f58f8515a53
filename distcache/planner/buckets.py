"""Slots in the order in which their rows leave: a bucket for each key, first in, first out.

Entries are hints: a slot that has been used, wanted or emptied since is passed over when its turn
comes, and dropped for good once hints outnumber the slots. So filing and taking cost as much as
the rows filed and taken, whatever the size of the cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from distcache.planner.bodies import bodies
from distcache.planner.loops import NEVER

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
        stop = self.stop + len(slots)
        if stop > len(self.slots):
            kept = len(self)
            size = max(8, 3 * (kept + len(slots)) // 2)
            for name in ("slots", "steps"):
                old, new = getattr(self, name), np.empty(size, np.int32)
                new[:kept] = old[self.start : self.stop]
                setattr(self, name, new)
            self.start, self.stop, stop = 0, kept, kept + len(slots)
        self.slots[self.stop : stop] = slots
        self.steps[self.stop : stop] = step
        self.stop = stop


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
        if not len(slots):
            return
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket()
            heapq.heappush(self._keys, key)
        bucket.append(slots, step)
        self._hints += len(slots)
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
        count, read = bodies().live(slots, steps, self._last_use, self._next_use, before, found)
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
