"""Two checkouts compared: blocks of steps that take turns, times and calls by thread."""

from __future__ import annotations

import json
import os
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from benchmark_checks import check_spread, of, read_report
from launching import CHECKOUT

from benchmarks import against_rank, step
from benchmarks.against import SIDES
from distcache import layout

SPEC = {
    "table_rows": [300, 40, 7], "zipf": 1.05, "batch": 24, "batches": 30, "width": 4,
    "bottom": [8, 4], "top": [4, 1], "embeddings": False, "parallel": "data", "optimizer": "sgd",
    "seed": 0, "count": False, "checkout": str(CHECKOUT),
    "settings": {"cache.rows": 120, "cache.lookahead": 2, "cache.prefetch": 1, "run.save": False,
                 "trainer.device": "cpu", "run.digest": "false"},
}  # fmt: skip


def test_batches_are_drawn_alike_and_split_over_ranks():
    whole, again = against_rank.draw(SPEC, 0, 1), against_rank.draw(SPEC, 0, 1)
    assert len(whole) == 30
    for (dense, (ids, offsets), labels), other in zip(whole, again, strict=True):
        assert torch.equal(ids, other[1][0]) and torch.equal(dense, other[0])
        assert dense.shape == (24, against_rank.DENSE) and set(labels.tolist()) <= {0.0, 1.0}
        assert len(ids) == 3 * 24 and offsets.tolist() == list(range(73))
        for table, rows in zip(ids.view(3, 24), SPEC["table_rows"], strict=True):
            assert table.min() >= 0 and table.max() < rows
    sizes = [len(against_rank.draw(SPEC, rank, 5)[0][2]) for rank in range(5)]
    assert sum(sizes) == 24 and max(sizes) - min(sizes) == 1
    first = torch.stack([ids.view(3, 24)[0] for _, (ids, _), _ in whole]).flatten()
    assert first.bincount().max() > 10 * len(first) / 300, "no row is hot"


def test_training_stands_still_between_blocks(tmp_path, monkeypatch):
    """The rank's own program in this process, told what to do as the parent does."""
    ours, theirs = Pipe()
    heard: list = []

    def tell() -> None:
        for lead, steps in ((0, 4), (2, 5)):
            ours.send(("run", lead, steps))
            heard.append(ours.recv())
        ours.send(("stop",))
        heard.append(ours.recv())

    spec = SPEC | {"settings": SPEC["settings"] | {"run.dir": str(tmp_path / "run")}}
    monkeypatch.setattr(sys, "argv", ["against_rank.py", json.dumps(spec)])
    monkeypatch.setenv("RANK_PIPE", str(os.dup(theirs.fileno())))
    parent = threading.Thread(target=tell, daemon=True)
    parent.start()
    against_rank.main()
    parent.join(10)
    first, second, loss = heard
    assert len(first["step_ms"]) == 4 and len(second["step_ms"]) == 5
    assert min(second["step_ms"]) > 0 and 0 < loss < 2
    for block in (first, second):
        assert {"training", "planning", "movement", "process"} <= set(block["cpu_ms"])
        assert all(ms >= 0 for ms in block["cpu_ms"].values())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 30 and summary["final_loss"] == loss


def test_calls_are_counted_by_thread_and_package():
    calls = against_rank.Calls()

    def work() -> None:
        for index in range(5):
            layout.TableSpec(f"t{index}", 10, 4, (f"f{index}",))

    threading.setprofile(calls)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    threading.setprofile(None)
    (package,) = calls.package.values()
    (everything,) = calls.all.values()
    assert everything > package >= 5  # TableSpec checks itself, in a function of the package
    assert against_rank.role_of(threading.main_thread()) == "training"
    named = {"distcache-planner": "planning", "distcache-movement": "movement", "x": "other"}
    for name, role in named.items():
        assert against_rank.role_of(threading.Thread(name=name)) == role


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkout_against_itself(tmp_path, ranks):
    out = tmp_path / "against.md"
    words = ["size=small", "batch=64", "ratio=0.1", "steps=6", "lead=2", "repetitions=2"]
    words += ["warmup=12", "modes=data,fused", f"ranks={ranks}", f"against={CHECKOUT}"]
    assert step.main([*words, "optim.embedding_lr=0.1", f"out={out}"]) == 0
    head, records = read_report(out, step.BENCH)
    assert str(CHECKOUT) not in out.read_text() and "against" not in head["settings"]
    blocks = of(records, "block")
    turns = [(block["repetition"], block["side"]) for block in blocks]
    assert turns == [(0, "this"), (0, "other"), (1, "other"), (1, "this")]
    (found,) = of(records, "against")
    assert found["mode"] == "data" and found["world_size"] == ranks and found["same"] is True
    assert tuple(found["commits"]) == SIDES and len(set(found["commits"].values())) == 1
    for side in SIDES:
        own = [ms for block in blocks if block["side"] == side for ms in block["step_ms"]]
        check_spread(found["step_ms"][side], own)
    threads = {record["thread"]: record for record in of(records, "thread")}
    assert {"training", "planning", "movement", "all", "process"} <= set(threads)
    for name in ("training", "planning", "movement", "all"):
        calls = threads[name]["calls"]
        assert calls["this"] == pytest.approx(calls["other"], rel=0.05)
        assert 0 < threads[name]["package_calls"]["this"] < calls["this"]
    assert not list(Path("/dev/shm").glob("*against*"))
