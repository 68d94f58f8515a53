"""Runs with hot and cold batches: the same bits in every mode, stopped or not; what they report."""

from __future__ import annotations

import json
import os
import re
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import source_runs
import torch
from batch_sources import RUN, SYNTHETIC, count, counted
from ranks import run_ranks

from distcache.comm.world import close_world, open_world
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.errors import ConfigError
from distcache.parallel.cached import CachedParallel
from distcache.popularity.statistics import write_statistics

QUIET = ("trainer.device=cpu", "trainer.log_level=ERROR", "trainer.log_every=1")
LONG = ("trainer.steps=60", "data.phase_rate=0.25", "optim.dense_lr=0.3", "run.save=false")
"""An epoch and a part, with a held-out loss that rises and falls."""

SAVED, AS_IS = "run.save=true", "data.batching=as_is"


def run(world, home: Path, *overrides: str) -> dict[str, Any]:
    """One run in `home`: its digests and its summary."""
    summary = source_runs.run(world, home, *QUIET, *RUN, *overrides)
    return summary | {"digests": source_runs.digests(summary)}


def lines_of(home: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]


def stopped(world, home: Path, at: int, *overrides: str) -> dict[str, Any]:
    """A run that gets SIGTERM in its `at`-th evaluation batch, on the last rank."""
    plain, seen = CachedParallel.eval_step, []

    def eval_step(self, step):
        seen.append(step)
        if len(seen) == at and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, step)

    CachedParallel.eval_step = eval_step
    try:
        return run(world, home, *overrides)
    finally:
        CachedParallel.eval_step = plain


def play(rank: int, size: int, folder: str) -> dict[str, Any]:
    """All runs of one world size in one set of processes."""
    torch.set_num_threads(1)
    home, seen = Path(folder), {}
    world = open_world("cpu", timeout_s=60)
    known = f"cache.statistics={home / 'counted'}"
    for mode in ("data", "resident", "hybrid" if size == 2 else "host"):
        seen[mode] = run(world, home / mode, known, f"parallel={mode}", *LONG)
    if size != 2:
        cold_start = run(world, home / "cold", known, "cache.warm_start=0", *LONG)
        seen["cold start"] = (cold_start["digests"], cold_start["hot_rows_fetched"])
    seen["rows"] = sum(seen["data"]["hot_rows_by_table"].values())
    seen["resumed"] = {}
    half = home / "half"
    run(world, half, known, *LONG, SAVED, "trainer.steps=23")
    rest = (known, *LONG, f"trainer.resume={half}")
    seen["resumed"]["step 23"] = run(world, home / "rest", *rest, "parallel=resident")["digests"]
    first = stopped(world, home / "stopped", 9, known, *LONG)
    resumed = run(world, home / "went-on", known, *LONG, f"trainer.resume={home / 'stopped'}")
    seen["resumed"]["evaluation 9"] = resumed["digests"]
    assert first["hot_rows_fetched"] == resumed["hot_rows_fetched"] == 0
    assert first["steps"] + resumed["steps"] == 60 and 0 < first["steps"] < 60
    if size == 1:
        seen["other"] = other_batches(world, home, known)
    close_world(world)
    return seen


def other_batches(world, home: Path, known: str) -> list[str]:
    """What is said of a checkpoint whose batches were other ones: hot rows, batching."""
    seen = []
    for change in ([known, *LONG, "data.hot_rows=100"], [LONG[0], *LONG[2:], AS_IS]):
        with pytest.raises(ConfigError) as caught:
            run(world, home / "other", *change, f"trainer.resume={home / 'half'}")
        seen.append(str(caught.value))
    # From as_is, where that is meant: the phases begin.
    run(world, home / "as-is", AS_IS, "trainer.steps=9")
    meant = (f"trainer.resume={home / 'as-is'}", "trainer.resume_data=any")
    run(world, home / "meant", known, *LONG, *meant, "trainer.steps=14")
    phases = [line["phase"] for line in lines_of(home / "meant") if "loss" in line]
    return [*seen, " ".join(phases)]


