"""The keys of group `cache`, checked as a whole."""

from __future__ import annotations

from distcache.config import CacheConfig
from distcache.errors import ConfigError


def check_cache(cache: CacheConfig) -> None:
    """Raise ConfigError for keys that contradict each other or are out of range."""
    sizes = {"rows": cache.rows, "ratio": cache.ratio, "bytes": cache.bytes}
    given = [f"cache.{name}={value}" for name, value in sizes.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} contradict each other: give one of them")
    if cache.ratio is not None and not 0 < cache.ratio <= 1:
        raise ConfigError(
            f"cache.ratio={cache.ratio} is a share of the rows: give a number above 0 and at most "
            "1, or cache.rows=<slots per rank>"
        )
