"""Which rows leave, by the book: a dictionary of the rows in the cache and a sort of all of them.

The slow twin of `distcache.planner.victims`. It follows the planner's
own choice among rows that score the same, and so says of every victim whether it is right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from distcache.layout import RowLayout
from distcache.planner.victims import PINNED, Policy

NEVER = 10**9
VALUES = [round(256 * (2 ** (level / 12) - 1) / (2 ** (1 / 12) - 1)) for level in range(256)]
FACTORS = [round(2 ** (28 - place / 256)) for place in range(257)]
RANKS = [0] + [round(4 * np.log2((2 ** (c / 12) - 1) / (2 ** (1 / 12) - 1))) for c in range(1, 256)]


def mixed(row: int, step: int) -> int:
    """24 bits of a hash of the two."""
    key = row << 32 ^ step
    key = (key ^ key >> 32) * 0xBF58476D1CE4E5B9 % 2**64
    key = (key ^ key >> 29) * 0x94D049BB133111EB % 2**64
    return (key ^ key >> 32) >> 40


def counted(level: int, row: int, step: int, age: int) -> int:
    """The level of a count after one more use, the last one `age` / 2^32 half-lives ago."""
    place, rest = (age >> 24) % 256, age % 2**24
    factor = FACTORS[place] - ((FACTORS[place] - FACTORS[place + 1]) * rest >> 24)
    value = (VALUES[level] * factor >> 28 >> (age >> 32)) + 256
    low = max(c for c in range(PINNED) if VALUES[c] <= value)
    if low == PINNED - 1:
        return low
    share = (value - VALUES[low]) * 2**24
    return low + (share > mixed(row, step) * (VALUES[low + 1] - VALUES[low]))


def resident(policy: Policy, layout: RowLayout, home: int, slots: int) -> set[int]:
    """The local rows of the tables that stay at a home with so many slots."""
    if policy.resident == "none":
        return set()
    if slots >= layout.local_rows:
        return set(range(layout.local_rows))
    found, room = set[int](), slots * layout.world_size // 8
    for table in sorted(range(len(layout.tables)), key=lambda t: layout.tables[t].rows):
        room -= layout.tables[table].rows
        if room < 0:
            break
        rows = np.arange(layout.offsets[table], layout.offsets[table + 1])
        found |= set(layout.local(rows[layout.home(rows) == home]).tolist())
    return found


@dataclass
class Held:
    """A row in the cache: when it was last used, and its key then."""

    last: int
    key: int


class Reference:
    """One home's cache. `classes`: the popularity of each of its rows (local numbers); `part`: says
    in which part a row is, `name` its number there, and `sizes` how many slots each part has;
    `resident`: rows that stay while others can leave."""

    def __init__(
        self,
        policy: Policy,
        slots: int,
        window: int,
        prefetch: int,
        classes: np.ndarray | None,
        part: Callable[[int], int] = lambda row: 0,
        sizes: Sequence[int] = (),
        name: Callable[[int], int] = lambda row: row,
        resident: Collection[int] = (),
    ) -> None:
        self.part, self.sizes, self.name = part, sizes or [slots], name
        self.policy, self.slots, self.prefetch = policy, slots, prefetch
        self.window = window if policy.name == "lookahead" else 0
        self.classes, self.resident = classes, resident
        self.cached: dict[int, Held] = {}
        self.levels: dict[int, int] = {}
        self.previous: dict[int, int] = {}
        self.clock = self.used = self.steps = self.rate = 0
        self.step = -1
        if policy.half_life is not None:
            self.rate = round(2**32 / policy.half_life)

    def pinned(self, row: int) -> bool:
        rated = self.classes is not None and self.classes[row] == PINNED
        return rated or row in self.resident

    def next_use(self, row: int, now: int, stream: list[set[int]]) -> int:
        """The first step in the window after `now` that names the row."""
        ahead = range(now + 1, min(now + self.window + 1, len(stream)))
        return next((step for step in ahead if row in stream[step]), NEVER)

    def key(self, row: int) -> int:
        """The key of a row that the step learnt last uses, and of all restored rows."""
        ranking = self.policy.ranking
        if ranking == "lfu":
            return RANKS[self.levels.get(row, 0)] + (4 * self.clock >> 32)
        return int(self.classes[row]) if ranking == "frequency" else 0

    def order(self, row: int, now: int, stream: list[set[int]]) -> tuple:
        """What says when a row leaves, smallest first; rows with the same leave in any order."""
        held = self.cached[row]
        if self.pinned(row):
            return (3,)
        use = self.next_use(row, now, stream)
        if held.last >= now - self.prefetch:
            return (2, held.last, -use)
        if use < NEVER:
            return (1, -use)
        return (0, held.key, held.last)

    def check(self, now: int, evicted: list[int], fetched: list[int], stream: list) -> None:
        """Step `now` decided this; raises AssertionError where another row should have left."""
        named, mine = stream[now], set(self.cached)
        assert sorted(fetched) == sorted(named - mine)
        for part, slots in enumerate(self.sizes):
            own = {row for row in mine if self.part(row) == part}
            wanted = {row for row in named if self.part(row) == part}
            left = [row for row in evicted if self.part(row) == part]
            assert len(left) == max(0, len(own | wanted) - slots)
            orders = sorted(self.order(row, now, stream) for row in own - wanted)
            assert sorted(self.order(row, now, stream) for row in left) == orders[: len(left)]
        for row in evicted:
            del self.cached[row]
        self.learn(sorted(named), now)
        for row in named:
            self.cached[row] = Held(now, self.key(row))

    def learn(self, rows: list[int], now: int) -> None:
        """The step uses these rows: count them."""
        self.used += len(rows)
        self.steps += 1
        if self.policy.half_life is None:
            self.rate = 2**32 * self.used // (16 * self.slots * self.steps)
        self.clock = max(0, self.clock + self.rate * (now - self.step))
        self.step = now
        for row in rows:
            age = (now - self.previous.get(row, -1)) * self.rate
            self.levels[row] = counted(self.levels.get(row, 0), self.name(row), now, age)
            self.previous[row] = now

    def restore(self, held: set[int], now: int) -> None:
        """Go on after `now` with these rows."""
        self.cached = {row: Held(now - self.prefetch - 1, self.key(row)) for row in held}