@pytest.fixture(scope="module")
def counts(tmp_path_factory) -> Path:
    return counted(SyntheticSource(SyntheticSpec(**SYNTHETIC)), tmp_path_factory.mktemp("known"))


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_modes_and_stops_give_the_same_bits(tmp_path, size):
    counted(SyntheticSource(SyntheticSpec(**SYNTHETIC)), tmp_path / "counted")
    first = run_ranks(play, size, str(tmp_path), timeout=240)[0]
    whole = first["data"]
    for mode in ("resident", "host") if size != 2 else ("resident",):
        assert first[mode]["digests"] == whole["digests"], mode
    if size == 2:  # the same batches: equal up to the order of sums
        both = [first[mode]["eval_logloss"] for mode in ("data", "hybrid")]
        np.testing.assert_allclose(*both, rtol=1e-4)
        assert first["hybrid"]["phase_rate"] == whole["phase_rate"]
    else:
        digests, fetched = first["cold start"]
        assert digests == whole["digests"]
        assert 0 < fetched <= first["rows"]  # each hot row once at most, whatever came between
    for name, found in first["resumed"].items():
        assert found == whole["digests"], name
    reported(whole, lines_of(tmp_path / "data"))
    if size == 1:
        hot_rows, batching, meant = first["other"]
        named = r"\d+ \(\w{12}\)"
        assert re.search(rf"other data: data.hot_rows was {named}, is {named}", hot_rows)
        assert "data.batching was hot_cold, is not set" in batching
        assert meant == "hot hot hot hot hot"


def reported(summary: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """What the summary and `metrics.jsonl` say of a whole run."""
    steps = [line for line in lines if "loss" in line]
    kinds = [line["phase"] for line in steps]
    assert len(steps) == summary["steps"] == 60
    assert summary["hot_steps"] == kinds.count("hot") > 0
    assert summary["cold_steps"] == kinds.count("cold") > 0
    assert 0.2 < summary["hot_samples"] < 0.9
    evaluations = [line for line in lines if "eval_logloss" in line]
    ends = [line["step"] for line in evaluations]
    assert ends[-1] == len(kinds)
    for start, end in pairwise([0, *ends]):  # every phase is of one kind
        assert len(set(kinds[start:end])) == 1
    changes = {at + 1 for at, (one, two) in enumerate(pairwise(kinds)) if one != two}
    assert changes <= set(ends)
    rates = [line["phase_rate"] for line in evaluations]
    assert len(set(rates)) > 1
    assert summary["phase_rate"] == rates[-1]
    for (one, two), (before, after) in zip(pairwise(evaluations), pairwise(rates), strict=True):
        rose = two["eval_logloss"] > one["eval_logloss"]
        assert before / 2 <= after <= before if rose else before <= after <= 2 * before
    # Hot rows lie in the cache before the first step, and stay there: hot batches move nothing.
    assert summary["hot_rows_fetched"] == summary["hot_host_bytes"] == 0
    assert summary["cold_rows_fetched"] == summary["rows_fetched"] > 0
    assert summary["cold_host_bytes"] > summary["host_to_device_bytes"]
    assert sum(summary["hot_rows_by_table"].values()) == summary["warm_start_rows"] > 100


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["data.hot_rows=0"], 0.0),
        (["cache.ratio=1", "cache.rows=null"], 1.0),
        (["cache.statistics=nowhere"], "holds neither statistics.json nor"),
        (["data.hot_rows=300"], "300 hot rows of the tables of width 4 leave no room"),
        (["data.table_rows=[300,40,500,4]"], "fingerprint"),
    ],
)
def test_all_of_one_kind_and_what_is_refused(world, tmp_path, counts, overrides, found):
    words = (f"cache.statistics={counts}", "trainer.steps=null", *overrides)
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found):
            run(world, tmp_path, *words)
        return
    summary = run(world, tmp_path, *words)
    assert (summary["hot_samples"], summary["steps"]) == (found, 44)
    assert summary["hot_steps"] == (44 if found else 0)


def test_statistics_of_a_sample_do(world, tmp_path):
    """Rows that were not counted are cold."""
    source = SyntheticSource(SyntheticSpec(**SYNTHETIC | {"samples": 100}))
    write_statistics(tmp_path / "some", count(source))
    found = run(world, tmp_path / "run", f"cache.statistics={tmp_path / 'some'}")
    assert 0 < found["hot_samples"] < 1
