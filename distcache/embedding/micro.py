"""Several micro-batches under one plan: their ids joined for planning, and parted again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from distcache.data.batch import Batch, JaggedIds
from distcache.embedding.ids import ReadIds
from distcache.pipeline.groups import GroupBags
from distcache.step_plan import StepPlan


def join_ids(parts: Sequence[JaggedIds]) -> JaggedIds:
    """The bags of all parts, feature-major: each feature's samples of part 0, then part 1, ..."""
    if len(parts) == 1:
        return parts[0]
    features = range(len(parts[0].features))

    def span(part: JaggedIds, feature: int) -> slice:
        size = part.batch_size
        return slice(int(part.offsets[feature * size]), int(part.offsets[(feature + 1) * size]))

    pieces = [(part, span(part, feature)) for feature in features for part in parts]
    lengths = torch.cat(
        [
            part.offsets.diff()[feature * part.batch_size : (feature + 1) * part.batch_size]
            for feature in features
            for part in parts
        ]
    )
    weights = None
    if parts[0].weights is not None:
        weights = torch.cat([part.weights[at] for part, at in pieces if part.weights is not None])
    return JaggedIds(
        features=parts[0].features,
        values=torch.cat([part.values[at] for part, at in pieces]),
        offsets=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))),
        weights=weights,
    )


def part_of(
    bags: GroupBags, plan: StepPlan, samples: slice, total: int
) -> tuple[GroupBags, StepPlan]:
    """The bags of `samples` out of `total` joined ones, and the plan as their lookup reads it.

    Of the plan only what a lookup needs is the part's own: positions, order, touched, segments.
    """
    first = np.arange(bags.features if total else 0) * total + samples.start
    count = samples.stop - samples.start
    chosen = (first[:, None] + np.arange(count)).reshape(-1)
    offsets = bags.offsets.numpy()
    spans = [np.arange(offsets[at], offsets[at + count]) for at in first]
    ids = torch.from_numpy(np.concatenate(spans) if spans else np.empty(0, np.int64))
    lengths = torch.from_numpy(np.diff(offsets)[chosen])
    own = GroupBags(
        features=bags.features,
        rows=bags.rows[ids.numpy()],
        offsets=torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))),
        weights=None if bags.weights is None else bags.weights[ids],
        scale=None if bags.scale is None else bags.scale[torch.from_numpy(chosen)],
    )
    positions = plan.positions[ids]
    touched, counts = positions.unique(return_counts=True)
    seen = replace(
        plan,
        positions=positions,
        order=positions.argsort(stable=True),
        touched=touched,
        segments=torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
    )
    return own, seen


def as_batch(reads: Sequence[ReadIds], index: int, kind: str = "train") -> Batch:
    """The ids of one plan's micro-batches as the planner takes them; `index` comes back with it."""
    ids: JaggedIds = join_ids([read.ids for read in reads])
    none = torch.empty(0)
    return Batch(none, ids, none, ids.batch_size, index, 0, 0, kind)
