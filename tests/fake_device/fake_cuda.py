"""A CUDA device that is not there: `cuda:0` in the memory of the host, for the CPU build of torch.

A tensor of the device is a wrapper over a CPU tensor. An operation finds its shapes on `meta` and
is queued on the calling thread's current stream, and done as late as can be (`Lazy`), or in any
other order that events allow (`Random`, `Moody`). So whatever the host or another stream reads
without waiting for it is read too early:

* new memory is NaN (integers: 0), and stays that until the operation that writes it is done;
* memory that was let go of is spoilt as soon as the streams that may use it are through (the one
  that it was made on, and those of `record_stream`): work of another stream finds NaN there;
* a host buffer is read when a copy is done, not when it is called, if the buffer is pinned;
* pinned memory is overwritten when it is freed, and then used again. A copy protects the memory
  until it is done, as torch's event does, only if the copied tensor's storage is the allocator's.
  A `from_numpy` view of a part of it is read late, whatever is there by then.

A graph holds what one stream was given while it was recorded, and its memory, garbage again at each
replay and as soon as it was let go of. Not there: the random numbers of a device, graphs of several
streams, other devices, what changes a tensor's shape in place, and setting `.data`. Several
processes may have one such device each, and gloo between them.

To be used in a process of its own (`process.py`): nothing here can be undone.
"""

from __future__ import annotations

import copy
import ctypes
import random
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

GUARD: Any = None
"""The library made of guard.cpp."""


def load(guard: Path) -> None:
    """Load the library made of guard.cpp, once more where torch was imported after it."""
    global GUARD
    GUARD = ctypes.PyDLL(str(guard), ctypes.RTLD_GLOBAL)
    GUARD.fake_stream.restype = ctypes.c_int64
    GUARD.fake_set_stream.argtypes = [ctypes.c_int64]
    GUARD.fake_is_pinned_block.restype = ctypes.c_bool
    GUARD.fake_is_pinned_block.argtypes = [ctypes.c_void_p]


class Dropped:
    """Memory that nobody holds any more: garbage once what `readers` were given by then is done."""

    def __init__(self, memory: Any, readers: Iterable[Stream]) -> None:
        self.memory = memory
        self.readers = [(reader, reader.queued) for reader in readers]

    def __call__(self) -> None:  # in a graph, where no other stream reads it
        fill_with_garbage(self.memory)

    def due(self) -> bool:
        return all(stream.done >= place for stream, place in self.readers)


