"""What a log line shows, on the screen and in `metrics.jsonl`."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from distcache.parallel.base import StepResult
from distcache.trainer.record import Progress, StepTimes, stages
from distcache.trainer.schedule import Schedule

CLOCK = len("14:01:56 ")
TOOK = {
    "ingest": 24.42,
    "load": 0.01,
    "plan": 9.61,
    "write_back": 0.71,
    "gather": 1.52,
    "fill": 5.74,
    "forward_backward": 73.0,
    "sync": 14.4,
    "apply": 1.4,
    "wait": 0.99,
}
BESIDE = ("ingest", "load", "plan", "write_back", "gather", "fill")
HIDDEN = {name: TOOK[name] for name in BESIDE}
LIVE = {"hit_rate": 0.5003, "stage_ms": TOOK, "stage_hidden_ms": HIDDEN, "stall_ms": 0.99}


def logged(tmp_path, caplog, live: dict[str, Any], steps: int | None = 60) -> tuple[list, list]:
    """Log lines and lines of the file after 40 steps of 100 ms with a line every 20."""
    caplog.set_level(logging.INFO, "distcache.trainer.trainer")
    times, mode = StepTimes(), SimpleNamespace(progress=lambda: live)
    path = tmp_path / "metrics.jsonl"
    with Progress(path, Schedule(0, steps, None, 0), 20) as report:
        for done in range(1, 41):
            times.add(0.1 if done > 20 else 0.2, 2048)
            report.step(done, 0, StepResult(0.568925, (), False), times, mode)
    values = [json.loads(line) for line in path.read_text().splitlines()]
    return [record.getMessage() for record in caplog.records], values


def test_stages_stall_and_hidden_share_are_in_every_line(tmp_path, caplog) -> None:
    lines, values = logged(tmp_path, caplog, LIVE | {"hidden_share": 0.968})
    assert lines[2:] == [
        "step 40/60  loss 0.568925  20,480 samples/s  100.00 ms  stall 0.99 ms  hidden 97 %  "
        "hit 50.03 %  ETA 0:00:02",
        "  ms: forward_backward 73 sync 14 apply 1.4 | hidden: ingest 24 plan 9.6 "
        "write_back 0.7 gather 1.5 fill 5.7",
    ]
    assert all(CLOCK + len(line) <= 120 for line in lines)
    assert [line["step"] for line in values] == [20, 40]
    assert values[0]["step_ms"] == pytest.approx(200)
    assert values[1]["step_ms"] == pytest.approx(100), "since the line before"
    assert values[1]["stage_ms"] == TOOK and values[1]["stage_hidden_ms"] == HIDDEN
    assert (values[1]["stall_ms"], values[1]["hidden_share"]) == (0.99, 0.968)


def test_a_mode_without_stages_shows_none(tmp_path, caplog) -> None:
    lines, values = logged(tmp_path, caplog, {}, steps=None)
    assert lines[1:] == ["step 40  loss 0.568925  20,480 samples/s  100.00 ms"]
    assert not {"stage_ms", "stage_hidden_ms", "stall_ms"} & set(values[1])


def test_what_was_waited_for_says_so() -> None:
    hidden = {"ingest": 20.0, "plan": 9.6, "gather": 0.0}
    took = {"ingest": 40.0, "plan": 9.61, "gather": 1.0, "fill": 3.0, "apply": 1.0, "wait": 21.0}
    assert stages(took, hidden) == (
        "  ms: fill 3.0 apply 1.0 | hidden: ingest 40 (50%) plan 9.6 gather 1.0 (0%)"
    )
