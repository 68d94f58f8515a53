"""From a rank's ids to requests, and from the homes' decisions to that rank's `StepPlan`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from distcache.layout import RowLayout
from distcache.planner.distinct import by_hash
from distcache.planner.home import HomeDecision
from distcache.step_plan import StepPlan


@dataclass(frozen=True)
class Request:
    """The rows that one rank names in a step, by home.

    `rows[h]`: int64 rows homed at h (distinct if W > 1), in first-occurrence order;
    `inverse`: for each of the n ids its index in the concatenation of `rows`, or None for n.
    """

    rows: tuple[np.ndarray, ...]
    inverse: np.ndarray | None

    @property
    def counts(self) -> list[int]:
        """Rows named at each home."""
        return [len(rows) for rows in self.rows]


def make_request(layout: RowLayout, rows: np.ndarray) -> Request:
    """The request for the rows (int64 `[n]`) of one rank's local batch."""
    if layout.world_size == 1:
        return Request((rows,), None)
    first, inverse = by_hash(rows)
    distinct = rows[first]
    homes = layout.home(distinct)
    order = np.argsort(homes, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    counts = np.bincount(homes, minlength=layout.world_size)
    parts = np.split(distinct[order], np.cumsum(counts)[:-1])
    return Request(tuple(parts), place[inverse])


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
    asked = np.concatenate([part.reply + start for part, start in zip(parts, base, strict=False)])
    positions = asked if request.inverse is None else asked[request.inverse]
    fetch = np.concatenate([part.fetch + start for part, start in zip(parts, base, strict=False)])
    total = int(base[-1])
    occurrences = np.bincount(positions, minlength=total)
    touched = np.flatnonzero(occurrences)
    missing = np.zeros(total, dtype=bool)
    missing[fetch] = True
    segments = np.zeros(len(touched) + 1, dtype=np.int64)
    np.cumsum(occurrences[touched], out=segments[1:])
    ids = torch.from_numpy(positions.astype(np.int64))
    cuts = np.searchsorted(touched, base)
    return StepPlan(
        step=own.step,
        kind=own.kind,
        positions=ids,
        order=ids.argsort(stable=True),
        touched=_tensor(touched),
        segments=_tensor(segments),
        touched_counts=tuple(np.diff(cuts).tolist()),
        slots=_tensor(np.concatenate([part.slots for part in parts])),
        home_counts=tuple(home_counts.tolist()),
        source_rows=_tensor(np.concatenate([_ascending(reply) for reply in own.replies])),
        source_counts=tuple(len(_ascending(reply)) for reply in own.replies),
        fetch=_tensor(fetch),
        fetch_counts=tuple(len(part.fetch) for part in parts),
        fetch_rows=_tensor(own.fetch_rows),
        evict_slots=_tensor(own.evict_slots),
        evict_rows=_tensor(own.evict_rows),
        move_after=move_after,
        lookup_hits=int(len(positions) - occurrences[missing].sum()),
    )


def next_move_after(step: int, prefetch: int, latest_uses: Sequence[int], before: int) -> int:
    """The step after whose `apply` the movement of `step` may start (DESIGN: holds).

    `latest_uses`: latest last use among each home's victims; `before`: the value of the step
    before, since movement stays in order.
    """
    return max(step - prefetch - 1, before, -1, *latest_uses)


def _ascending(reply: np.ndarray) -> np.ndarray:
    """The distinct canonical indices of one rank's reply, ascending."""
    if len(reply) == 0:
        return reply
    seen = np.zeros(int(reply.max()) + 1, dtype=bool)
    seen[reply] = True
    return np.flatnonzero(seen)


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
