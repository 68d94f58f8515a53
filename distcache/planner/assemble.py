"""From a rank's ids to requests, and from the homes' decisions to that rank's `StepPlan`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distcache.layout import RowLayout
from distcache.planner.calls import grouped, hashed_rows, occurrences
from distcache.planner.home import HomeDecision
from distcache.step_plan import StepPlan


@dataclass(frozen=True)
class Request:
    """The rows that one rank names in a step, by home.

    `rows[h]`: int64 rows homed at h. One rank asks for all its ids. Others ask for the R distinct
    rows, by home, then first occurrence; then `labels`, int32 `[n]`, has the rank of each id's row
    by first occurrence alone, and `places`, int32 `[R]`, where that row is in all of `rows`.
    """

    rows: tuple[np.ndarray, ...]
    labels: np.ndarray | None = None
    places: np.ndarray | None = None

    @property
    def counts(self) -> list[int]:
        """Rows named at each home."""
        return [len(rows) for rows in self.rows]


def make_request(layout: RowLayout, rows: np.ndarray) -> Request:
    """The request for the rows (int64 `[n]`) of one rank's local batch."""
    if layout.world_size == 1:
        return Request((rows,))
    distinct, labels = hashed_rows(rows)
    order, starts = grouped(layout.home(distinct), 0, layout.world_size)
    places = np.empty_like(order)
    places[order] = np.arange(len(order), dtype=np.int32)
    return Request(tuple(np.split(distinct[order], starts[1:-1])), labels, places)


@dataclass(frozen=True)
class HomePart:
    """What one home tells one rank about a step: slots of its rows, which of them are fetched
    (indices, ascending), and the canonical index of every row that the rank asked it for."""

    slots: np.ndarray
    fetch: np.ndarray
    reply: np.ndarray


def assemble(
    request: Request,
    parts: Sequence[HomePart],
    own: HomeDecision,
    move_after: int,
) -> StepPlan:
    """This rank's plan from its request, every home's part in rank order, and its own decision."""
    home_counts = np.array([len(part.slots) for part in parts])
    base = np.concatenate(([0], np.cumsum(home_counts)))
    total = int(base[-1])
    asked = _joined([part.reply for part in parts], base)
    if request.labels is None:
        ids = occurrences(asked, None, total)
    else:
        ids = occurrences(request.labels, asked[request.places], total)
    fetch = _joined([part.fetch for part in parts], base)
    missed = int((ids.starts[fetch + 1] - ids.starts[fetch]).sum())
    if len(parts) == 1:  # the only rank names every row
        sources = [np.arange(total)]
    else:
        sources = [_ascending(reply, len(own.slots)) for reply in own.replies]
    return StepPlan(
        step=own.step,
        kind=own.kind,
        positions=_tensor(ids.positions),
        order=_tensor(ids.order),
        touched=_tensor(ids.touched),
        segments=_tensor(ids.segments),
        touched_counts=tuple(np.diff(np.searchsorted(ids.touched, base)).tolist()),
        slots=_tensor(np.concatenate([part.slots for part in parts])),
        home_counts=tuple(home_counts.tolist()),
        source_rows=_tensor(np.concatenate(sources)),
        source_counts=tuple(len(source) for source in sources),
        fetch=_tensor(fetch),
        fetch_counts=tuple(len(part.fetch) for part in parts),
        fetch_rows=_tensor(own.fetch_rows),
        evict_slots=_tensor(own.evict_slots),
        evict_rows=_tensor(own.evict_rows),
        move_after=move_after,
        lookup_hits=len(ids.positions) - missed,
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


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
