"""Fixtures of the command line's tests."""

from __future__ import annotations

import pytest
import ranks


@pytest.fixture
def free_port() -> int:
    """A TCP port that nobody listens on now."""
    return ranks.free_port()
