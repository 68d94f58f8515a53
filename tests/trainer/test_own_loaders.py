"""distcache.fit over every kind of iterable: equal bits, resuming, buffers, worker processes."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from own_items import SCENARIO, Resumable, digests, fit, item, play, slices
from ranks import run_ranks
from scenarios import run_mode
from torch.utils.data import DataLoader, Dataset, IterableDataset

from distcache.parallel.cached import CachedSettings


class Items(Dataset):
    """A map-style data set whose samples are whole slices."""

    def __init__(self, rank: int, world: int, count: int = 12) -> None:
        self.rank, self.world, self.count = rank, world, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int):
        return item(index, self.rank, self.world)


class Endless(IterableDataset):
    """Without a length."""

    def __init__(self, rank: int, world: int, count: int) -> None:
        self.rank, self.world, self.count = rank, world, count

    def __iter__(self):
        return (item(step, self.rank, self.world) for step in range(self.count))


def source_losses(world, home: Path) -> list[float]:
    """Of a source with the same slices."""
    return run_mode(world, SCENARIO, CachedSettings("data", (160,), lookahead=3)).losses


def forms(world, home: Path) -> dict[str, Any]:
    """The same data as every kind of iterable."""
    place = world.rank, world.size
    loaders = {
        "generator": (item(step, *place) for step in range(12)),
        "kjt": slices(*place, form="kjt"),
        "jagged": slices(*place, form="jagged"),
        "workers": DataLoader(Items(*place), batch_size=None, num_workers=2, pin_memory=True),
        "no length": DataLoader(Endless(*place, 12), batch_size=None),
    }
    return {name: fit(world, home / name, loader, **AUTO) for name, loader in loaders.items()}


def resuming(world, home: Path) -> dict[str, Any]:
    """Half of the steps, then the rest from the checkpoint."""
    place, seen = (world.rank, world.size), {}
    makers = {
        "replayed": lambda: slices(*place),
        "state": lambda: Resumable(*place),
        "workers": lambda: DataLoader(Items(*place), batch_size=None, num_workers=1),
    }
    for name, make in makers.items():
        first = fit(world, home / name, make(), trainer__steps=5, **AUTO)
        loader = make()
        rest = fit(world, home / f"{name}2", loader, trainer__resume=str(home / name), **AUTO)
        seen[name] = (first["steps"], rest["first_step"], rest["steps"], digests(rest))
        if name == "state":
            seen["drawn again"] = loader.drawn
    once = fit(world, home / "epochs", slices(*place, count=7), epochs=2)
    for steps in ENDS[world.size]:
        for kind, make in (("state", Resumable7), ("list", lambda *at: slices(*at, count=7))):
            half = home / f"half-{kind}-{steps}"
            fit(world, half, make(*place), epochs=2, trainer__steps=steps)
            rest = home / f"rest-{kind}-{steps}"
            again = fit(world, rest, make(*place), epochs=2, trainer__resume=str(half), **AUTO)
            seen[f"epochs {kind} {steps}"] = digests(once) == digests(again), again["first_step"]
    return seen


ENDS = {1: (1, 6, 7, 8, 14), 2: (6, 7)}
"""Steps before a stop, by ranks: at the first item, around the end of a pass, at the end."""


class Resumable7:
    """Re-iterable, with a state inside the pass."""

    def __init__(self, rank: int, world: int) -> None:
        self.place, self.at = (rank, world), 0

    def __iter__(self):
        while self.at < 7:
            self.at += 1
            yield item(self.at - 1, *self.place)
        self.at = 0

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]


def reused(world, home: Path) -> dict[str, Any]:
    """A loader that fills the same buffers for every item; without workers left when it ends."""
    place, seen = (world.rank, world.size), {}

    def same_buffers():
        whole = slices(*place)
        longest = max(len(ids[0]) for _, ids, _ in whole)
        values = torch.empty(longest, dtype=torch.int64)
        dense, offsets, labels = (
            torch.empty_like(x) for x in (whole[0][0], whole[0][1][1], whole[0][2])
        )
        for step in whole:
            dense.copy_(step[0]), offsets.copy_(step[1][1]), labels.copy_(step[2])
            own = values[: len(step[1][0])]
            own.copy_(step[1][0])
            yield dense, (own, offsets), labels

    for mode in ("data", "resident", "hybrid"):
        kept = fit(world, home / f"kept-{mode}", slices(*place), mode)
        found = fit(world, home / f"buffers-{mode}", same_buffers(), mode, **AUTO)
        seen[mode] = digests(found) == digests(kept)
    return seen


def workers_end(world, home: Path) -> dict[str, Any]:
    """Worker processes left after runs that stop early, or fail in the loader or after it."""
    seen = {}
    for name, bad in (("early", None), ("raises", "raise"), ("shape", "shape")):
        loader = DataLoader(Failing(world.rank, world.size, bad), batch_size=None, num_workers=1)
        try:
            fit(world, home / f"workers-{name}", loader, trainer__steps=6)
        except Exception as error:  # held, with its traceback
            seen[f"{name} error"] = str(error)
            seen[name] = len(multiprocessing.active_children())
        else:
            seen[name] = len(multiprocessing.active_children())
    return seen


class Failing(IterableDataset):
    """Many items, of which the fifth is bad or raises."""

    def __init__(self, rank: int, world: int, bad: str | None) -> None:
        self.rank, self.world, self.bad = rank, world, bad

    def __iter__(self):
        for step in range(400):
            if step == 4 and self.bad == "raise":
                raise ValueError("disk on fire")
            yield (1,) if step == 4 and self.bad else item(step, self.rank, self.world)


AUTO = {"cache__lookahead": "auto"}
"""The window by the ids of the first item, read before the run, and trained in its turn."""

SCENES = {
    "source losses": source_losses,
    "forms": forms,
    "resuming": resuming,
    "reused": reused,
    "workers_end": workers_end,
}


@pytest.fixture(scope="module", params=[1, 2])
def seen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"own{request.param}")
    found = run_ranks(play, request.param, SCENES, str(folder), timeout=200)
    return found, request.param, folder


def test_every_kind_of_iterable_trains_alike(seen):
    ranks, _, folder = seen
    for found in ranks:
        for name, summary in found["forms"].items():
            assert digests(summary) == ranks[0]["whole"], name
            assert summary["steps"] == 12 and summary["global_batch_size"] is None
            assert summary["lookahead"] == 64
    assert json.loads((folder / "whole" / "summary.json").read_text())["steps"] == 12


def test_equal_to_a_source_with_the_same_slices(seen):
    ranks, _, _ = seen
    assert ranks[0]["last loss"] == ranks[0]["source losses"][-1]


def test_resuming_is_exact(seen):
    ranks, world, _ = seen
    for found in ranks:
        for name in ("replayed", "state", "workers"):
            assert found["resuming"][name] == (5, 5, 7, found["whole"]), name
        assert found["resuming"]["drawn again"] == [0, *range(5, 12)]
        for kind in ("state", "list"):
            for steps in ENDS[world]:
                assert found["resuming"][f"epochs {kind} {steps}"] == (True, steps)


def test_a_loader_may_fill_the_same_buffers(seen):
    for found in seen[0]:
        assert found["reused"] == {"data": True, "resident": True, "hybrid": True}


def test_no_worker_process_is_left(seen):
    for found in seen[0]:
        left = found["workers_end"]
        assert (left["early"], left["raises"], left["shape"]) == (0, 0, 0)
        assert "disk on fire" in left["raises error"] and "batch 4" in left["shape error"]
