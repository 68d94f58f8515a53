"""The compiled loops, and the same loops as Python runs them, where NumPy checks every index."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from distcache.planner import loops
from distcache.popularity import loops as counting_loops

COMPILED, PYTHON = BODIES = ("compiled", "python")

NAMES = {
    module: [name for name, value in vars(module).items() if hasattr(value, "py_func")]
    for module in (loops, counting_loops)
}
"""The names of the loops that each module of them has."""


@contextlib.contextmanager
def using(body: str) -> Iterator[None]:
    """The loops by one body while open."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore"):
        for module, names in NAMES.items():
            for name in names if body == PYTHON else ():
                loop = getattr(module, name)
                patch.setattr(module, name, getattr(loop, "py_func", loop))
        yield
