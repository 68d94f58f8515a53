"""Runs whose rows move beside the steps: what is trained, how far ahead, delays."""

from __future__ import annotations

from dataclasses import replace

from oracle import OPTIMIZERS
from scenarios import Scenario, table

from distcache.parallel.cached import CachedSettings

TABLES = (table("a", 300), table("b", 40, features=2), table("c", 7, dim=4), table("d", 1))
SHAKE_MS = 3.0


def case(optimizer: str = "adam", **changes: object) -> Scenario:
    """Weighted bags of four tables, a short last batch; `changes` of it."""
    spec, lr = OPTIMIZERS[optimizer]
    return replace(Scenario(TABLES, spec, lr, steps=20, weighted=True, last_batch=5), **changes)


def cached(lookahead: int, prefetch: int, **changes: object) -> CachedSettings:
    """Mode `data` with few rows in the cache, every plan checked."""
    return CachedSettings("data", (216, 12), lookahead, prefetch, validate=True, **changes)
