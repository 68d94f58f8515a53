"""Every body of the planner's loops, and whether two results of theirs are the same."""

from __future__ import annotations

import numpy as np
import torch

from distcache.planner.calls import NUMPY, Bodies
from distcache.planner.calls import PLAIN as BY_NAME

PLAIN = Bodies("python", **BY_NAME)
"""The loops as Python runs them, so that NumPy checks every index."""

ALL = (NUMPY, "compiled", PLAIN)


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
