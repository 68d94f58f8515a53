"""Slots per rank for each group of tables, from cache.rows, cache.ratio or cache.bytes."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from fractions import Fraction

from distcache.errors import ConfigError

log = logging.getLogger(__name__)

DEFAULT_RATIO = 0.015
"""Slots as a share of the rows when none of the three keys is given."""


def cache_slots(
    rows: int | None,
    ratio: float | None,
    bytes: int | None,
    groups: Sequence[tuple[int, int, int]],
    itemsize: int,
    world_size: int,
) -> list[int]:
    """Slots per rank (C) of each group.

    At most one of `rows` (slots over all groups), `ratio` (of each group's rows, in (0, 1]) and
    `bytes` (device memory of all groups' slots) is given; none means ratio 0.015. `groups`: (V,
    D, S) of each; `itemsize`: bytes of an element; `world_size`: W.

    `rows` and `bytes` are split over the groups by their rows V; bytes that a group cannot use go
    to the others. C is a multiple of W, because home h owns C / W slots: `rows` and `ratio` are
    rounded up to it, `bytes` down, as it is a bound; at least W, at most W * ceil(V / W) (a cache
    larger than the tables is capped, and logged). Raises ConfigError for two keys, or a value out
    of range.
    """
    given = {"rows": rows, "ratio": ratio, "bytes": bytes}
    given = {key: value for key, value in given.items() if value is not None} or {
        "ratio": DEFAULT_RATIO
    }
    if len(given) > 1:
        named = " and ".join(f"cache.{key}={value}" for key, value in given.items())
        raise ConfigError(f"{named}: give at most one of cache.rows, cache.ratio, cache.bytes")
    key, value = next(iter(given.items()))
    _check(key, value)
    all_rows = sum(v for v, _, _ in groups)
    if key == "ratio":
        share = Fraction(str(value))  # the decimal that was typed: 0.07 of 100 rows is 7
        wanted = [math.ceil(share * v) for v, _, _ in groups]
    elif key == "rows":
        wanted = [-(-int(value) * v // all_rows) for v, _, _ in groups]
        _say_capped(key, int(value), all_rows)
    else:
        full = [-(-v // world_size) * world_size for v, _, _ in groups]
        wanted = _split_bytes(int(value), groups, full, itemsize)
        _say_capped(key, int(value), cache_bytes(full, groups, itemsize))
        wanted = [slots // world_size * world_size for slots in wanted]
    return [
        min(max(-(-slots // world_size), 1), -(-v // world_size)) * world_size
        for slots, (v, _, _) in zip(wanted, groups, strict=True)
    ]


def cache_bytes(slots: Sequence[int], groups: Sequence[tuple[int, int, int]], itemsize: int) -> int:
    """Device bytes of one rank's slots of all groups, rows and optimizer state."""
    pairs = zip(slots, groups, strict=True)
    return sum(count * (dim + state) * itemsize for count, (_, dim, state) in pairs)


def _check(key: str, value: float) -> None:
    """ConfigError unless a ratio is in (0, 1], rows and bytes are whole and at least 1."""
    if key == "ratio":
        if not 0 < value <= 1:
            raise ConfigError(
                f"cache.ratio={value} is not in (0, 1]: it is a share of the rows, 0.015 for 1.5 %"
            )
    elif value != int(value) or value < 1:
        raise ConfigError(f"cache.{key}={value} must be a whole number of at least 1")


def _split_bytes(
    budget: int, groups: Sequence[tuple[int, int, int]], full: Sequence[int], itemsize: int
) -> list[int]:
    """Slots of each group for `budget` bytes split by rows; at most its `full` count.

    A full group takes only what its rows need, and the others split the rest by their rows,
    until no further group is full.
    """
    row_bytes = [(dim + state) * itemsize for _, dim, state in groups]
    slots, open_groups = list(full), set(range(len(groups)))
    while open_groups:
        rows = sum(groups[g][0] for g in open_groups)
        share = {g: budget * groups[g][0] // rows // row_bytes[g] for g in open_groups}
        filled = {g for g in open_groups if share[g] >= full[g]}
        if not filled:
            return [share.get(g, slots[g]) for g in range(len(groups))]
        budget -= sum(full[g] * row_bytes[g] for g in filled)
        open_groups -= filled
    return slots


def _say_capped(key: str, value: int, largest: int) -> None:
    """Log it when a cache of `value` is larger than the tables, which take `largest`."""
    if value > largest:
        log.warning(
            "cache larger than the tables: capped (cache.%s=%d, all rows take %d)",
            key,
            value,
            largest,
        )
