"""No kernel is compiled in the middle of a run: before the first step, one thread has launched all
variants that a later launch uses. Variants are told apart by Triton's own function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device.process import run
from fake_device.runs import Training, trained
from fake_device.test_fake_device import drop_in, loop, modules
from scenarios import OPTIMIZERS, Scenario, table

from distcache.engine.groups import Placement
from distcache.parallel.cached import CachedSettings

WIDTHS = (
    table("a", 300),
    table("b", 200, dim=6, features=2, pooling="mean"),
    replace(table("c", 90, dim=3), dtype=torch.float16),
)
"""Rows of 32, 24 and 6 bytes: pieces of tables begin at any multiple of 8 and of 2 bytes."""


def training(
    optimizer: str,
    placement: str = "replicated",
    weighted: bool = False,
    **settings: Any,
) -> Training:
    """A run in which some steps name a row more than 32 times, and whose last batch is small."""
    spec, lr = OPTIMIZERS[optimizer]
    case = Scenario(WIDTHS[:2] if weighted else WIDTHS, spec, lr, global_batch=60, last_batch=2)
    tables = tuple(replace(one, pooling="sum") for one in case.tables)
    case = replace(case, tables=tables if weighted else case.tables, weighted=weighted, skew=6.0)
    slots = (160, 120, 80)[: len(case.tables)]
    how = {"placement": Placement(placement), "cuda_graph": False} | settings
    return Training(case, CachedSettings("data", slots, 2, 1, **how), evals=7)


def first_launches(call: Any) -> tuple[list[str], int]:
    """Variants that were launched for the first time after another thread had launched something,
    and the number of all variants."""
    from fake_device.kernels import recorded_launches  # where the device is

    with recorded_launches() as launches:
        if isinstance(call, Training):
            trained(call)
        elif "settings" in call:
            drop_in(call)
        else:
            modules(call)
    threads = [launch.thread for launch in launches]
    others = [place for place, thread in enumerate(threads) if thread != "MainThread"]
    compiled = {launch.variant for launch in launches[: others[0]]}
    late = {launch.variant for launch in launches[others[0] :]} - compiled
    return sorted(late), len(compiled)


def check(found: list[list[tuple[list[str], int]]]) -> None:
    """No variant is late on any rank."""
    for by_rank in found:
        for late, variants in by_rank:
            assert late == []
            assert variants > 6


def test_training_launches_no_new_variant(guard: Path) -> None:
    calls = [
        training("adam"),
        training("counted_adam", access="zero_copy"),
        training("ftrl", weighted=True, result_delay=0),
    ]
    check(run(guard, first_launches, calls, under=[("lazy", 0), ("moody", 1), ("random", 2)]))


@pytest.mark.parametrize("placement", ["replicated", "sharded"])
def test_several_ranks_launch_no_new_variant(guard: Path, placement: str) -> None:
    calls = [training("adagrad", placement), training("l2", placement, access="zero_copy")]
    check(run(guard, first_launches, calls, ranks=2))


def test_a_collection_launches_no_new_variant(guard: Path) -> None:
    stopping = loop(2, "staged")
    stopping["settings"]["on_nonfinite"] = "stop"
    module = {"device": "cuda", "ahead": True, "moved": False}
    calls = [loop(1, "zero_copy"), stopping, loop(1, "staged") | {"kind": "sequences"}, module]
    check(run(guard, first_launches, calls))
