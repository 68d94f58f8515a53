"""One rank's plan of the sharded rows of a step: what it sends as a home, what it gets. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from distcache.planner.calls import divided, grouped
from distcache.planner.regions import ShardParts
from distcache.planner.relays import Routes, carriers, has_several, mask_type, sent_by_home
from distcache.shard_plan import Relay, ShardPlan, Transfer


def shard_plan(parts: ShardParts, asked: Sequence[np.ndarray], move_after: int) -> ShardPlan:
    """The plan from `parts`; `asked`: the sharded rows (int64) that this rank named, by home.

    A row that no step after `move_after` names before this one has its last value once movement may
    start, so it may travel then (BagPipe's rule, SOSP 2023, that only what the next step shares is
    urgent, turned around).
    """
    own, routes = parts.own, parts.routes
    counts, sources = [len(rows) for rows in asked], np.concatenate(own.replies)
    sent = own.replies if routes is None else sent_by_home(own.replies, len(own.slots), routes)
    sent_counts = [len(reply) for reply in sent]
    bound = move_after if parts.early else _BEFORE_ALL
    flat = sources if routes is None else np.concatenate(sent)
    going = divided(own.previous, bound, sent_counts, (flat, own.slots))
    coming = divided(parts.named, bound + 1, counts)
    late, early = _transfers(going, coming, (sent_counts, counts), _arrivals(parts, asked))
    return ShardPlan(
        distinct=parts.distinct,
        misses=parts.misses,
        counts=tuple(counts),
        slots=as_tensor(own.slots),
        source_rows=as_tensor(sources),
        source_counts=tuple(len(reply) for reply in own.replies),
        early=early if parts.early else None,
        late=late,
        fetch_slots=as_tensor(own.slots[own.fetch]),
        fetch_rows=as_tensor(own.fetch_rows),
        evict_slots=as_tensor(own.evict_slots),
        evict_rows=as_tensor(own.evict_rows),
        runs=() if routes is None else routes.runs,
    )


_BEFORE_ALL = -2
"""A step after which every row was named, as it were: all rows are late."""

Divided = tuple[np.ndarray, np.ndarray, list[int]]


def _transfers(
    going: Divided,
    coming: Divided,
    lengths: tuple[Sequence[int], Sequence[int]],
    arrivals: Arrivals | None,
) -> tuple[Transfer, Transfer]:
    """The late and the early rows: `going` are slots, `coming` places, both in pieces of `lengths`,
    by rank and by home."""
    (sent, sent_others, sent_counts), (places, other_places, place_counts) = going, coming
    rest = [
        [length - count for length, count in zip(of, late, strict=True)]
        for of, late in zip(lengths, (sent_counts, place_counts), strict=True)
    ]
    return (
        _transfer((sent, sent_counts), (places, place_counts), arrivals),
        _transfer((sent_others, rest[0]), (other_places, rest[1]), arrivals),
    )


def _transfer(
    going: tuple[np.ndarray, list[int]],
    coming: tuple[np.ndarray, list[int]],
    arrivals: Arrivals | None,
) -> Transfer:
    """Slots and places, and how many of each rank and of each home."""
    receive, relay = (tuple(coming[1]), None) if arrivals is None else arrivals.divide(coming[0])
    return Transfer(as_tensor(going[0]), tuple(going[1]), as_tensor(coming[0]), receive, relay)


def _arrivals(parts: ShardParts, asked: Sequence[np.ndarray]) -> Arrivals | None:
    """Where the rows that this rank named come from; None: each from its home."""
    if parts.routes is None or not parts.routes.hands_on:
        return None
    return Arrivals(parts.routes, parts.masks, asked)


class Arrivals:
    """Which rank of the node brings each of this rank's N sharded rows, and to whom they go on."""

    def __init__(
        self, routes: Routes, masks: Sequence[np.ndarray | None], asked: Sequence[np.ndarray]
    ) -> None:
        """`masks`: what each home told (`relays.masks_for_all`); `asked`: the rows, by home."""
        nodes, rows, counts = routes.nodes, np.concatenate(asked), [len(part) for part in asked]
        self._routes, self._ends = routes, np.cumsum(counts)
        none = [np.zeros(count, mask_type(routes.mates)) for count in counts]
        named = np.concatenate(
            [zeros if told is None else told for zeros, told in zip(none, masks, strict=True)]
        )
        several = has_several(named)
        several = several[np.argsort(rows[several])]
        first = [
            nodes.peer(home, routes.node) - nodes.firsts[routes.node] for home in range(len(counts))
        ]
        homes = np.searchsorted(self._ends, several, side="right")
        by = carriers(named[several], np.array(first)[homes], routes.mates)
        brought = by != routes.local
        self._from_mate = np.zeros(len(rows), bool)
        self._from_mate[several] = brought
        order, _ = grouped(by, 0, routes.mates)
        order, own = order[brought[order]], several[~brought]
        self._brought, self._by = several[order], by[order]
        """`[k]`: rows that mates bring, and who does; by mate, then ascending by number."""
        masks = named[own] & ~named.dtype.type(1 << routes.local)
        self._to, of = np.nonzero(
            masks >> np.arange(routes.mates, dtype=masks.dtype)[:, None] & masks.dtype.type(1)
        )
        self._passed = own[of]
        """`[p]`: rows that this rank hands on, those `_to` the same mate together, as above."""

    def divide(self, places: np.ndarray) -> tuple[tuple[int, ...], Relay]:
        """For the rows `places` of a transfer, ascending: how many each home sends here, and the
        second leg."""
        mates, total = self._routes.mates, len(self._from_mate)
        direct = places[~self._from_mate[places]]
        receive = np.diff(np.searchsorted(direct, self._ends), prepend=0)
        at, moves = np.full(total, -1), np.zeros(total, bool)
        at[direct], moves[places] = np.arange(len(direct)), True
        come, go = moves[self._brought], moves[self._passed]
        brought = self._brought[come]
        at[brought] = len(direct) + np.arange(len(brought))
        relay = Relay(
            as_tensor(at[self._passed[go]]),
            tuple(np.bincount(self._to[go], minlength=mates).tolist()),
            tuple(np.bincount(self._by[come], minlength=mates).tolist()),
            as_tensor(at[places]),
        )
        return tuple(receive.tolist()), relay


def as_tensor(values: np.ndarray) -> torch.Tensor:
    """int64, contiguous, without a copy where it is that already."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
