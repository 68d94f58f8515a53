"""The package's own modes in the step's bench, driven as training drives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.stream import Contender, Feed
from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.engine.step import StepContext
from distcache.engine.tables import all_of
from distcache.parallel.base import Parallel, Step
from distcache.parallel.cached import CachedParallel
from distcache.step_plan import StepPlan
from distcache.trainer import build

CACHED = ("data", "serial", "replicated", "home", "sharded", "mixed", "auto")
"""Mode `data` in its variants."""

SHARDED_BY = ("table_wise", "row_wise", "column_wise")
"""Mode `hybrid` with that `parallel.sharding`."""

PIPELINED = "torchrec"
"""Mode `hybrid` as TorchRec's own `TrainPipelineSparseDist` trains it."""

MODES = (*CACHED, "resident", "host", "hybrid", *SHARDED_BY, PIPELINED)
"""Contenders that are modes of the package, and one that is built as its mode `hybrid` is."""

AHEAD = 8
"""Steps that the threads of a cached mode hold beside those of L and P, at most."""

_INDEX_BYTES = 4
"""Indices on the device are int32."""


class ModeContender(Contender):
    """One of the package's own modes, planning thread included."""

    def __init__(self, name: str, mode: Parallel, feed: Feed, ahead: int) -> None:
        self.name, self.mode, self.ahead = name, mode, ahead
        self._rows = RowCounts()
        self._stream = mode.stream(feed)
        self._parts = DeviceParts(mode) if isinstance(mode, CachedParallel) else None

    def step(self) -> Callable[[], float]:
        """See `Contender.step`."""
        step: Step = next(self._stream)
        result = self.mode.train_step(step)
        if self._parts is not None:
            self._rows.add(step.context.plans)
            self._parts.add(step.context)
        return lambda: result.loss

    def meters(self) -> dict[str, Mapping[str, float]]:
        """See `Contender.meters`; the stage `wait` is that for plans and rows."""
        mode, found = self.mode, {}
        if isinstance(mode, CachedParallel):
            ms = 1e3 * mode.streams.timed_every  # the timed steps stand for those between them
            found["stage_ms"] = {name: ms * s for name, s in mode.clock.seconds.items()}
            found["stage_hidden_ms"] = {name: ms * s for name, s in mode.clock.hidden.items()}
        if self.name in CACHED:
            found["rows_per_step"] = self._rows.sums
        if (counters := getattr(mode, "counters", None)) is not None:
            found["sent_per_step"] = counters.values()
        return {name: dict(sums) for name, sums in found.items()}

    def steady(self) -> bool:
        """With a cache: every fetched row sends one away; the other modes: always."""
        return self.name not in CACHED or self._rows.steady

    def summary(self) -> dict[str, Any]:
        """The mode's own counts, and the bound on its device bytes."""
        summary = self.mode.summary()
        keys = ("embedding_device_bytes", "cache_rows", "collective_bytes", "early_rows")
        values = {key: summary.get(key) for key in (*keys, "placement", "cache_state")}
        if isinstance(self.mode, CachedParallel) and self._parts is not None:
            most = self._rows.most_distinct
            values["embedding_bytes_bound"] = embedding_bound(self.mode, most)
            values["device_parts"] = self._parts.summary()
        return values

    def close(self) -> None:
        """See `Contender.close`."""
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()
        self.mode.close()


class RowCounts:
    """Rows of all steps so far over all groups, and the most distinct ones of any step.

    `steady`: whether every row that the last step fetched sent one away.
    """

    def __init__(self) -> None:
        self.sums = {"distinct": 0, "misses": 0, "evictions": 0}
        self.most_distinct, self.steady = 0, False

    def add(self, plans: Sequence[StepPlan]) -> None:
        """Note the plans of one step. Evictions are those of this rank's home."""
        parts = [part for plan in plans for part in (plan, plan.shard) if part is not None]
        distinct = sum(plan.all_distinct for plan in plans)
        evictions = sum(len(part.evict_slots) for part in parts)
        self.sums["distinct"] += distinct
        self.sums["misses"] += sum(part.misses for part in parts)
        self.sums["evictions"] += evictions
        self.most_distinct = max(self.most_distinct, distinct)
        self.steady = evictions > 0 and all(
            len(part.evict_slots) == len(part.fetch_rows) for part in parts
        )


def embedding_bound(mode: CachedParallel, distinct: int) -> int:
    """slots (D + S) + 3 U D + 2 U (D + S), in bytes: slots, the rows' copies, gradients and sums,
    and staging of at most U fetched and U outgoing rows, for the largest step's U (`distinct`).

    In mode `host` all rows of the step before leave: the same bound.
    """
    total = 0
    for rows in mode.rows:
        cache = rows.cache
        total += (cache.slots + 2 * distinct) * rows.row_bytes
        total += 3 * distinct * cache.dim * cache.kind.dtype.itemsize
    return total


