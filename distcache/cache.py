"""Slots for rows on the device, with their optimizer state; moves rows and decides nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distcache.compiled import array, compiled, fetch_early, i8, in4, in8, out4, out8, types
from distcache.errors import MemoryTooSmallError, PlanError
from distcache.layout import RowKind
from distcache.ops import put
from distcache.ops.reference import as_numpy, check_rows, take_rows
from distcache.store.memory import describe_bytes, require_memory
from distcache.streams import DeviceEvent, Streams


@dataclass(frozen=True)
class StateSlots:
    """The slots with optimizer state on this rank, where homes alone keep it (ZeRO's first stage):
    [first, first + count), and all from `tail` on, in this order."""

    first: int
    count: int
    tail: int

    def rows(self, slots: int) -> int:
        """How many of `slots` slots have state."""
        return self.count + slots - self.tail

    def of(self, slots: np.ndarray) -> np.ndarray:
        """Where the state of each of `slots` (`[m]`, all of which have one) lies."""
        return np.where(slots >= self.tail, slots - self.tail + self.count, slots - self.first)

    def start(self, slots: slice) -> int:
        """Where the state of consecutive slots begins."""
        first = slots.start
        return first - self.tail + self.count if first >= self.tail else first - self.first


# -----------------------------------------------------------------------------
# Host buffers between the store and the device: pinned for a GPU, and used again and again.


class StagingRing:
    """`count` buffers of rows and their state, handed out in turn: one piece of memory each.

    A buffer is pinned where the device is a GPU, so that copies run beside the host and the
    device. It grows to the largest number of rows asked for, and is waited for (by the thread that
    moves rows, never by the training loop) while the copy that reads it is on its way.
    """

    def __init__(self, count: int, kind: RowKind, streams: Streams) -> None:
        """`kind`: of the rows."""
        self._row_bytes, self._streams = kind.nbytes, streams
        self._buffers = [self._make(0)] * count
        self._busy = list[DeviceEvent]([None]) * count
        self._next = 0

    def take(self, rows: int) -> tuple[int, Tensor]:
        """The next buffer: its number, for `release`, and uint8 of it for `RowKind.parts`.

        Raises MemoryTooSmallError where the host does not pin so much.
        """
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        self._streams.synchronize(self._busy[number])
        if len(self._buffers[number]) < rows * self._row_bytes:
            self._buffers[number] = self._make(int(rows * 1.25))  # so that it seldom grows
        return number, self._buffers[number][: rows * self._row_bytes]

    def release(self, number: int, mark: DeviceEvent) -> None:
        """The buffer may be written again once `mark` is reached."""
        self._busy[number] = mark

    def _make(self, rows: int) -> Tensor:
        nbytes, pinned = rows * self._row_bytes, self._streams.asynchronous
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError as error:
            wanted = describe_bytes(nbytes)
            raise MemoryTooSmallError(
                f"the host did not give {wanted} of pinned memory for {rows} rows between the "
                f"store and {self._streams.device}: {str(error).splitlines()[0]}; lower "
                "data.global_batch_size or cache.prefetch, or raise the limit of locked memory "
                "(ulimit -l)"
            ) from error


Index = Tensor | np.ndarray
"""int32 or int64 `[m]`, on the CPU."""

FREE = -1
"""`slot_row` of a slot that holds no row of this rank's home."""

FOREIGN = -2
"""`slot_row` of a slot with a row of another rank's home, which alone keeps the number; noted where
every slot is looked at."""

# -----------------------------------------------------------------------------
# What slots hold, in compiled loops: C slots, `slot_row` int64 `[C]`, `dirty` bool `[C]`.

_flags = array(types.boolean, True)

_EARLY = 24
"""Slots ahead of the one that is looked at that are on their way to the core's cache."""


@compiled(types.void(_flags, in4))
def set_flags(flags: np.ndarray, slots: np.ndarray) -> None:
    """Set the flags of `slots`, int32 `[m]`."""
    for i in range(len(slots)):
        flags[slots[i]] = True


@compiled(types.boolean(out8, _flags, in4, i8, in8))
def hold_rows(
    slot_row: np.ndarray, dirty: np.ndarray, slots: np.ndarray, first: int, rows: np.ndarray
) -> bool:
    """Let `slots`, int32 `[m]`, from `first` on hold `rows`, int64, clean; False, and all is as
    before, where one of them all is outside."""
    for i in range(len(slots)):
        if np.uint32(slots[i]) >= len(slot_row):
            return False
    slots = slots[first : first + len(rows)]
    for i in range(len(slots)):
        if i + _EARLY < len(slots):
            fetch_early(slot_row, slots[i + _EARLY])
            fetch_early(dirty, slots[i + _EARLY])
        slot_row[slots[i]], dirty[slots[i]] = rows[i], False
    return True


@compiled(i8(out8, _flags, in4, in8, out4, out8))
def free_slots(
    slot_row: np.ndarray,
    dirty: np.ndarray,
    slots: np.ndarray,
    rows: np.ndarray,
    left: np.ndarray,
    left_rows: np.ndarray,
) -> int:
    """Free `slots`, int32 `[m]`, if they hold `rows`, int64. How many of them were dirty, which go
    to `left`, and their rows to `left_rows`, both of `[m]`; where the i-th, the first, is outside,
    or holds another row, -1 - i, and all is as before."""
    count = 0
    for i in range(len(slots)):
        if i + _EARLY < len(slots):
            fetch_early(slot_row, slots[i + _EARLY])
            fetch_early(dirty, slots[i + _EARLY])
        slot = slots[i]
        if np.uint32(slot) >= len(slot_row) or slot_row[slot] != rows[i]:
            for k in range(i):
                slot_row[slots[k]] = rows[k]
            for k in range(count):
                dirty[left[k]] = True
            return -1 - i
        if dirty[slot]:
            left[count], left_rows[count] = slot, rows[i]
            count += 1
        slot_row[slot], dirty[slot] = FREE, False
    return count


# -----------------------------------------------------------------------------
# The slots.

_WAY_OUT = "lower cache.rows (or cache.ratio, cache.bytes), or use more memory"


class DeviceCache:
    """C slots of one group on one rank.

    `weight` `[C, D]` and `state` `[C, S]` (None where S = 0; fewer rows with `state_slots`) lie on
    the device; they are plain tensors, neither parameters nor buffers. What the slots hold is kept
    on the host in NumPy: `slot_row` int64 `[C]` (row number, or FREE) and `dirty` bool `[C]`
    (changed since its fill). The bookkeeping advances when the method is called; the device follows
    in stream order. Slots and rows given to a method lie on the CPU, slots are distinct where they
    are written. A slot that holds another row than it should raises PlanError, which names both,
    before anything changes.
    """

    def __init__(
        self,
        slots: int,
        kind: RowKind,
        device: torch.device | str,
        state_slots: StateSlots | None = None,
        validate: bool = True,
    ) -> None:
        """C = `slots` free slots for rows of `kind`.

        `state_slots`: those that have state; None: all. Raises MemoryTooSmallError where the
        device's memory does not hold them.
        `validate`: look at every slot that a step reads, changes or fills, which a plan has checked
        (two passes over its rows, in the thread that trains).
        """
        self._validate = validate
        self._changed: deque[Index] = deque()
        self.kind, self.dim, self.state_width = kind, kind.dim, kind.state_width
        self.state_slots = state_slots
        self.device = torch.device(device)
        self.weight, self.state = self._allocate(slots)
        self.slot_row = np.full(slots, FREE, dtype=np.int64)
        self._dirty = np.zeros(slots, dtype=np.bool_)

    @property
    def dirty(self) -> np.ndarray:
        """Whether the row of each slot was changed since its fill, bool `[C]`.

        `mark_dirty` only notes slots: the thread that trains has no time to write them here. Who
        looks next does so, before it frees or fills any: movement, or a flush while nothing moves.
        """
        while self._changed:
            set_flags(self._dirty, _numpy(self._changed.popleft(), np.int32))
        return self._dirty

    @property
    def slots(self) -> int:
        """C: the number of slots."""
        return len(self.slot_row)

    @property
    def device_bytes(self) -> int:
        """Bytes of weights and state on the device."""
        return self.weight.nbytes + (0 if self.state is None else self.state.nbytes)

    def fill(
        self,
        slots: Index,
        rows: Index,
        weight: Tensor,
        state: Tensor | None,
        where: Tensor | None = None,
        first: int = 0,
    ) -> None:
        """Put rows, just fetched, into `slots` `[m]`; they are clean. `where`: the slots on the
        device, if they are there already.

        `rows` `[k]`: the names of those in `slots[first : first + k]`, which are free; the others,
        of other ranks' homes, which write them back, have none here, and nothing is noted of them
        but where every slot is looked at (`validate`). `weight` `[m, D]`, `state` `[m, S]` or None,
        on any device; of a cache with `state_slots` the state of the k rows alone. Pinned sources
        may be reused once the current stream is past this call.
        """
        at, new = self._slots(slots), _numpy(rows, np.int64)
        own = at[first : first + len(new)]
        if self._validate:
            self._require(at)
            held = self.slot_row[own]
            taken = (held != FREE) & (held != FOREIGN)
            if taken.any():
                i = int(np.argmax(taken))
                raise PlanError(
                    f"slot {own[i]} still holds row {held[i]}: evict it before row {new[i]} is put "
                    "there"
                )
            self.slot_row[at] = FOREIGN
        if not hold_rows(self.slot_row, self.dirty, at, first, new):
            self._require(at)
        where = self._to_device(at) if where is None else where
        self._copy_in(self.weight, where, weight)
        if self.state is not None and state is not None:
            if self.state_slots is not None:
                where = self._to_device(self.state_slots.of(own))
            self._copy_in(self.state, where, state)

    def read(self, slots: Index) -> Tensor:
        """Copies of rows and their state on the device, uint8 for `RowKind.parts`.

        A slot that was just evicted may be read until it is filled again.
        """
        at = self._slots(slots)
        self._require(at)
        where, nbytes = self._to_device(at), len(at) * self.kind.nbytes
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        weight, state = self.kind.parts(memory)
        _copy_out(self.weight, where, weight)
        if self.state is not None and state is not None:
            if self.state_slots is not None:
                where = self._to_device(self.state_slots.of(at))
            _copy_out(self.state, where, state)
        return memory

    def part(self, slots: slice) -> tuple[Tensor, Tensor | None]:
        """Views of weight and state of consecutive slots, all of which have state."""
        if self.state is None:
            return self.weight[slots], None
        if self.state_slots is None:
            return self.weight[slots], self.state[slots]
        start = self.state_slots.start(slots)
        return self.weight[slots], self.state[start : start + slots.stop - slots.start]

    def gather(self, slots: Index, where: Tensor | None = None) -> Tensor:
        """Copies of a step's rows on the device, `[U, D]`; every slot must hold a row.

        `where`: the slots on the device, if they are there already.
        """
        if where is None or self._validate:
            at = self._held(slots, "read")
            where = self._to_device(at) if where is None else where
        return self.weight.index_select(0, where)

    def evict(self, slots: Index, rows: Index) -> tuple[Tensor, Tensor]:
        """Free `slots`, which must hold exactly `rows`; the dirty ones among them.

        Returns (slots, rows) `[k]`, on the CPU: what must be written back. Their
        values stay readable (`read`) until the slots are filled again.
        """
        at, expected = self._slots(slots), _numpy(rows, np.int64)
        left, left_rows = np.empty_like(at), np.empty_like(expected)
        count = free_slots(self.slot_row, self.dirty, at, expected, left, left_rows)
        if count < 0:
            i = -1 - count
            self._require(at)
            held = self.slot_row[at[i]]
            what = "is free" if held == FREE else f"holds row {held}"
            raise PlanError(f"slot {at[i]} {what}, but row {expected[i]} was to leave it")
        return torch.from_numpy(left[:count]), torch.from_numpy(left_rows[:count])

    def dirty_slots(self) -> Tensor:
        """Dirty slots, ascending, int64 on the CPU; their rows are `slot_row` there."""
        return torch.from_numpy(np.flatnonzero(self.dirty))

    def mark_dirty(self, slots: Index) -> None:
        """Mark `slots`, whose rows were changed in place on the device."""
        self._changed.append(self._held(slots, "change") if self._validate else slots)

    def clean(self, slots: Index) -> None:
        """Mark `slots` as written back; they keep their rows."""
        self.dirty[self._held(slots, "clean")] = False

    def forget(self) -> None:
        """Free every slot, whatever it holds, without a write-back."""
        self.slot_row.fill(FREE)
        self.dirty.fill(False)  # what was noted is forgotten too

    def ensure(self, slots: int) -> None:
        """Have at least `slots` slots; what the present ones hold is kept.

        Raises MemoryTooSmallError when the device cannot hold old and new at once.
        """
        old = self.slots
        if slots <= old:
            return
        weight, state = self._allocate(slots)
        for new, held in ((weight, self.weight), (state, self.state)):
            if new is not None and held is not None:
                new[:old] = held
                if held.is_cuda:  # it may be of another stream, which would have it back too early
                    held.record_stream(torch.cuda.current_stream(self.device))
        self.weight, self.state = weight, state
        self.slot_row = np.concatenate((self.slot_row, np.full(slots - old, FREE, np.int64)))
        self._dirty = np.concatenate((self.dirty, np.zeros(slots - old, np.bool_)))

    def _allocate(self, slots: int) -> tuple[Tensor, Tensor | None]:
        """Zeroed weights and state of `slots` slots; MemoryTooSmallError when there is no room."""
        what = f"a cache of {slots} slots x ({self.dim} + {self.state_width} of state)"
        stateful = slots if self.state_slots is None else self.state_slots.rows(slots)
        nbytes = self.kind.bytes_of(slots, stateful)
        if self.device.type == "cpu":
            require_memory(nbytes, what, _WAY_OUT)
        state, where = None, self.device
        try:
            weight = torch.zeros(slots, self.dim, dtype=self.kind.stored, device=where)
            if self.state_width:
                size = stateful, self.state_width
                state = torch.zeros(size, dtype=self.kind.dtype, device=where)
        except RuntimeError as error:  # torch.OutOfMemoryError, or the CPU allocator's refusal
            raise MemoryTooSmallError(
                f"{self.device} did not give {describe_bytes(nbytes)} for {what}, "
                f"{self.kind.stored}: {str(error).splitlines()[0]}; {_WAY_OUT}"
            ) from error
        return weight, state

    def _slots(self, slots: Index) -> np.ndarray:
        """`slots` as NumPy, int32, of which loops, or `_require`, see whether they are inside;
        PlanError for one that cannot be that."""
        at = slots.numpy() if isinstance(slots, Tensor) else slots
        if at.dtype != np.int32:
            self._require(at)
        return _numpy(at, np.int32)

    def _require(self, at: np.ndarray) -> None:
        """PlanError for a slot outside [0, C)."""
        check_rows(at, self.slots, "slot")

    def _held(self, slots: Index, verb: str) -> np.ndarray:
        """`slots` as NumPy; PlanError for one that is outside, or free."""
        at = self._slots(slots)
        self._require(at)
        free = self.slot_row[at] == FREE
        if free.any():
            raise PlanError(f"slot {at[int(np.argmax(free))]} holds no row: nothing to {verb}")
        return at

    def _copy_in(self, target: Tensor, where: Tensor, values: Tensor) -> None:
        """Write `values` to places of `target`; PlanError for another shape or dtype."""
        put(target, where, values.to(self.device, non_blocking=True).contiguous())

    def _to_device(self, at: np.ndarray) -> Tensor:
        where = torch.from_numpy(at)
        if self.device.type == "cuda":
            where = where.pin_memory()
        return where.to(self.device, non_blocking=True)


def _copy_out(source: Tensor, where: Tensor, out: Tensor) -> None:
    """Copy rows of `source` to `out`, on its device."""
    if source.device.type != "cpu":
        torch.index_select(source, 0, where, out=out)
    else:
        take_rows(as_numpy(source), where.numpy(), as_numpy(out))


def _numpy(index: Index, dtype: type[np.signedinteger]) -> np.ndarray:
    """`index` in one piece and of `dtype`; itself where it is that."""
    return np.ascontiguousarray(index.numpy() if isinstance(index, Tensor) else index, dtype)
