"""The tables of the traffic report, made of its records alone."""

from __future__ import annotations

from collections.abc import Sequence

from distcache.bench.report import Record, Table

CLOSE = 0.03
"""Most that predicted bytes of a link may be off."""

BAR = 0.35
"""Most that `auto` with objective `bytes` may send, of hybrid table-wise."""

NEAR_SMALLEST = 1.02
"""Most that it may send, of the smallest fixed placement."""

EVEN = 1.2
"""Most that the busiest rank may have, of the mean."""


def tables(records: Sequence[Record]) -> list[Table]:
    """All tables that have rows."""
    kinds = ("replay", "choice", "hybrid", "run", "speed", "prediction")
    of = {kind: [r for r in records if r["kind"] == kind] for kind in kinds}
    worlds = list(dict.fromkeys(r["world"] for r in of["hybrid"]))
    replays = {(r["world"], r["placement"]): r for r in of["replay"]}
    hybrids = {r["world"]: r for r in of["hybrid"]}
    choices = {r["world"]: r for r in of["choice"]}
    made = [
        _bytes(worlds, replays, choices, hybrids),
        _with_planning(worlds, replays, hybrids),
        _parts(worlds, replays),
        _at_home(worlds, replays),
        _balance(worlds, replays, hybrids),
        _predicted(of["replay"]),
        _extent(of["replay"]),
        _runs(of["run"]),
        _speed(of["speed"]),
        _sources(of["prediction"]),
    ]
    return [table for table in made if table.rows]


def _kib(value: float) -> str:
    return f"{value / 1024:,.1f}"


def _bytes(worlds: Sequence[int], replays: dict, choices: dict, hybrids: dict) -> Table:
    rows = []
    for world in worlds:
        fixed = [replays[world, name]["sent_mean"] for name in ("replicated", "sharded", "mixed")]
        choice, hybrid = choices[world], hybrids[world]["sent_mean"]
        ratio, near = choice["sent_mean"] / hybrid, choice["sent_mean"] / choice["smallest_fixed"]
        rows.append(
            (
                str(world),
                *map(_kib, fixed),
                f"{_kib(choice['sent_mean'])} ({choice['placement']})",
                _kib(hybrid),
                f"{fixed[1] / hybrid:.3f}",
                f"{ratio:.3f} ({'ok' if ratio <= BAR else 'missed'})",
                f"{near:.3f} ({'ok' if near <= NEAR_SMALLEST else 'missed'})",
            )
        )
    note = (
        "KiB per rank and step, the mean over ranks: rows and row gradients (`collective_bytes`; "
        "for hybrid pooled vectors and their gradients). `auto` has `cache.objective=bytes`. Bars: "
        f"auto at most {BAR} x hybrid table-wise, and at most {NEAR_SMALLEST} x the smallest fixed "
        "placement. With SGD, rows have no state, so `cache.state=home` sends what `replicated` "
        "does."
    )
    columns = ("ranks", "replicated", "sharded", "mixed", "auto", "hybrid table-wise")
    columns += ("sharded / hybrid", "auto / hybrid", "auto / smallest fixed")
    return Table("Rows and row gradients", note, columns, rows)


def _with_planning(worlds: Sequence[int], replays: dict, hybrids: dict) -> Table:
    rows = []
    for world in worlds:
        sharded, replicated = replays[world, "sharded"], replays[world, "replicated"]
        hybrid = hybrids[world]
        whole, all_hybrid = (r["sent_mean"] + r["planning_mean"] for r in (sharded, hybrid))
        rows.append(
            (
                str(world),
                *(_kib(r["planning_mean"]) for r in (replicated, sharded, hybrid)),
                *(_kib(value) for value in (whole, all_hybrid)),
                f"{whole / all_hybrid:.3f}",
            )
        )
    note = (
        "KiB per rank and step. Integers of planning (requests, decisions, headers, control), and "
        "ids with lengths of hybrid's input (8 + 4 bytes for each id and bag); then all together. "
        "Planning runs ahead of the step, beside compute; hybrid's ids travel in the step (TorchRec"
        "'s train pipeline can send them one step ahead)."
    )
    columns = ("ranks", "replicated, planning", "sharded, planning", "hybrid, ids")
    columns += ("sharded, all", "hybrid, all", "ratio")
    return Table("With planning and ids", note, columns, rows)