class DeviceParts:
    """What a cached mode keeps on the device, part by part, in bytes: as the design counts it, and
    as it is, the largest of any step; but for `slots` and `dense` it depends on the batch alone.

    `slots`: C (D + S) elements per group. `ids`: index tensors, dense features and labels of P + 1
    steps, beside those of a few that are over. `rows`: a step's rows, their gradients and sums, 3 U
    D, and of N sharded rows, of which H are this home's, (2 N + H) D. `moving`: rows on their way
    in and out. `dense`: parameters, gradients and optimizer state.
    """

    def __init__(self, mode: CachedParallel) -> None:
        self._mode, count = mode, mode.tables.count
        self._most: dict[str, dict[str, int]] = {}
        self._rows = 0

        def counted(context: StepContext) -> None:  # once it is over, a step has no rows any more
            grads = [leaf.grad for leaf in context.leaves]
            self._rows = nbytes([*context.leaves, *grads, *all_of(context.result.sums)])
            count(context)

        mode.tables.count = counted

    def add(self, context: StepContext) -> None:
        """Take in one training step that was run."""
        mode, batch = self._mode, context.batch
        ahead = mode.settings.prefetch + 1 if mode.settings.schedule == "overlapped" else 1
        item, index, rows, moving = mode.settings.dtype.itemsize, 0, 0, 0
        floats = len(batch.labels) * (batch.dense.shape[1] + 1)
        for plan, bags, of in zip(context.plans, context.bags, mode.rows, strict=True):
            shard, size = plan.shard, of.cache.dim * item
            index += 3 * len(plan.positions) + len(bags.offsets) + 4 * plan.distinct + 1
            floats += sum(len(part) for part in (bags.weights, bags.divisors) if part is not None)
            rows += 3 * plan.distinct * size
            moving += (plan.misses + len(plan.evict_slots)) * of.row_bytes
            if shard is not None:
                index += 2 * shard.rows
                rows += (2 * shard.rows + len(shard.slots)) * size
                moving += (len(shard.fetch_slots) + len(shard.evict_slots)) * of.row_bytes
        ids = [tensor for of in context.where for tensor in of.tensors()]
        ids += [tensor for part in context.lookups for bags in part for tensor in bags.tensors()]
        on_device = ahead * nbytes([*ids, context.dense, context.labels])
        moved = sum(c.host_to_device_bytes + c.device_to_host_bytes for c in context.counts)
        self._keep("ids", ahead * (_INDEX_BYTES * index + item * floats), on_device)
        self._keep("rows", rows, self._rows)
        self._keep("moving", moving, moved)

    def _keep(self, name: str, expected: int, measured: int) -> None:
        found = self._most.setdefault(name, {"expected": 0, "measured": 0})
        found["expected"] = max(found["expected"], expected)
        found["measured"] = max(found["measured"], measured)

    def summary(self) -> dict[str, dict[str, int]]:
        """`{part: {expected, measured}}`, and on CUDA the allocator's `peak`."""
        mode = self._mode
        slots = sum(rows.cache.slots * rows.row_bytes for rows in mode.rows)
        held = [part for rows in mode.rows for part in (rows.cache.weight, rows.cache.state)]
        self._keep("slots", slots, nbytes(held))
        of_state = [value for of in mode.dense_optimizer.state.values() for value in of.values()]
        state = [value for value in of_state if isinstance(value, Tensor)]
        dense = list(mode.model.parameters())
        expected = 2 * nbytes(dense) + nbytes(state)
        self._keep("dense", expected, nbytes([*dense, mode.dense.flat, *state]))
        if mode.world.device.type == "cuda":
            total = sum(part["expected"] for part in self._most.values())
            peak = torch.cuda.max_memory_allocated(mode.world.device)
            self._keep("peak of the allocator", total, peak)
        return self._most


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of distinct tensors' elements; one that is named twice counts once."""
    seen = {t.data_ptr(): t.nbytes for t in tensors if t is not None and t.numel()}
    return sum(seen.values())


def mode_contender(
    name: str, config: Config, world: World, parts: tuple[Any, Any, nn.Module], feed: Feed
) -> Contender:
    """The contender of one of `MODES`; `parts`: source, tables, dense model. Collective."""
    source, tables, model = parts
    if name == PIPELINED:
        from benchmarks.pipelined import Pipelined  # needs TorchRec, which the other modes do not

        return Pipelined(config, world, parts, feed)
    # A planning group for each: its planning thread must not meet those of the others on one.
    timeout = timedelta(seconds=world.timeout_s)
    own = replace(world, planning_group=dist.new_group(backend="gloo", timeout=timeout))
    mode = build.build_parallel(config_of(name, config), own, tables, model, source)
    mode.set_lr(*build.build_rates(config)(0))
    planned = name in (*CACHED, "resident", "host")
    ahead = config.cache.lookahead + config.cache.prefetch + AHEAD if planned else 0
    return ModeContender(name, mode, feed, ahead)


def config_of(name: str, config: Config) -> Config:
    """The configuration of a contender: `serial` is mode `data`, one stage after the other; the
    placements are of mode `data`, the shardings of mode `hybrid`."""
    mode = name
    if name in CACHED:
        mode = "data"
        if name == "serial":
            config = replace(config, trainer=replace(config.trainer, schedule="serial"))
        elif name != "data":
            kind, state = ("replicated", "home") if name == "home" else (name, "replicated")
            config = replace(config, cache=replace(config.cache, placement=kind, state=state))
    elif name in SHARDED_BY:
        mode = "hybrid"
        config = replace(config, parallel=replace(config.parallel, sharding=name))
    return replace(config, parallel=replace(config.parallel, mode=mode))
