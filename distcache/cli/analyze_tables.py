"""The tables of an analysis, as rows of text."""

from __future__ import annotations

from collections.abc import Sequence

from distcache.bench.report import Table
from distcache.cli.analyze_sizes import SizePoint
from distcache.planner.cases import Outcome
from distcache.popularity.profile import TOP_SHARES, TableProfile
from distcache.run.prediction import Estimate, Prediction, Sizes


def human_bytes(count: float) -> str:
    """A byte count in a unit that reads well."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def percent(value: float | None, digits: int = 2) -> str:
    """A share in percent, `-` for None."""
    return "-" if value is None else f"{100 * value:.{digits}f}"


def access_table(profiles: Sequence[TableProfile]) -> Table:
    """Who gets the lookups, table by table."""
    rows = []
    for profile in profiles:
        counts = profile.counts
        sign = "" if profile.distinct_error == 0 else "~"
        rows.append(
            (
                counts.feature,
                f"{counts.rows:,}",
                f"{counts.lookups:,}",
                f"{sign}{counts.distinct:,}",
                *("-" if profile.unused else percent(profile.top(s), 1) for s in TOP_SHARES),
                _zipf(profile),
            )
        )
    return Table(
        "Accesses of each table",
        "Lookups counted, distinct rows among them, share of the lookups (%) on the most frequent "
        "rows, and the exponent of Zipf's law (rank regression over rows with at least 30 lookups, "
        "Gabaix & Ibragimov 2011) with its standard error. `-`: nothing to tell it from; `alike`: "
        "rows differ by chance alone.",
        (
            "table",
            "rows",
            "lookups",
            "distinct",
            *(f"top {100 * share:g} %" for share in TOP_SHARES),
            "Zipf",
        ),
        rows,
    )


def use_table(
    profiles: Sequence[TableProfile], world_sizes: Sequence[int], advised: Sequence[int]
) -> Table:
    """What each table means for batches and caches."""
    rows = []
    worlds = sorted({1, *world_sizes})
    for profile, own in zip(profiles, advised, strict=True):
        counts = profile.counts
        distinct = (f"{profile.distinct_per_batch(world):,.1f}" for world in worlds)
        rows.append(
            (
                counts.feature,
                f"{profile.batch_lookups:,.1f}",
                *distinct,
                percent(profile.drift.kept(), 1),
                percent(profile.drift.kept_far(), 1),
                f"{own:,}",
                percent(own / counts.rows, 2),
            )
        )
    slices = ("distinct rows", *(f"of a rank of {world}" for world in worlds if world > 1))
    return Table(
        "Batches, drift, and each table's share of the cache",
        "Lookups of a global batch and the distinct rows expected in it (and in a rank's slice of "
        "it); what the hot rows of one part of the stream (1 % of the table's, at most a tenth of "
        "those that the part looks up) serve of the next part, and the first part's of the last, "
        "in % of what that part's own hot rows serve; and the rows of "
        "the advised cache that are this table's if it holds the most frequent ones, with their "
        "share of the table (%).",
        ("table", "lookups", *slices, "kept next", "kept far", "cache rows", "of the table"),
        rows,
    )


def size_table(points: Sequence[SizePoint], sizes: Sizes) -> Table:
    """Hit rates by cache size."""
    rows = []
    for point in points:
        found = point.estimate
        rows.append(
            (
                percent(sum(point.slots) / sizes.rows, 3),
                f"{sum(point.slots):,}",
                human_bytes(point.bytes),
                percent(found.hit_rate_lookups),
                percent(found.hit_rate),
                f"{(found.fetched or 0) / found.steps:,.1f}",
                percent(point.static),
                percent(point.static_distinct),
            )
        )
    label = points[0].estimate.case.label if points else ""
    return Table(
        "Hit rate by cache size",
        f"Slots per rank; what the run comes to with `{label}`: hits of lookups and of distinct "
        "rows (%), rows fetched per step, from an empty cache on; and the same two rates of the "
        "best fixed set of rows, were it cached from the start. Sizes that a step does not fit in "
        "are left out.",
        (
            "% of rows",
            "rows",
            "bytes",
            "hits of lookups",
            "of distinct rows",
            "fetched per step",
            "fixed set, lookups",
            "distinct",
        ),
        rows,
    )


def prediction_table(
    estimates: Sequence[Estimate], prediction: Prediction, expected: float
) -> Table:
    """What the configured run will measure, by number of ranks."""
    rows, refused = [], ""
    for found in estimates:
        start = (str(found.case.world_size), f"{sum(found.case.slots):,}")
        if found.refused is not None:
            rows.append((*start, "refused", *["-"] * 5))
            refused += f" Training would refuse {start[1]} slots: {found.refused}."
            continue
        rows.append(
            (
                *start,
                f"{found.hit_rate_lookups:.4f}",
                f"{found.hit_rate:.4f}",
                f"{expected:,.1f}",
                f"{(found.distinct or 0) / found.steps:,.1f}",
                f"{(found.fetched or 0) / found.steps:,.1f}",
                f"{(found.written_back or 0) / found.steps:,.1f}",
            )
        )
    steps = prediction.steps
    how = f"all {steps:,} steps were replayed"
    if prediction.recorded < steps:
        how = (
            f"the first {prediction.recorded:,} of {steps:,} steps were replayed, and the rest "
            "taken to go on as the last quarter of them"
        )
    return Table(
        "What training will measure with this configuration",
        "`hit_rate_lookups` and `hit_rate` (of distinct rows) of `summary.json`; distinct rows per "
        "step as expected from the counts alone, and as replayed; rows fetched and written back "
        f"per step. Through the planner that training runs: {how}.{refused}",
        (
            "ranks",
            "slots",
            "hit_rate_lookups",
            "hit_rate",
            "distinct, expected",
            "distinct, replayed",
            "fetched",
            "written back",
        ),
        rows,
    )


def simulation_table(outcomes: Sequence[Outcome], row_bytes: Sequence[int]) -> Table:
    """Policies x sizes x windows x ranks, beside the offline optimum of the same size."""
    least = {_key(o): o.fetched for o in outcomes if o.case.policy is None and o.refused is None}
    rows, refused = [], {}
    for outcome in outcomes:
        case = outcome.case
        start = (case.label, f"{sum(case.slots):,}", str(case.world_size))
        if outcome.refused is not None:
            rows.append((*start, "refused", *["-"] * 6))
            refused[_key(outcome)] = outcome.refused
            continue
        steps, optimum = max(outcome.steps, 1), least.get(_key(outcome))
        rows.append(
            (
                *start,
                percent(outcome.hit_rate_lookups),
                percent(outcome.hit_rate),
                f"{outcome.fetched / steps:,.1f}",
                f"{outcome.written_back / steps:,.1f}",
                human_bytes(outcome.host_to_device_bytes(row_bytes) / steps),
                human_bytes(outcome.device_to_host_bytes(row_bytes) / steps),
                f"{outcome.fetched / optimum:.3f}" if optimum else "-",
            )
        )
    return Table(
        "Simulated policies",
        "Hits of lookups and of distinct rows (%), and per step over all ranks: rows fetched and "
        "written back, bytes in and out; rows fetched relative to Belady's MIN over the whole "
        "trace (the offline optimum). No tensors are made, but plans are those of training."
        + "".join(
            f" Training would refuse {sum(k[0]):,} slots: {why}." for k, why in refused.items()
        ),
        (
            "policy",
            "slots per rank",
            "ranks",
            "hits of lookups",
            "of distinct rows",
            "fetched",
            "written back",
            "bytes in",
            "bytes out",
            "of MIN",
        ),
        rows,
    )


def _key(outcome: Outcome) -> tuple[tuple[int, ...], int]:
    return outcome.case.slots, outcome.case.world_size


def _zipf(profile: TableProfile) -> str:
    fit = profile.fit
    if profile.alike:
        return "alike"
    if fit.exponent is None or fit.error is None:
        return "-"
    return f"{fit.exponent:.2f} ± {fit.error:.2f}"
