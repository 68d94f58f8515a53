"""Runs in a process that has the device: what they are told, and the digest of all that they gave.

No loop here reads a loss at once: one that does orders all streams by itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from scenarios import Scenario, make_mode, popularity_of

from distcache.comm.world import close_world, open_world
from distcache.ops.reference import as_numpy
from distcache.parallel.cached import CachedSettings


@dataclass(frozen=True)
class Training:
    """A run of `case`, with an evaluation batch every `evals` steps (0: none); `how`: what is made
    of statistics (None: nothing)."""

    case: Scenario
    settings: CachedSettings
    evals: int = 0
    how: dict[str, Any] | None = None
    backend: str = "gloo"


@dataclass(frozen=True)
class Ended:
    """Digests of losses and weights, and of each evaluation step's predictions; rows that left the
    cache changed."""

    digest: str
    predictions: dict[int, str]
    left: int


def trained(call: Training) -> Ended:
    """What becomes of a run."""
    from fake_device import fake_nccl  # where the device is

    with fake_nccl.nccl():
        world = open_world("cuda", call.backend, 60)
        try:
            return _trained(call, world)
        finally:
            close_world(world)


def digest_of(value: torch.Tensor) -> str:
    """Of its bits."""
    return hashlib.sha256(as_numpy(value.cpu()).tobytes()).hexdigest()


def _trained(call: Training, world: Any) -> Ended:
    case, settings = call.case, call.settings
    popularity = call.how and popularity_of(case, settings.slots, **call.how)
    mode, losses = make_mode(world, case, settings, popularity or None), []

    def batches() -> Any:
        for step in range(case.steps):
            yield case.batch(step, world.rank, world.size)
            if call.evals and step % call.evals == call.evals - 1:
                yield case.batch(1000 + step, world.rank, world.size, "eval")

    predictions = {}
    for step in mode.stream(batches()):
        if step.batch.kind == "eval":
            predictions[step.batch.index] = mode.eval_step(step)
        else:
            losses.append(mode.train_step(step))
    # In the end, when nothing is ordered by it any more.
    evaluated = {index: digest_of(values) for index, values in predictions.items()}
    found = [torch.tensor([one.loss for one in losses], dtype=torch.float64)]
    mode.flush()
    found += [mode.table_block(at, 0, spec.rows) for at, spec in enumerate(case.tables)]
    found += [value for _, value in sorted(mode.dense_state().items())]
    left = sum(rows.counts.rows_written_back for rows in mode.rows)
    digest = "".join(map(digest_of, found))
    mode.close()
    return Ended(digest, evaluated, left)
