"""CUDA streams of one rank, and how work passes from one to another.

On the CPU everything happens in program order, so all of this does nothing there. Hand-overs are
events, never a wait of the host; a tensor that was made on one stream and is read on another is
made known to the allocator, which would give its memory away too early otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager as Context
from contextlib import nullcontext

import torch
from torch import Tensor

COMPUTE, COMMUNICATION, COPY_IN, COPY_OUT = "compute", "communication", "copy_in", "copy_out"
NAMES = (COMPUTE, COMMUNICATION, COPY_IN, COPY_OUT)
"""Streams by name; stages of any other name (`host`) issue no device work."""

TIMED_EVERY = 10
"""Of so many steps one is timed on a device where nobody asks for more: a timed step takes two
events for each stage, which the training loop reads."""

_REBASE_S = 60.0
"""Times are told from an event that is this old, or up to twice as old."""


Mark = torch.cuda.Event | None
"""A point in the work of a stream; None: one that is long over, for which nobody waits, as all are
on the CPU."""

_NOWHERE = nullcontext()


class DeviceClock:
    """When events of a device were reached, on the host's clock; for one thread.

    A device tells the time between two events in milliseconds as a float32, whose step is 0.25 ms
    after an hour and 4 ms after ten. So times are told from an event of the last minutes.
    """

    def __init__(self, zero: torch.cuda.Event, zero_s: float) -> None:
        """`zero`: an event that was reached when the host's clock said `zero_s`."""
        self._base = self._next = (zero, zero_s)

    def seconds(self, event: torch.cuda.Event) -> float:
        """When `event`, which has been reached, was."""
        base, base_s = self._base
        now = base_s + base.elapsed_time(event) / 1e3
        if now - self._next[1] > _REBASE_S:
            self._base, self._next = self._next, (event, now)
        return now


class Streams:
    """The streams of `device`.

    `compute` is whatever stream is current when it is asked for, since a training loop may run
    inside a stream of its own, and in another one tomorrow. So only the thread that trains, and
    not inside `on` another stream, may name it; others get marks of it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._beside: dict[str, torch.cuda.Stream] = {}
        self.ordered = self.asynchronous = device.type == "cuda"
        """`ordered`: whether marks tell anything; `asynchronous`: whether work runs on after the
        call that issues it."""
        self.timed_every = TIMED_EVERY if self.ordered else 1
        """Of so many steps the stages of one are timed."""
        if not self.ordered:
            return
        self._beside = {name: torch.cuda.Stream(device) for name in NAMES if name != COMPUTE}
        # Device times are told on the host's clock, from one moment that both know.
        zero = torch.cuda.Event(enable_timing=True)
        zero.record(torch.cuda.current_stream(device))
        zero.synchronize()
        self._clock = DeviceClock(zero, time.perf_counter())

    def _stream(self, name: str) -> torch.cuda.Stream | None:
        """The stream of a name; None on the CPU, and for `host`."""
        if name == COMPUTE and self._beside:
            return torch.cuda.current_stream(self.device)
        return self._beside.get(name)

    def on(self, name: str) -> Context[object]:
        """Issue what is done inside on a stream; `compute` is the one that is current anyway."""
        stream = self._beside.get(name)
        return _NOWHERE if stream is None else torch.cuda.stream(stream)

    def times(self, step: int) -> bool:
        """Whether the stages of a step are timed."""
        return step % self.timed_every == 0

    def mark(self, name: str, timed: bool = False) -> Mark:
        """What has been issued on a stream so far; `timed`: `seconds` will be asked when that was
        reached."""
        stream = self._stream(name) if self.ordered else None
        if stream is None:
            return None
        event = torch.cuda.Event(enable_timing=timed)
        event.record(stream)
        return event

    def after(self, name: str, marks: Iterable[Mark]) -> None:
        """What a stream is given from now on comes after `marks`; the host does not wait."""
        stream = self._stream(name) if self.ordered else None
        if stream is not None:
            for mark in marks:
                if mark is not None:
                    stream.wait_event(mark)

    def drain(self) -> None:
        """What is issued from now on comes after the other streams' work so far, so that memory
        which that uses may be let go of; the host does not wait."""
        self.after(COMPUTE, [self.mark(name) for name in self._beside])

    def hand_over(self, tensors: Iterable[Tensor | None], name: str) -> None:
        """`tensors`, made on the current stream, will be read on stream `name`."""
        stream = self._stream(name)
        for tensor in tensors:
            if stream is not None and tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)

    def wait(self, mark: Mark) -> None:
        """Let the host wait for `mark`: for threads beside training only."""
        if mark is not None:
            mark.synchronize()

    def seconds(self, mark: Mark) -> float | None:
        """When a timed `mark` was reached, on the clock of `time.perf_counter`; None on the CPU.

        Waits for the mark if it is not reached yet.
        """
        if mark is None:
            return None
        mark.synchronize()
        return self._clock.seconds(mark)

    def bind(self) -> None:
        """In a thread beside training: its CUDA calls go to this device."""
        if self._beside:
            torch.cuda.set_device(self.device)
