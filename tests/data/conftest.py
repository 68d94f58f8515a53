"""Fixtures of the tests of data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from criteo_lines import make_lines, write_lines


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes with one thread, and then with as many as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """700 Criteo lines."""
    return write_lines(tmp_path_factory.mktemp("text") / "train.txt", make_lines(700))
