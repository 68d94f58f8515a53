"""How evenly rows and their traffic fall to the ranks, and how much of the traffic is hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distcache.comm.world import World
from distcache.pipeline.placement import Placement
from distcache.step_plan import StepPlan

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
                self.rows += len(shard.slots)
                self.received += shard.rows
                self.early += 0 if shard.early is None else len(shard.early.places)

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
