"""The lock files are complete: every requirement is pinned, and so is whatever it requires."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launch import pick

OUTSIDE = {"torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"}


def required(name: str) -> set[str]:
    """Names that an installed distribution requires here, without its extras."""
    wanted = map(Requirement, importlib.metadata.requires(name) or [])
    here = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return {canonicalize_name(one.name) for one in here}


def test_every_line_is_pinned_once() -> None:
    wanted = pick.lines(pick.BUILD, pick.LOCK, pick.TEST)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in wanted)
    names = [pick.normalised(line)[0] for line in wanted]
    assert len(names) == len(set(names))


def test_requirements_of_the_locked_are_locked() -> None:
    names = {pick.normalised(line)[0] for line in pick.lines(pick.BUILD, pick.LOCK, pick.TEST)}
    for name in sorted(names | {"torchrec"}):
        assert required(name) <= names | OUTSIDE, name


def test_triton_is_the_one_that_torch_wants() -> None:
    wanted = [Requirement(one) for one in importlib.metadata.requires("torch") or []]
    named = [one for one in wanted if canonicalize_name(one.name) == "triton"]
    if not named:
        pytest.skip("a CPU build of torch names no triton")
    if importlib.metadata.version("torch").split("+")[0] != pick.TORCH:
        pytest.skip("another torch than the pinned one brings its own triton")
    (ours,) = (v for n, v in map(pick.normalised, pick.lines(pick.TEST)) if n == "triton")
    assert all(ours in one.specifier for one in named)
