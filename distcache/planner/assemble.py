"""From a rank's ids to requests, and from the homes' decisions to that rank's `StepPlan`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distcache.layout import RowLayout
from distcache.planner.home import HomeDecision
from distcache.planner.loops import grouped, hashed_rows, occurrences
from distcache.planner.shard import HotRows, ShardParts, as_tensor, in_tail, shard_plan
from distcache.step_plan import StepPlan


@dataclass(frozen=True)
class Request:
    """The rows that one rank names in a step, by home.

    `rows[h]`: int64 rows homed at h. One rank asks for all its ids. Others ask for the R distinct
    rows, by home, then first occurrence; then `labels`, int32 `[n]`, has the rank of each id's row
    by first occurrence alone, and `places`, int32 `[R]`, where that row is in all of `rows`, which
    are followed by all of `sharded`: the sharded rows homed at h.
    """

    rows: tuple[np.ndarray, ...]
    labels: np.ndarray | None = None
    places: np.ndarray | None = None
    sharded: tuple[np.ndarray, ...] = ()

    @property
    def counts(self) -> list[int]:
        """Rows named at each home."""
        return [len(rows) for rows in self.rows]


def make_request(
    layout: RowLayout, rows: np.ndarray, hot: np.ndarray | HotRows | None = None
) -> Request:
    """The request for the rows (int64 `[n]`) of one rank's local batch.

    `hot`: the replicated rows of a group with sharded ones, int64 `[K]`, ascending; None: all are
    replicated. `HotRows`, made once for a stream, find them at less cost.
    """
    world = layout.world_size
    if world == 1 and hot is None:
        return Request((rows,))
    distinct, labels = hashed_rows(rows)
    homes = layout.home(distinct)
    if hot is not None:
        homes = homes + world * in_tail(distinct, hot)
    order, starts = grouped(homes, 0, world if hot is None else 2 * world)
    places = np.empty_like(order)
    places[order] = np.arange(len(order), dtype=np.int32)
    parts = tuple(np.split(distinct[order], starts[1:-1]))
    return Request(parts[:world], labels, places, parts[world:])


@dataclass(frozen=True)
class HomePart:
    """What one home tells one rank about a step: slots of its rows, which of them are fetched
    (indices, ascending), and the canonical index of every row that the rank asked it for.

    Of sharded rows: neither slots nor `fetch`, and as `reply` that of `replies_to_all`; `masks`:
    those of `relays.masks_for_all`, None where there are none.
    """

    slots: np.ndarray
    fetch: np.ndarray
    reply: np.ndarray
    masks: np.ndarray | None = None


def assemble(
    request: Request,
    parts: Sequence[HomePart],
    own: HomeDecision,
    move_after: int,
    sharded: ShardParts | None = None,
) -> StepPlan:
    """This rank's plan from its request, every home's part in rank order, and its own decision.

    `sharded`: what the homes said of the sharded rows, if the group has any.
    """
    home_counts = np.array([len(part.slots) for part in parts])
    base = np.concatenate(([0], np.cumsum(home_counts)))
    total = int(base[-1])
    asked, shard, leaf_rows = _joined([part.reply for part in parts], base), None, total
    if sharded is not None:
        shard = shard_plan(sharded, request.sharded, move_after)
        leaf_rows = total + shard.rows
        asked = np.concatenate((asked, np.arange(total, leaf_rows, dtype=np.int32)))
    if request.labels is None:
        ids = occurrences(asked, None, leaf_rows)
    else:
        ids = occurrences(request.labels, asked[request.places], leaf_rows)
    fetch = _joined([part.fetch for part in parts], base)
    missing = fetch if sharded is None else np.concatenate((fetch, total + sharded.fetched))
    missed = int((ids.starts[missing + 1] - ids.starts[missing]).sum())
    if len(parts) == 1 and sharded is None:  # the only rank names every row
        sources = [np.arange(total)]
    else:
        sources = [_ascending(reply, len(own.slots)) for reply in own.replies]
    return StepPlan(
        step=own.step,
        kind=own.kind,
        positions=as_tensor(ids.positions),
        order=as_tensor(ids.order),
        touched=as_tensor(ids.touched),
        segments=as_tensor(ids.segments),
        touched_counts=tuple(np.diff(np.searchsorted(ids.touched, base)).tolist()),
        slots=as_tensor(np.concatenate([part.slots for part in parts])),
        home_counts=tuple(home_counts.tolist()),
        source_rows=as_tensor(np.concatenate(sources)),
        source_counts=tuple(len(source) for source in sources),
        fetch=as_tensor(fetch),
        fetch_counts=tuple(len(part.fetch) for part in parts),
        fetch_rows=as_tensor(own.fetch_rows),
        evict_slots=as_tensor(own.evict_slots),
        evict_rows=as_tensor(own.evict_rows),
        move_after=move_after,
        lookup_hits=len(ids.positions) - missed,
        shard=shard,
    )


def next_move_after(step: int, prefetch: int, latest_uses: Sequence[int], before: int) -> int:
    """The step after whose `apply` the movement of `step` may start (DESIGN: holds).

    `latest_uses`: latest last use among each home's victims; `before`: the value of the step
    before, since movement stays in order.
    """
    return max(step - prefetch - 1, before, -1, *latest_uses)


def _joined(parts: Sequence[np.ndarray], base: np.ndarray) -> np.ndarray:
    """The indices (int32) that each home counts from 0, counted from its `base`."""
    if len(parts) == 1:
        return parts[0]
    pairs = zip(parts, base.tolist(), strict=False)
    return np.concatenate([part + np.int32(start) for part, start in pairs])


def _ascending(reply: np.ndarray, total: int) -> np.ndarray:
    """The distinct indices, below `total`, of one rank's reply, ascending."""
    seen = np.zeros(total, dtype=bool)
    seen[reply] = True
    return np.flatnonzero(seen)
