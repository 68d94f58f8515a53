"""The library that gives the CPU build of torch a CUDA device, made once for a run of tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_device import process


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """guard.cpp as a library, which takes seconds; skips where it cannot be made or is no use."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip(
            f"torch {torch.__version__} is a build for GPUs, whose CUDA device cannot be "
            "replaced: install a CPU build (https://download.pytorch.org/whl/cpu)"
        )
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine, which the fake CUDA device is made with")
    of_torch = Path(torch.__file__).parent
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    source = Path(__file__).with_name("guard.cpp")
    made = subprocess.run(
        [
            compiler, "-std=c++17", "-O0", "-w", "-shared", "-fPIC", source, "-o", library,
            f"-I{of_torch / 'include'}", f"-L{of_torch / 'lib'}", "-lc10", "-ltorch_cpu",
            f"-Wl,-rpath,{of_torch / 'lib'}",
        ],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    yield library
    process.stop()
