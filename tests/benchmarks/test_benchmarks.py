"""Each benchmark runs two steps at a small size and writes its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import CHECKOUT

from benchmarks import cache, checkpoint, drop_in, kernels, planner, preprocess, step
from benchmarks.report import Bench

STEPS = ["size=small", "batch=64", "steps=2", "lead=1", "repetitions=1"]


def run(bench: Bench, out: Path, *arguments: str) -> list[dict]:
    """Run a benchmark; return the records of its report."""
    assert bench.main([*arguments, f"out={out}"]) == 0
    header, *records = map(json.loads, out.with_suffix(".jsonl").read_text().splitlines())
    assert header["kind"] == "environment" and out.read_text().startswith(f"# {bench.title}\n")
    return records


def losses(records: list[dict]) -> dict[str, float]:
    """Return the last loss of each contender."""
    return {record["mode"]: record["loss"] for record in records if record["kind"] == "mode"}


def test_step(tmp_path: Path) -> None:
    modes = "modes=data,resident,bag"
    records = run(step.BENCH, tmp_path / "step.md", *STEPS, modes, "ratio=0.05", "warmup=4")
    loss = losses(records)
    assert loss["data"] == loss["resident"] == pytest.approx(loss["bag"], rel=1e-5)
    (data,) = (r for r in records if r["kind"] == "mode" and r["mode"] == "data")
    assert data["is_steady"] and data["rows_per_step"]["misses"] > 0


@pytest.mark.parametrize("bench", [step.BENCH, planner.BENCH])
def test_two_checkouts(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [*(word for word in STEPS if "lead" not in word), "warmup=4", "cache.ratio=0.2"]
    words += ["modes=data"] if bench is step.BENCH else []
    records = run(bench, tmp_path / "against.md", *words, f"against={CHECKOUT}")
    assert records[0]["kind"] == "against" and records[0]["same_loss"]
    (planning,) = (record for record in records if record.get("thread") == "planning")
    assert planning["cpu_ms"]["this"]["median"] > 0


def test_planner(tmp_path: Path) -> None:
    words = [word for word in STEPS if "lead" not in word]
    records = run(planner.BENCH, tmp_path / "planner.md", *words)
    plan, unique = (record for record in records if record["kind"] == "mode")
    assert plan["is_steady"] and plan["ids"] == unique["ids"] == 6 * 64


def test_kernels(tmp_path: Path) -> None:
    words = "tables=3 rows=50 width=8 batch=6 pooling=4 steps=2 lead=1 repetitions=1 device=cpu"
    records = run(kernels.BENCH, tmp_path / "kernels.md", *words.split())
    assert {"reference, sgd", "reference, adam"} <= losses(records).keys()


def test_drop_in(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    words = [*STEPS, "warmup=4", "zipf=1.05", "collections=cached,copies,sharded"]
    loss = losses(run(drop_in.BENCH, tmp_path / "drop_in.md", *words))
    assert loss["cached, zipf 1.05"] == pytest.approx(loss["copies, zipf 1.05"], rel=1e-5)


def test_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    words = f"rows=4000 batch=32 repetitions=1 steps=2 width=8 folder={folder}"
    records = run(checkpoint.BENCH, tmp_path / "checkpoint.md", *words.split())
    assert [record["kind"] for record in records].count("rate") == 4
    assert not list(folder.iterdir())


def test_preprocess(tmp_path: Path) -> None:
    words = ["bytes=300000", "jobs=vocabulary", "repetitions=1"]
    text, job = run(preprocess.BENCH, tmp_path / "preprocess.md", *words)
    assert text["lines"] > 1000 and job["output_bytes"] > 0


def test_cache(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    words = "device=cpu rows=2000 batch=100 width=8 warmup=8 steps=2 blocks=1 slots=1.2x,100"
    records = run(cache.BENCH, tmp_path / "cache.md", *words.split())
    staged, zero_copy = (record for record in records if record["kind"] == "mode")
    assert staged["is_steady"] and staged["misses"] == zero_copy["misses"] > 0
    # Caches that are too small for a step are refused, and the others still run.
    assert [record["kind"] for record in records].count("failed") == 2
