"""Whether the cache has room for a step: expected before training, refused while it runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from distcache.errors import StepTooLargeError
from distcache.pipeline.groups import TableGroup

log = logging.getLogger(__name__)

_DEVIATIONS = 3.0
"""The fullest home of the largest of many steps is about so many standard deviations above the
mean; the variance is at most the mean, as rows come and fall to homes nearly independently."""


class Expecting(Protocol):
    """What a batch source knows about its ids before any is drawn."""

    def lookups_per_sample(self, table: int) -> float:
        """Mean ids that a sample looks up in `table`."""
        ...

    def expected_distinct(self, table: int, lookups: int) -> float:
        """Expected distinct rows of `table` among `lookups` ids of it."""
        ...


def smallest_cache_rows(groups: Sequence[TableGroup], most: Sequence[int]) -> int:
    """The smallest `cache.rows` that gives every home of each group at least `most` slots.

    `cache.rows` is split over the groups by their rows, then over the homes, rounding up.
    """
    total = sum(group.layout.rows for group in groups)
    return max(
        (rows - 1) * group.layout.world_size * total // group.layout.rows + 1
        for rows, group in zip(most, groups, strict=True)
    )


def too_large(
    step: int, groups: Sequence[TableGroup], rows: np.ndarray, slots: Sequence[int]
) -> StepTooLargeError:
    """Why `step` is refused and how to avoid it.

    `rows`: its distinct rows int64 `[W, G]` by home and group; `slots`: those of one home, by
    group.
    """
    world = len(rows)
    home, group = np.unravel_index(np.argmax(rows / np.asarray(slots)), rows.shape)
    needs, has = int(rows[home, group]), int(slots[group])
    enough = smallest_cache_rows(groups, rows.max(0).tolist())
    return StepTooLargeError(
        f"step {step} needs {needs} distinct rows of home rank {home}, which has {has} slots of "
        f"{has * world} on each device (tables of width {groups[group].dim}): set "
        f"cache.rows={enough} or more (the smallest that holds this step), or lower "
        f"data.global_batch_size{_other_split(groups)}",
        rows=needs,
        slots=has,
    )


def _other_split(groups: Sequence[TableGroup]) -> str:
    """A way out that tables of several widths have."""
    return "" if len(groups) == 1 else "; cache.split=by_curve shares slots out by need"


def warn_if_too_small(
    source: object, groups: Sequence[TableGroup], slots: Sequence[int], batch: int
) -> bool:
    """Warn before training if the slots will hardly hold a step; whether they will not.

    `source`: a batch source, which knows its expected rows if it is `Expecting`, with one feature
    for each table of the model, in their order; `slots`: C by group; `batch`: global batch size B.
    """
    if not all(hasattr(source, name) for name in ("lookups_per_sample", "expected_distinct")):
        return False
    most = [_expected_rows(source, group, batch) for group in groups]  # type: ignore[arg-type]
    homes = [c // group.layout.world_size for c, group in zip(slots, groups, strict=True)]
    short = [g for g, group in enumerate(groups) if most[g] > homes[g]]
    if short:
        worst = max(short, key=lambda g: most[g] / homes[g])
        log.warning(
            "the cache is likely too small: a batch of %d samples is expected to name about %d "
            "distinct rows of one home (tables of width %d), which has %d slots; a step that "
            "does not fit is refused. Set cache.rows=%d or more, or lower data.global_batch_size",
            batch,
            most[worst],
            groups[worst].dim,
            homes[worst],
            smallest_cache_rows(groups, most),
        )
    return bool(short)


def _expected_rows(source: Expecting, group: TableGroup, batch: int) -> int:
    """About how many distinct rows of a group the fullest home has in one global batch."""
    world, size = group.layout.world_size, group.layout.local_rows
    total = sum(
        source.expected_distinct(table, round(batch * source.lookups_per_sample(table)))
        for table in group.tables
    )
    mean = total / world
    return min(size, max(1, math.ceil(mean + _DEVIATIONS * math.sqrt(mean))))
