"""What a run says of itself: metrics by definition and over ranks, files, times, log lines."""

from __future__ import annotations

import json
import logging
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks

from distcache.comm.world import close_world, open_world
from distcache.data.files import write_json
from distcache.parallel.base import StepResult
from distcache.trainer import record
from distcache.trainer.record import (
    EvalResult,
    Evaluation,
    Progress,
    StepTimes,
    announce_stop,
    auc,
    log_loss,
    measure,
    normalized_entropy,
    plain,
    stages,
)
from distcache.trainer.schedule import Schedule


def auc_by_pairs(scores, labels):
    pairs = [(p, n) for p in scores[labels > 0] for n in scores[labels == 0]]
    return sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([0.1, 0.4, 0.35, 0.8], 0.75),
        ([3, 2, 1, 0], 0.0),
        ([0, 0, 0, 0], 0.5),
        ([40, 41, 42, 43], 1.0),  # a sigmoid would merge them
        ([-np.inf, 0, 1, np.inf], 1.0),
        ([0, 0, 1, np.nan], None),
    ],
)
def test_auc_by_hand(scores, expected):
    assert auc(np.array(scores, dtype=float), np.array([0, 0, 1, 1])) == expected


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_auc_equals_its_definition_with_ties(levels):
    rng = np.random.default_rng(levels)
    scores = rng.integers(levels, size=200) / 7
    labels = (rng.random(200) < 0.3).astype(float)
    assert auc(scores, labels) == pytest.approx(auc_by_pairs(scores, labels), abs=1e-15)


def test_undefined_is_none():
    both = np.array([0.0, 1.0])
    for labels in (np.zeros(3), np.ones(3), np.zeros(0)):
        assert auc(np.arange(float(len(labels))), labels) is None
        assert normalized_entropy(0.3, labels) is None
    assert log_loss(np.array([0.0, np.nan]), both) is None
    assert log_loss(np.zeros(0), np.zeros(0)) is None
    assert normalized_entropy(None, both) is None


def test_log_loss_by_hand_and_at_extremes():
    logits = np.array([0.3, 2.0, -1.0, -2.0, 5.0])
    chance = 1 / (1 + np.exp(-logits))
    for labels in ([1, 1, 0, 0, 1], [0.25, 1, 0, 0.9, 1]):  # probabilities as in training
        given = np.array(labels, dtype=float)
        expected = -np.mean(given * np.log(chance) + (1 - given) * np.log(1 - chance))
        assert log_loss(logits, given) == pytest.approx(expected, rel=1e-12)
    assert log_loss(np.array([800.0]), np.array([0.0])) == 800.0
    assert log_loss(np.array([np.inf]), np.array([1.0])) == 0.0
    assert log_loss(np.array([np.inf]), np.array([0.0])) is None


@pytest.mark.parametrize("labels", [[1.0, 0.0, 0.0, 0.0], [0.25] * 4])
def test_normalized_entropy_of_the_base_rate_is_one(labels):
    given, base = np.array(labels), math.log(0.25 / 0.75)
    assert normalized_entropy(log_loss(np.full(4, base), given), given) == pytest.approx(1.0)


LENGTHS = [[3, 0, 7], [0, 0, 0], [11, 1, 0]]
"""Samples of each batch by rank; rank 1 of three has none at all."""


def data(rank: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + batch)
    count = LENGTHS[rank][batch]
    logits = torch.randn(count, generator=generator)
    return logits, (torch.rand(count, generator=generator) < 0.4).float()


def evaluate(rank: int, world_size: int) -> list[EvalResult]:
    """One evaluation of three batches, one of none, one with a NaN."""
    world, results = open_world("cpu", timeout_s=60), []
    for batches, factor in ((range(3), 1), ((), 1), (range(3), torch.nan if rank == 2 else 1)):
        evaluation = Evaluation()
        for logits, labels in (data(rank, batch) for batch in batches):
            evaluation.add(logits * factor, labels)
        results.append(evaluation.finish(world))
    close_world(world)
    return results


