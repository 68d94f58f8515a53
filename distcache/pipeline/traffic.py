"""What a training run would send: its batches through the planners of all ranks, without tensors.

Groups, rows and slots are those of training, so bytes are those of its counters, rank by rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from distcache.data.batch import BatchSource
from distcache.layout import TableSpec
from distcache.pipeline.groups import TableGroup, group_bags, make_groups
from distcache.pipeline.placement import Placement, region_slots
from distcache.planner.flows import RowFormat, StepTraffic
from distcache.planner.policy import DEFAULT, Policy
from distcache.planner.simulator import PlannerSettings
from distcache.planner.traffic import TrafficPlanner


@dataclass(frozen=True)
class TrafficSettings:
    """A run of mode `data`. `slots`: C per rank of each group; `state_widths`: S of each group;
    `itemsize`: bytes of an element."""

    world_size: int
    slots: tuple[int, ...]
    placement: Placement
    state_widths: tuple[int, ...]
    lookahead: int = 8
    prefetch: int = 1
    policy: Policy = DEFAULT
    itemsize: int = 4


def replay_traffic(
    source: BatchSource,
    tables: Sequence[TableSpec],
    settings: TrafficSettings,
    order: Iterable[tuple[str, int]],
) -> Iterator[StepTraffic]:
    """What every rank sends in each step; `order`: (`train` or `eval`, index) of the batches.

    Each rank takes its slice of a global batch, as in training. Memory: the index of all homes (8
    bytes per row, and what the policy keeps) and all their slots. Raises StepTooLargeError as
    training would.
    """
    world = settings.world_size
    groups = make_groups(tables, source.features, world)
    if world > 1:
        groups = settings.placement.groups(groups)
    planners = [
        TrafficPlanner(group.layout, _planner_settings(group, slots, settings))
        for group, slots in zip(groups, settings.slots, strict=True)
    ]
    formats = tuple(
        RowFormat(group.dim, state, settings.itemsize, settings.placement.state)
        for group, state in zip(groups, settings.state_widths, strict=True)
    )
    for kind, index in order:
        draw = source.train_batch if kind == "train" else source.eval_batch
        ids = [draw(index, rank, world).ids for rank in range(world)]
        found = []
        for group, planner in zip(groups, planners, strict=True):
            rows = [group_bags(group, part, torch.float32).rows for part in ids]
            found.append(planner.add(rows, kind))
        alone = settings.lookahead == 0
        yield from (StepTraffic(counts, formats, alone) for counts in zip(*found, strict=True))
    found = [planner.finish() for planner in planners]
    yield from (StepTraffic(counts, formats, alone=True) for counts in zip(*found, strict=True))


def _planner_settings(group: TableGroup, slots: int, settings: TrafficSettings) -> PlannerSettings:
    found, early = region_slots(group, slots), settings.placement.early
    return PlannerSettings(
        found.all,
        settings.lookahead,
        settings.prefetch,
        settings.policy,
        hot=group.hot,
        replicated=found.replicated,
        early=early and settings.prefetch > 0,
    )
