"""What a run counts for `summary.json`: bytes, rows, phases, and the ranks' shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from distcache.comm.link import CollectiveCounters
from distcache.comm.world import World
from distcache.engine.groups import Placement
from distcache.engine.movement import GroupRows, MoveCounts
from distcache.engine.step import TRAINING, WAIT, Flight, StageClock
from distcache.step_plan import StepPlan

# -----------------------------------------------------------------------------
# How evenly rows and their traffic fall to the ranks, and how much of the traffic is hidden.

COLLECTIVE = ("fill", "share_early", "share_late", "sync", "return_rows")
"""Stages of several ranks that exchange."""


class RankLoad:
    """Over all training steps: rows of this rank's home that some rank looked up, sharded rows that
    came to this rank from their homes, and those of them that came before their step."""

    def __init__(self) -> None:
        self.steps = self.rows = self.received = self.early = 0

    def add(self, plans: Sequence[StepPlan], rank: int) -> None:
        """Count one step."""
        self.steps += 1
        for plan in plans:
            self.rows += plan.home_counts[rank]
            shard = plan.shard
            if shard is not None:
                self.rows += shard.slots.shape[0]
                self.received += shard.rows
                self.early += 0 if shard.early is None else shard.early.places.shape[0]

    def summary(
        self,
        world: World,
        placement: Placement,
        took: Mapping[str, float],
        hidden: Mapping[str, float],
    ) -> dict[str, Any]:
        """Values of `summary.json` of several ranks; none of one rank. Called by all ranks.

        `took`, `hidden`: milliseconds of each stage, and what training did not wait for.
        """
        if world.size == 1:
            return {}
        most = torch.tensor([self.rows, 0])
        total = torch.tensor([self.rows, self.received, self.early])
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=world.host_group)
        dist.all_reduce(total, group=world.host_group)
        rows, received, early = total.tolist()
        steps = max(self.steps, 1)
        exchange = sum(took.get(name, 0.0) for name in COLLECTIVE)
        beside = sum(hidden.get(name, 0.0) for name in COLLECTIVE)
        return {
            "placement": placement.kind,
            "cache_state": placement.state,
            "home_rows_mean": rows / world.size / steps,
            "home_rows_max": int(most[0]) / steps,
            "early_rows": early / received if received else None,
            "exchange_ms": exchange,
            "exchange_hidden": beside / exchange if exchange else None,
        }


# -----------------------------------------------------------------------------
# What a run of a cached mode counts for `summary.json`.


@dataclass
class PhaseCounts:
    """Training steps of hot or of cold batches, and the rows that moved for them."""

    steps: int = 0
    moved: MoveCounts = field(default_factory=MoveCounts)

    @property
    def numbers(self) -> tuple[int, int]:
        """Rows fetched, and bytes over the host link in both directions."""
        moved = self.moved
        return moved.rows_fetched, moved.host_to_device_bytes + moved.device_to_host_bytes


class StepStatistics:
    """Counts over all training steps of this process."""

    def __init__(self, ahead: int = 0) -> None:
        """`ahead`: steps, P, whose rows may come beside the step that runs."""
        self.distinct = 0
        self.misses = 0
        self.lookups = 0
        self.lookup_hits = 0
        self._ahead, self._own_bytes, self._early_bytes = ahead, 0, 0
        self.phases = {"hot": PhaseCounts(), "cold": PhaseCounts()}

    def add(self, flight: Flight, rows: Sequence[GroupRows]) -> None:
        """Count one training step over `rows`.

        Row buffers: the replicated rows' copies, their gradients and the sums (3 U D), sharded ones
        as they come and go at rank and home, and what was fetched and evicted, (D + S) each.
        Sharded rows that came early lie there for as many steps as movement is ahead.
        """
        buffers = early = 0
        phase = self.phases.get(flight.batch.phase)
        if phase is not None:
            phase.steps += 1
            for counts in flight.counts:
                phase.moved.add(counts)
        for plan, group in zip(flight.plans, rows, strict=True):
            self.distinct += plan.all_distinct
            self.misses += plan.all_misses
            self.lookups += plan.positions.shape[0]
            self.lookup_hits += plan.lookup_hits
            moved, kept = plan.misses + plan.evict_slots.shape[0], 3 * plan.distinct
            shard = plan.shard
            if shard is not None:
                moved += shard.fetch_slots.shape[0] + shard.evict_slots.shape[0]
                copies = 2 if plan.distinct == 0 else 3  # joined with the replicated ones
                kept += copies * shard.rows + 2 * shard.source_rows.shape[0] + shard.slots.shape[0]
                if shard.early is not None:
                    early += shard.rows * group.cache.dim * group.cache.dtype.itemsize
            item = group.cache.dtype.itemsize
            buffers += kept * group.cache.dim * item + moved * group.row_bytes
        self._own_bytes = max(self._own_bytes, buffers)
        self._early_bytes = max(self._early_bytes, early)

    @property
    def row_buffer_bytes(self) -> int:
        """The most that the rows of steps took beside the slots."""
        return self._own_bytes + self._ahead * self._early_bytes

    def hit_rate(self) -> float | None:
        """Distinct rows found cached when planned / distinct rows, so far; None before any."""
        return 1 - self.misses / self.distinct if self.distinct else None

    def summary(
        self,
        world: World,
        rows: Sequence[GroupRows],
        counters: CollectiveCounters,
        dense_bytes: int,
    ) -> dict[str, Any]:
        """Values of `summary.json`, over all ranks; called by all of them.

        `dense_bytes`: parameters, gradients and optimizer state of the dense part.
        """
        counts = [group.counts for group in rows]
        totals = torch.tensor(
            [
                self.lookups,
                self.lookup_hits,
                sum(c.rows_fetched for c in counts),
                sum(c.rows_written_back for c in counts),
                sum(c.host_to_device_bytes for c in counts),
                sum(c.device_to_host_bytes for c in counts),
                *counters.values().values(),
                *(n for phase in self.phases.values() for n in phase.numbers),
            ],
            dtype=torch.int64,
        )
        if world.size > 1:
            dist.all_reduce(totals, group=world.host_group)
        lookups, hits, *moved, row_bytes, dense, planning = totals[:-4].tolist()
        embedding = sum(group.cache.device_bytes for group in rows) + self.row_buffer_bytes
        peak = torch.tensor([embedding, embedding + dense_bytes], dtype=torch.int64)
        if world.device.type == "cuda":
            peak[1] = torch.cuda.max_memory_allocated(world.device)
        if world.size > 1:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=world.host_group)
        names = (
            "rows_fetched",
            "rows_written_back",
            "host_to_device_bytes",
            "device_to_host_bytes",
        )
        return {
            "hit_rate": self.hit_rate(),
            "hit_rate_lookups": hits / lookups if lookups else None,
            **dict(zip(names, moved, strict=True)),
            **self._of_phases(totals[-4:].tolist()),
            "collective_bytes": row_bytes // world.size,
            "dense_collective_bytes": dense // world.size,
            "planning_bytes": planning // world.size,
            "embedding_device_bytes": int(peak[0]),
            "peak_device_bytes": int(peak[1]),
            "cache_rows": sum(group.cache.slots for group in rows),
        }

    def _of_phases(self, numbers: Sequence[int]) -> dict[str, int]:
        """Steps of each phase, and the sums over ranks of their `numbers`; none without phases."""
        if not any(phase.steps for phase in self.phases.values()):
            return {}
        found = {f"{name}_steps": phase.steps for name, phase in self.phases.items()}
        keys = [f"{name}_{key}" for name in self.phases for key in ("rows_fetched", "host_bytes")]
        return found | dict(zip(keys, numbers, strict=True))


def inter_node_bytes(world: World, counters: CollectiveCounters) -> int | None:
    """The mean over ranks of what they sent to other nodes; None on one node. Called by all."""
    if world.nodes.count == 1:
        return None
    sent = torch.tensor(counters.inter_node_bytes, dtype=torch.int64)
    dist.all_reduce(sent, group=world.host_group)
    return int(sent) // world.size


def stage_values(clock: StageClock) -> dict[str, Any]:
    """What stages took since the last call, for `Parallel.progress`.

    The hidden share counts planning and movement, wherever they ran: what ran in the loop, as
    with the serial schedule, was waited for.
    """
    took, hidden = clock.lap()
    own = {WAIT, *(stage.name for stage in TRAINING)}
    beside = sum(ms for name, ms in took.items() if name not in own)
    return {
        "stage_ms": took,
        "stage_hidden_ms": hidden,
        "stall_ms": took.get(WAIT, 0.0),
        "hidden_share": sum(hidden.values()) / beside if beside > 0 else None,
    }
