"""The policies' bench at a small size: its numbers are those of the replay, its bars are judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench_checks import of, read_report

from distcache.bench.policies import PoliciesOptions, contenders, main, window_rows
from distcache.bench.policy_tables import tables
from distcache.bench.policy_traces import NAMES, TraceSettings, drifting, make_trace
from distcache.errors import ConfigError
from distcache.planner.policy import POLICIES, TAILS, Policy
from distcache.replay import Case, replay
from distcache.trace import record_ids

SETTINGS = TraceSettings(
    steps=30, rows=2000, lookups=64, criteo_batch=4, criteo_shrink=5000, book_batch=4, book="",
    seed=0,
)  # fmt: skip
ARGUMENTS = [
    "steps=30", "rows=2000", "lookups=64", "criteo_batch=4", "criteo_shrink=5000", "book_batch=4",
    "sizes=1,5,20", "windows=4,8", "prefetch=0,1",
]  # fmt: skip


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("book") / "purchases.txt"
    lines = [f"{user} {' '.join(map(str, rng.choice(90, 6, replace=False)))}" for user in range(30)]
    path.write_text("\n".join([*lines, "30 "]) + "\n")
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, book: Path):
    """The header and records of one run."""
    out = tmp_path_factory.mktemp("bench") / "policies.md"
    assert main([*ARGUMENTS, f"book={book}", f"out={out}"]) == 0
    return read_report(out, tables)


def test_every_policy_is_measured_on_every_trace(report) -> None:
    _, records = report
    assert [record["trace"] for record in of(records, "trace")] == list(NAMES)
    assert not of(records, "skipped")
    outcomes = of(records, "outcome")
    labels = 2 + 2 * (2 * len(TAILS) + len(POLICIES) - 1)
    assert len(outcomes) == len(NAMES) * 3 * 2 * labels
    assert len({(r["trace"], r["size"], r["prefetch"], r["label"]) for r in outcomes}) == len(
        outcomes
    )
    for record in outcomes:
        if record["refused"]:
            assert record["ratio_to_min"] is None and "distinct rows for" in record["refused"]
            continue
        assert record["ratio_to_min"] >= 1 and record["ids_per_second"] > 0
        knows_all = record["lookahead"] is None and record["prefetch"] == 0
        assert record["ratio_to_min"] == 1 or not (record["policy"] == "MIN" or knows_all)
    refused = {(r["trace"], r["size"]) for r in outcomes if r["refused"]}
    assert refused and len(refused) < len(NAMES) * 3


def test_outcomes_are_those_of_the_replay(report) -> None:
    _, records = report
    trace = make_trace("drift", SETTINGS)
    for record in of(records, "outcome"):
        if record["trace"] == "drift" and record["policy"] == "lru" and not record["admission"]:
            (outcome,) = replay(
                trace, [Case(Policy("lru"), (record["slots"],), 0, record["prefetch"])]
            )
            assert record["slots"] == 2000 * record["size"] / 100
            assert record["rows_fetched"] == outcome.fetched
            assert record["hit_rate"] == outcome.hit_rate
            assert record["rows_written_back"] == outcome.written_back


def test_bars_are_judged_from_the_records(report) -> None:
    _, records = report
    named = {table.title: table for table in tables(records)}
    assert {f"{name}, P = {p}" for name in NAMES for p in (0, 1)} <= set(named)
    assert "Left out" not in named
    window = {r["trace"]: r["window_rows"] for r in of(records, "trace")}
    expected: dict[tuple[str, ...], list[float]] = {}
    for r in of(records, "outcome"):
        if r["policy"] != "lookahead" or r["refused"] or r["lookahead"] is None:
            continue
        if window[r["trace"]][str(r["lookahead"])] >= r["slots"]:
            admission = "yes" if r["admission"] else "no"
            key = (
                r["trace"],
                f"{r['slots']:,}",
                str(r["lookahead"]),
                str(r["prefetch"]),
                admission,
            )
            expected.setdefault(key, []).append(r["ratio_to_min"])
    shown = named["Lookahead beside MIN"].rows
    assert len(shown) == len(expected) > 0
    for name, _, slots, ahead, _, prefetch, admission, *ratios, met in shown:
        found = expected[name, slots, ahead, prefetch, admission]
        assert ratios == [f"{ratio:.3f}" for ratio in found]
        assert (met == "yes") == (max(found) <= 1.05)
    best = named["Lookahead beside the best other policy"].rows
    assert best and {row[-1] for row in best} <= {"yes", "no"}
    assert all(row[3].startswith("lookahead 8, frequency") for row in best)
    drift = named["Lookahead beside its tail, under drift"].rows
    assert {row[4].removesuffix(", admission") for row in drift} == set(TAILS)


def test_windows_are_counted() -> None:
    trace = record_ids([np.array([step, step + 1]) for step in range(10)], 11)
    assert window_rows(trace, 1) == 2
    assert window_rows(trace, 4) == 5
    assert window_rows(trace, 99) == 11


def test_drift_deals_popularity_anew() -> None:
    settings = TraceSettings(400, 500, 200, 4, 5000, 4, "", 0)
    steps = list(drifting(settings))
    counts = [
        np.bincount(np.concatenate(part), minlength=500) for part in (steps[:40], steps[-40:])
    ]
    first, last = (set(np.argsort(-count)[:50].tolist()) for count in counts)
    assert len(steps) == 400 and all(len(step) == 200 for step in steps)
    assert len(first & last) < 30  # the hot rows of the start are not those of the end
    near = np.bincount(np.concatenate(steps[40:80]), minlength=500)
    assert len(first & set(np.argsort(-near)[:50].tolist())) > 30  # but those of soon after


def test_a_trace_without_data_is_left_out_and_said(capsys, tmp_path: Path) -> None:
    out = tmp_path / "policies.md"
    arguments = ["traces=book,zipf_1.2", "policies=lru", *ARGUMENTS]
    assert main([*arguments, f"out={out}", f"book={tmp_path / 'none.txt'}"]) == 0
    _, records = read_report(out, tables)
    (skipped,) = of(records, "skipped")
    assert skipped["trace"] == "book" and "names no file" in skipped["reason"]
    assert "Left out" in capsys.readouterr().out
    assert str(tmp_path) not in out.read_text()


def test_what_cannot_be_measured_is_refused() -> None:
    for wrong, says in (
        ({"traces": ("zipf",)}, "traces=zipf is unknown"),
        ({"sizes": (0.0,)}, "sizes=0.0 is not a percentage"),
        ({"policies": ("mru",)}, "cache.policy=mru is unknown"),
        ({"tails": ("static",)}, "cache.tail=static is unknown"),
        ({"windows": (-1,)}, "windows=-1"),
        ({"steps": 0}, "steps=0"),
    ):
        with pytest.raises(ConfigError, match=says):
            PoliciesOptions(**wrong)
    with pytest.raises(ConfigError, match="traces=book: no file was given"):
        make_trace("book", SETTINGS)
    with pytest.raises(ConfigError, match="traces=zipf: choose of"):
        make_trace("zipf", SETTINGS)
    assert contenders(PoliciesOptions())[0] == (None, 0)
