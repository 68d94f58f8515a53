"""A Ctrl-C in a loop of one's own leaves a collection that goes on to the same bits."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from ebc_cases import assert_same, batches, cached, values_of
from torch import Tensor

import distcache
from distcache import lookahead

PACKAGE = str(Path(distcache.__file__).parent)
STEPS = 5
POINTS = 12


class CtrlC:
    """Sends SIGINT at call number `point` of the package in this thread, where Python sees one."""

    def __init__(self, point: int) -> None:
        self.calls = 0
        self._point = point

    def __enter__(self) -> CtrlC:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        is_ours = frame.f_code.co_filename.startswith(PACKAGE)
        if not is_ours or event not in ("call", "c_return"):
            return
        self.calls += 1
        if self.calls == self._point:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)


def weights(ebc: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in ebc.state_dict().items()}


def train(ebc: Any, data: list[Any], ahead: bool, interrupt: CtrlC | None, part: str) -> None:
    """A loop whose third step is interrupted, in its `part`."""
    for at, batch in enumerate(lookahead(data, ebc) if ahead else data):
        is_due = interrupt is not None and at == 2
        with interrupt if is_due and part == "forward" else torch.enable_grad():
            found = ebc(batch.sparse_features)
        values_of(found).square().sum().backward()
        with interrupt if is_due and part == "step" else torch.enable_grad():
            ebc.step()


def interrupted(ahead: bool, part: str, point: int) -> tuple[int, bool, dict[str, Tensor]]:
    """Train with a Ctrl-C at `point`, then go on; the calls, whether it came, and the weights."""
    ebc = cached("adagrad", rows=200, lookahead=2)
    data = batches(STEPS)
    interrupt = CtrlC(point)
    is_interrupted = False
    try:
        train(ebc, data, ahead, interrupt, part)
    except KeyboardInterrupt:
        is_interrupted = True
        ebc.optimizer.zero_grad()
        train(ebc, data[ebc.summary()["steps"] :], ahead, None, part)
    found = weights(ebc)
    ebc.close()
    return interrupt.calls, is_interrupted, found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("part", ["forward", "step"])
def test_a_loop_goes_on_after_a_ctrl_c_anywhere_in(part: str, ahead: bool) -> None:
    calls, _, expected = interrupted(ahead, part, -1)
    assert calls > POINTS
    interruptions = 0
    for point in range(1, calls + 1, -(-calls // POINTS)):
        reached, is_interrupted, found = interrupted(ahead, part, point)
        # A run that waits less for the planner makes fewer calls, and may not come to the point.
        assert is_interrupted == (reached >= point)
        assert_same(found, expected)
        interruptions += is_interrupted
    assert interruptions > POINTS // 2
