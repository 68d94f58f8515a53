"""The bench of the drop-in collection at a small size: who takes turns trains the same model."""

from __future__ import annotations

import pytest
from benchmark_checks import of, read_report

from benchmarks import drop_in

SMALL = ["size=small", "batch=64", "steps=3", "lead=1", "repetitions=2", "warmup=4"]


def test_collections_take_turns_and_train_the_same(tmp_path):
    out = tmp_path / "drop_in.md"
    assert drop_in.main([*SMALL, "who=cached,copies,sharded", f"out={out}"]) == 0
    _, records = read_report(out, drop_in.BENCH)
    ways = [f"{who}, {ids}" for ids in ("zipf 1.05", "uniform") for who in drop_in.WHO]
    assert {record["mode"] for record in of(records, "mode")} == set(ways)
    assert len(of(records, "turn")) == 2 * len(ways) and len(of(records, "ratio")) == 6
    losses = {record["mode"]: record["loss"] for record in of(records, "mode")}
    for ids in ("zipf 1.05", "uniform"):  # `sharded` draws other initial rows
        assert losses[f"cached, {ids}"] == pytest.approx(losses[f"copies, {ids}"], rel=1e-5)
        assert 0 < losses[f"sharded, {ids}"] < 1
