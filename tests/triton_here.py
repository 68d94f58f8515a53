"""The kernels on the device that there is: compiled on a GPU, else in Triton's interpreter.

A test module that imports this is skipped where they cannot run.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distcache import ops
from distcache.versions import installed, minor

pytest.importorskip("triton", reason="Triton is not installed")
kernels = ops.triton_bodies()

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
if not kernels.INTERPRETED and not CUDA:
    pytest.skip("no GPU, and Triton was imported without TRITON_INTERPRET=1", True)
if kernels.INTERPRETED and CUDA:
    pytest.skip("TRITON_INTERPRET=1 is set: unset it to test the kernels on the GPU", True)
if kernels.INTERPRETED and minor(installed("triton")) < "3.7" and np.__version__ >= "2.4":
    pytest.skip("the interpreter of Triton before 3.7 needs NumPy before 2.4", True)

DIMS = [1, 2, 3, 4, 5, 8, 12, 16, 20, 33, 64, 100, 128, 260, 512]


def here(value):
    """A tensor, None or chunk tables on the device of the kernels."""
    return None if value is None else value.to(DEVICE)


def lookup(*call):
    """`pooled_lookup` of the kernels, on the CPU."""
    return kernels.pooled_lookup(*map(here, call)).cpu()


def gradients(*call):
    """`row_gradients` of the kernels, on the CPU."""
    return kernels.row_gradients(*map(here, call)).cpu()
