"""A step in two parts, one of hot samples and one of the others, whose gradients are added.

The parts of FAE's hot and cold batches (Adnan et al., VLDB 2022) without its reordering of samples:
the hot part, all of whose rows were cached before, computes while the cold part's rows arrive.
Which samples are hot depends on their ids alone, so a step's bits are the same for every cache; up
to the order of summation they are those of the step as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from distcache.data.batch import Batch, JaggedIds
from distcache.pipeline.groups import GroupBags
from distcache.planner.calls import occurrences
from distcache.step_plan import StepPlan

HotSamples = Callable[[JaggedIds], np.ndarray]
"""Which samples of a local batch have hot ids alone: bool `[b]`."""


@dataclass(frozen=True)
class StepPart:
    """Some samples of a local batch, which may be none.

    `samples`: int64 `[p]`, ascending; `dense` and `labels`: theirs; for each group `bags`, and a
    plan of this part alone: `positions`, `order`, `segments` and `slots` speak of the R rows that
    it names, and `touched` int64 `[R]` says which leaf rows of the step these are; the slot of a
    sharded row is -1. The plan's other fields are the step's. `early`: whether all its rows are
    cached before the step's move.
    """

    samples: Tensor
    dense: Tensor
    labels: Tensor
    bags: list[GroupBags]
    plans: list[StepPlan]
    early: bool


def split_step(
    batch: Batch, bags: Sequence[GroupBags], plans: Sequence[StepPlan], hot: HotSamples
) -> tuple[StepPart, StepPart]:
    """The hot and the cold part of a planned step. NumPy: it runs beside training."""
    is_hot = hot(batch.ids)
    return tuple(_part(batch, bags, plans, chosen) for chosen in (is_hot, ~is_hot))  # type: ignore[return-value]


def _part(
    batch: Batch, bags: Sequence[GroupBags], plans: Sequence[StepPlan], chosen: np.ndarray
) -> StepPart:
    pairs = [_part_of_group(b, p, chosen) for b, p in zip(bags, plans, strict=True)]
    early = all(_all_here(part, plan) for (_, part), plan in zip(pairs, plans, strict=True))
    samples = np.flatnonzero(chosen)
    return StepPart(
        samples=torch.from_numpy(samples),
        dense=torch.from_numpy(batch.dense.numpy()[samples]),
        labels=torch.from_numpy(batch.labels.numpy()[samples]),
        bags=[part for part, _ in pairs],
        plans=[plan for _, plan in pairs],
        early=early,
    )


def _all_here(part: StepPlan, plan: StepPlan) -> bool:
    """Whether none of a part's rows is fetched, or comes from its home in every step."""
    touched = part.touched.numpy()
    if len(touched) and touched[-1] >= plan.distinct:
        return False
    return not np.isin(touched, plan.fetch.numpy(), assume_unique=True).any()


def _part_of_group(
    bags: GroupBags, plan: StepPlan, chosen: np.ndarray
) -> tuple[GroupBags, StepPlan]:
    """The bags of the chosen samples (bool `[b]`), and the plan of the rows that they name."""
    lengths = np.diff(bags.offsets.numpy())
    kept_bags = np.tile(chosen, len(lengths) // max(len(chosen), 1))
    kept = np.repeat(kept_bags, lengths)
    own = lengths[kept_bags]
    offsets = np.zeros(len(own) + 1, dtype=np.int64)
    np.cumsum(own, out=offsets[1:])
    positions = plan.positions.numpy()[kept]
    ids = occurrences(positions.astype(np.int32), None, plan.leaf_rows)
    place = np.empty(plan.leaf_rows, dtype=np.int64)
    place[ids.touched] = np.arange(len(ids.touched))
    part = GroupBags(
        features=bags.features,
        rows=bags.rows[kept],
        offsets=torch.from_numpy(offsets),
        weights=_of(bags.weights, kept),
        scale=_of(bags.scale, kept_bags),
    )
    tensors = (place[positions], ids.order, ids.touched, ids.segments)
    names = ("positions", "order", "touched", "segments")
    of_part = dict(zip(names, map(torch.from_numpy, tensors), strict=True))
    slots = np.full(plan.leaf_rows, -1, dtype=np.int64)  # sharded rows have no slot of their own
    slots[: plan.distinct] = plan.slots.numpy()
    own = torch.from_numpy(slots[ids.touched])
    return part, replace(plan, slots=own, shard=None, **of_part)


def _of(values: Tensor | None, kept: np.ndarray) -> Tensor | None:
    return None if values is None else torch.from_numpy(values.numpy()[kept])
