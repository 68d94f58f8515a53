"""Rows of whole tables on several nodes, where each node's store holds those at home on its ranks.

Every rank knows which rows every rank wants, so no ids travel: the ranks that home them send them
over the host group. Rows at home on a rank's own node it reads from its store itself. All of it is
called by all ranks, in the main thread, while nothing trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from distcache.comm.counters import ROWS
from distcache.comm.link import Link, host_link
from distcache.comm.world import World
from distcache.store.base import Rows
from distcache.store.rows import RowStore

BLOCK_BYTES = 16 << 20
"""About how many bytes of a table one exchange brings to a rank."""

NONE = np.empty(0, dtype=np.int64)


class RowExchange:
    """Rows of `store` to the ranks that want them, and back."""

    def __init__(self, world: World, store: RowStore) -> None:
        self._world, self._store = world, store
        self._link: Link = host_link(world)

    def bring(self, wanted: Sequence[np.ndarray]) -> Rows:
        """Weights `[m, D]` and state `[m, S]` (None where S = 0) of this rank's wanted rows.

        `wanted[r]`: the rows of rank r, int64 `[m_r]` by the layout's numbers; the same on all
        ranks.
        """
        store, route = self._store, _Route(self._world, self._store, wanted)
        own = wanted[self._world.rank]
        arrived = self._link.all_to_all(
            _joined(store.gather(route.sent)), route.sends, route.receives, ROWS, "rows of tables"
        )
        near = _joined(store.gather(torch.from_numpy(own[route.near])))
        found = near.new_empty((len(own), near.shape[1]))
        found[torch.from_numpy(route.near)] = near
        found[torch.from_numpy(route.far)] = arrived
        return _parted(found, store)

    def put(self, wanted: Sequence[np.ndarray], values: Rows) -> None:
        """Write this rank's values of its wanted rows to the stores of their homes.

        The reverse of `bring`; no row may be in two ranks' lists. The rows are there once all
        ranks have returned.
        """
        store, route = self._store, _Route(self._world, self._store, wanted)
        joined, own = _joined(values), wanted[self._world.rank]
        arrived = self._link.all_to_all(
            joined[torch.from_numpy(route.far)],
            route.receives,
            route.sends,
            ROWS,
            "rows of tables",
        )
        _scatter(store, route.sent, arrived)
        _scatter(store, torch.from_numpy(own[route.near]), joined[torch.from_numpy(route.near)])


class _Route:
    """Who sends which rows to whom.

    `sent`: the rows that this rank, their home, sends to ranks of other nodes, by receiver;
    `sends`, `receives`: rows to and from each rank; `near`, `far`: positions of this rank's wanted
    rows that its node has, and of the others in the order in which they arrive.
    """

    def __init__(self, world: World, store: RowStore, wanted: Sequence[np.ndarray]) -> None:
        mine = range(world.first_local, world.first_local + world.local_size)
        parts = [
            NONE if rank in mine else rows[store.part.homes(rows) == world.rank]
            for rank, rows in enumerate(wanted)
        ]
        self.sent = torch.from_numpy(np.concatenate(parts))
        self.sends = [len(part) for part in parts]
        homes = store.part.homes(wanted[world.rank])
        inside = (homes >= mine.start) & (homes < mine.stop)
        self.near = np.flatnonzero(inside)
        far = np.flatnonzero(~inside)
        self.far = far[np.argsort(homes[far], kind="stable")]
        self.receives = np.bincount(homes[far], minlength=world.size).tolist()


def table_block(world: World, store: RowStore, table: int, rows: range) -> Tensor | None:
    """Rows `rows` of table `table` of the layout, by original ids, `[n, D]`; on rank 0 only."""
    offset = int(store.layout.offsets[table])
    wanted = [NONE] * world.size
    wanted[0] = np.arange(offset + rows.start, offset + rows.stop)
    found = RowExchange(world, store).bring(wanted)[0]
    return found if world.is_first else None


def shares(rows: int, parts: int) -> list[range]:
    """`rows` ids in `parts` contiguous ranges of about equal length."""
    cuts = [rows * part // parts for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def blocks(ranges: Sequence[range], row_bytes: int) -> Iterator[list[range]]:
    """Block after block of all `ranges`; those of a range that has ended are empty."""
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    longest = max((len(part) for part in ranges), default=0)
    for start in range(0, longest, step):
        yield [part[start : start + step] for part in ranges]


def row_numbers(store: RowStore, table: int, ids: Sequence[range]) -> list[np.ndarray]:
    """The layout's numbers of ids of table `table` of the layout, int64, range by range."""
    offset = int(store.layout.offsets[table])
    return [np.arange(offset + part.start, offset + part.stop) for part in ids]


def _joined(rows: Rows) -> Tensor:
    weight, state = rows
    return weight if state is None else torch.cat([weight, state], dim=1)


def _parted(joined: Tensor, store: RowStore) -> Rows:
    width = store.layout.dim
    return joined[:, :width], joined[:, width:] if store.state_width else None


def _scatter(store: RowStore, rows: Tensor, joined: Tensor) -> None:
    weight, state = _parted(joined, store)
    store.scatter(rows, weight.contiguous(), None if state is None else state.contiguous())
