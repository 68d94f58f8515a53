"""Whether accesses to slots are ordered, whatever the scheduler: vector clocks, as race detectors
of threads have them (Mattern 1989, and CUDA's CSAN in torch), over (cache, slot).

A stream knows how far it comes after each other one: by events that it has waited for, and by what
the thread that issues its work has waited for. Of two accesses to a slot of which one writes, the
later one's stream must know of the earlier one.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
from fake_device.fake_cuda import DEVICE, Device, Event, Stream

from distcache.cache import DeviceCache
from distcache.engine.movement import GroupRows, RowChoice

STREAMS = 200
"""Most streams that a process makes."""


class Slots:
    """The last write of each slot of a cache, and the last read of each stream: places there."""

    def __init__(self, slots: int) -> None:
        self.writer = np.zeros(slots, np.int64)
        self.written = np.zeros(slots, np.int64)
        self.read = np.zeros((STREAMS, slots), np.int64)


class Watch:
    """`races`: what was not ordered."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.accesses = 0
        self._lock = threading.RLock()
        self._known: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(STREAMS, np.int64))
        self._of_thread: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(STREAMS, np.int64))
        self.caches: dict[DeviceCache, Slots] = {}

    def known(self, stream: Stream) -> np.ndarray:
        """How far `stream` comes after each stream; itself as far as it is."""
        clock = self._known[stream.stream_id]
        clock[stream.stream_id] = stream.queued
        return clock

    def join(self, clock: np.ndarray, other: np.ndarray) -> None:
        """What comes after `clock` comes after `other` too."""
        with self._lock:
            np.maximum(clock, other, out=clock)

    def heard(self, other: np.ndarray) -> None:
        """The calling thread has waited for it."""
        self.join(self._of_thread[threading.get_ident()], other)

    def issued(self, stream: Stream) -> None:
        """The calling thread gives `stream` work."""
        self.join(self._known[stream.stream_id], self._of_thread[threading.get_ident()])

    def made(self, cache: DeviceCache) -> None:
        """Its slots lie in new memory."""
        self.caches[cache] = Slots(cache.slots)
        self.access(cache, np.arange(cache.slots), "making")

    def access(self, cache: DeviceCache, slots: Any, what: str) -> None:
        """What was just issued reads slots (`gather`, `read`), or writes them."""
        at, stream = np.asarray(slots), DEVICE.current()
        with self._lock:
            seen, clock, here = self.caches[cache], self.known(stream), stream.stream_id
            writes = what not in ("gather", "read")
            late = clock[seen.writer[at]] < seen.written[at]
            if writes:
                late |= (seen.read[:, at] > clock[:, None]).any(0)
                seen.writer[at], seen.written[at] = here, stream.queued
            else:
                seen.read[here, at] = stream.queued
            self.accesses += len(at)
            if late.any():
                slot = at[late.argmax()]
                self.races.append(f"{what} of slot {slot} on stream {here}, unordered")

    # --- called after the methods of these names ---------------------------------------------

    def recorded(self, _: None, event: Event, *given: Any) -> None:
        event.clock = self.known(event.stream).copy()

    def blocked(self, _: None, stream: Stream, event: Event) -> None:
        if event.stream is not None:
            self.join(self.known(stream), event.clock)

    def reached(self, found: bool | None, event: Event) -> None:
        if event.stream is not None and found is not False:
            self.heard(event.clock)

    def waited(self, _: None, device: Device, stream: Stream, place: int, **how: bool) -> None:
        if place == stream.queued:
            self.heard(self.known(stream))

    def queued(self, _: None, device: Device, work: Any, stream: Any = None, **how: Any) -> None:
        self.issued(stream or DEVICE.current())

    def touched(self, what: str, _: Any, cache: DeviceCache, slots: Any, *given: Any) -> None:
        self.access(cache, slots, what)

    def applied(
        self,
        _: None,
        rows: GroupRows,
        plan: Any,
        where: Any,
        sums: Any,
        choice: RowChoice,
        enabled: Any,
    ) -> None:
        replicated = plan.slots
        if rows.cache.state_slots is not None:
            replicated = replicated[plan.home_slice(rows.link.world.rank)]
        shard = plan.shard and plan.shard.slots
        for slots, of, only in zip((replicated, shard), sums, choice[2:], strict=True):
            if of is not None and slots is not None:
                self.access(rows.cache, slots if only is None else slots[only], "apply")

    def returned(self, _: None, rows: GroupRows, plan: Any, *given: Any) -> None:
        self.access(rows.cache, plan.slots, "return")

    def initialised(self, _: None, cache: DeviceCache, *given: Any, **how: Any) -> None:
        self.made(cache)

    def ensured(self, _: None, cache: DeviceCache, slots: int) -> None:
        if len(self.caches[cache].writer) < cache.slots:
            self.made(cache)


@contextmanager
def watched() -> Iterator[Watch]:
    """Watches the caches of this process."""
    watch, accesses = Watch(), ("fill", "read", "gather")
    found: list[tuple[Any, str, Callable]] = [
        (Event, "record", watch.recorded),
        (Event, "query", watch.reached),
        (Event, "synchronize", watch.reached),
        (Stream, "wait_event", watch.blocked),
        (Device, "wait", watch.waited),
        (Device, "queue", watch.queued),
        (GroupRows, "apply", watch.applied),
        (GroupRows, "return_rows", watch.returned),
        (DeviceCache, "__init__", watch.initialised),
        (DeviceCache, "ensure", watch.ensured),
    ]
    for name in accesses:
        found.append((DeviceCache, name, partial(watch.touched, name)))
    with ExitStack() as stack:
        for of, method, told in found:
            stack.enter_context(patch.object(of, method, _then(getattr(of, method), told)))
        yield watch


def _then(call: Callable, told: Callable) -> Callable:
    """A method after which `told` gets its result and arguments."""

    def changed(*given: Any, **named: Any) -> Any:
        found = call(*given, **named)
        told(found, *given, **named)
        return found

    return changed
