"""Errors of the parts below, in the words of the library."""

from __future__ import annotations

import pytest

from distcache.embedding.settings import CacheSettings, library_words
from distcache.errors import ConfigError, MemoryTooSmallError


@pytest.mark.parametrize(
    ("key", "argument"),
    [
        ("set store.access=staged, or", "set store_access='staged', or"),
        ("store.access=zero_copy takes", "store_access='zero_copy' takes"),
        ("lower cache.rows (or cache.ratio)", "lower rows (or ratio)"),
        ("data.on_bad_id=hash", "on_bad_id='hash'"),
        ("python -m distcache.analyze", "python -m distcache.analyze"),
    ],
)
def test_keys_become_arguments(key: str, argument: str) -> None:
    with pytest.raises(MemoryTooSmallError) as caught, library_words():
        raise MemoryTooSmallError(f"no room: {key}")
    assert str(caught.value) == f"no room: {argument}"


def test_an_unknown_way_of_access_is_refused() -> None:
    assert CacheSettings(store_access="zero_copy").store_access == "zero_copy"
    with pytest.raises(ConfigError, match="store_access='direct' is not 'staged' or 'zero_copy'"):
        CacheSettings(store_access="direct")