def test_three_ranks_equal_one():
    ranks = run_ranks(evaluate, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    pairs = [data(rank, batch) for rank in range(3) for batch in range(3)]
    logits, labels = (np.concatenate([p[i].double().numpy() for p in pairs]) for i in (0, 1))
    whole, nothing, poisoned = ranks[0]
    assert whole == measure(logits, labels) and whole.samples == 22
    assert nothing == EvalResult(None, None, None, 0)
    assert poisoned == EvalResult(None, None, None, 22)


def test_json_is_strict_and_whole(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, plain({"a": float("nan"), "b": [float("inf"), 1], "c": torch.tensor(2.0)}))
    assert json.loads(path.read_text()) == {"a": None, "b": [None, 1], "c": 2.0}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
    assert plain({1: (np.float32("nan"), np.int64(3))}) == {"1": [None, 3]}


def test_metrics_of_a_resumed_run_are_added(tmp_path):
    path, result = tmp_path / "run" / "metrics.jsonl", EvalResult(0.5, math.nan, None, 3)
    for first, expected in ((0, [1]), (1, [1, 2]), (0, [3])):
        with Progress(path, Schedule(first, 9, None, 1), 1) as report:
            report.evaluation(expected[-1], result)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["step"] for line in lines] == expected  # readable before it is closed
        assert lines[0]["eval_logloss"] is None


def test_times_leave_out_the_first_ten_steps():
    times = StepTimes()
    for _ in range(10):
        times.add(9.0, 16)
    assert times.step_ms() == {"median": None, "p90": None}
    assert times.samples_per_second() is None
    for step in range(1, 12):
        times.add(step / 1000, 16)
    assert times.step_ms() == pytest.approx({"median": 6.0, "p90": 10.0})
    assert times.samples_per_second() == pytest.approx(11 * 16 / 0.066)
    assert times.lap() == pytest.approx((90.066 / 21, 21 * 16 / 90.066))
    times.add(0.010, 16), times.add(0.011, 16)
    assert times.lap() == pytest.approx((0.0105, 32 / 0.021))


CLOCK = len("14:01:56 ")
BESIDE = {"ingest": 24.42, "load": 0.01, "plan": 9.61, "write_back": 0.71, "gather": 1.52}
BESIDE |= {"fill": 5.74}
TOOK = BESIDE | {"forward_backward": 73.0, "sync": 14.4, "apply": 1.4, "wait": 0.99}
LIVE = {"hit_rate": 0.5003, "stage_ms": TOOK, "stage_hidden_ms": BESIDE, "stall_ms": 0.99}


def logged(
    tmp_path,
    caplog,
    live: dict[str, Any],
    steps: int | None = 60,
    level: int = logging.INFO,
    log_seconds: float = 0.0,
) -> tuple[list, list]:
    """Log lines and lines of the file after 40 steps of 100 ms with a line every 20."""
    caplog.set_level(level, "distcache.trainer.trainer")
    times, mode = StepTimes(), SimpleNamespace(progress=lambda: live)
    path, schedule = tmp_path / "metrics.jsonl", Schedule(0, steps, None, 0)
    with Progress(path, schedule, 20, log_seconds=log_seconds) as report:
        for done in range(1, 41):
            times.add(0.1 if done > 20 else 0.2, 2048)
            report.step(done, 0, StepResult(0.568925, (), False), times, mode)
    values = [json.loads(line) for line in path.read_text().splitlines()]
    return [record.getMessage() for record in caplog.records], values


