"""On a device that does things late and forgets: it is as it says, and trainer and drop-in have
there the bits of `resident`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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


def loop(prefetch: int, access: str, schedule: str = "overlapped", **how: Any) -> dict[str, Any]:
    """A call of `runs.drop_in`, through a look-ahead."""
    settings = {"rows": 260, "prefetch": prefetch, "store_access": access, "schedule": schedule}
    return {"settings": settings, "device": "cuda", "ahead": True, "own_stream": False} | how


def test_a_loop_inside_a_stream_of_its_own_has_the_same_bits(guard: Path) -> None:
    calls = [
        loop(0, "staged", "serial", ahead=False),
        loop(1, "staged"),
        loop(1, "staged", own_stream=True),
        loop(3, "zero_copy", own_stream=True),
        loop(0, "staged", own_stream=True, ahead=False),
        loop(1, "staged", device="cpu"),
    ]
    *found, on_cpu = [by_rank[0] for by_rank in run(guard, "fake_device.runs:drop_in", calls)]
    assert [one["digest"] for one in found] == [found[0]["digest"]] * len(found)
    assert found[0]["losses"] == pytest.approx(on_cpu["losses"], rel=1e-5)


def test_the_device_keeps_its_promises(guard: Path) -> None:
    ((done,),) = run(guard, "fake_device.checks:checks", [None])
    assert len(done) == 6
    assert not torch.cuda.is_available()  # nothing of it here
