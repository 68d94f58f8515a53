"""The loops as the planner calls them: results made, cut to length, and what is wrong raised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distcache.errors import PlanError
from distcache.planner.bodies import bodies


def distinct_rows(
    local: np.ndarray, position: np.ndarray, step: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(distinct [U], previous [U], labels [n])`, int32, of local rows (int64 `[n]`).

    `position` int32: the step that named each row last, -1 for none; it becomes `step` for these.
    Raises PlanError for a row outside it, and leaves it as it was.
    """
    local = np.ascontiguousarray(local, dtype=np.int64)
    distinct, previous, labels = (np.empty(len(local), np.int32) for _ in range(3))
    count = bodies().name_rows(local, position, step, distinct, previous, labels)
    if count < 0:
        raise PlanError(
            f"step {step}: id {-1 - count} is row {local[-1 - count]} of a home that has "
            f"{len(position)}: ids must lie within their tables"
        )
    return distinct[:count].copy(), previous[:count].copy(), labels


def hashed_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`(distinct rows int64 [U], labels int32 [n])` of rows int64 `[n]`, whatever their range."""
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    table = np.full(1 << max(1, (2 * len(rows) - 1).bit_length()), -1, np.int32)
    distinct, labels = np.empty(len(rows), np.int64), np.empty(len(rows), np.int32)
    count = bodies().find_rows(rows, table, distinct, labels)
    return distinct[:count].copy(), labels


def grouped(keys: np.ndarray, low: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """`(order [n], starts [groups + 1])`, int32: a stable sort of integer keys by value - low.

    Keys below `low` count as `low`. Raises PlanError for one of `low + groups` or more.
    """
    keys = np.ascontiguousarray(keys, dtype=np.int32)
    order, starts = np.empty(len(keys), np.int32), np.empty(max(groups, 0) + 1, np.int32)
    bad = bodies().group(keys, low, order, starts)
    if bad < 0:
        raise PlanError(f"{keys[-1 - bad]} is not below {low + groups}: steps come in order")
    return order, starts


def divided(
    values: np.ndarray,
    bound: int,
    lengths: Sequence[int],
    items: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """`(above, others, counts)`: which items have a value above `bound`, and which have not; int64.

    The items, in pieces of `lengths`, are 0, 1, ... of these `values` (int32 `[n]`), or, with
    `items` = (index int32 `[n]`, of int32 `[U]`), `of[index]` of `values[index]`. `counts`: those
    above in each piece.
    """
    none = np.empty(0, np.int32)
    index, of = (none, none) if items is None or not len(items[1]) else items
    index, of = (np.ascontiguousarray(part, dtype=np.int32) for part in (index, of))
    ends = np.cumsum(lengths, dtype=np.int64)
    count = int(ends[-1]) if len(ends) else 0
    above, others = np.empty(count, np.int64), np.empty(count, np.int64)
    counts = np.empty(len(ends), np.int64)
    values = np.ascontiguousarray(values, dtype=np.int32)
    high = bodies().divide(values, bound, index, of, ends, above, others, counts)
    return above[:high].copy(), others[: count - high].copy(), counts.tolist()


@dataclass(frozen=True)
class Occurrences:
    """Where the ids of a batch occur; see the fields of `StepPlan`. int64, but for `starts` int32
    `[U + 1]`: how many ids have a smaller canonical index."""

    positions: np.ndarray
    order: np.ndarray
    touched: np.ndarray
    segments: np.ndarray
    starts: np.ndarray


def occurrences(labels: np.ndarray, lookup: np.ndarray | None, total: int) -> Occurrences:
    """Canonical indices of the ids, below `total`, and the ids sorted by them.

    `labels` int32 `[n]`: those indices, or indices into `lookup`, which holds them. Raises
    PlanError for one outside.
    """
    count = len(labels)
    labels = np.ascontiguousarray(labels, dtype=np.int32)
    if lookup is None:
        lookup = np.empty(0, np.int32)
    lookup = np.ascontiguousarray(lookup, dtype=np.int32)
    positions, order = np.empty(count, np.int64), np.empty(count, np.int64)
    touched, segments = np.empty(total, np.int64), np.empty(total + 1, np.int64)
    starts = np.empty(total + 2, np.int32)
    found = bodies().order_ids(labels, lookup, positions, starts, order, touched, segments)
    if found < 0:
        raise PlanError(f"id {-1 - found} names none of the {total} rows of its step")
    touched, segments = touched[:found].copy(), segments[: found + 1].copy()
    return Occurrences(positions, order, touched, segments, starts[: total + 1])
