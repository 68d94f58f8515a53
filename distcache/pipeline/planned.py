"""What goes into the planner of a stream, waits in it and comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from distcache.data.batch import Batch
from distcache.pipeline.clock import Span
from distcache.pipeline.groups import GroupBags
from distcache.pipeline.split import HotSamples, StepPart
from distcache.planner.assemble import Request
from distcache.step_plan import StepPlan


@dataclass(frozen=True)
class PlannedStep:
    """A batch, its bags and plans by group, its hot and its cold part if steps are split, and when
    its planning ran."""

    step: int
    batch: Batch
    bags: list[GroupBags]
    plans: list[StepPlan]
    spans: list[Span]
    planning_bytes: int = 0
    parts: tuple[StepPart, ...] = ()


@dataclass
class Waiting:
    """An ingested step whose window is not complete yet."""

    step: int
    batch: Batch
    bags: list[GroupBags]
    requests: list[Request]
    spans: list[Span] = field(default_factory=list)
    planning_bytes: int = 0


@dataclass(frozen=True)
class PlanningSettings:
    """L, P, the dtype of weights, whether to check every law, and a number that must agree on all
    ranks; `prepare` checks a batch (raising DataError) before anything is sent; `hot` splits
    training steps, see `pipeline.split`; `early`: sharded rows may travel before their step."""

    lookahead: int
    prefetch: int
    dtype: torch.dtype
    validate: bool = False
    fingerprint: int = 0
    prepare: Callable[[Batch], Batch] = field(default=lambda batch: batch)
    hot: HotSamples | None = None
    early: bool = False
