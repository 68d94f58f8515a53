"""Tables as they were when a snapshot began, read while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distcache.engine.movement import GroupRows
from distcache.engine.whole import WholeTables
from distcache.errors import DistcacheError
from distcache.ops.reference import as_numpy
from distcache.store.old_rows import OldRows, read_old


class Snapshot:
    """The tables of one node as they are when this is made: after a flush, while nothing moves, by
    all ranks.

    `folder`: for old rows, there already, without any, and seen by all ranks of the node; `block`
    may be called by any thread until all ranks have called `close`. `hurry`: set where training
    waits for whoever reads.
    """

    def __init__(self, folder: Path, groups: Sequence[GroupRows], whole: WholeTables) -> None:
        self._folder, self._whole, self._groups = folder, whole, list(groups)
        self.hurry = threading.Event()
        for at, rows in enumerate(self._groups):
            if rows.store is not None:
                rows.old = OldRows(folder, at, rows.link.world.rank, rows.store)

    def block(self, name: str, ids: np.ndarray, now: Tensor) -> Tensor:
        """Rows `ids`, int64 `[m]`, ascending, of the value `name` of `WholeTables.state`, as they
        were; `now`: as they are, `[m, columns]`, a view of the store, or read just before."""
        group, first, state, columns = self._whole.source(name)
        store = self._groups[group].store
        if store is None:
            raise DistcacheError(f"{name} lies on the device: it has no snapshot")
        # NumPy: torch would start a pool of threads for this one, beside that of training.
        block = as_numpy(now).copy()
        places = first + ids
        ends = int(places[0]), int(places[-1]) + 1
        for changed, values in read_old(self._folder, group, store, *ends, state):
            at = np.searchsorted(places, changed)
            own = places[at] == changed
            block[at[own]] = values[own, columns]
        return torch.from_numpy(block).view(now.dtype)

    @property
    def error(self) -> OSError | None:
        """Why some row of this rank could not be kept: what `block` gives is worth nothing then."""
        kept = [rows.old.error for rows in self._groups if rows.old is not None]
        return next((error for error in kept if error is not None), None)

    def close(self) -> None:
        """Let go of the old rows; safe to call twice."""
        for rows in self._groups:
            if rows.old is not None:
                rows.old.close()
            rows.old = None
