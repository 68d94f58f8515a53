"""Predicted bytes per link within 3 % of the counters of real runs: three sources, placements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from traffic_prediction import (
    CLOSE,
    Known,
    data_cases,
    prediction_records,
    synthetic_case,
)
from traffic_runs import counted


def check(known: Known, world: int, timeout: float = 120) -> None:
    """Predictions of all placements beside runs: by the law or by counts, and with the rows fetched
    that a replay tells."""
    runs = [known.case.run(placement, world) for placement, _ in known.placements]
    steps = known.case.steps
    found = counted(runs, world, timeout)
    for record, ranks in zip(prediction_records(known, [world]), found, strict=True):
        real = {
            "collective": np.mean([rank["collective_bytes"] for rank in ranks]) / steps,
            "host_read": np.mean([rank["host_read"] for rank in ranks]) / steps,
        }
        assert real == pytest.approx(record["counted"], rel=1e-12), "the replay is not the run"
        label = (known.case.name, world, record["placement"])
        for way, predicted in record["predicted"].items():
            off = predicted["collective"] / real["collective"] - 1
            assert abs(off) <= CLOSE, (*label, way)
            off = predicted["host_read"] / real["host_read"] - 1
            assert abs(off) <= CLOSE, (*label, way)


def test_a_sample() -> None:
    check(Known.of(synthetic_case(steps=15)), 2)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("place", range(3))
def test_campaign(place: int, world: int, tmp_path: Path) -> None:
    check(Known.of(data_cases(tmp_path)[place]), world, timeout=600)
