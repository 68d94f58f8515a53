"""Fixtures that every test folder shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the checkout."""
    return CHECKOUT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of sample files: $DISTCACHE_SHARED, or `shared/data` beside or above the checkout.

    Skips the test where there is none.
    """
    given = os.environ.get("DISTCACHE_SHARED")
    above = [folder / "shared" / "data" for folder in list(CHECKOUT.parents)[:2]]
    places = [Path(given)] if given else above
    for place in places:
        if place.is_dir():
            return place
    pytest.skip(f"no sample files at {' or '.join(map(str, places))}: set DISTCACHE_SHARED")
