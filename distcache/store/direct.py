"""Host rows that the device reads and writes where they lie: `store.access=zero_copy`.

The memory of the node's rows is page-locked and mapped into the device's addresses
(`cudaHostRegister`), so a kernel reads single rows over the host link, without a host thread and
without a staging buffer (EMOGI, Min et al., VLDB 2020, for graphs; PyTorch-Direct, Min et al.,
2021, for features). On the CPU the same calls copy between tables in one memory.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from distcache import ops
from distcache.comm.failure import first_line
from distcache.errors import ConfigError, DistcacheError, MemoryTooSmallError, PlanError
from distcache.ops.copies import check_rows
from distcache.store.available import describe_bytes
from distcache.store.base import Rows
from distcache.streams import Mark

log = logging.getLogger(__name__)

STAGED, ZERO_COPY = "staged", "zero_copy"
ACCESS = (STAGED, ZERO_COPY)
"""Ways of rows between host memory and the device."""

_PATIENCE_S, _PAUSE_S = 5.0, 0.001
"""How long closing waits for the device, and how often it looks."""

_kept: list[Tensor] = []
"""Memory that could not be let go of: it stays mapped, for the device may still use it."""


class DirectRows:
    """Tables in host memory, weight `[R, D]` and state `[R, S]` or None, as `device` sees them.

    Rows are read and written on the current stream, in its order, and nobody waits: what the device
    wrote is there for the host once `marks` are reached. A reader on another stream comes after an
    event of the writer. The memory is let go of by `close`, or with this object.
    """

    def __init__(
        self,
        weight: Tensor,
        state: Tensor | None,
        places: Callable[[np.ndarray], np.ndarray],
        device: torch.device,
    ) -> None:
        """`places`: where in the tables rows lie, int64 `[m]` both.

        Raises MemoryTooSmallError where the host does not lock the memory, ConfigError where the
        kernel that reads it cannot be had.
        """
        self.device, self._places = device, places
        self._locked = _Locked(weight, state)
        self._release = weakref.finalize(self, self._locked.release)
        self._release.atexit = False  # the driver is gone by then, and so is what it had locked
        if device.type == "cuda":
            ops.copy_kernel()  # whether there is one
            self._register()

    def try_out(self) -> None:
        """Read a row of each table and write it back: what cannot work is found, and the kernels
        are compiled, before training. Raises ConfigError."""
        try:
            for table in self._tables():
                if table is None or not len(table):
                    continue
                at, expected = self._index(np.zeros(1, np.int64)), table[:1].clone()
                row = self._read(table, at)
                if not torch.equal(row.cpu(), expected):
                    raise RuntimeError("it reads other values than there are")
                ops.copy_rows(row, None, table, at)
                if not torch.equal(self._read(table, at).cpu(), expected):
                    raise RuntimeError("it writes other values than it should")
        except Exception as error:  # the compiler's, the driver's
            raise ConfigError(
                f"{self.device} cannot read rows in host memory ({first_line(error)}): set "
                "store.access=staged"
            ) from error

    def read(self, rows: Tensor) -> Rows:
        """Copies of `rows` (int64 `[m]`, on the CPU) on the device: `[m, D]`, `[m, S]` or None.

        Raises PlanError for a row that does not lie here.
        """
        weight, state = self._tables()
        at = self._index(self._places(rows.numpy()))
        found = self._read(weight, at), None if state is None else self._read(state, at)
        self._mark()
        return found

    def write(self, rows: Tensor, weight: Tensor, state: Tensor | None) -> None:
        """Write `weight` `[m, D]` and `state` `[m, S]`, on the device, to distinct `rows`.

        Raises PlanError for a row that does not lie here, or other shapes.
        """
        tables = self._tables()
        at = self._index(self._places(rows.numpy()))
        for name, table, values in zip(("weight", "state"), tables, (weight, state), strict=True):
            want = None if table is None else (len(at), table.shape[1])
            got = None if values is None else tuple(values.shape)
            if want != got:
                raise PlanError(f"{name} of {len(at)} rows must be {want}, got {got}")
            if table is not None and values is not None and len(at):
                ops.copy_rows(values, None, table, at)
        self._mark()

    def marks(self) -> list[Mark]:
        """The last reads and writes, of each stream that they were on."""
        return [Mark(event) for event in self._locked.events.values()]

    def close(self) -> None:
        """Let go of the memory once the device is through with it; safe to call twice.

        Where the device is not, after a few seconds, the memory stays locked, with a warning.
        """
        self._release()

    def _tables(self) -> tuple[Tensor, Tensor | None]:
        if self._locked.weight is None:
            raise DistcacheError("the row store is closed")
        return self._locked.weight, self._locked.state

    def _read(self, table: Tensor, at: Tensor) -> Tensor:
        out = torch.empty(len(at), table.shape[1], dtype=table.dtype, device=self.device)
        if len(at):
            ops.copy_rows(table, at, out, None)
        return out

    def _index(self, places: np.ndarray) -> Tensor:
        check_rows(places, len(self._tables()[0]))
        at = torch.from_numpy(places)
        if self.device.type != "cuda":
            return at
        return at.pin_memory().to(self.device, non_blocking=True)

    def _mark(self) -> None:
        """Note that work was issued on the current stream."""
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            events, name = self._locked.events, stream.cuda_stream
            if name not in events:
                events[name] = torch.cuda.Event()
            events[name].record(stream)

    def _register(self) -> None:
        """Lock the tables' pages and map them for the device."""
        runtime = torch.cuda.cudart()
        for table in self._tables():
            if table is None or not table.numel():
                continue
            nbytes = table.numel() * table.element_size()
            with torch.cuda.device(self.device):
                # 3: portable and mapped (cudaHostRegisterPortable | cudaHostRegisterMapped)
                error = runtime.cudaHostRegister(table.data_ptr(), nbytes, 3)
            if int(error) == 0:
                self._locked.registered.append(table)
                continue
            with suppress(Exception):  # the next launch reports the refusal once more
                torch.zeros(1, device=self.device)
            self.close()
            why = runtime.cudaGetErrorString(error)
            raise MemoryTooSmallError(
                f"the host did not lock {describe_bytes(nbytes)} of rows for {self.device} to read "
                f"in place ({why}): set store.access=staged, or use a machine that gives more "
                "locked memory"
            )


class _Locked:
    """The tables of a `DirectRows`, those of them that are `registered`, and on each stream the
    `events` after what was last issued."""

    def __init__(self, weight: Tensor, state: Tensor | None) -> None:
        self.weight: Tensor | None = weight
        self.state = state
        self.registered: list[Tensor] = []
        self.events: dict[int, torch.cuda.Event] = {}

    def release(self) -> None:
        """Unlock what is registered, before it may be unmapped; raises nothing."""
        try:
            deadline = time.monotonic() + _PATIENCE_S
            while not all(event.query() for event in self.events.values()):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the device still used them after {_PATIENCE_S:.0f} s")
                time.sleep(_PAUSE_S)
            while self.registered:
                error = torch.cuda.cudart().cudaHostUnregister(self.registered[-1].data_ptr())
                if int(error) != 0:
                    raise RuntimeError(torch.cuda.cudart().cudaGetErrorString(error))
                self.registered.pop()
        except RuntimeError as error:
            log.warning("rows stay locked in host memory: %s", first_line(error))
            _kept.extend(self.registered)
        self.weight = self.state = None
        self.registered, self.events = [], {}
