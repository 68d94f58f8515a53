"""distcache.fit over every kind of iterable: equal bits, resuming, buffers, worker processes; ranks
that differ or fail: sizes, lengths, no data, errors, bad values."""

from __future__ import annotations

import json
import multiprocessing
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_items import SCENARIO, Resumable, digests, fit, item, play, slices
from ranks import run_ranks
from scenarios import run_mode
from torch.utils.data import DataLoader, Dataset, IterableDataset

from distcache.data.batch import JaggedIds
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


def uneven(world, home: Path) -> dict[str, Any]:
    """Sizes, lengths and evaluations that differ between ranks, in every mode."""
    rank, seen = world.rank, {}

    def lopsided(count):
        return [
            as_tuple(SCENARIO.batch(s, 0, 3) if rank == 0 and world.size > 1 else rest(s))
            for s in range(count)
        ]

    def rest(step):
        batch = SCENARIO.batch(step, 0, 1)
        if world.size == 1:
            return batch
        return cut(batch, SCENARIO.global_batch // 3)

    evals = [as_tuple(SCENARIO.batch(50 + n, rank, world.size)) for n in range(3 + 2 * rank)]
    more = {"eval_loader": evals, "trainer__eval_every": 4}
    for mode in ("data", "resident", "host", "hybrid"):
        seen[mode] = fit(world, home / mode, lopsided(12 - 2 * rank), mode, **more)
    seen["no eval"] = fit(world, home / "none", lopsided(12 - 2 * rank))
    return seen


def as_tuple(batch):
    return batch.dense, batch.ids, batch.labels


def cut(batch, first: int):
    """The samples of a batch from `first` on."""
    ids, b = batch.ids, batch.ids.batch_size
    lengths = ids.offsets.diff().view(len(ids.features), b)[:, first:]
    values = [
        ids.values[ids.offsets[f * b + first] : ids.offsets[(f + 1) * b]]
        for f in range(len(ids.features))
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)])
    jagged = JaggedIds(ids.features, torch.cat(values), offsets)
    return replace(batch, dense=batch.dense[first:], labels=batch.labels[first:], ids=jagged)


def nothing_to_train(world, home: Path) -> dict[str, Any]:
    """The last rank has no data at all, neither to train nor to evaluate on; or all is done."""
    rank, last = world.rank, world.rank == world.size - 1 and world.size > 1
    evals = [] if last else slices(rank, world.size, 3)
    seen = {}
    for mode in ("data", "hybrid"):
        loader = [] if last or world.size == 1 else slices(rank, world.size)
        seen[mode] = error_of(fit, world, home / f"nothing-{mode}", loader, mode, eval_loader=evals)
    used = iter(slices(rank, world.size, 3))
    whole = fit(world, home / "read", used, run__save=True)["steps"]
    seen["again"] = whole, error_of(fit, world, home / "used", used)
    seen["resumed"] = fit(world, home / "done", slices(rank, world.size, 3), eval_loader=evals,
                          trainer__resume=str(home / "read"))  # fmt: skip
    return seen


def error_of(function, *arguments, **settings) -> str | None:
    """What a call raises, in a line; None where it returns."""
    try:
        function(*arguments, **settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def failing(world, home: Path) -> dict[str, Any]:
    """What goes wrong on the last rank, as every rank hears of it."""
    last, place, seen = world.rank == world.size - 1, (world.rank, world.size), {}

    def broken():
        for step in range(12):
            if step == 7 and last:
                raise ValueError("disk on fire")
            yield item(step, *place)

    shape = slices(*place)
    if last:
        shape[4] = (shape[4][0][:, :2], shape[4][1], shape[4][2][:-1])
    for mode in ("data", "hybrid"):
        for name, loader in (("raises", broken()), ("shape", shape)):
            try:
                fit(world, home / f"{name}-{mode}", loader, mode)
            except Exception as error:
                seen[f"{name} {mode}"] = f"{type(error).__name__}: {error}"
    resume = str(home / "raises-data")  # the steps before the error are saved
    rest = fit(world, home / "rescued", slices(*place), trainer__resume=resume)
    seen["rescued"] = rest["first_step"], digests(rest)
    return seen


BAD_STEPS = {"label": 6, "nan": 0, "width": 4, "id": 5}


def with_bad_value(name: str, rank: int, world: int) -> list:
    """Items of which that of step `BAD_STEPS[name]` has one bad value."""
    items, step = slices(rank, world), BAD_STEPS[name]
    dense, (values, offsets), labels = items[step]
    if name in ("label", "nan"):
        labels = labels.clone()
        labels[3] = 2 if name == "label" else torch.nan
    if name == "width":
        dense = dense[:, :1]
    if name == "id":
        values = values.clone()
        values[0] = 300
    items[step] = dense, (values, offsets), labels
    return items


def bad_values(world, home: Path) -> dict[str, Any]:
    """Values on the last rank that must not be trained, as every rank hears of them."""
    last, place, seen = world.rank == world.size - 1, (world.rank, world.size), {}
    bad = {name: with_bad_value(name, *place) if last else slices(*place) for name in BAD_STEPS}
    for mode in ("data", "resident", "host", "hybrid"):
        seen[f"label {mode}"] = error_of(fit, world, home / f"label-{mode}", bad["label"], mode)
    for name in ("nan", "width", "id"):
        seen[name] = error_of(fit, world, home / name, bad[name])
    for name in ("label", "width"):
        at = {"eval_loader": bad[name], "trainer__eval_every": 4}
        seen[f"eval {name}"] = error_of(fit, world, home / "bad-eval", slices(*place), **at)
    resume = str(home / "label-data")  # the six steps before the bad one
    rest = fit(world, home / "label-rest", slices(*place), trainer__resume=resume)
    seen["rest"] = rest["first_step"], digests(rest)
    return seen


SCENES = {
    "source losses": source_losses,
    "forms": forms,
    "resuming": resuming,
    "reused": reused,
    "workers_end": workers_end,
    "bad_values": bad_values,
    "uneven": uneven,
    "failing": failing,
    "nothing_to_train": nothing_to_train,
}


@pytest.fixture(scope="module", params=[1, 2])
def seen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"own{request.param}")
    found = run_ranks(play, request.param, SCENES, str(folder), timeout=400)
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


