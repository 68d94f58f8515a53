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


def trained(call: Training) -> tuple[str, int]:
    """The digest of losses, predictions and weights, and how many rows left the cache changed."""
    from fake_device import fake_nccl  # where the device is

    with fake_nccl.nccl():
        world = open_world("cuda", call.backend, 60)
        try:
            return _trained(call, world)
        finally:
            close_world(world)


def _trained(call: Training, world: Any) -> tuple[str, int]:
    case, settings, found = call.case, call.settings, hashlib.sha256()
    popularity = call.how and popularity_of(case, settings.slots, **call.how)
    mode, given = make_mode(world, case, settings, popularity or None), []

    def batches() -> Any:
        for step in range(case.steps):
            yield case.batch(step, world.rank, world.size)
            if call.evals and step % call.evals == call.evals - 1:
                yield case.batch(1000 + step, world.rank, world.size, "eval")

    for step in mode.stream(batches()):
        evaluated = step.batch.kind == "eval"
        given.append(mode.eval_step(step) if evaluated else mode.train_step(step))
    for one in given:  # in the end, when nothing is ordered by it any more
        known = one.cpu() if isinstance(one, torch.Tensor) else torch.tensor(one.loss).double()
        found.update(known.numpy().tobytes())
    mode.flush()
    for at, spec in enumerate(case.tables):
        found.update(mode.table_block(at, 0, spec.rows).numpy().tobytes())
    for _, value in sorted(mode.dense_state().items()):
        found.update(value.cpu().numpy().tobytes())
    left = sum(rows.counts.rows_written_back for rows in mode.rows)
    mode.close()
    return found.hexdigest(), left
