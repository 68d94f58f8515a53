"""distcache.fit where ranks differ or fail: sizes, lengths, no data, errors, bad values."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from own_items import SCENARIO, digests, fit, item, play, slices
from ranks import run_ranks

from distcache.data.batch import JaggedIds


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
    "bad_values": bad_values,
    "uneven": uneven,
    "failing": failing,
    "nothing_to_train": nothing_to_train,
}


@pytest.fixture(scope="module", params=[1, 2])
def seen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"own{request.param}")
    found = run_ranks(play, request.param, SCENES, str(folder), timeout=200)
    return found, request.param, folder


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
