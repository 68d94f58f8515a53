"""Runs whose placement, cache, policy, schedule and look-ahead are drawn: under every scheduler,
and however collectives are ordered, they have the bits of `resident`, their predictions too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_device.clocks import watched
from fake_device.process import LAZY, run
from fake_device.runs import Ended, Training, trained
from placement_cases import draw_jobs

SCHEDULES = ("lazy", "moody", "random")


def drawn(seed: int, ranks: int, runs: int, backend: str) -> list[Training]:
    """`resident`, which predicts after every step, `host`, and so many runs of mode `data`."""
    jobs = draw_jobs(seed, ranks, runs, steps=12)
    found = [Training(job.case, job.settings, job.evals, job.how, backend) for job in jobs]
    found[0] = replace(found[0], evals=1)
    in_host = replace(found[0].settings, mode="host", schedule="overlapped", result_delay=None)
    return [found[0], replace(found[0], settings=in_host), *found[1:]]


def run_watched(call: Training) -> tuple[Ended, list[str]]:
    """A run, and what clocks have seen unordered."""
    with watched() as watch:
        return trained(call), watch.races


def check(guard: Path, seed: int, ranks: int, runs: int, backend: str) -> None:
    """All have the bits of the first, and all that they do to slots is ordered."""
    calls = drawn(seed, ranks, runs, backend)
    under = [(SCHEDULES[(seed + at) % 3], 100 * seed + 10 * at) for at in range(len(calls) - 1)]
    found = run(guard, run_watched, calls, ranks, under=[LAZY, *under])
    for call, how, by_rank in zip(calls, [LAZY, *under], found, strict=True):
        for (first, _), (ended, races) in zip(found[0], by_rank, strict=True):
            assert not races, (call, how, races[0])
            assert ended.digest == first.digest, (call, how)
            assert ended.predictions.items() <= first.predictions.items(), (call, how)
    assert any(ended.left for ((ended, _), *_) in found)


@pytest.mark.parametrize(
    ("seed", "ranks", "backend"), [(0, 1, "gloo"), (7, 1, "gloo"), (1, 2, "gloo"), (9, 3, "nccl")]
)
def test_a_drawn_run_has_the_bits_of_resident(
    guard: Path, seed: int, ranks: int, backend: str
) -> None:
    check(guard, seed, ranks, 3 if ranks == 1 else 1, backend)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
@pytest.mark.parametrize(
    ("ranks", "backend"), [(1, "gloo"), *((r, b) for r in (2, 3) for b in ("gloo", "nccl"))]
)
def test_every_drawn_run_has_the_bits_of_resident(
    guard: Path, seed: int, ranks: int, backend: str
) -> None:
    check(guard, seed, ranks, 6, backend)
