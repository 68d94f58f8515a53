"""Host rows that the device reads and writes where they lie: `store.access=zero_copy`.

The memory of the node's rows is page-locked and mapped into the device's addresses
(`cudaHostRegister`), so a kernel reads single rows over the host link, without a host thread and
without a staging buffer (EMOGI, Min et al., VLDB 2020, for graphs; PyTorch-Direct, Min et al.,
2021, for features). On the CPU the same calls copy between tables in one memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from distcache import ops
from distcache.errors import MemoryTooSmallError, PlanError
from distcache.store.available import describe_bytes
from distcache.store.base import Rows
from distcache.store.copies import check_rows

STAGED, ZERO_COPY = "staged", "zero_copy"
ACCESS = (STAGED, ZERO_COPY)
"""Ways of rows between host memory and the device."""


class DirectRows:
    """Tables in host memory, weight `[R, D]` and state `[R, S]` or None, as `device` sees them.

    Rows are read and written on the current stream, in its order, and nobody waits: what the device
    wrote is there for the host once the stream is through. A reader on another stream comes after
    an event of the writer.
    """

    def __init__(
        self,
        weight: Tensor,
        state: Tensor | None,
        places: Callable[[np.ndarray], np.ndarray],
        device: torch.device,
    ) -> None:
        """`places`: where in the tables rows lie, int64 `[m]` both.

        Raises MemoryTooSmallError where the host does not lock the memory, ConfigError without the
        kernel that reads it.
        """
        self.device, self._places = device, places
        self._tables: tuple[Tensor, Tensor | None] = (weight, state)
        self._registered: list[Tensor] = []
        if device.type != "cuda":
            return
        ops.copy_kernel()  # whether there is one
        for table in self._tables:
            if table is not None and table.numel():
                self._register(table)

    def read(self, rows: Tensor) -> Rows:
        """Copies of `rows` (int64 `[m]`, on the CPU) on the device: `[m, D]`, `[m, S]` or None.

        Raises PlanError for a row that does not lie here.
        """
        at, (weight, state) = self._index(rows), self._tables
        return self._read(weight, at), None if state is None else self._read(state, at)

    def write(self, rows: Tensor, weight: Tensor, state: Tensor | None) -> None:
        """Write `weight` `[m, D]` and `state` `[m, S]`, on the device, to distinct `rows`.

        Raises PlanError for a row that does not lie here, or other shapes.
        """
        at = self._index(rows)
        for name, table, values in zip(
            ("weight", "state"), self._tables, (weight, state), strict=True
        ):
            want = None if table is None else (len(at), table.shape[1])
            got = None if values is None else tuple(values.shape)
            if want != got:
                raise PlanError(f"{name} of {len(at)} rows must be {want}, got {got}")
            if table is not None and values is not None and len(at):
                ops.copy_rows(values, None, table, at)

    def wait(self) -> None:
        """Let the host wait until all that was written is there, on whichever stream."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Wait for the device and let go of the memory; safe to call twice."""
        if self._registered:
            self.wait()
        for table in self._registered:
            torch.cuda.cudart().cudaHostUnregister(table.data_ptr())
        self._registered = []

    def _read(self, table: Tensor, at: Tensor) -> Tensor:
        out = torch.empty(len(at), table.shape[1], dtype=table.dtype, device=self.device)
        if len(at):
            ops.copy_rows(table, at, out, None)
        return out

    def _index(self, rows: Tensor) -> Tensor:
        places = self._places(rows.numpy())
        check_rows(places, len(self._tables[0]))
        at = torch.from_numpy(places)
        if self.device.type != "cuda":
            return at
        return at.pin_memory().to(self.device, non_blocking=True)

    def _register(self, table: Tensor) -> None:
        nbytes = table.numel() * table.element_size()
        with torch.cuda.device(self.device):
            runtime = torch.cuda.cudart()
            # 3: portable and mapped (cudaHostRegisterPortable | cudaHostRegisterMapped)
            error = runtime.cudaHostRegister(table.data_ptr(), nbytes, 3)
        if int(error) != 0:
            self.close()
            why = runtime.cudaGetErrorString(error)
            raise MemoryTooSmallError(
                f"the host did not lock {describe_bytes(nbytes)} of rows for {self.device} to read "
                f"in place ({why}): set store.access=staged, or raise the limit of locked memory "
                "(ulimit -l)"
            )
        self._registered.append(table)
