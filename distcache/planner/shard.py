"""One rank's plan of the sharded rows of a step: what it sends as a home, what it gets. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from distcache.planner.calls import divided
from distcache.planner.regions import ShardParts
from distcache.step_plan import ShardPlan, Transfer


def shard_plan(parts: ShardParts, counts: Sequence[int], move_after: int) -> ShardPlan:
    """The plan from `parts`; `counts` `[W]`: sharded rows that this rank asked each home for.

    A row that no step after `move_after` names before this one has its last value once movement may
    start, so it may travel then (BagPipe's rule, SOSP 2023, that only what the next step shares is
    urgent, turned around).
    """
    own = parts.own
    sources = np.concatenate(own.replies)
    source_counts = [len(reply) for reply in own.replies]
    bound = move_after if parts.early else _BEFORE_ALL
    going = divided(own.previous, bound, source_counts, (sources, own.slots))
    coming = divided(parts.named, bound + 1, counts)
    late, early = _transfers(going, coming, (source_counts, counts))
    return ShardPlan(
        distinct=parts.distinct,
        misses=parts.misses,
        counts=tuple(counts),
        slots=as_tensor(own.slots),
        source_rows=as_tensor(sources),
        source_counts=tuple(source_counts),
        early=early if parts.early else None,
        late=late,
        fetch_slots=as_tensor(own.slots[own.fetch]),
        fetch_rows=as_tensor(own.fetch_rows),
        evict_slots=as_tensor(own.evict_slots),
        evict_rows=as_tensor(own.evict_rows),
    )


_BEFORE_ALL = -2
"""A step after which every row was named, as it were: all rows are late."""

Divided = tuple[np.ndarray, np.ndarray, list[int]]


def _transfers(
    going: Divided, coming: Divided, lengths: tuple[Sequence[int], Sequence[int]]
) -> tuple[Transfer, Transfer]:
    """The late and the early rows: `going` are slots, `coming` places, both in pieces of `lengths`,
    by rank and by home."""
    (sent, sent_others, sent_counts), (places, other_places, place_counts) = going, coming
    rest = [
        tuple(length - count for length, count in zip(of, late, strict=True))
        for of, late in zip(lengths, (sent_counts, place_counts), strict=True)
    ]
    late = Transfer(as_tensor(sent), tuple(sent_counts), as_tensor(places), tuple(place_counts))
    return late, Transfer(as_tensor(sent_others), rest[0], as_tensor(other_places), rest[1])


def as_tensor(values: np.ndarray) -> torch.Tensor:
    """int64, contiguous, without a copy where it is that already."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
