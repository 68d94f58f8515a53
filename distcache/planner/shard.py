"""Replicated rows beside sharded ones, and one rank's plan of the sharded rows of a step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from distcache.planner.home import HomeDecision
from distcache.step_plan import ShardPlan, Transfer

# -----------------------------------------------------------------------------
# The two regions of a cache: rows that every rank has, and rows that their homes alone have.
#
# A row is replicated when it is among the `hot` rows of its group, and sharded otherwise. Each
# home plans its rows of either region by themselves, in slots of their own. DESIGN, section 6;
# splitting replicated hot rows from a sharded tail is SCARS' idea (arXiv 2411.01611).

FETCHED = np.int32(1 << 30)
"""Flag of a reply: the row is fetched. The lower bits are one more than the step that named the row
before, 0 for none."""


@dataclass(frozen=True)
class ShardParts:
    """What one rank knows of the sharded rows of a step.

    `own`: its home's decision; `replies`: for each home, int32 for every row that this rank asked
    it for, see `replies_to_all`; `distinct`, `misses`: rows of all homes; `early`: whether rows may
    travel before the step.
    """

    own: HomeDecision
    replies: tuple[np.ndarray, ...]
    distinct: int
    misses: int
    early: bool

    @cached_property
    def joined(self) -> np.ndarray:
        """The replies of all homes, int32 `[N]`."""
        return np.concatenate(self.replies)


def replies_to_all(decision: HomeDecision) -> list[np.ndarray]:
    """What a home tells each rank about every sharded row that it asked for, int32; see
    `FETCHED`."""
    about = decision.previous + np.int32(1)
    about[decision.fetch] |= FETCHED
    return [about[reply] for reply in decision.replies]


def nothing(label: tuple[int, str], world: int) -> HomeDecision:
    """The decision about replicated rows where a group has none; `label`: step and kind."""
    none = np.empty(0, np.int32)
    return HomeDecision(*label, (none,) * world, *(none,) * 5, -1, none)


# -----------------------------------------------------------------------------
# One rank's plan of the sharded rows of a step: what it sends as a home, what it gets.

_BEFORE_ALL = -2
"""A step after which every row was named, as it were: all rows are late."""


def shard_plan(parts: ShardParts, asked: Sequence[np.ndarray], move_after: int) -> ShardPlan:
    """The plan from `parts`; `asked`: the sharded rows (int32, as parts number them) that this rank
    named, by home.

    A row that no step after `move_after` names before this one has its last value once movement may
    start, so it may travel then (BagPipe's rule, SOSP 2023, that only what the next step shares is
    urgent, turned around).
    """
    own = parts.own
    counts = [len(rows) for rows in asked]
    source_counts = [len(reply) for reply in own.replies]
    sources = np.concatenate(own.replies)
    bound = move_after if parts.early else _BEFORE_ALL

    def transfer(sent: np.ndarray, received: np.ndarray) -> Transfer:
        """The transfer of some of the rows; bool masks over `sources` and over `asked`."""
        sends = sent.nonzero()[0]
        places = received.nonzero()[0]
        return Transfer(
            as_tensor(own.slots[sources[sends]]),
            by_piece(sends, source_counts),
            as_tensor(places),
            by_piece(places, counts),
        )

    sent_late = own.previous[sources] > bound
    received_late = (parts.joined & ~FETCHED) > bound + 1
    return ShardPlan(
        distinct=parts.distinct,
        misses=parts.misses,
        counts=tuple(counts),
        slots=as_tensor(own.slots),
        source_rows=as_tensor(sources),
        source_counts=tuple(source_counts),
        early=transfer(~sent_late, ~received_late) if parts.early else None,
        late=transfer(sent_late, received_late),
        fetch_slots=as_tensor(own.fetch_slots),
        fetch_rows=as_tensor(own.fetch_rows, np.int64),
        evict_slots=as_tensor(own.evict_slots),
        evict_rows=as_tensor(own.evict_rows, np.int64),
    )


def by_piece(places: np.ndarray, lengths: Sequence[int]) -> tuple[int, ...]:
    """How many of `places`, ascending, are in each of the pieces of `lengths` that follow one
    another."""
    return tuple(np.diff(np.searchsorted(places, np.cumsum(lengths)), prepend=0).tolist())


def as_tensor(values: np.ndarray, dtype: type = np.int32) -> torch.Tensor:
    """Contiguous, without a copy where it is that already."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype))
