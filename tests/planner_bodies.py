"""The compiled loops, and the same loops as Python runs them, where NumPy checks every index."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from distcache.planner import loops

COMPILED, PYTHON = BODIES = ("compiled", "python")

NAMES = [name for name, value in vars(loops).items() if hasattr(value, "py_func")]
"""The names of the loops."""


@contextlib.contextmanager
def using(body: str) -> Iterator[None]:
    """The loops by one body while open."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
        for name in NAMES if body == PYTHON else ():
            loop = getattr(loops, name)
            patch.setattr(loops, name, getattr(loop, "py_func", loop))
        yield
