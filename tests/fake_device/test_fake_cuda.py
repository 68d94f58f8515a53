"""The device that is not there is as late, and as forgetful, as it says."""

from __future__ import annotations

from pathlib import Path

import torch
from fake_device.process import run


def test_the_device_keeps_its_promises(guard: Path) -> None:
    ((done,),) = run(guard, "fake_device.checks:checks", [None])
    assert len(done) == 6
    assert not torch.cuda.is_available()  # nothing of it here
