"""Orderly stops: SIGINT and SIGTERM become a flag that a loop acts on between two steps."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import _utils

from distcache.comm.link import PLANNING, host_link
from distcache.comm.world import World

_GRACE_S = 1.0
"""Seconds to wait for the signal of a worker that has died. A signal to a process group may end the
workers of a DataLoader before Python runs the handler of this process."""

_active: list[StopRequest] = []
"""The requests that are entered, innermost last."""


class StopRequest:
    """Context manager under which the first Ctrl-C or SIGTERM sets `signal` and interrupts nothing.

    For loops of one's own, on all ranks, from their main threads::

        with distcache.StopRequest() as stop:
            for batch in distcache.lookahead(loader, ebc):
                ...
                step += 1
                if stop.agreed():
                    break
            distcache.save(f"checkpoints/step_{step:08d}", model, [dense], step=step)

    A signal to the whole process group also ends the workers of a `DataLoader`. Their death is no
    error then: batches that were read are trained, and `lookahead` and `distcache.fit` end after
    them. (Without a stop, the loader raises it where batches are read, and not anywhere in the main
    thread.) A second signal, if either is a Ctrl-C, does what a Ctrl-C did before; torchrun passes
    a second Ctrl-C on as SIGTERM. Python has handlers in the main thread only: elsewhere nothing is
    installed. The handlers from before come back at the end.

    `signal`: the number of the signal that this rank received, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            with suppress(AttributeError):  # not public: else the first DataLoader replaces ours
                _utils.signal_handling._set_SIGCHLD_handler()
            handlers = {signal.SIGINT: self._handle, signal.SIGTERM: self._handle}
            for number, handler in (handlers | {signal.SIGCHLD: self._child_ended}).items():
                self._before[number] = signal.signal(number, handler)
        _active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _active.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Set the flag and nothing else, because this may run in the middle of a write."""
        if self.signal is not None and signal.SIGINT in (number, self.signal):
            before = self._before[signal.SIGINT]
            (before if callable(before) else signal.default_int_handler)(signal.SIGINT, frame)
        self.signal = number

    def _child_ended(self, number: int, frame: FrameType | None) -> None:
        """Call the handler from before, without the error that torch's raises for a dead worker.

        It would come in the middle of a step. The loader itself raises when its batch is read.
        """
        before = self._before[signal.SIGCHLD]
        with suppress(RuntimeError):
            if callable(before):
                before(number, frame)

    def agreed(self, world: World | None = None) -> int | None:
        """Return the signal that some rank received (the highest number), or None.

        Called by all ranks after the same step. `world`: its ranks; None: all ranks of
        torch.distributed, or this process alone.
        """
        if world is not None:
            received = torch.tensor(self.signal or 0)
            link = host_link(world)
            return int(link.start_all_gather(received, PLANNING, "who is to stop")().max()) or None
        if not dist.is_initialized():
            return self.signal
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        received = torch.tensor(self.signal or 0, device=device)
        dist.all_reduce(received, dist.ReduceOp.MAX)
        return int(received) or None


class DelayedInterrupt:
    """Context manager that delays a Ctrl-C to the end of its block, which must not end half-way.

    A second Ctrl-C does at once what it did before, for the block may wait for other ranks. Blocks
    are short: each entry costs a few microseconds. Does nothing outside the main thread, where
    Python runs no handlers, and where SIGINT has no handler of Python's.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._is_received = False

    def __enter__(self) -> DelayedInterrupt:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            # That of a StopRequest only takes note of a first signal.
            if callable(before) and not _active:
                self._before = before
                signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._before is None:
            return
        signal.signal(signal.SIGINT, self._before)
        if self._is_received and not isinstance(error, KeyboardInterrupt):
            self._before(signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_received:
            self._before(number, frame)
        self._is_received = True


def stop_requested() -> bool:
    """Return True if this process received a signal to stop under a `StopRequest`."""
    return any(request.signal is not None for request in list(_active))


def stop_explains(error: Exception) -> bool:
    """Return True if a stop was requested, so that `error`, of a loader, ends its batches.

    Waits a moment for the signal if `error` is that of a worker that has died.
    """
    deadline = time.monotonic() + _GRACE_S * (bool(_active) and _is_lost_worker(error))
    while not stop_requested() and time.monotonic() < deadline:
        time.sleep(0.02)
    return stop_requested()


def _is_lost_worker(error: Exception) -> bool:
    """Return True if `error` may come from the death of a DataLoader's worker.

    The loader raises RuntimeError for that, or the queue breaks. An error of the data set inside a
    worker says "Caught ... in DataLoader worker".
    """
    if isinstance(error, RuntimeError):
        return str(error).startswith("DataLoader worker")
    return isinstance(error, OSError | EOFError)
