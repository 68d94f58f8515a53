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
        name = given[-1].partition("=")[0]
        raise ConfigError(
            f"{' and '.join(given)} contradict each other: give one of them (null takes back what "
            f"an experiment brings: {name}=null)"
        )
    if cache.ratio is not None and not 0 < cache.ratio <= 1:
        raise ConfigError(
            f"cache.ratio={cache.ratio} is a share of the rows: give a number above 0 and at most "
            "1, or cache.rows=<slots per rank>"
        )
    _check_policy(cache)
    _check_popularity(cache)
    _check_placement(cache)


def _check_placement(cache: CacheConfig) -> None:
    rows, share = cache.replicated_rows, cache.replicated_share
    if rows is not None and share is not None:
        raise ConfigError(
            f"cache.replicated_rows={rows} and cache.replicated_share={share} contradict each "
            "other: give one of them"
        )
    given = {"replicated_rows": rows, "replicated_share": share}
    for name, value in given.items():
        if value is not None and cache.placement != "mixed":
            raise ConfigError(
                f"cache.{name}={value} says which rows cache.placement=mixed replicates, but "
                f"cache.placement={cache.placement}: leave it out, or use cache.placement=mixed"
            )
    if cache.reduction == "native" and (cache.placement != "replicated" or cache.state == "home"):
        key = "state" if cache.placement == "replicated" else "placement"
        raise ConfigError(
            f"cache.reduction=native lets the library sum rows that all ranks hold, but "
            f"cache.{key}={getattr(cache, key)} sums them at their homes: leave one of them out"
        )
    if cache.cluster is not None and cache.placement not in ("auto", "mixed"):
        raise ConfigError(
            f"cache.cluster={cache.cluster} is for a choice by prediction, but cache.placement="
            f"{cache.placement} leaves none: leave it out, or use cache.placement=auto"
        )
    if share is not None and not 0 < share < 1:
        raise ConfigError(
            f"cache.replicated_share={share} is a share of all rows: give a number above 0 and "
            "below 1, or use cache.placement=sharded (none) or replicated (all)"
        )
    if rows is not None:
        _check_replicated_rows(rows)


def _check_replicated_rows(rows: object) -> None:
    if not isinstance(rows, Mapping):
        raise ConfigError(
            f"cache.replicated_rows={rows}: give the rows of each table, "
            "cache.replicated_rows='{t_cat_0:1000,t_cat_1:500}'"
        )
    for name, count in rows.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigError(
                f"cache.replicated_rows: {name}={count}: give a whole number of rows, at least 0"
            )


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


def _check_policy(cache: CacheConfig) -> None:
    ahead, life = cache.policy == "lookahead", cache.half_life
    if cache.tail != CacheConfig().tail and not ahead:
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