_STAGES = ("late_rows", "early_rows", "sharded_row_gradients", "fill", "row_gradients", "row_sums")


def _parts(worlds: Sequence[int], replays: dict) -> Table:
    rows = []
    for world in worlds:
        for name in ("replicated", "sharded", "mixed"):
            record = replays[world, name]
            stages = [record["stages"].get(stage, 0.0) for stage in _STAGES]
            forward = stages[0] + stages[1]
            early = f"{stages[1] / forward:.0%}" if forward else ""
            cells = [_kib(value) if value else "" for value in stages]
            rows.append((str(world), name, *cells, early))
    note = (
        "KiB per rank and step of each stage. Early rows travel beside compute of the step before; "
        "late ones after its update. The last column: early of all rows sent forward."
    )
    titles = ("late rows", "early rows", "gradients to sharded homes", "fill", "gradients to homes")
    columns = ("ranks", "placement", *titles, "sums to all", "early")
    return Table("Stages", note, columns, rows)


def _at_home(worlds: Sequence[int], replays: dict) -> Table:
    rows = []
    for world in worlds:
        found = replays[world, "replicated"]["home_with_adam"]
        saved = 1 - found["home"] / found["replicated"]
        rows.append((str(world), _kib(found["replicated"]), _kib(found["home"]), f"{saved:.1%}"))
    note = (
        "KiB per rank and step of `replicated` if the optimizer were Adam (two more floats per "
        "element): a fill sends state to all ranks only where they keep it."
    )
    columns = ("ranks", "cache.state=replicated", "cache.state=home", "less")
    return Table("State at the home", note, columns, rows)


def _balance(worlds: Sequence[int], replays: dict, hybrids: dict) -> Table:
    rows, keys = [], ("home_rows", "sent", "received", "planning", "host_read")
    for world in worlds:
        for name in ("replicated", "sharded"):
            ratios = [replays[world, name][f"{key}_ratio"] for key in keys]
            rows.append(
                (str(world), name, *(f"{r:.3f}{'' if r <= EVEN else ' !'}" for r in ratios))
            )
        hybrid = hybrids[world]
        none = hybrid["without_tables"]
        label = "hybrid table-wise" + (f", {none} ranks without a table" if none else "")
        rows.append((str(world), label, "", f"{hybrid['sent_ratio']:.3f}", "", "", ""))
    note = (
        f"The busiest rank's over the mean (at most {EVEN}, else marked !): rows of a home, bytes "
        "of rows sent and received, planning sent, and rows read from host memory. Hybrid deals "
        "whole tables by size; beyond 26 ranks some have none, and send gradients alone."
    )
    columns = ("ranks", "layout", "rows of a home", "sent", "received", "planning", "host reads")
    return Table("Largest over mean", note, columns, rows)


def _predicted(replays: Sequence[Record]) -> Table:
    rows = []
    for r in replays:
        cells = []
        for mine, true in (
            (r["predicted"]["collective"], r["sent_mean"]),
            (r["predicted"]["host_read"], r["host_read_mean"]),
        ):
            off = f"{mine / true - 1:+.1%}" if true else ""
            cells.append(f"{_kib(mine)} / {_kib(true)} ({off})")
        cells[1] += "" if r["full"] else " *"
        rows.append((str(r["world"]), r["placement"], *cells))
    note = (
        "KiB per rank and step, predicted by `distcache.cost` from the Zipf law / replayed. * "
        "slots were still free: the prediction is of a warm cache, so reads (and fills) differ."
    )
    columns = ("ranks", "placement", "rows and gradients", "read from host memory")
    return Table("Predicted", note, columns, rows)


