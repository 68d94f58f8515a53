"""Fixtures that every test folder shares."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from drawing import ALL, FEW
from hypothesis import settings

if not torch.cuda.is_available():
    # Before anything imports Triton (TorchRec does): without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from ranks import share_all

from distcache.comm.world import World, close_world, open_world

CHECKOUT = Path(__file__).resolve().parent.parent
LONG = ("docs", "end_to_end", "trainer", "checkpoint", "parallel", "pipeline", "embedding", "nodes")
STARTED = time.monotonic()

share_all()


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
    above = [folder / "shared" / "data" for folder in CHECKOUT.parents[:2]]
    for place in [Path(given)] if given else above:
        if place.is_dir():
            return place
    pytest.skip(f"no sample files at {given or above}: set DISTCACHE_SHARED")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A world of this process alone."""
    opened = open_world("cpu", "gloo", 60)
    yield opened
    close_world(opened)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes with one thread; a look-ahead's own threads must have ended."""
    torch.set_num_threads(1)
    yield
    gc.collect()
    left = [t for t in threading.enumerate() if t.name.startswith("distcache")]
    assert not left, "a planner's thread has outlived its loop"


def draws_in_full(config: pytest.Config) -> bool:
    """Whether the slow tests run, and property tests with all their examples among them."""
    return "slow" in config.option.markexpr.replace("not slow", "")


def pytest_configure(config: pytest.Config) -> None:
    """A property test draws few examples, unless the slow tests run or a profile is named.

    Ctrl-C is heard also where a shell has started the tests in its background, without it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.getoption("--hypothesis-profile", None):
        settings.load_profile(ALL if draws_in_full(config) else FEW)


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The folders with the longest files first: where several processes run files, none of these is
    left to the end. Where the slow tests run, property tests are among them."""
    for item in items if draws_in_full(config) else ():
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("slow")
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.parent.name, len(order)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collections that tests ask for need not walk it."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip `gpu` tests without a CUDA device, and `slow` ones once $DISTCACHE_SLOW_S are over.

    Operations on small tensors get one thread: several would only wait for each other, ten times as
    long where the machine has more to do. A test of threads asks for them.
    """
    torch.set_num_threads(1)
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    budget = os.environ.get("DISTCACHE_SLOW_S")
    if budget and item.get_closest_marker("slow") and time.monotonic() - STARTED > float(budget):
        pytest.skip(f"the time for slow tests is over: DISTCACHE_SLOW_S={budget}")
