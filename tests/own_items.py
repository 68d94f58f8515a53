"""Items of a user's own loaders, and runs of distcache.fit over them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scenarios import Scenario, table

import distcache
from distcache.comm.world import close_world, open_world
from distcache.parallel.base import OptimizerSpec

SCENARIO = Scenario((table("t", 300, 8, 3),), OptimizerSpec("adagrad"), steps=12, weighted=False)
"""Three features on one table; a rank's slice of step s is `SCENARIO.batch(s, rank, world)`."""
ROWS = {"cache.rows": 160, "cache.lookahead": 3, "optim.dense_lr": 0.1, "optim.embedding_lr": 0.1}


def item(step: int, rank: int, world: int, form: str = "tuple") -> Any:
    """One item of a loader."""
    batch = SCENARIO.batch(step, rank, world)
    ids = batch.ids
    if form == "kjt":
        from torchrec import KeyedJaggedTensor

        keys = list(reversed(ids.features))  # in another order than the tables read
        b = ids.batch_size
        parts = [ids.values[ids.offsets[f * b] : ids.offsets[(f + 1) * b]] for f in (2, 1, 0)]
        lengths = ids.offsets.diff().view(3, b).flip(0).reshape(-1)
        jagged = KeyedJaggedTensor.from_lengths_sync(keys, torch.cat(parts), lengths)
        return batch.dense, jagged, batch.labels
    if form == "jagged":
        return batch.dense, ids, batch.labels.long().unsqueeze(1)
    return batch.dense, (ids.values, ids.offsets), batch.labels


class Resumable:
    """An iterator with a state; `drawn` lists the items that were read."""

    def __init__(self, rank: int, world: int, count: int = 12) -> None:
        self.rank, self.world, self.count, self.at = rank, world, count, 0
        self.drawn: list[int] = []

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.count:
            raise StopIteration
        self.drawn.append(self.at)
        self.at += 1
        return item(self.at - 1, self.rank, self.world)

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]


def fit(world, folder: Path, loader, parallel="data", **settings):
    """One run in `folder`: its summary. A checkpoint is left where `trainer.steps` ends it."""
    save = "trainer__steps" in settings or "run__save" in settings
    own = {key.replace("__", "."): value for key, value in settings.items() if "__" in key}
    rest = {key: value for key, value in settings.items() if "__" not in key}
    result = distcache.fit(
        loader,
        SCENARIO.tables,
        SCENARIO.model(),
        parallel=parallel,
        settings=ROWS | {"run.dir": str(folder), "run.save": save, "run.overwrite": True} | own,
        world=world,
        **rest,
    )
    return result.summary


def digests(summary) -> tuple[str, str]:
    """What says the bits of a run: of its losses and of its state."""
    return summary["loss_digest"], summary["state_digest"]


def slices(rank: int, world: int, count: int = 12, form: str = "tuple") -> list:
    """A rank's items of the first steps."""
    return [item(step, rank, world, form) for step in range(count)]


def play(rank: int, size: int, scenes: dict[str, Callable], folder: str) -> dict[str, Any]:
    """What each of `scenes` finds on a rank, and the numbers of the whole run beside them."""
    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False  # a daemon may have no workers
    world = open_world("cpu", timeout_s=60)
    whole = fit(world, Path(folder) / "whole", slices(rank, size))
    seen: dict[str, Any] = {"whole": digests(whole), "last loss": whole["final_loss"]}
    seen |= {name: scene(world, Path(folder)) for name, scene in scenes.items()}
    close_world(world)
    return seen
