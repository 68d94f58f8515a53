"""Every body of the compiled loops, and whether two results of theirs are the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import planner_twins
import pytest
import torch

from distcache.planner import loops, victims

COMPILED, NUMPY, PYTHON = "compiled", "numpy", "python"
"""Machine code, the NumPy twins, and the loops as Python runs them: there NumPy checks indices."""

BODIES = (COMPILED, NUMPY)
ALL = (NUMPY, COMPILED, PYTHON)

TWINS = {loops: planner_twins}
NAMES = {
    module: [name for name, value in vars(module).items() if hasattr(value, "py_func")]
    for module in TWINS
}
"""The names of the loops that each module of them has."""


@contextlib.contextmanager
def using(body: str) -> Iterator[None]:
    """The loops by one body while open."""
    with pytest.MonkeyPatch.context() as patch:
        for module, names in NAMES.items():
            for name in names if body != COMPILED else ():
                loop = getattr(module, name)
                twin = loop.py_func if body == PYTHON else getattr(TWINS[module], name, loop)
                patch.setattr(module, name, twin)
        if body == NUMPY:  # the twins of the loops over lists and the window are these classes
            patch.setattr(victims, "Queue", planner_twins.Queue)
            patch.setattr(victims, "Window", planner_twins.Window)
        yield


def equal(one: object, other: object) -> bool:
    """Whether two results are the same: arrays by dtype and value."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, tuple) and not hasattr(one, "_fields"):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "__dict__"):
        return all(equal(value, vars(other)[name]) for name, value in vars(one).items())
    return one == other
