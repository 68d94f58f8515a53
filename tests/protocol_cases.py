"""Small runs whose streams end, stop or fail, for the tests of the protocol between ranks."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from scenarios import Scenario, table

from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.optim import row_update
from distcache.parallel.cached import CachedParallel, CachedSettings

TABLES = (table("a", 60), table("b", 9, features=2), table("c", 5, dim=4))
CASE = Scenario(TABLES, row_update("adagrad"), global_batch=12, steps=6)
SLOTS = (48, 6)


def make(world: World, lookahead: int = 2, prefetch: int = 1, **changes: object) -> CachedParallel:
    """A mode over `CASE`, `data` with a tight cache unless `changes` say otherwise."""
    tables, model = changes.pop("tables", CASE.tables), changes.pop("model", CASE.model())
    popularity = changes.pop("popularity", None)
    settings = CachedSettings("data", SLOTS, lookahead, prefetch, validate=True)
    settings = replace(settings, **changes)
    parts = (tables, CASE.features, model, CASE.optimizer)
    mode = CachedParallel(world, *parts, settings, popularity)
    mode.set_lr(CASE.lr, CASE.lr)
    return mode


def batches(
    world: World, steps: range, fail_at: int | None = None, evals: bool = False, pause: float = 0.0
) -> Iterator[Batch]:
    """This rank's slices of training `steps`; an error in the place of step `fail_at`, of an odd
    one when its dense features are to be loaded."""

    def fail() -> None:
        raise OSError(f"no batch {fail_at} for rank {world.rank}")

    for step in steps:
        time.sleep(pause)
        if step == fail_at and step % 2 == 0:
            fail()
        batch = CASE.batch(step, world.rank, world.size)
        yield replace(batch, load=fail) if step == fail_at else batch
        if evals:
            yield CASE.batch(step, world.rank, world.size, "eval")


def train(
    mode: CachedParallel,
    source: Iterator[Batch],
    stop_at: int | None = None,
    at_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train until the stream ends or all ranks agree to stop; the losses."""
    losses = []
    for step in mode.stream(source):
        if step.batch.kind == "eval":
            mode.eval_step(step)
            continue
        at_step(step.batch.index)
        result = mode.train_step(step, step.batch.index == stop_at)
        losses.append(result.loss)
        if result.stop:
            break
    return losses


def state(mode: CachedParallel) -> str:
    """A digest of all rows, their optimizer state and the dense part, after a flush."""
    mode.flush()
    sha = hashlib.sha256()
    for index in range(len(TABLES)):
        for values in mode.tables.full_tables.local(index):
            if values is not None:
                sha.update(np.ascontiguousarray(values.numpy()))
    for value in mode.dense_state().values():
        sha.update(value.numpy())
    sha.update(str(int(mode.applied)).encode())
    return sha.hexdigest()


def planner_threads() -> int:
    """Planners' threads that live in this process."""
    return sum(thread.name == "distcache-planner" for thread in threading.enumerate())


def caught(action: Callable[[], object]) -> str:
    """The class and text of the error that `action` raises; "" if it raises none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def warnings() -> Iterator[list[str]]:
    """The package's log lines of level warning and above, meanwhile."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("distcache")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class Raises(torch.nn.Module):
    """A dense part that raises in step `at` on this rank (None: in no step)."""

    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.inner, self.at, self.calls = CASE.model(), at, 0

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.at is not None and self.calls > self.at:
            raise ValueError(f"the model fails in step {self.at}")
        return self.inner(dense, pooled)
