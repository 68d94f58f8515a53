"""The keys of group `cache`, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping

from distcache.config import CacheConfig
from distcache.errors import ConfigError

_HOW = "give cache.statistics=<folder of python -m distcache.analyze or preprocess>"


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
    _check_popularity(cache)


def _check_popularity(cache: CacheConfig) -> None:
    """The keys that read `cache.statistics`."""
    warm, split, known = cache.warm_start, cache.split, cache.statistics is not None
    number = isinstance(warm, int | float) and not isinstance(warm, bool)
    if warm != "auto" and not (number and 0 <= warm <= 1):
        raise ConfigError(
            f"cache.warm_start={warm} is a share of the slots: give a number from 0 to 1, or auto"
        )
    if number and warm > 0 and not known:
        raise ConfigError(
            f"cache.warm_start={warm} fills slots with the most frequent rows, and which those are "
            f"is not known: {_HOW}, or leave cache.warm_start out"
        )
    if cache.order == "popularity" and not known:
        raise ConfigError(
            f"cache.order=popularity needs to know how often rows are looked up: {_HOW}, or use "
            "cache.order=ids"
        )
    if isinstance(split, Mapping):
        for name, rows in split.items():
            if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
                raise ConfigError(
                    f"cache.split: {name}={rows}: give a whole number of rows, at least 0"
                )
        return
    if split not in ("proportional", "by_curve"):
        raise ConfigError(
            f"cache.split={split} is unknown: choose proportional or by_curve, or give the rows "
            "of each table: cache.split='{t_cat_0:1000,t_cat_1:500}'"
        )
    if split == "by_curve" and not known:
        raise ConfigError(
            f"cache.split=by_curve needs to know how often rows are looked up: {_HOW}, or use "
            "cache.split=proportional"
        )