def test_a_rank_without_any_data(seen):
    for found in seen[0]:
        nothing = found["nothing_to_train"]
        for mode in ("data", "hybrid"):
            expected = f"DataError: nothing was trained: the loader of rank {len(seen[0]) - 1} has"
            assert nothing[mode].startswith(expected)
        steps, error = nothing["again"]
        assert steps == 3 and "an iterator that was read before" in error
        done = nothing["resumed"]  # not empty: all of it was trained before
        assert (done["first_step"], done["steps"]) == (3, 0) and 0 < done["eval_auc"] < 1


def test_uneven_sizes_and_lengths(seen):
    ranks, world, _ = seen
    for found in ranks:
        runs = found["uneven"]
        assert digests(runs["data"]) == digests(runs["resident"]) == digests(runs["host"])
        assert digests(runs["data"]) == digests(runs["no eval"])
        for summary in runs.values():
            assert summary["steps"] == 12 - 2 * (world - 1)  # the first rank's end
        assert runs["hybrid"]["final_loss"] == pytest.approx(runs["data"]["final_loss"], rel=1e-5)
        assert runs["hybrid"]["eval_auc"] == pytest.approx(runs["data"]["eval_auc"], abs=1e-3)
        assert 0 < runs["data"]["eval_auc"] < 1
    if world == 2:
        lines = (seen[2] / "data" / "metrics.jsonl").read_text().splitlines()
        evaluated = [json.loads(line) for line in lines if "eval_auc" in line]
        assert [line["step"] for line in evaluated] == [4, 8, 10]


def test_an_error_reaches_all_ranks(seen):
    ranks, world, _ = seen
    for found in ranks:
        assert found["failing"]["rescued"] == (7, found["whole"])
    own, others = ranks[-1]["failing"], [found["failing"] for found in ranks[:-1]]
    for mode in ("data", "hybrid"):
        assert own[f"raises {mode}"] == (
            "DataError: train batch 7 of your loader: ValueError: disk on fire"
        )
        size = 24 // world
        assert (
            f"train batch 4 of your loader: dense is [{size}, 2], labels [{size - 1}]"
            in (own[f"shape {mode}"])
        )
        for found in others:
            said = "PeerError: stopped because rank 1"
            if mode == "hybrid":  # agrees on each batch, so others hear of it as it is
                said = "DataError: rank 1: "
            assert found[f"raises {mode}"].startswith(said)
            assert found[f"shape {mode}"].startswith(said)


def test_bad_values_are_refused_before_their_step(seen):
    ranks, name = seen[0], "of your loader"
    modes = [f"label {mode}" for mode in ("data", "resident", "host", "hybrid")]
    said = {mode: f"train batch 6 {name}: sample 3 has the label 2; 1 of its" for mode in modes}
    said |= {
        "nan": f"train batch 0 {name}: sample 3 has the label nan; 1 of its labels",
        "width": f"train batch 4 {name}: dense has 1 features, those before it 5",
        "id": r"train batch 5: feature 't_0', sample \d+ of this rank's slice: id 300 is not in",
        "eval label": f"eval batch 6 {name}: sample 3 has the label 2",
        "eval width": f"eval batch 4 {name}: dense has 1 features, those before it 5",
    }
    for rank, found in enumerate(ranks):
        heard = found["bad_values"]
        assert heard.pop("rest") == (6, found["whole"])
        assert heard.keys() == said.keys()
        for key, message in heard.items():
            expected = f"DataError: {said[key]}"
            if rank < len(ranks) - 1:
                expected = "PeerError: stopped because rank 1 failed"
                if key == "label hybrid":
                    expected = f"DataError: rank 1: {said[key]}"
            assert re.match(expected, message), (key, message)