class Device:
    """The streams, and what was counted: operations by kind and name of the thread.

    What is queued is done when somebody waits for it, and before that as the `scheduler` says.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.scheduler: Scheduler = Lazy()
        self.warns = False
        """Whether a host that waits is warned (`torch.cuda.set_sync_debug_mode`)."""
        self.failure: Exception | None = None
        self.counts: Counter[tuple[str, str]] = Counter()
        self._dropped: list[Dropped] = []
        self._events: dict[int, Event] = {}

    def count(self, what: str, times: int = 1) -> None:
        """Count one `what`, such as `launch` or `host wait`, of this thread, or some of them."""
        self.counts[what, threading.current_thread().name] += times

    def current(self) -> Stream:
        """The stream that this thread's work goes to."""
        return self.streams[GUARD.fake_stream()]

    def allocate(self, stream: Stream) -> None:
        """Memory is asked for on `stream`: what was dropped there goes to what it is given next."""
        with self.lock:
            while stream.dropped:
                stream.used_again.append(stream.dropped.popleft())

    def queue(self, work: Work, stream: Stream | None = None, launch: bool = False) -> None:
        """Append `work` to the current stream (or `stream`): a call (`launch`: which may write to
        memory), or an event to wait for."""
        with self.lock:
            self.check()
            stream = stream or self.current()
            if stream.records is not None:
                stream.records.work.append(work)
                return
            while launch and stream.used_again:
                self._append(stream.used_again.popleft(), stream)
            self._append(work, stream)
            self.scheduler.queued(self)

    def polled(self, event: Event) -> None:
        """The host has looked at an event that is not reached; a host that looks again sees it."""
        event.looks += 1
        if event.looks > 1:
            self.reach(event.stream, event.place)

    def _append(self, work: Work, stream: Stream) -> None:
        stream.work.append(work)
        stream.queued += 1
        self._spoil(stream)

    def advance(self, stream: Stream, place: int) -> Event | Gate | None:
        """Do the work of `stream` up to `place`, as far as that waits for nothing; what it is."""
        with self.lock:
            while stream.done < place:
                work = stream.work[0]
                if isinstance(work, Event) and work.stream.done < work.place:
                    return work
                if isinstance(work, Gate) and not self._is_open(work):
                    return work
                stream.work.popleft()
                stream.done += 1
                if not isinstance(work, Event | Gate):
                    work()
                self._spoil(stream)
            return None

    def _is_open(self, gate: Gate) -> bool:
        try:
            return self.failure is None and gate.ready()
        except Exception as error:  # for the hosts, whoever has looked
            self.failure = error
            return False

    def reach(self, stream: Stream, place: int) -> None:
        """Do the work of `stream` up to `place`, and what that waits for, and nothing else; as far
        as other devices let it."""
        with self.lock:
            path = [(stream, place)]
            while path:
                blocker = self.advance(*path[-1])
                if isinstance(blocker, Gate):
                    return
                if blocker is None:
                    path.pop()
                else:
                    path.append((blocker.stream, blocker.place))

    def give_up(self) -> None:
        """Forget what has failed, and with it all work."""
        with self.lock:
            for stream in self.streams if self.failure is not None else ():
                stream.work.clear()
                stream.done = stream.queued
            self.failure = None

    def permit(self) -> None:
        """RuntimeError where this thread records a graph: it may not wait, or ask what is done."""
        graph = self.current().records
        if graph is not None:
            graph.spoilt = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def check(self) -> None:
        """Raise what has failed."""
        if self.failure is not None:
            raise RuntimeError(str(self.failure)) from self.failure

    def wait(self, stream: Stream, place: int, an_event: bool = False) -> None:
        """Let the host wait for `stream` to be at `place`; for an event's, nobody is warned."""
        self.permit()
        if stream.done < place:
            self.count("host wait")
            if self.warns and not an_event:
                warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
            while stream.done < place:
                self.check()
                self.reach(stream, place)
                if stream.done < place:
                    time.sleep(1e-4)  # another device is not there yet

    def _spoil(self, stream: Stream) -> None:
        """Memory is written to as early as that may be: as soon as the work before is done."""
        while stream.work and isinstance(stream.work[0], Dropped):
            self._dropped.append(stream.work.popleft())
            stream.done += 1
        waiting, self._dropped = self._dropped, []
        for dropped in waiting:
            if dropped.due():
                fill_with_garbage(dropped.memory)
            else:
                self._dropped.append(dropped)

    def _record(self, number: int, stream: int) -> int:
        event = self._events.get(number) or Event()
        self._events[id(event)] = event
        event.record(self.streams[stream])
        return id(event)

    def _block(self, number: int, stream: int) -> None:
        self.streams[stream].wait_event(self._events[number])

    def callbacks(self) -> None:
        """Tell guard.cpp, whose caller is autograd's thread, what events are."""
        number = ctypes.c_int64
        self._called = (
            ctypes.CFUNCTYPE(number, number, number)(self._record),
            ctypes.CFUNCTYPE(None, number, number)(self._block),
            ctypes.CFUNCTYPE(number, number)(lambda event: self._events[event].query()),
        )
        GUARD.fake_callbacks(*self._called)


# --- what is done before somebody waits for it --------------------------------------------------


class Lazy:
    """Nothing."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)

    def queued(self, device: Device) -> None:
        """Something was queued; the device is locked."""


class Random(Lazy):
    """Now and then some of the work of any stream."""

    def queued(self, device: Device) -> None:
        if self.random.random() < 0.5:
            stream = self.random.choice([stream for stream in device.streams if stream.work])
            ahead = self.random.randrange(1, 2 + 2 * len(stream.work))
            device.advance(stream, min(stream.queued, stream.done + ahead))


class Moody(Lazy):
    """Each stream is fast, with nothing left to do, or asleep, for a while."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._moods: dict[Stream, tuple[bool, int]] = {}

    def queued(self, device: Device) -> None:
        for stream in filter(lambda stream: stream.work, device.streams):
            fast, left = self._moods.get(stream, (False, 0))
            if left == 0:
                fast, left = self.random.random() < 0.5, self.random.randrange(1, MOOD)
            self._moods[stream] = fast, left - 1
            if fast:
                device.advance(stream, stream.queued)


