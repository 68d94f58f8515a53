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
    _check_policy(cache)


def _check_policy(cache: CacheConfig) -> None:
    ahead, life = cache.policy == "lookahead", cache.half_life
    if cache.tail != "lru" and not ahead:
        raise ConfigError(
            f"cache.tail={cache.tail} orders what cache.policy=lookahead leaves open, and "
            f"cache.policy={cache.policy} leaves nothing open: leave one of them out"
        )
    name, ranking = ("tail", cache.tail) if ahead else ("policy", cache.policy)
    if ranking in ("frequency", "static") and cache.statistics is None:
        raise ConfigError(
            f"cache.{name}={ranking} ranks rows by how often they are looked up: give "
            "cache.statistics=<folder> made by python -m distcache.analyze or distcache.preprocess"
        )
    if life == "auto":
        return
    if isinstance(life, bool) or not isinstance(life, int | float) or not 1 <= life <= 10**9:
        raise ConfigError(
            f"cache.half_life={life} is out of range: give auto, or steps from 1 to 1000000000"
        )
    if ranking != "lfu":
        raise ConfigError(
            f"cache.half_life={life} is for counts, which cache.{name}={ranking} does not keep: "
            "leave it out, or use cache.tail=lfu or cache.policy=lfu"
        )
