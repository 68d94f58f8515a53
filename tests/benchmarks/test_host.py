"""The host's bench at a small size: what it leaves, and what counts as a thread's own work."""

from __future__ import annotations

import os
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmark_checks import of, read_report
from launching import CHECKOUT

from benchmarks import against_rank, host
from distcache.cost.cluster import HOST
from distcache.cost.predict import BINDS
from distcache.parallel.cached import CachedParallel

SMALL = ["size=small", "batch=64", "ratio=0.1", "steps=2", "repetitions=2", "warmup=12"]


@pytest.mark.slow
@pytest.mark.parametrize("given", [["ranks=1,2"], ["ranks=1", f"against={CHECKOUT}"]])
def test_threads_are_measured_and_steps_predicted_from_them(tmp_path, monkeypatch, given):
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "host.md"
    words = ["optimizers=sgd", "optim.embedding_lr=0.1", "planner_threads=3", f"out={out}"]
    assert host.main([*SMALL, *words, *given]) == 0
    _, records = read_report(out, host.BENCH)
    threads = of(records, "thread")
    sides = {"this", "other"} if "against" in given[-1] else {"this"}
    assert {record["side"] for record in threads} == sides
    assert {record["thread"] for record in threads if record["ranks"] > 1} in (
        set(),
        {*host.THREADS},
    )
    assert {r["thread"] for r in threads if r["ranks"] == 1} == {*host.THREADS} - {"talking"}
    assert {record["batch"] for record in threads} == {64, 16}
    for record in threads:
        assert 0 < record["package_calls"] < record["calls"]
        some = record["thread"] not in ("movement", "talking")  # nothing moves
        assert record["numpy_calls"] > 0 or not some
        assert record["own_ms"]["min"] >= 0 and record["core_ms"]["median"] > 0
        assert record["own_ms"]["count"] == record["core_ms"]["count"] == 2
        planner = record["thread"] == "planning" and record["side"] == "this"
        assert planner == ("predicted_ms" in record) and record.get("predicted_ms", 1.0) > 0
    values = {record["key"]: record["value"] for record in of(records, "constant")}
    assert values["planner_threads"] == 3 and values["launch_s"] == 7e-6
    assert min(values.values()) >= 0 < max(values[name] for name in host.PLANNER)
    steps = of(records, "step")
    shapes = product(host.WIDTHS, (16, 64), host.WORLDS)
    shown = [(step["width"], step["batch"], step["ranks"]) for step in steps[::4]]
    assert shown == list(shapes)
    for step in steps:
        parts = [step[of] for of in ("gpu", "link", "launch", "planner", "talker", "mover")]
        assert step["step"] == pytest.approx(max(parts)) and step["binds"] in BINDS
        same = [s for s in steps if (s["width"], s["batch"], s["ranks"]) ==
                (step["width"], step["batch"], step["ranks"])]  # fmt: skip
        (resident,) = (s["step"] for s in same if s["who"] == "resident")
        assert step["to_resident"] == pytest.approx(step["step"] / resident)
        fused = step["who"] == "fused tables"
        assert (step["planner"] == 0) == (step["mover"] == 0) == fused
    assert not list(Path("/dev/shm").glob("*against*"))


def test_steps_are_predicted_from_the_table_alone(tmp_path):
    out = tmp_path / "host.md"
    words = ["measured=false", "planner_threads=14", f"out={out}"]
    assert host.main([*SMALL, *words]) == 0
    _, records = read_report(out, host.BENCH)
    values = {record["key"]: record["value"] for record in of(records, "constant")}
    assert values.pop("planner_threads") == 14 and not of(records, "thread")
    assert all(value == getattr(HOST, key) for key, value in values.items())
    assert len(of(records, "step")) == 4 * len(host.WIDTHS) * len(host.SHARES) * len(host.WORLDS)


def test_torch_kernels_and_model_are_not_a_threads_own_work(monkeypatch):
    """By a clock that says how long each call takes, as `sys.setprofile` tells of them."""
    now = [0.0]
    monkeypatch.setattr(against_rank.time, "thread_time", lambda: now[0])
    calls = against_rank.Calls()
    package = Path(against_rank.distcache.__file__).parent

    def frame(file: object, name: str = "own") -> object:
        """One of a function of that name in that file."""
        names = {"sys": sys}
        exec(compile(f"def {name}():\n    return sys._getframe()", str(file), "exec"), names)
        return names[name]()

    def during(call: object, kind: str, seconds: float, inner: tuple = ()) -> None:
        given = (call, "call", None) if kind == "call" else (frame("x.py"), "c_call", call)
        calls(*given)
        now[0] += seconds
        for one in inner:
            during(*one)
        calls(given[0], "return" if kind == "call" else "c_return", None)

    planner, ops = frame(package / "planner/home.py"), frame(package / "ops/reference.py")
    model, stdlib = frame(against_rank.__file__), frame(os.__file__)
    assert callable(getattr(CachedParallel, against_rank.REPLAYED))
    replayed = frame(package / "parallel/cached.py", against_rank.REPLAYED)
    of_torch, of_tensor = torch.add, torch.zeros(1).add_
    nested = (planner, "call", 1.0)  # as a backward of the package's, which torch calls
    inner = (
        (ops, "call", 10.0, ((np.copyto, "c_call", 10.0),)),
        (of_torch, "c_call", 20.0, (nested,)),
        (of_tensor, "c_call", 40.0),
        (model, "call", 80.0, ((stdlib, "call", 80.0),)),
        (replayed, "call", 160.0, ((planner, "call", 160.0),)),
        (stdlib, "call", 2.0),
        (np.copyto, "c_call", 4.0),
        (of_torch, "c_call", 0.0),  # what is its own is counted where it ends
    )
    during(planner, "call", 8.0, inner)
    (work,) = calls.threads.values()
    assert work.meters["own_ms"] == 1e3 * (8 + 1 + 2 + 4)
    assert work.meters["package_calls"] == 3 and work.meters["calls"] == 5
    assert work.meters["numpy_calls"] == 2 and work.others == [False]
    calls.over = True
    calls(planner, "call", None)
    assert work.meters["calls"] == 5


def test_times_are_fitted_and_none_is_negative() -> None:
    counts = [[1.0, 1e5, 3e4], [1.0, 4e5, 7e4], [1.0, 1e5, 5e4], [1.0, 2e5, 9e4]]
    true = [1e-4, 2e-8, 3e-8]
    seconds = [sum(a * b for a, b in zip(row, true, strict=True)) for row in counts]
    assert host.fit(counts, seconds) == pytest.approx(true)
    falling = [2e-3, 5e-4, 1.9e-3, 1.2e-3]  # the more ids, the less
    found = host.fit(counts, falling)
    assert min(found) == 0 < max(found)
