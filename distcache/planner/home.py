"""The planner of one home: distinct rows, hits, slots for misses, victims.

The rows of a large home are on *shelves*, by a mix of their local numbers; canonical order is by
shelf, then by first occurrence over the ranks. How many there are follows from the number of rows
alone, so canonical order depends on no slot. Consecutive shelves make up a *part*, which has a
piece of the home's slots; nothing that one part decides depends on another, so each can be planned
by a thread of its own, and what it reads fits a core's cache. How many parts there are follows from
rows and slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from distcache.errors import PlanError, StepTooLargeError
from distcache.layout import RowLayout
from distcache.planner import loops, request_loops
from distcache.planner.replicated_rows import ReplicatedRows
from distcache.planner.threads import ALONE
from distcache.planner.victims import AUTO, DEFAULT, PINNED, Policy, grouped, make_ranking

Layout: TypeAlias = RowLayout | ReplicatedRows
"""How the rows of homes are numbered."""

_AHEAD = 24
"""Steps, beside those of 2 P, that may be planned and never run: threads are no further ahead."""

_ROW_S = 6e-8
"""What the loops over a home's rows take for one of them, about, seconds on a core."""

MOST_PARTS, LEAST = 16, 4096
"""Shelves, and parts, of a home at most; rows of a shelf, and slots of a part, at least, where
there are several."""

_MOST_SLOTS = (1 << 31) // loops.LEVELS - 1
"""Slots of a part at most."""


