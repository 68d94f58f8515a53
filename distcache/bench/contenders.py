"""What takes turns in the step bench: the parallel modes, and yardsticks of other libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distcache.bench.device_parts import DeviceParts
from distcache.bench.step_batches import Feed
from distcache.engine.step import Flight
from distcache.parallel.base import Parallel, Step
from distcache.parallel.cached import CachedParallel
from distcache.parallel.hybrid import HybridParallel


@dataclass
class Traffic:
    """Rows of all steps so far over all groups, and the most distinct ones of any step."""

    distinct: int = 0
    misses: int = 0
    evictions: int = 0
    most_distinct: int = 0
    steady: bool = False
    """Whether every row that the last step fetched sent one away."""

    def add(self, planned: Flight) -> None:
        """Note the plans of one step."""
        plans = planned.plans
        distinct, misses = sum(p.all_distinct for p in plans), sum(p.all_misses for p in plans)
        evictions = sum(len(p.evict_slots) for p in plans)
        evictions += sum(len(p.shard.evict_slots) for p in plans if p.shard is not None)
        self.distinct += distinct
        self.misses += misses
        self.evictions += evictions
        self.most_distinct = max(self.most_distinct, distinct)
        # Evictions are those of this rank's home; on one rank they are all.
        self.steady = evictions > 0 and all(
            len(part.evict_slots) == len(part.fetch_rows)
            for p in plans
            for part in (p, p.shard)
            if part is not None
        )


class Contender(ABC):
    """A model with its tables that trains a step at a time on batches of its own feed."""

    name: str
    ahead: int = 0
    """Steps of the stream that it reads before it trains them."""

    @abstractmethod
    def prepare(self, steps: int) -> None:
        """Make ready, outside the timed part, what a data loader would: the next `steps` steps."""

    @abstractmethod
    def step(self) -> Callable[[], float]:
        """Train on the next batch; what gives the loss, mean over the global batch.

        On a GPU the host may be two steps ahead of the device; asking for the loss waits for it.
        """

    def stage_seconds(self) -> dict[str, float]:
        """Seconds so far by stage; empty where there are no stages."""
        return {}

    def hidden_seconds(self) -> dict[str, float]:
        """Of these, seconds that training did not wait for, of stages beside it."""
        return {}

    def rows(self) -> dict[str, int]:
        """Rows so far: `distinct`, `misses` and `evictions`; empty where none is planned."""
        return {}

    def sent(self) -> dict[str, int]:
        """Bytes that this rank has sent so far, by category; empty where nobody counts."""
        return {}

    def steady(self) -> bool:
        """Whether the last step was like all that follow."""
        return True

    def summary(self) -> dict[str, Any]:
        """Values of the record of this contender; called by all ranks."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Let go of threads and tables."""


class ModeContender(Contender):
    """One of the package's own modes, driven as training drives it, planning thread included."""

    def __init__(
        self, name: str, mode: Parallel, feed: Feed, ahead: int, cached: bool = False
    ) -> None:
        self.name, self.mode, self.ahead, self._cached = name, mode, ahead, cached
        self.traffic = Traffic()
        self._stream = mode.stream(feed)
        self._parts = DeviceParts(mode) if isinstance(mode, CachedParallel) else None

    def prepare(self, steps: int) -> None:
        """Nothing: planning runs beside training, and counts."""

    def step(self) -> Callable[[], float]:
        """See `Contender.step`."""
        step: Step = next(self._stream)
        if isinstance(step.flight, Flight):
            self.traffic.add(step.flight)
        result = self.mode.train_step(step)
        if self._parts is not None:
            self._parts.add(step.flight)
        return lambda: result.loss

    def stage_seconds(self) -> dict[str, float]:
        """See `Contender.stage_seconds`; `wait` is that for plans and rows."""
        return dict(self.mode.clock.seconds) if isinstance(self.mode, CachedParallel) else {}

    def hidden_seconds(self) -> dict[str, float]:
        """See `Contender.hidden_seconds`."""
        return dict(self.mode.clock.hidden) if isinstance(self.mode, CachedParallel) else {}

    def rows(self) -> dict[str, int]:
        """See `Contender.rows`; evictions are those of this rank's home."""
        if not self._cached:
            return {}
        traffic = self.traffic
        names = ("distinct", "misses", "evictions")
        return {name: getattr(traffic, name) for name in names}

    def sent(self) -> dict[str, int]:
        """See `Contender.sent`: `comm.counters.CATEGORIES`."""
        counted = isinstance(self.mode, CachedParallel | HybridParallel)
        return self.mode.counters.values() if counted else {}

    def steady(self) -> bool:
        """With a cache: every fetched row sends one away; the other modes: always."""
        return not self._cached or self.traffic.steady

    def summary(self) -> dict[str, Any]:
        """The mode's own counts, and the bound on its device bytes."""
        summary = self.mode.summary()
        keys = ("embedding_device_bytes", "cache_rows", "collective_bytes", "early_rows")
        keys += ("placement", "cache_state")
        values = {key: summary.get(key) for key in keys}
        if isinstance(self.mode, CachedParallel):
            values["embedding_bytes_bound"] = embedding_bound(self.mode, self.traffic)
        if self._parts is not None:
            values["device_parts"] = self._parts.summary()
        return values

    def close(self) -> None:
        """See `Contender.close`."""
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()
        self.mode.close()


def embedding_bound(mode: CachedParallel, traffic: Traffic) -> int:
    """slots (D + S) + 3 U D + 2 U (D + S), in bytes: slots, the rows' copies, gradients and sums,
    and staging of at most U fetched and U outgoing rows, for the largest step's U.

    In mode `host` all rows of the step before leave: the same bound.
    """
    total = 0
    for rows in mode.rows:
        cache, distinct = rows.cache, traffic.most_distinct
        total += cache.slots * rows.row_bytes
        total += 3 * distinct * cache.dim * cache.dtype.itemsize + 2 * distinct * rows.row_bytes
    return total
