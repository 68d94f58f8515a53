"""Stopping in order: SIGINT and SIGTERM become a flag that all ranks act on after the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from distcache.comm.world import World

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While entered, the first Ctrl-C or SIGTERM sets `signal`; a Ctrl-C after it interrupts.

    Handlers are installed in the main thread only (elsewhere Python has none) and put back at the
    end. The handler does nothing but set the flag: it may run in the middle of a write.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signal is not None

    def agreed(self, world: World) -> int | None:
        """The signal that some rank got (the highest number), or None; all ranks call this."""
        value = torch.tensor([self.signal or 0])
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=world.host_group)
        return int(value) or None
