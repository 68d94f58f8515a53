"""The traffic bench at a small size: its bars are judged, its arithmetic is TorchRec's plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from bench_checks import of, read_report

from distcache.bench.traffic import TrafficOptions, main, shape_of
from distcache.bench.traffic_replay import hybrid_record, tables_of_ranks
from distcache.bench.traffic_tables import tables
from distcache.data.raw.settings import KAGGLE_ROWS

ARGUMENTS = [
    "worlds=2,4", "batch=64", "dim=8", "shrink=500", "cached=10", "share=0.5", "steps=3",
    "warm_ids=150000", "runs=2", "run_steps=3", "run_shrink=2", "sources=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory):
    """The header and records of one run."""
    out = tmp_path_factory.mktemp("bench") / "traffic.md"
    assert main([*ARGUMENTS, f"out={out}"]) == 0
    return read_report(out, tables)


def test_every_placement_is_counted_at_every_number_of_ranks(report) -> None:
    _, records = report
    replays = of(records, "replay")
    names = ("replicated", "sharded", "mixed")
    expected = [(world, name) for world in (2, 4) for name in names]
    assert [(r["world"], r["placement"]) for r in replays] == expected
    for record in replays:
        assert record["steps"] == 3 and record["dropped"] >= 8 + 1 + 1
        assert record["sent_mean"] == pytest.approx(sum(record["stages"].values()))
        assert record["home_with_adam"]["home"] <= record["home_with_adam"]["replicated"]
        assert record["hot_rows"] > 0 or record["placement"] != "mixed"
    by = {(r["world"], r["placement"]): r for r in replays}
    assert by[4, "replicated"]["full"], "nothing ever leaves the cache"
    for choice in of(records, "choice"):
        assert choice["sent_mean"] == by[choice["world"], "sharded"]["sent_mean"]


def test_real_runs_count_what_is_computed(report) -> None:
    _, records = report
    runs = {r["layout"]: r for r in of(records, "run")}
    for run in runs.values():
        for key, close in (("collective_bytes", 1e-9), ("planning_bytes", 0.02)):
            # Counters are whole bytes of all steps; hybrid's ids come with sizes of their splits.
            assert run["counted"][key] == pytest.approx(run["computed"][key], rel=close, abs=1)
    auto, hybrid = (runs[name]["counted"]["collective_bytes"] for name in ("auto", "hybrid"))
    assert auto < 0.5 * hybrid


def test_hybrid_deals_whole_tables(report) -> None:
    _, records = report
    for record in of(records, "hybrid"):
        world = record["world"]
        vectors = 2 * (world - 1) / world * 26 * 64 * 8 * 4
        assert record["sent_mean"] == pytest.approx(vectors)
    for world in (2, 26, 64):
        held = tables_of_ranks(KAGGLE_ROWS, world)
        assert held.sum() == 26 and held.max() <= 26
        assert (held == 0).sum() >= world - 26
    assert tables_of_ranks([9, 1, 1], 2).tolist() == [1, 2]


def test_judgements(report) -> None:
    _, records = report
    text = [row for table in tables(records) for row in table.rows]
    assert any("(ok)" in cell for row in text for cell in row)
    for record in of(records, "choice"):
        record["sent_mean"] *= 10
    first = tables(records)[0]
    assert all("(missed)" in row[-1] and "(missed)" in row[-2] for row in first.rows)


@pytest.mark.parametrize(
    "words", [["worlds=1"], ["runs=1"], ["cached=0"], ["share=101"], ["batch=0"], ["out=a.txt"]]
)
def test_bad_keys(words: list[str], tmp_path: Path) -> None:
    assert main(words) == 1


def test_a_table_of_many_ranks_has_its_busiest() -> None:
    shape = shape_of(TrafficOptions(shrink=500, batch=16))
    record = hybrid_record(shape, 64)
    assert record["without_tables"] >= 64 - 26 and record["sent_ratio"] > 1
    assert np.isclose(record["sent_mean"], 2 * 63 / 64 * 26 * 16 * 16 * 4)
