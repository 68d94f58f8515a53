"""The drop-in collection on a device that does things late: the same bits, whatever the stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_device.process import run


def call(prefetch: int, access: str, schedule: str = "overlapped", **how: Any) -> dict[str, Any]:
    """A call of `runs.drop_in`, through a look-ahead."""
    settings = {"rows": 260, "prefetch": prefetch, "store_access": access, "schedule": schedule}
    return {"settings": settings, "device": "cuda", "ahead": True, "own_stream": False} | how


def test_a_loop_inside_a_stream_of_its_own_has_the_same_bits(guard: Path) -> None:
    calls = [
        call(0, "staged", "serial", ahead=False),
        call(1, "staged"),
        call(1, "staged", own_stream=True),
        call(3, "zero_copy", own_stream=True),
        call(0, "staged", own_stream=True, ahead=False),
        call(1, "staged", device="cpu"),
    ]
    *found, on_cpu = [by_rank[0] for by_rank in run(guard, "fake_device.runs:drop_in", calls)]
    assert [one["digest"] for one in found] == [found[0]["digest"]] * len(found)
    assert found[0]["losses"] == pytest.approx(on_cpu["losses"], rel=1e-5)
