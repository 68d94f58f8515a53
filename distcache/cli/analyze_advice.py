"""One paragraph of advice from what was counted and replayed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distcache.cli.analyze_sizes import CLOSE, Target
from distcache.cli.analyze_tables import human_bytes
from distcache.popularity.curve import split_static
from distcache.popularity.profile import TableProfile
from distcache.run.prediction import Sizes

_MOSTLY = 0.5
"""Share of the rows, cached or in tables without hot rows, above which a cache is of little use."""


@dataclass(frozen=True)
class Advice:
    """The `text`; `paste`: keys to give to distcache.train; `table_rows`: of the advised cache, how
    many rows each table would have if its rows were the most frequent ones."""

    text: str
    paste: tuple[str, ...]
    table_rows: tuple[int, ...]


def advise(
    target: Target,
    profiles: Sequence[TableProfile],
    sizes: Sizes,
    optimizer: str,
    distinct: float,
) -> Advice:
    """What to do about `target`, for tables of these `sizes` with their optimizer state.

    `distinct`: rows of a step, the mean.
    """
    point = target.point
    rows = _split(profiles, sizes, point.slots)
    share = sum(point.slots) / sizes.rows
    parts = [*_odd_tables(profiles), _reach(target)]
    saved = sizes.bytes - point.bytes
    parts.append(
        f"That is {sum(point.slots):,} rows per rank, {share:.3%} of {sizes.rows:,}: "
        f"{human_bytes(point.bytes)} with the state of optim={optimizer}, where the whole "
        f"tables take {human_bytes(sizes.bytes)} on every rank; it saves "
        f"{human_bytes(saved)}, {saved / sizes.bytes:.1%}."
    )
    parts += _beside(target, sizes, distinct)
    if share > _MOSTLY:
        parts.append("That saves little: the lookups are spread over most of the rows.")
    largest = sorted(range(len(rows)), key=lambda table: -rows[table])[:3]
    named = ", ".join(
        f"{profiles[t].counts.feature} {rows[t] / max(sum(rows), 1):.0%}"
        for t in largest
        if rows[t]
    )
    if named:
        parts.append(f"Most of the cache goes to {named} (`cache rows` in the table).")
    alike = _alike(profiles)
    if alike is not None:
        parts.append(alike)
    paste = [f"cache.ratio={point.ratio:.12g}"]
    if len(sizes.groups) == 1:
        paste.append(f"cache.bytes={point.bytes}")
    return Advice(" ".join(parts), tuple(paste), rows)


def _beside(target: Target, sizes: Sizes, distinct: float) -> list[str]:
    """What a step takes on the device beside its slots, and whether rows can move ahead."""
    parts, case = [], target.point.estimate.case
    if len(sizes.groups) == 1:
        _, dim, _ = sizes.groups[0]
        parts.append(
            f"A step's copies of its {distinct:,.0f} rows, their gradients and sums take about "
            f"{human_bytes(round(3 * distinct * dim * sizes.itemsize))} beside it."
        )
    if case.prefetch == 0 and case.policy is not None and sum(case.slots) < 2 * distinct:
        parts.append(
            "It does not hold the rows of two steps, so rows move between the steps and not beside "
            f"them (P = 0): {math.ceil(2.2 * distinct):,} rows or more hide the movement."
        )
    return parts


def _reach(target: Target) -> str:
    """Which rate is reached, and why not the one that was wanted."""
    estimate, policy = target.point.estimate, target.point.estimate.case.label
    rate = f"{estimate.hit_rate_lookups:.2%} of the lookups"
    if target.point.ratio >= 1:
        start = f"Only the whole tables serve {rate}; no smaller cache does."
        return start if target.reachable else f"{_unreachable(target)} {start}"
    if target.reachable:
        return (
            f"For analyze.target_hit_rate={target.wanted:g}: cache.ratio={target.point.ratio:g} "
            f"serves {rate} over {estimate.steps:,} steps ({policy})."
        )
    return (
        f"{_unreachable(target)} {CLOSE:.0%} of that takes cache.ratio={target.point.ratio:g}, "
        f"which serves {rate} ({policy})."
    )


def _unreachable(target: Target) -> str:
    return (
        f"No cache serves analyze.target_hit_rate={target.wanted:g} of the lookups: the whole "
        f"tables on the device serve {target.whole.rate:.2%} over "
        f"{target.whole.estimate.steps:,} steps, because the first access to a row always misses; "
        "a longer run (trainer.steps, more epochs) comes closer."
    )


def _alike(profiles: Sequence[TableProfile]) -> str | None:
    """Why a cache will not help, where most rows are in tables without hot rows."""
    tables = [profile for profile in profiles if profile.alike]
    rows = sum(profile.counts.rows for profile in tables)
    share = rows / sum(profile.counts.rows for profile in profiles)
    if share <= _MOSTLY:
        return None
    lookups = sum(p.counts.lookups for p in tables) / sum(p.counts.lookups for p in profiles)
    return (
        f"A cache will not help: {len(tables)} table(s) with {share:.0%} of the rows and "
        f"{lookups:.0%} of the lookups are looked up uniformly (their rows differ by chance "
        "alone), so no rows are worth keeping, and a cache of some share of these rows serves "
        "about that share of their lookups. Keep the tables on the devices (parallel=hybrid or "
        "resident) if they fit; with parallel=data nearly every row of a step comes from the host."
    )


def _odd_tables(profiles: Sequence[TableProfile]) -> list[str]:
    """Tables without accesses, and those with one id."""
    found = []
    unused = [profile.counts.feature for profile in profiles if profile.unused]
    if unused:
        found.append(
            f"Nothing looks up {_listed(unused)}: such a table takes no slots; leave it out."
        )
    single = [profile.counts.feature for profile in profiles if profile.single]
    if single:
        found.append(
            f"All ids of {_listed(single)} are equal: one row serves every lookup, and the feature "
            "tells samples apart by nothing."
        )
    return found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _split(profiles: Sequence[TableProfile], sizes: Sizes, slots: Sequence[int]) -> tuple[int, ...]:
    """The slots of every table if each group's hold its most frequent rows."""
    rows = [0] * len(profiles)
    for members, count in zip(sizes.members, slots, strict=True):
        curves = [profiles[table].curve for table in members]
        for table, part in zip(members, split_static(curves, count), strict=True):
            rows[table] = round(part)
    return tuple(rows)
