"""The package's own modes as contenders of `benchmarks.step`, driven as training drives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from benchmarks.report import Record
from benchmarks.turns import Contender, Feed
from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.parallel.base import Parallel, Step
from distcache.parallel.cached import CachedParallel
from distcache.step_plan import StepPlan
from distcache.trainer import build

CACHED_MODES = ("data", "serial", "replicated", "home", "sharded", "mixed", "auto")
"""Mode `data` and its variants."""

SHARDINGS = ("table_wise", "row_wise", "column_wise")
"""Mode `hybrid` with that `parallel.sharding`."""

MODES = (*CACHED_MODES, "resident", "host", "hybrid", *SHARDINGS)

STEPS_AHEAD = 8
"""Steps that the threads of a cached mode hold beside those of L and P, at most."""


class ModeContender(Contender):
    """One of the package's own modes with its planner."""

    def __init__(self, name: str, mode: Parallel, feed: Feed, steps_ahead: int) -> None:
        self.name = name
        self.mode = mode
        self.steps_ahead = steps_ahead
        self._rows = RowCounts()
        self._stream = mode.stream(feed)

    def step(self) -> Callable[[], float]:
        """See `Contender.step`."""
        step: Step = next(self._stream)
        result = self.mode.train_step(step)
        if isinstance(self.mode, CachedParallel):
            self._rows.add(step.context.plans)
        return lambda: result.loss

    def meters(self) -> dict[str, Mapping[str, float]]:
        """See `Contender.meters`; the stage `wait` is that for plans and rows."""
        mode = self.mode
        meters: dict[str, Mapping[str, float]] = {}
        if isinstance(mode, CachedParallel):
            # The timed steps stand for those between them.
            ms = 1e3 * mode.streams.timed_every
            meters["stage_ms"] = {name: ms * s for name, s in mode.clock.seconds.items()}
            meters["stage_hidden_ms"] = {name: ms * s for name, s in mode.clock.hidden.items()}
        if self.name in CACHED_MODES:
            meters["rows_per_step"] = dict(self._rows.sums)
        counters = getattr(mode, "counters", None)
        if counters is not None:
            meters["sent_per_step"] = dict(counters.values())
        return meters

    def is_steady(self) -> bool:
        """Return True if every fetched row evicts one; modes without a cache are always steady."""
        return self.name not in CACHED_MODES or self._rows.is_steady

    def summary(self) -> Record:
        """Return counts of the mode's own summary."""
        summary = self.mode.summary()
        keys = ("embedding_device_bytes", "early_rows", "placement")
        return {key: summary.get(key) for key in keys}

    def close(self) -> None:
        """See `Contender.close`."""
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()
        self.mode.close()


class RowCounts:
    """Rows of all steps over all groups of tables.

    Attributes:
        sums: distinct and fetched rows of all owners, and evictions of this rank's owner.
        is_steady: True if every row that the last step fetched evicted one.
    """

    def __init__(self) -> None:
        self.sums = {"distinct": 0, "misses": 0, "evictions": 0}
        self.is_steady = False

    def add(self, plans: Sequence[StepPlan]) -> None:
        """Add the plans of one step."""
        parts = [part for plan in plans for part in (plan, plan.shard) if part is not None]
        evictions = sum(len(part.evict_slots) for part in parts)
        self.sums["distinct"] += sum(plan.all_distinct for plan in plans)
        self.sums["misses"] += sum(part.misses for part in parts)
        self.sums["evictions"] += evictions
        self.is_steady = evictions > 0 and all(
            len(part.evict_slots) == len(part.fetch_rows) for part in parts
        )


def mode_contender(
    name: str, config: Config, world: World, parts: tuple[Any, Any, nn.Module], feed: Feed
) -> Contender:
    """Build the contender of one of `MODES` from source, tables and dense model. Collective."""
    source, tables, model = parts
    # Every contender has a planning group: planners of two contenders must not share one.
    timeout = timedelta(seconds=world.timeout_s)
    planning_group = dist.new_group(backend="gloo", timeout=timeout)
    mode_world = replace(world, planning_group=planning_group)
    mode = build.build_parallel(config_of(name, config), mode_world, tables, model, source)
    mode.set_lr(*build.build_rates(config)(0))
    has_planner = name in (*CACHED_MODES, "resident", "host")
    window = config.cache.lookahead + config.cache.prefetch + STEPS_AHEAD
    return ModeContender(name, mode, feed, window if has_planner else 0)


def config_of(name: str, config: Config) -> Config:
    """Return the configuration of a contender.

    `serial` is mode `data` with one stage after the other. The placements are of mode `data`, the
    shardings of mode `hybrid`.
    """
    mode = name
    if name in SHARDINGS:
        mode = "hybrid"
        config = replace(config, parallel=replace(config.parallel, sharding=name))
    elif name == "serial":
        mode = "data"
        config = replace(config, trainer=replace(config.trainer, schedule="serial"))
    elif name in CACHED_MODES and name != "data":
        mode = "data"
        placement = "replicated" if name == "home" else name
        state = "home" if name == "home" else "replicated"
        config = replace(config, cache=replace(config.cache, placement=placement, state=state))
    return replace(config, parallel=replace(config.parallel, mode=mode))