@dataclass(frozen=True)
class Parts:
    """How the local rows of homes, `rows` at most, stand on 2^`shelves` shelves, and these and the
    `slots` of each home fall into 2^`bits` parts, no more than shelves: part p has the slots from
    `edges[p]` to `edges[p + 1]`."""

    slots: int
    rows: int
    shelves: int = 0
    bits: int = 0

    @classmethod
    def of(cls, slots: int, rows: int) -> Parts:
        """Those of homes of this size. One part where every row has a slot."""
        shelves, bits = (
            max(_bits(min(count // LEAST, MOST_PARTS)), (count // _MOST_SLOTS).bit_length())
            for count in (rows, slots)
        )
        if _MOST_SLOTS > slots >= rows:
            bits = 0
        return cls(slots, rows, shelves, min(bits, shelves))

    @property
    def count(self) -> int:
        """K, how many."""
        return 1 << self.bits

    @cached_property
    def shape(self) -> np.ndarray:
        """What the loops know of a home, see `request_loops.Homes`; int64 `[3]`."""
        return np.array([self.shelves, self.shelves - self.bits, -(-self.rows >> self.shelves)])

    @property
    def part_rows(self) -> int:
        """R, how many rows a part has at most."""
        return -(-self.rows >> self.shelves) << self.shelves - self.bits

    @cached_property
    def edges(self) -> np.ndarray:
        """See the class; int64 `[K + 1]`."""
        return np.arange(self.count + 1, dtype=np.int64) * self.slots >> self.bits

    def shelved(self, local: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shelf of each local row, and how its part numbers it."""
        shelves, numbers = np.empty((2, len(local)), np.int64)
        rows = np.ascontiguousarray(local, dtype=np.int64)
        request_loops.shelve(rows, self.shape, shelves, numbers)
        return shelves, numbers

    def divide(self, local: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Local rows `[n]` sorted by shelf, stably.

        Returns the rows as their parts number them, int32; where each shelf begins, int64
        `[shelves + 1]`; and where each of `local` is now, int32.
        """
        shelves, numbers = self.shelved(local)
        order, starts = grouped(shelves, 1 << self.shelves)
        places = np.empty(len(order), np.int32)
        places[order] = np.arange(len(order))
        return numbers[order].astype(np.int32), starts, places

    def parts_of(self, local: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The part of each local row, and its number there."""
        shelves, numbers = self.shelved(local)
        return shelves >> self.shelves - self.bits, numbers

    def spread(self, values: np.ndarray) -> np.ndarray:
        """`values` of all local rows of a home by part, `[K, R]`."""
        found = np.zeros((self.count, self.part_rows), values.dtype)
        for start in range(0, len(values), _BLOCK):
            block = values[start : start + _BLOCK]
            found[self.parts_of(np.arange(start, start + len(block)))] = block
        return found

    def seats(self, local: np.ndarray, share: float) -> np.ndarray:
        """A slot of the home, int64, for each of `local`, the likeliest row first; -1 where rows
        before it fill `share` of its part. The likeliest have the last slots: among equals, the
        first leave first."""
        part, _ = self.parts_of(local)
        order, starts = grouped(part, self.count)
        nth = np.empty(len(part), np.int64)
        nth[order] = np.arange(len(part)) - np.repeat(starts[:-1], np.diff(starts))
        most = (share * np.diff(self.edges)).astype(np.int64)
        return np.where(nth < most[part], self.edges[part + 1] - 1 - nth, -1)

    def enough(self, local: np.ndarray) -> int:
        """Slots of each home, few beyond what it takes, with which it holds the rows `local`."""
        for bits in range(self.shelves + 1):
            part, _ = replace(self, bits=bits).parts_of(local)
            fullest = int(np.bincount(part, minlength=1).max())
            slots = max(fullest, LEAST if bits else 0) << bits
            if Parts.of(slots, self.rows).bits == bits:
                return slots
        return self.rows


def _bits(count: int) -> int:
    """The largest b with 2^b <= `count`, 0 for 0."""
    return max(count, 1).bit_length() - 1


_BLOCK = 1 << 20


@dataclass(frozen=True)
class Ingested:
    """A step's rows at their home, U_h distinct `rows`, which its slots hold where it `fits`.

    `named`: them, until the step is planned `previous` as `loops.tell_new` gives it; `firsts`: the
    canonical index of the first of each part, int64 `[K]`.
    """

    kind: str
    rows: int
    fits: bool
    named: loops.Named
    firsts: np.ndarray

    def dense(self, values: np.ndarray) -> np.ndarray:
        """`values` int32 `[N]`, of which each part has `counts` from `bases` on, without gaps."""
        if self.rows == len(values):
            return values
        found = np.empty(self.rows, np.int32)
        loops.join_parts(values, self.named.bases, self.named.counts, found)
        return found

    def by_part(self) -> Iterator[tuple[int, np.ndarray, slice]]:
        """Each part, its `distinct` rows, and which of the home's in canonical order they are."""
        of = self.named.bases, self.firsts, self.named.counts
        for part, (base, first, count) in enumerate(zip(*map(np.ndarray.tolist, of), strict=True)):
            yield part, self.named.distinct[base : base + count], slice(first, first + count)

    def local(self, parts: Parts) -> np.ndarray:
        """The home's rows in canonical order, local int64 `[U_h]`."""
        found = np.empty(self.rows, np.int64)
        loops.local_rows(self.named, parts.shape, found)
        return found

    def replies(self) -> tuple[np.ndarray, ...]:
        """For each rank, int32: the canonical index of every row that it asked for."""
        ends = [0, *self.named.starts[:, -1].tolist()]
        return tuple([self.named.labels[start:stop] for start, stop in pairwise(ends)])


@dataclass(frozen=True)
class HomeDecision:
    """A home's part of a step of `kind`, whose U_h distinct rows are in canonical order.

    `replies`: for each rank, int32, the canonical index within this home of every row that it asked
    for; `slots` `[U_h]`: device slots (global numbers); `fetch`: indices into the part of rows to
    fetch, ascending, which fill `fetch_slots`; rows are row numbers of the layout (int64).
    `ingested`: the rows themselves, None where there are none.
    """

    step: int
    kind: str
    replies: tuple[np.ndarray, ...]
    slots: np.ndarray
    fetch: np.ndarray
    fetch_rows: np.ndarray
    evict_slots: np.ndarray
    evict_rows: np.ndarray
    latest_use: int
    fetch_slots: np.ndarray
    ingested: Ingested | None = None

    @cached_property
    def told(self) -> np.ndarray:
        """`slots` as other ranks are told them, int32 `[U_h]`: of a row to fetch the complement."""
        slots, fetch = (np.ascontiguousarray(of, np.int32) for of in (self.slots, self.fetch))
        told = np.empty_like(slots)
        loops.encode_slots(slots, fetch, told)
        return told

    @cached_property
    def previous(self) -> np.ndarray:
        """The steps before it that named its rows last, -1 for none, int32 `[U_h]`; for sharded
        rows, of which others are to know."""
        return self.ingested.dense(self.ingested.named.previous)


class Planner:
    """Plans the rows of one home: `ingest` in stream order, then `plan` in stream order.

    What all kinds share: distinct rows, by an index of 8 bytes per local row.
    """

    def __init__(
        self,
        layout: Layout,
        home: int,
        parts: Parts,
        own_slots: slice,
        room: tuple[int, int, int] = (0, 2, 2),
    ) -> None:
        """`own_slots`: where this home's slots are among those of the device; `room`: for slots of
        the largest part, steps and keys, see `loops.Home`."""
        self.layout, self.home, self.parts, self.own_slots = layout, home, parts, own_slots
        self.threads = ALONE
        """What runs the parts."""
        self._home, self._sizes = _new_home(parts, *room), np.diff(parts.edges)
        self._window: deque[Ingested] = deque()
        self._looks_ahead, self._planned = False, -1
        self._popularity: np.ndarray | None = None

    @property
    def slots(self) -> int:
        """How many it has."""
        return self.parts.slots

    @property
    def index_bytes(self) -> int:
        """Bytes of the index over this home's rows, with what the policy keeps of each."""
        popular = 0 if self._popularity is None else self._popularity.nbytes
        return self._home.index.nbytes + popular

    @property
    def due_rows(self) -> int:
        """Distinct rows of the oldest ingested step, which `plan` would decide; if it would refuse
        them, the slots that would be enough."""
        return self._window[0].rows

    def ingest(
        self,
        step: int,
        kind: str,
        requests: Sequence[np.ndarray],
        counts: np.ndarray | None = None,
        decide: bool = False,
        once: bool = False,
    ) -> Ingested:
        """Take the rows, homed here, that every rank names in `step`, in rank order.

        `requests`: of each rank, int32, numbered in their parts, by shelf; `counts` int64 `[W,
        shelves]`: how many are on each; `decide`: `plan` comes next, of the oldest step before
        this one, and may well be done at the same time; `once`: there is one rank, and it names no
        row twice. Raises PlanError for a row that the layout
        does not have, and for a step that does not come after those before it.
        """
        rows = np.concatenate(requests) if len(requests) > 1 else requests[0]
        rows, count = np.ascontiguousarray(rows, dtype=np.int32), self.parts.count
        if counts is None:
            counts = np.array([[len(request)] for request in requests])
        starts = np.empty((len(requests), counts.shape[1] + 1), np.int64)
        bases, sizes, firsts = np.empty((3, count), np.int64)
        distinct, previous, labels = np.empty((3, len(rows)), np.int32)
        if not self._window and step > self._planned:
            self._planned = step - 1  # all steps before are
        oldest = self._window[0].named.step if self._window else -1
        last = self._window[-1].named.step if self._window else self._planned
        if step != last + 1:
            raise PlanError(f"step {step} does not follow {last}: steps come in order")
        inner, highest, waiting = self.parts.shelves - self.parts.bits, -1, 0
        named = loops.Named(
            step, self._planned, self._looks_ahead, once, inner, rows, starts, bases,
            distinct, previous, labels, sizes,
        )  # fmt: skip
        if counts.shape == (len(requests), 1 << self.parts.shelves):
            given = named, np.ascontiguousarray(counts)
            highest, waiting = loops.spread_counts(self._home, oldest, *given)
        if highest < 0:
            raise PlanError(
                f"step {step}: {counts.tolist()} do not count {len(rows)} rows by shelf"
            )
        if highest >= self.parts.part_rows:
            bad = np.flatnonzero(rows.view(np.uint32) >= self.parts.part_rows)
            raise PlanError(
                f"step {step}: id {bad[0]} is row {rows[bad[0]]} of a home that has "
                f"{self.parts.part_rows}: ids must lie within their tables"
            )
        if self._looks_ahead:
            self._make_room(step, waiting)
        self._take_in(named, decide)
        total, over = loops.sum_up(sizes, self._sizes, firsts)
        entry = Ingested(kind, int(total), over == 0, named, firsts)
        self._window.append(entry)
        return entry

    def _take_in(self, named: loops.Named, decide: bool) -> None:
        """The work of `ingest` in all parts."""
        self._share(loops.ingest, len(named.rows), named)

    def _share(self, loop: Callable[..., object], rows: int, *what: tuple) -> None:
        """`loop(home, first, last, *what)` for all parts, shared out among the threads, which is
        work on so many rows."""
        ranges = self.threads.ranges(self.parts.count, _ROW_S * rows)
        self.threads.each(loop, [(self._home, *of, *what) for of in ranges])

    def _make_room(self, step: int, waiting: int) -> None:
        """Room for what the window knows of `step`, with which so many rows of a part may wait."""

    def plan(self) -> HomeDecision:
        """Decide the oldest ingested step."""
        raise NotImplementedError

    def restore(self, slot_row: np.ndarray, step: int) -> None:
        """Forget all beyond `step`, and start again from what the device holds after it.

        `slot_row` int64 `[slots]`: the row in each of this home's slots, -1 free.
        """
        self._window.clear()
        self._planned = step
        np.minimum(self._home.index[..., loops.NAMED], step, out=self._home.index[..., loops.NAMED])


def _new_home(parts: Parts, slots: int, steps: int, keys: int) -> loops.Home:
    """A home of which nothing is known; see `Planner`."""
    count = parts.count
    index = np.full((count, parts.part_rows, 2), -1, np.int32)
    index[..., loops.HELD] = -loops.LEVELS
    return loops.Home(
        index=index,
        row_of=np.full((count, slots), -1, np.int32),
        table=np.empty((count, slots + loops.STEPS + steps + keys, 4), np.int32),
        keys=np.zeros(count, np.int64),
        waiting=np.empty((count, 2, 2), np.int32),
        begins=np.zeros((count, steps), np.int64),
        waits=np.zeros((count, steps), np.int64),
        heads=np.zeros(count, np.int64),
    )


def resident_rows(policy: Policy, layout: Layout, home: int, slots: int) -> Iterator[np.ndarray]:
    """The local rows of `home`, int64, of the tables that stay; see `Policy.resident_tables`."""
    world = layout.world_size
    for first, last in policy.resident_tables(layout.offsets, slots * world):
        local = np.arange(first // world, -(-last // world))
        rows = layout.row(home, local)
        yield local[(rows >= first) & (rows < last)]


class HomePlanner(Planner):
    """Plans the rows of `home` into its own range of `slots` device slots.

    `prefetch` is P. A step is decided when the ids through step + L are ingested (or the stream
    ended). `popularity` uint8 `[local rows]`: each row's class, higher is hotter, 0 never seen;
    `PINNED` rows leave where no other can, whatever the policy, as do those of `resident_rows`. Its
    index is 8 bytes per local row: slot, level and last reference; only the home has it, so it is
    divided over the ranks. Rows of a step in the window wait until that is planned, 8 bytes each.
    Every slot with a row that is not pinned lies in a list, so filing and taking cost as much as
    the rows filed and taken, whatever the size of the cache; only where pinned rows must leave are
    all slots looked at. Raises ConfigError where a policy needs popularity and it is None.
    """

    def __init__(
        self,
        layout: Layout,
        home: int,
        slots: int,
        prefetch: int,
        policy: Policy = DEFAULT,
        popularity: np.ndarray | None = None,
        first_slot: int | None = None,
        parts: Parts | None = None,
    ) -> None:
        """`first_slot`: of its range on the device; None: home h's range follows that of h - 1;
        `parts`: None: as all homes of this size are."""
        first = home * slots if first_slot is None else first_slot
        parts = parts or Parts.of(slots, layout.most_rows)
        room = int(np.diff(parts.edges).max()), 64, 256
        super().__init__(layout, home, parts, slice(first, first + slots), room)
        self._prefetch, self._looks_ahead = prefetch, policy.uses_window
        self._ranking, self._popularity = make_ranking(policy, slots, popularity), popularity
        self._own_slots = first + parts.edges[:-1]
        held = self._home.index[..., loops.HELD]
        if popularity is not None and policy.ranking == "frequency":
            held += parts.spread(popularity)
        elif popularity is not None:
            held[parts.spread(popularity == PINNED)] += PINNED
        if policy.resident == AUTO and slots >= parts.rows:
            held[:] = PINNED - loops.LEVELS
        for local in resident_rows(policy, layout, home, slots):
            held[parts.parts_of(local)] = PINNED - loops.LEVELS
        self._lowest = self._highest = 0
        self._decided: HomeDecision | Exception | None = None
        self._past: deque[tuple[Ingested, np.ndarray, tuple]] = deque(maxlen=2 * prefetch + _AHEAD)
        self._hold(np.full(slots, -1, np.int64), -1)

    @property
    def due_rows(self) -> int:
        """See `Planner.due_rows`."""
        if self._decided is not None:
            return 0 if isinstance(self._decided, Exception) else len(self._decided.slots)
        entry, parts = self._window[0], self.parts
        return entry.rows if entry.fits else parts.enough(entry.local(parts))

    def _make_room(self, step: int, waiting: int) -> None:
        """See `Planner._make_room`."""
        if step - self._planned >= self._home.begins.shape[1]:
            self._widen(2 * (step - self._planned), 0)
        known, size = self._home, self._home.waiting.shape[1]
        if waiting > size:
            begins = known.heads
            if self._window:
                oldest = self._window[0].named.step & (known.begins.shape[1] - 1)
                begins = known.begins[:, oldest]
            wider = np.empty((self.parts.count, 1 << int(waiting).bit_length(), 2), np.int32)
            for part, (start, stop) in enumerate(zip(begins, known.heads, strict=True)):
                at = np.arange(start, stop)
                wider[part, at & (wider.shape[1] - 1)] = known.waiting[part, at & (size - 1)]
            self._home = known._replace(waiting=wider)

    def _take_in(self, named: loops.Named, decide: bool) -> None:
        """See `Planner._take_in`: with the next decision, where that is known to be possible."""
        if not decide or not self._window or not self._window[0].fits:
            super()._take_in(named, decide)
            return
        try:
            due, decided = self._begin(named.step)
        except Exception as error:  # `plan` raises it, where it is told to others
            self._decided = error
            super()._take_in(named, decide)
            return
        self._share(loops.advance, len(named.rows), named, due)
        try:
            self._decided = decided()
        except Exception as error:
            self._decided = error

    def plan(self) -> HomeDecision:
        """Decide the oldest ingested step. Raises StepTooLargeError and decides nothing when the
        distinct rows of a part exceed its slots."""
        found, self._decided = self._decided, None
        if isinstance(found, Exception):
            raise found
        if found is not None:
            return found
        entry = self._window[0]
        if not entry.fits:
            needs = self.due_rows
            raise StepTooLargeError(
                f"step {entry.named.step}: home rank {self.home} has {entry.rows} distinct rows, "
                f"which want {needs} slots, for {self.slots}",
                rows=needs,
                slots=self.slots,
            )
        due, decided = self._begin(self._window[-1].named.step)
        self._share(loops.plan, entry.rows, due)
        return decided()

    def _begin(self, newest: int) -> tuple[loops.Due, Callable[[], HomeDecision]]:
        """The oldest step for the loops, and what gives the decision once they are done; `newest`:
        the last step that is known."""
        entry, ranking = self._window.popleft(), self._ranking
        step = self._planned = entry.named.step
        before = ranking.learn(entry.rows, step)
        self._highest = max(self._highest, ranking.base + ranking.top)
        keys = self._highest - self._lowest + 1
        if keys > self._home.table.shape[1] - self._by_key:
            self._widen(0, 2 * keys)
        newest = newest if self._looks_ahead else step
        when = (entry.named, newest, self._prefetch, ranking.rate, ranking.base)
        scale = (ranking.ranks, ranking.values, ranking.factors, ranking.nearest)
        where = (entry.firsts, self._own_slots, self.parts.shape)
        slots, fetch, taken, evict_slots = np.empty((4, entry.rows), np.int32)
        local, levels = np.empty((2, entry.rows), np.int64), np.empty((2, entry.rows), np.uint8)
        out = (slots, *levels, fetch, taken, evict_slots, *local)
        done = np.empty((self.parts.count, 3), np.int64)
        due = loops.Due(*when, *scale, *where, *out, done)
        return due, lambda: self._decision(entry, due, before)

    def _decision(self, entry: Ingested, due: loops.Due, before: tuple) -> HomeDecision:
        """What the loops have decided."""
        came, gone, latest, self._lowest = loops.gather(self._home.keys, due)
        if latest < -1:
            raise PlanError(
                f"step {entry.named.step}: home rank {self.home} finds too few slots that may leave"
            )
        self._past.append((entry, due.levels, before))
        return HomeDecision(
            step=entry.named.step,
            kind=entry.kind,
            replies=entry.replies(),
            slots=due.slots,
            fetch=due.fetch[:came],
            fetch_rows=self.layout.row(self.home, due.fetched[:came]),
            evict_slots=due.evict_slots[:gone],
            evict_rows=self.layout.row(self.home, due.evicted[:gone]),
            latest_use=latest,
            fetch_slots=due.taken[:came],
            ingested=entry,
        )

    def restore(self, slot_row: np.ndarray, step: int) -> None:
        """See `Planner.restore`. How far planning was ahead leaves no trace: what later steps were
        counted for is taken back. Where rows score the same, the less popular leaves first."""
        self._decided = None
        while self._window:
            self._unname(self._window.pop())
        while self._past and self._past[-1][0].named.step > step:
            entry, levels, before = self._past.pop()
            self._unname(entry)
            if self._ranking.rate >= 0:
                for part, rows, span in entry.by_part():
                    held = self._home.index[part, rows, loops.HELD]
                    held += levels[span] - held % loops.LEVELS
                    self._home.index[part, rows, loops.HELD] = held
            self._ranking.forget(before)
        super().restore(slot_row, step)  # steps beyond `_past`
        local = np.where(slot_row >= 0, self.layout.local(np.maximum(slot_row, 0)), -1)
        self._hold(local, step - self._prefetch - 1)

    def _unname(self, entry: Ingested) -> None:
        previous = entry.dense(entry.named.previous)
        previous = np.where(previous < -1, -2 - previous, previous)  # see `loops.tell_new`
        for part, rows, span in entry.by_part():
            self._home.index[part, rows, loops.NAMED] = previous[span]

    def _hold(self, local: np.ndarray, used_at: int) -> None:
        """Let the slots hold these local rows (-1: free), all last used by `used_at`, and nothing
        wait to be told."""
        known, parts = self._home, self.parts
        known.row_of.fill(-1)
        known.index[..., loops.HELD] %= loops.LEVELS
        known.index[..., loops.HELD] -= loops.LEVELS
        slot = np.flatnonzero(local >= 0)
        part, rows = parts.parts_of(local[slot])
        known.row_of[part, slot - parts.edges[part]] = rows
        known.index[part, rows, loops.HELD] += (slot - parts.edges[part] + 1) * loops.LEVELS
        known.table[:] = np.arange(known.table.shape[1])[:, None]
        known.table[..., loops.LAST], known.table[..., loops.NEXT] = used_at, loops.NEVER
        known.heads.fill(0)
        self._lowest = self._ranking.base
        known.keys.fill(self._lowest)
        self._highest = self._ranking.base + self._ranking.top
        if self._popularity is not None:
            slot = slot[np.argsort(self._popularity[local[slot]], kind="stable")]
        slot = np.concatenate((slot, np.flatnonzero(local < 0)))
        part = np.searchsorted(parts.edges, slot, side="right") - 1
        loops.file_slots(
            known, part, slot - parts.edges[part], self._ranking.base, self._ranking.ranks
        )

    @property
    def _by_key(self) -> int:
        """The first node of a key."""
        return self._home.row_of.shape[1] + loops.STEPS + self._home.begins.shape[1]

    def _widen(self, steps: int, keys: int) -> None:
        """Room for lists of at least so many steps and keys."""
        known, slots = self._home, self._home.row_of.shape[1]
        old_steps, old_by_key = known.begins.shape[1], self._by_key
        old_keys = known.table.shape[1] - old_by_key
        steps = max(old_steps, 1 << max(steps - 1, 0).bit_length())
        keys = max(old_keys, 1 << max(keys - 1, 0).bit_length())
        by_step, by_key = slots + loops.STEPS, slots + loops.STEPS + steps
        in_use = np.arange(self._planned, self._planned + old_steps)
        lists = int(known.keys.min()) + np.arange(old_keys)
        here = [np.arange(by_step), by_step + (in_use & (old_steps - 1))]
        there = [np.arange(by_step), by_step + (in_use & (steps - 1))]
        old = np.concatenate([*here, old_by_key + (lists & (old_keys - 1))])
        new = np.concatenate([*there, by_key + (lists & (keys - 1))])
        table = np.empty((self.parts.count, by_key + keys, 4), np.int32)
        table[:] = np.arange(table.shape[1])[:, None]
        renamed = np.empty(known.table.shape[1], np.int32)
        renamed[old] = new
        table[:, new] = known.table[:, old]
        table[:, new, : loops.LAST] = renamed[known.table[:, old, : loops.LAST]]
        begins, waits = np.zeros((2, self.parts.count, steps), np.int64)
        for wider, own in ((begins, known.begins), (waits, known.waits)):
            wider[:, in_use & (steps - 1)] = own[:, in_use & (old_steps - 1)]
        self._home = known._replace(table=table, begins=begins, waits=waits)


class ResidentPlanner(Planner):
    """All rows on every device: slot = row, nothing moves (mode `resident`)."""

    def __init__(self, layout: RowLayout, home: int) -> None:
        rows = layout.local_rows
        parts = replace(Parts.of(rows, layout.most_rows), bits=0)
        super().__init__(layout, home, parts, slice(None))

    def plan(self) -> HomeDecision:
        """See `Planner.plan`: every row is a hit."""
        entry, none = self._window.popleft(), np.empty(0, np.int64)
        self._planned = entry.named.step
        rows = self.layout.row(self.home, entry.local(self.parts))
        known = (entry.named.step, entry.kind, entry.replies())
        return HomeDecision(*known, rows, *[none] * 4, -1, none, entry)


class PassThroughPlanner(ResidentPlanner):
    """No cache: every row comes from the store and leaves after its step (mode `host`).

    Slots interleave over homes, so that the buffer may grow with the largest step.
    """

    def __init__(self, layout: RowLayout, home: int) -> None:
        super().__init__(layout, home)
        self._world = layout.world_size
        self._leaving = (np.empty(0, np.int64), np.empty(0, np.int64), -1)

    def plan(self) -> HomeDecision:
        """See `Planner.plan`: the rows of the step before leave, all of this step's come in."""
        every = super().plan()
        every_row = np.arange(len(every.slots))
        slots = every_row * self._world + self.home
        old_slots, old_rows, latest = self._leaving
        self._leaving = (slots, every.slots, every.step)
        return replace(
            every,
            slots=slots,
            fetch=every_row,
            fetch_rows=every.slots,
            evict_slots=old_slots,
            evict_rows=old_rows,
            latest_use=latest,
            fetch_slots=slots,
        )

    def restore(self, slot_row: np.ndarray, step: int) -> None:
        """See `Planner.restore`; the rows still in the buffer leave before the next step."""
        super().restore(slot_row, step)
        slots = np.flatnonzero(slot_row >= 0)
        self._leaving = (slots, slot_row[slots], step)