MOOD = 300
"""How many operations a mood lasts at most: a few steps' of the tests."""

SCHEDULERS = {"lazy": Lazy, "random": Random, "moody": Moody}
Scheduler = Lazy
"""A source of its own of random numbers, and what it does with them."""

DEVICE = Device()


def fill_with_garbage(memory: Any) -> None:
    """NaN, or 0 where there is none: in range for an index, but wrong."""
    memory.fill_(float("nan") if memory.dtype.is_floating_point else 0)


class Stream:
    """torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.work: deque[Work] = deque()
        self.dropped: deque[Dropped] = deque()
        self.used_again: deque[Dropped] = deque()
        self.queued = self.done = 0
        self.records: CUDAGraph | None = None
        """The graph that gets what this stream is given."""
        with DEVICE.lock:
            self.cuda_stream = self.stream_id = len(DEVICE.streams)
            DEVICE.streams.append(self)

    def wait_event(self, event: Event) -> None:
        """What is queued from now on comes after what `event` has recorded so far."""
        if self.records is not event.records:
            for graph in filter(None, (self.records, event.records)):
                graph.spoilt = True
            raise RuntimeError("CUDA error: dependency created on uncaptured work")
        if event.stream is not None and self.records is None:
            DEVICE.queue(copy.copy(event), self)  # what is recorded now, whatever it records later

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        DEVICE.wait(self, self.queued)


class Event:
    """torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, **kwargs: bool) -> None:
        self.stream: Any = None
        self.timing = enable_timing
        self.place = self.looks = 0
        self.time: list[float] = []
        self.records: CUDAGraph | None = None

    def record(self, stream: Stream | None = None) -> None:
        with DEVICE.lock:
            self.stream, self.time, self.looks = stream or DEVICE.current(), [], 0
            self.records = self.stream.records
            reached = self.time.append
            DEVICE.queue(lambda: reached(time.perf_counter()), self.stream)
            self.place = self.stream.queued

    def wait(self, stream: Stream | None = None) -> None:
        (stream or DEVICE.current()).wait_event(self)

    def query(self) -> bool:
        with DEVICE.lock:
            DEVICE.permit()
            DEVICE.check()
            if self.stream is not None and self.stream.done < self.place:
                DEVICE.polled(self)
            return self.stream is None or self.stream.done >= self.place

    def synchronize(self) -> None:
        if self.stream is not None:
            DEVICE.wait(self.stream, self.place, an_event=True)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds to `end`; RuntimeError where one is not reached, or takes no time."""
        if not (self.timing and end.timing):
            raise RuntimeError("CUDA error: invalid resource handle: events without timing")
        if not (self.time and end.time):
            raise RuntimeError("CUDA error: device not ready")
        return (end.time[0] - self.time[0]) * 1e3


class CUDAGraph:
    """torch.cuda.CUDAGraph: `work`, in order, with the memory that it holds."""

    def __init__(self) -> None:
        self.work: list[Any] = []
        self.stream: Any = None
        self.spoilt = False

    def capture_begin(self, **how: Any) -> None:
        """From now on the current stream's work is the graph's."""
        self.stream = DEVICE.current()
        self.stream.records = self

    def capture_end(self) -> None:
        """RuntimeError where something was not permitted meanwhile."""
        self.stream.records = None
        if self.spoilt:
            raise RuntimeError("CUDA error: operation failed due to a previous error")

    def replay(self) -> None:
        """One launch, of all of it."""
        DEVICE.count("launch")
        DEVICE.queue(self._do, launch=True)

    def _do(self) -> None:
        for work in self.work:
            work()


@runtime_checkable
class Gate(Protocol):
    """Work that others take part in."""

    def ready(self) -> bool:
        """Whether it is done; goes on with it meanwhile."""
        ...


Work = Callable[[], None] | Event | Dropped | Gate
"""What a stream is given: a call, an event to wait for, memory that is used again, or a gate."""
