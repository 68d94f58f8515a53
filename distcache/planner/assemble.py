"""From a rank's ids to requests, and from the homes' decisions to that rank's `StepPlan`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from distcache.errors import PlanError
from distcache.layout import RowLayout
from distcache.planner import loops
from distcache.planner.home import HomeDecision
from distcache.planner.shard import HotRows, ShardParts, as_tensor, grouped, shard_plan
from distcache.step_plan import StepPlan

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True)
class RowRequest:
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


def hashed_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`(distinct rows int64 [U], labels int32 [n])` of rows int64 `[n]`, whatever their range."""
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    table = np.full(1 << max(1, (2 * len(rows) - 1).bit_length()), -1, np.int32)
    distinct, labels = np.empty(len(rows), np.int64), np.empty(len(rows), np.int32)
    count = loops.find_rows(rows, table, distinct, labels)
    return distinct[:count].copy(), labels


def make_request(layout: RowLayout, rows: np.ndarray, hot: HotRows | None = None) -> RowRequest:
    """The request for the rows (int64 `[n]`) of one rank's local batch.

    `hot`: the replicated rows of a group with sharded ones; None: all are replicated.
    """
    world = layout.world_size
    if world == 1 and hot is None:
        return RowRequest((rows,))
    distinct, labels = hashed_rows(rows)
    homes = layout.home(distinct)
    if hot is not None:
        homes = homes + world * (hot.find(distinct) < 0)
    order, starts = grouped(homes, world if hot is None else 2 * world)
    places = np.empty_like(order)
    places[order] = np.arange(len(order), dtype=np.int32)
    named = distinct[order]
    parts = tuple(named[start:stop] for start, stop in pairwise(starts.tolist()))
    return RowRequest(parts[:world], labels, places, parts[world:])


@dataclass(frozen=True)
class HomePart:
    """What one home tells one rank about a step: slots of its rows, which of them are fetched
    (indices, ascending), and the canonical index of every row that the rank asked it for.

    Of sharded rows: neither slots nor `fetch`, and as `reply` that of `replies_to_all`; `masks`:
    those of `masks_for_all`, None where there are none.
    """

    slots: np.ndarray
    fetch: np.ndarray
    reply: np.ndarray
    masks: np.ndarray | None = None


def assemble(
    request: RowRequest,
    parts: Sequence[HomePart],
    own: HomeDecision,
    move_after: int,
    sharded: ShardParts | None = None,
) -> StepPlan:
    """This rank's plan from its request, every home's part in rank order, and its own decision.

    `sharded`: what the homes said of the sharded rows, if the group has any.
    """
    home_counts = [len(part.slots) for part in parts]
    base = list(accumulate(home_counts, initial=0))
    total = base[-1]
    asked, shard, leaf_rows = _joined([part.reply for part in parts], base), None, total
    if sharded is not None:
        shard = shard_plan(sharded, request.sharded, move_after)
        leaf_rows = total + shard.rows
        asked = np.concatenate((asked, np.arange(total, leaf_rows, dtype=np.int32)))
    if request.labels is None:
        ids = occurrences(asked, _NONE, leaf_rows)
    else:
        ids = occurrences(request.labels, asked[request.places], leaf_rows)
    positions, order, touched, segments, starts = ids
    fetch = _joined([part.fetch for part in parts], base)
    missing = fetch if sharded is None else np.concatenate((fetch, total + sharded.fetched))
    missed = int((starts[missing + 1] - starts[missing]).sum())
    if len(parts) == 1 and sharded is None:  # the only rank names every row
        sources = [np.arange(total)]
    else:
        sources = [_ascending(reply, len(own.slots)) for reply in own.replies]
    ends = touched.searchsorted(base).tolist()
    return StepPlan(
        step=own.step,
        kind=own.kind,
        positions=torch.from_numpy(positions),
        order=torch.from_numpy(order),
        touched=torch.from_numpy(touched),
        segments=torch.from_numpy(segments),
        touched_counts=tuple([stop - start for start, stop in pairwise(ends)]),
        slots=as_tensor(_concatenated([part.slots for part in parts])),
        home_counts=tuple(home_counts),
        source_rows=torch.from_numpy(_concatenated(sources)),
        source_counts=tuple([len(source) for source in sources]),
        fetch=as_tensor(fetch),
        fetch_counts=tuple([len(part.fetch) for part in parts]),
        fetch_rows=as_tensor(own.fetch_rows),
        evict_slots=as_tensor(own.evict_slots),
        evict_rows=as_tensor(own.evict_rows),
        move_after=move_after,
        lookup_hits=len(positions) - missed,
        shard=shard,
    )


def occurrences(labels: np.ndarray, lookup: np.ndarray, total: int) -> tuple[np.ndarray, ...]:
    """`positions`, `order`, `touched` and `segments` of a `StepPlan`, int64, and how many ids have
    a smaller canonical index than each, int32 `[total + 1]`.

    `labels` int32 `[n]`: the ids' canonical indices, below `total`, or indices into `lookup` unless
    that is empty. Raises PlanError for one outside.
    """
    labels = np.ascontiguousarray(labels, dtype=np.int32)
    lookup = np.ascontiguousarray(lookup, dtype=np.int32)
    positions, order = np.empty(len(labels), np.int64), np.empty(len(labels), np.int64)
    touched, segments = np.empty(total, np.int64), np.empty(total + 1, np.int64)
    starts = np.empty(total + 2, np.int32)
    found = loops.order_ids(labels, lookup, positions, starts, order, touched, segments)
    if found < 0:
        raise PlanError(f"id {-1 - found} names none of the {total} rows of its step")
    touched, segments = touched[:found].copy(), segments[: found + 1].copy()
    return positions, order, touched, segments, starts[: total + 1]


def next_move_after(step: int, prefetch: int, latest_uses: Sequence[int], before: int) -> int:
    """The step after whose `apply` the movement of `step` may start (DESIGN: holds).

    `latest_uses`: latest last use among each home's victims; `before`: the value of the step
    before, since movement stays in order.
    """
    return max(step - prefetch - 1, before, -1, *latest_uses)


def _joined(parts: Sequence[np.ndarray], base: Sequence[int]) -> np.ndarray:
    """The indices (int32) that each home counts from 0, counted from its `base`."""
    if len(parts) == 1:
        return parts[0]
    pairs = zip(parts, base, strict=False)
    return np.concatenate([part + np.int32(start) for part, start in pairs])


def _concatenated(parts: Sequence[np.ndarray]) -> np.ndarray:
    """`parts` one after the other, without a copy where there is one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _ascending(reply: np.ndarray, total: int) -> np.ndarray:
    """The distinct indices, below `total`, of one rank's reply, ascending."""
    seen = np.zeros(total, dtype=bool)
    seen[reply] = True
    return np.flatnonzero(seen)
