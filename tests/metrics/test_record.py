"""Files that a run writes, and step times."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from distcache.trainer.record import MetricsFile, StepTimes, plain, write_json


def test_json_is_strict_and_whole(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"a": float("nan"), "b": [float("inf"), 1], "c": torch.tensor(2.0)})
    assert json.loads(path.read_text()) == {"a": None, "b": [None, 1], "c": 2.0}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
    assert plain({1: (np.float32("nan"), np.int64(3))}) == {"1": [None, 3]}


def test_metrics_file_appends_or_begins_anew(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    for append, expected in ((False, [1]), (True, [1, 2]), (False, [3])):
        file = MetricsFile(path, append)
        file.write(step=expected[-1])
        lines = path.read_text().splitlines()  # readable before it is closed
        file.close()
        assert [json.loads(line)["step"] for line in lines] == expected


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
    for step in (10, 11):
        times.add(step / 1000, 16)
    assert times.lap() == pytest.approx((0.0105, 32 / 0.021))
