"""Fixtures that every test folder shares."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports Triton (TorchRec does): without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

CHECKOUT = Path(__file__).resolve().parent.parent
LONG = ("docs", "end_to_end", "trainer", "parallel", "pipeline", "embedding", "nodes")
STARTED = time.monotonic()


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the checkout."""
    return CHECKOUT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of sample files: $DISTCACHE_SHARED, or `shared/data` beside or above the checkout.

    Skips the test where there is none.
    """
    given = os.environ.get("DISTCACHE_SHARED")
    above = [folder / "shared" / "data" for folder in list(CHECKOUT.parents)[:2]]
    places = [Path(given)] if given else above
    for place in places:
        if place.is_dir():
            return place
    pytest.skip(f"no sample files at {' or '.join(map(str, places))}: set DISTCACHE_SHARED")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folders with the longest files first: where several processes run files, none of these is
    left to the end."""
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collections that tests ask for need not walk it."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip `gpu` tests without a CUDA device, and `slow` ones once $DISTCACHE_SLOW_S are over."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    budget = os.environ.get("DISTCACHE_SLOW_S")
    if budget and item.get_closest_marker("slow") and time.monotonic() - STARTED > float(budget):
        pytest.skip(f"the time for slow tests is over: DISTCACHE_SLOW_S={budget}")