def test_stages_stall_and_hidden_share_are_in_every_line(tmp_path, caplog) -> None:
    lines, values = logged(tmp_path, caplog, LIVE | {"hidden_share": 0.968}, level=logging.DEBUG)
    assert lines[3:] == [
        "step 40/60  loss 0.568925  20,480 samples/s  100.00 ms  stall 0.99 ms  hidden 97 %  "
        "hit 50.03 %  ETA 0:00:02",
        "ms/step: forward_backward 73 sync 14 apply 1.4 | hidden: ingest 24 plan 9.6 "
        "write_back 0.7 gather 1.5 fill 5.7",
    ]
    assert all(CLOCK + len(line) <= 120 for line in lines)
    assert [line["step"] for line in values] == [20, 40]
    assert values[0]["step_ms"] == pytest.approx(200)
    assert values[1]["step_ms"] == pytest.approx(100), "since the line before"
    assert values[1]["stage_ms"] == TOOK and values[1]["stage_hidden_ms"] == BESIDE
    assert (values[1]["stall_ms"], values[1]["hidden_share"]) == (0.99, 0.968)


def test_a_mode_without_stages_shows_none(tmp_path, caplog) -> None:
    lines, values = logged(tmp_path, caplog, {}, steps=None)
    assert lines[2:] == ["step 40  loss 0.568925  20,480 samples/s  100.00 ms"]
    assert not {"stage_ms", "stage_hidden_ms", "stall_ms"} & set(values[1])


def test_what_was_waited_for_says_so() -> None:
    hidden = {"ingest": 20.0, "plan": 9.6, "gather": 0.0}
    took = {"ingest": 40.0, "plan": 9.61, "gather": 1.0, "fill": 3.0, "apply": 1.0, "wait": 21.0}
    assert stages(took, hidden) == (
        "ms/step: fill 3.0 apply 1.0 | hidden: ingest 40 (50%) plan 9.6 gather 1.0 (0%)"
    )
    assert stages({"forward_backward": 20.0, "sync": None, "wait": 0.0}, {}) == (
        "ms/step: forward_backward 20"
    )


@pytest.mark.parametrize("steps", [40, 60, None])
def test_the_screen_has_the_first_and_the_last_step_alone_in_a_short_run(tmp_path, caplog, steps):
    lines, values = logged(tmp_path, caplog, LIVE, steps, log_seconds=3600.0)
    assert [line["step"] for line in values] == [20, 40]
    of = "" if steps is None else f"/{steps}"
    assert lines[0] == f"step 1{of}  loss 0.568925"
    assert len(lines) == 2 and lines[1].startswith(f"step 40{of}  loss 0.568925  20,480 samples/s")


def test_lines_of_steps_are_throttled_by_time_and_those_of_evaluations_are_not(
    tmp_path, caplog, monkeypatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(record.time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO, "distcache.trainer.trainer")
    times, mode = StepTimes(), SimpleNamespace(progress=dict)
    path = tmp_path / "metrics.jsonl"
    with Progress(path, Schedule(0, 100, 31, 1), 2, log_seconds=10.0) as report:
        for done in range(1, 38):
            now[0] += 1.0
            times.add(1.0, 8)
            report.step(done, 0, StepResult(0.5, (), False), times, mode)
            if done == 31:
                report.evaluation(done, EvalResult(0.5, 0.6, 0.9, 64))
    shown = [entry.getMessage().split("/")[0] for entry in caplog.records]
    # Step 11 is no multiple of 2; 31 is shown with its evaluation, 37 as the last one of the loop.
    assert shown == [f"step {done}" for done in (1, 12, 22, 31, 31, 37)]
    values = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in values if "loss" in line] == list(range(2, 37, 2))


def test_a_stop_that_takes_longer_than_torchrun_waits_is_announced(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(record, "PROBE_BYTES", 1 << 20)
    caplog.set_level(logging.INFO, "distcache")
    announce_stop(tmp_path, 4 * record.PROBE_BYTES - 1)
    announce_stop(tmp_path, 1 << 45)  # nobody waits without torchrun
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-test")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "1e6")
    announce_stop(tmp_path, 1 << 30)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    announce_stop(tmp_path, 1 << 45)
    announce_stop(tmp_path / "none", 1 << 45)
    texts = [entry.getMessage() for entry in caplog.records]
    assert [text.count("--shutdown-timeout=") for text in texts] == [0, 0, 1, 0]
    assert "32768.00 GiB" in texts[0] and "30 s after a signal" in texts[2] and "none" in texts[3]
    assert not list(tmp_path.iterdir())
