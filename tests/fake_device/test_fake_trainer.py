"""Mode `data` on a device that does things late has the bits of `resident` there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_device.process import run

RESIDENT = ["parallel=resident"]
CPU = ["parallel=resident", "trainer.device=cpu"]

ONE = [(150, 0, "staged"), (250, 1, "zero_copy"), (430, 3, "staged")]
"""Rows, P and access: caches that hold hardly more than the rows of P + 1 steps."""

TWO = [
    (150, 0, "staged", "replicated"),
    (250, 1, "zero_copy", "mixed"),
    (290, 3, "zero_copy", "sharded"),
    (160, 1, "staged", "sharded"),
]
"""The same with the placement, for two ranks."""

REST = [
    (rows, prefetch, access, placement)
    for access in ("staged", "zero_copy")
    for placement, sizes in (
        ("replicated", (170, 260, 440)),
        ("sharded", (110, 170, 300)),
        ("mixed", (140, 200, 330)),
    )
    for prefetch, rows in zip((0, 1, 3), sizes, strict=True)
]


def keys(rows: int, prefetch: int, access: str, placement: str = "replicated") -> list[str]:
    """The keys of mode `data`."""
    given = [f"cache.rows={rows}", f"cache.prefetch={prefetch}", f"store.access={access}"]
    share = ["cache.replicated_share=0.05"] if placement == "mixed" else []
    return [*given, f"cache.placement={placement}", *share]


def calls(folder: Path, cases: list[list[str]], *common: str) -> list[dict[str, Any]]:
    """Calls of `runs.command`, each with a folder of its own."""
    return [
        {"keys": [*common, *case], "folder": str(folder / str(place))}
        for place, case in enumerate(cases)
    ]


def check(found: list[list[dict[str, Any]]]) -> None:
    """All runs on the device have the digests of the first, which is `resident`."""
    first = found[0][0]
    for by_rank in found:
        for summary in by_rank:
            for name in ("loss_digest", "state_digest"):
                assert summary[name] == first[name]
    assert min(by_rank[0]["rows_written_back"] for by_rank in found[1:]) > 50


def test_one_rank_has_the_bits_of_resident(guard: Path, tmp_path: Path) -> None:
    cases = [RESIDENT, *(keys(*case) for case in ONE), CPU]
    *found, on_cpu = run(guard, "fake_device.runs:command", calls(tmp_path, cases))
    check(found)
    # The device computes what the CPU does, but for rounding.
    assert found[0][0]["final_loss"] == pytest.approx(on_cpu[0]["final_loss"], rel=1e-5)


def test_two_ranks_have_the_bits_of_resident(guard: Path, tmp_path: Path) -> None:
    cases = [RESIDENT, *(keys(*case) for case in TWO)]
    check(run(guard, "fake_device.runs:command", calls(tmp_path, cases), ranks=2))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_placement_has_the_bits_of_resident(
    guard: Path, tmp_path: Path, ranks: int, optimizer: str
) -> None:
    cases = [RESIDENT, *(keys(*case) for case in REST if ranks > 1 or case[3] == "replicated")]
    given = calls(tmp_path, cases, f"optim={optimizer}", "trainer.steps=24")
    check(run(guard, "fake_device.runs:command", given, ranks=ranks))


def test_what_is_not_ordered_is_seen(guard: Path, tmp_path: Path) -> None:
    """Without a stream's wait for an event, or the host's for a stream, numbers are wrong."""
    cases = [RESIDENT, keys(*ONE[0]), keys(*ONE[1])]
    given = calls(tmp_path, cases)
    for call, without in zip(given, ("query", "synchronize", "wait_event"), strict=True):
        call["without"] = without  # nobody asks a stream itself: this one is as it should be
    resident, staged, in_place = run(guard, "fake_device.runs:broken", given)
    assert resident != staged
    assert resident != in_place
