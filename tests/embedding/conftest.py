"""Both kinds of collection, and loops that leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import ebc_cases
import pytest


@pytest.fixture(params=ebc_cases.KINDS)
def kind(request) -> Iterator[str]:
    """The test runs with pooled and with sequence embeddings, see `ebc_cases.using`."""
    ebc_cases.using(request.param)
    yield request.param
    ebc_cases.using("bags")


@pytest.fixture
def sequences() -> Iterator[None]:
    """The test runs with sequence embeddings."""
    ebc_cases.using("sequences")
    yield
    ebc_cases.using("bags")