def _extent(replays: Sequence[Record]) -> Table:
    rows = [
        (
            str(r["world"]),
            r["placement"],
            f"{r['hot_rows']:,}" if r["hot_rows"] else "",
            str(r["dropped"]),
            "yes" if r["full"] else "no",
            str(r["steps"]),
            f"{r['fetched']:,.0f}",
        )
        for r in replays
    ]
    note = (
        "Steps before counting (twice as many as went by before rows began to leave, for then "
        "slots are full), whether there were any, and steps counted; fetched: rows per step over "
        "all homes. What sharded placements send does not depend on what is cached, but for the "
        "late rows, which settle after L + P steps."
    )
    columns = ("ranks", "placement", "replicated rows", "dropped", "full", "counted", "fetched")
    return Table("Steps", note, columns, rows)


def _runs(records: Sequence[Record]) -> Table:
    rows = []
    for r in records:
        cells = []
        for key in ("collective_bytes", "planning_bytes"):
            counted, computed = r["counted"][key], r["computed"][key]
            cells.append(f"{counted:,.0f} / {computed:,.0f} ({computed / counted - 1:+.3%})")
        rows.append((str(r["world"]), r["layout"], str(r["steps"]), *cells))
    by = {(r["world"], r["layout"]): r for r in records}
    ratios = []
    for world in dict.fromkeys(r["world"] for r in records):
        auto, hybrid = (
            by[world, name]["counted"]["collective_bytes"] for name in ("auto", "hybrid")
        )
        ratios.append(f"{auto / hybrid:.3f} at W = {world}")
    note = (
        "Bytes per rank and step, counted by real runs (gloo) / computed: hybrid by TorchRec, and "
        "`auto` with objective bytes, from the first step on. run_shrink divides the rows of these "
        "tables: rows then repeat more, and the ratio is lower than of whole tables. TorchRec also "
        "sends sizes of its splits and one loss per step, which are not in the computed ids. "
        f"Counted, auto / hybrid: {', '.join(ratios)}."
    )
    columns = ("ranks", "layout", "steps", "rows and gradients", "planning, ids")
    return Table("Real runs", note, columns, rows)


def _speed(records: Sequence[Record]) -> Table:
    rows = [
        (
            str(r["world"]),
            f"{r['ids']:,}",
            f"{r['seconds']:.2f}",
            f"{1e9 * r['seconds'] / r['ids']:.0f}",
            f"{r['ids'] / r['seconds'] / 1e6:.1f}",
        )
        for r in records
    ]
    note = (
        "CPU time of planning all homes and counting, in one process, sharded, without drawing "
        "the ids: linear in the ids where nanoseconds per id stay."
    )
    columns = ("ranks", "ids", "CPU seconds", "ns per id", "million ids/s")
    return Table("Time of a replay", note, columns, rows)


def _sources(records: Sequence[Record]) -> Table:
    rows = []
    for r in records:
        for way, found in r["predicted"].items():
            cells = []
            for key, counted in r["counted"].items():
                off = found[key] / counted - 1
                mark = "" if abs(off) <= CLOSE else " !"
                cells.append(f"{_kib(found[key])} / {_kib(counted)} ({off:+.2%}){mark}")
            case = (r["source"], str(r["world"]), r["placement"], str(r["steps"]))
            rows.append((*case, way, *cells))
    note = (
        "KiB per rank and step from the first step on, predicted by `distcache.cost` / counted (by "
        f"replay, which is the counters of a real run to the byte); off by more than {CLOSE:.0%}: "
        "!. Adagrad, window 4. Popularity: the law of the ids, or counts of the steps themselves; "
        "`replayed`: the rows fetched per step are known from a replay instead of estimated, as "
        "`Settings.fetched` takes them (reads from host memory are then right by construction)."
    )
    columns = ("source", "ranks", "placement", "steps", "popularity")
    columns += ("rows and gradients", "read from host memory")
    return Table("Predicted, on three sources", note, columns, rows)
