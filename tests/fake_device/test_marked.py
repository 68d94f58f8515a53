"""The tests that are marked `gpu` and need no real one, in a process that has the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_device.process import run

TESTS = Path(__file__).resolve().parent.parent

RANKS = "starts processes of its own: test_drawn.py has ranks in all placements"
REAL = {
    "test_ranks_that_share_a_gpu_agree_with_the_cpu": RANKS,
    "test_every_placement_has_the_bits_of_resident": RANKS,
    "test_device_memory_is_what_the_parts_add_up_to": "asks a real allocator for its bytes",
    "test_a_new_cache_is_empty_and_numpy_indices_are_copied": "tensors are of a subclass here",
    "test_others_tables_train_the_same": "trains the CUDA build of FBGEMM",
}
"""What needs a real device, and why."""

QUICK = "not test_cuda"
"""Of the others, `-k` of those that take few seconds."""


class Ends:
    """A plugin: leaves out `REAL`, and keeps how each test has ended and what it said."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}
        self.real: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        marked = [item for item in items if item.get_closest_marker("gpu")]
        self.real = {item.originalname for item in marked} & set(REAL)
        items[:] = [item for item in marked if item.originalname not in REAL]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.found[report.nodeid] = report.outcome, str(report.longrepr or "")


def marked(chosen: str) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """What becomes of the marked tests that are `chosen`, and those of `REAL` that there are."""
    from fake_device import fake_nccl  # where the device is

    ends = Ends()
    files = [str(file) for file in TESTS.rglob("test_*.py") if "mark.gpu" in file.read_text()]
    with fake_nccl.nccl():
        pytest.main(
            ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen, *files], [ends]
        )
    return ends.found, ends.real


def check(guard: Path, chosen: str, least: int) -> set[str]:
    """They pass."""
    (((found, real),),) = run(guard, marked, [chosen], timeout=900)
    failed = {name: said for name, (outcome, said) in found.items() if outcome != "passed"}
    assert not failed, "\n".join(failed.values())
    assert len(found) >= least
    return real


def test_quick_tests_that_are_marked_pass(guard: Path) -> None:
    check(guard, QUICK, 8)


@pytest.mark.slow
def test_all_tests_that_are_marked_pass(guard: Path) -> None:
    """But for those that need a real device, which are there."""
    assert check(guard, "", 25) == set(REAL)
