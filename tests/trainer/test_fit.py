"""distcache.fit: items of a user's loaders as batches; runs over every kind of iterable, resumed,
with ranks that differ or fail, beside groups of the caller's own; wrong settings."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from scenarios import Scenario, SmallNet, run_mode, table
from source_runs import digests
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

import distcache
from distcache.checkpoint.manifest import Manifest
from distcache.comm.world import close_world, open_world
from distcache.config.keys import flat_settings
from distcache.data.batch import JaggedIds
from distcache.data.own import Draws, OwnBatches, as_batch, digest_of, read_position
from distcache.errors import ConfigError, DataError, StepTooLargeError
from distcache.fitting import _summed, own_config, table_specs
from distcache.layout import TableSpec
from distcache.optim import row_update
from distcache.parallel.cached import CachedSettings

SCENARIO = Scenario((table("t", 300, 8, 3),), row_update("adagrad"), steps=12, weighted=False)
"""Three features on one table; a rank's slice of step s is `SCENARIO.batch(s, rank, world)`."""
READS = {feature: feature for feature in SCENARIO.features}
"""The feature that each lookup reads."""
ROWS = {"cache.rows": 160, "cache.lookahead": 3, "optim.dense_lr": 0.1, "optim.embedding_lr": 0.1}
AUTO = {"cache__lookahead": "auto"}
"""The window by the ids of the first item, read before the run, and trained in its turn."""
MODES = ("data", "resident", "host", "hybrid")


def item(step: int, rank: int = 0, world: int = 1, form: str = "tuple") -> Any:
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
    if form == "weighted":
        return batch.dense, (ids.values, ids.offsets, 0.5 + ids.values % 3), batch.labels
    return batch.dense, (ids.values, ids.offsets), batch.labels


def slices(rank: int = 0, world: int = 1, count: int = 12, form: str = "tuple") -> list:
    return [item(step, rank, world, form) for step in range(count)]


class Resumable:
    """Re-iterable, with a state inside a pass; `drawn` lists the items that were read."""

    def __init__(self, rank: int = 0, world: int = 1, count: int = 12) -> None:
        self.place, self.count, self.at = (rank, world), count, 0
        self.drawn: list[int] = []

    def __iter__(self):
        while self.at < self.count:
            self.drawn.append(self.at)
            self.at += 1
            yield item(self.at - 1, *self.place)
        self.at = 0

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]


class Endless(IterableDataset):
    """Items without a length, of which the fifth may be bad, or raise."""

    def __init__(self, rank: int, world: int, count: int, bad: str | None = None) -> None:
        self.place, self.count, self.bad = (rank, world), count, bad

    def __iter__(self):
        for step in range(self.count):
            if step == 4 and self.bad == "raises":
                raise ValueError("disk on fire")
            yield (1,) if step == 4 and self.bad else item(step, *self.place)


def fit(world, folder: Path, loader, parallel="data", **settings):
    """One run in `folder`: its summary. A checkpoint is left where `trainer.steps` ends it."""
    save = "trainer__steps" in settings or "run__save" in settings
    own = {key.replace("__", "."): value for key, value in settings.items() if "__" in key}
    rest = {key: value for key, value in settings.items() if "__" not in key}
    keys = ROWS | {"run.dir": str(folder), "run.save": save, "run.overwrite": True} | own
    model, tables = rest.pop("model", SCENARIO.model)(), rest.pop("tables", SCENARIO.tables)
    return distcache.fit(
        loader, tables, model, parallel=parallel, settings=keys, world=world, **rest
    ).summary


def error_of(function, *arguments, **settings) -> str | None:
    """What a call raises, in a line; None where it returns."""
    try:
        function(*arguments, **settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# Runs on one rank and on two, all of a scene in one set of processes.


def forms(world, home: Path) -> dict[str, Any]:
    """The same data as every kind of iterable, and as a source."""
    place = world.rank, world.size
    loaders = {
        "generator": (item(step, *place) for step in range(12)),
        "kjt": slices(*place, form="kjt"),
        "jagged": slices(*place, form="jagged"),
        "workers": DataLoader(slices(*place), batch_size=None, num_workers=2, pin_memory=True),
        "no length": DataLoader(Endless(*place, 12), batch_size=None),
    }
    found = {name: fit(world, home / name, loader, **AUTO) for name, loader in loaders.items()}
    source = run_mode(world, SCENARIO, CachedSettings("data", (160,), lookahead=3))
    return found | {"source": source.losses[-1]}


def resuming(world, home: Path) -> dict[str, Any]:
    """Half of the steps, then the rest from the checkpoint."""
    place, seen = (world.rank, world.size), {}
    makers = {
        "replayed": lambda: slices(*place),
        "state": lambda: Resumable(*place),
        "workers": lambda: DataLoader(slices(*place), batch_size=None, num_workers=1),
    }
    for name, make in makers.items():
        first = fit(world, home / name, make(), trainer__steps=5, **AUTO)
        loader = make()
        rest = fit(world, home / f"{name}2", loader, trainer__resume=str(home / name), **AUTO)
        seen[name] = (first["steps"], rest["first_step"], rest["steps"], digests(rest))
        if name == "state":
            seen["drawn again"] = loader.drawn
    return seen


def reused(world, home: Path) -> dict[str, Any]:
    """A loader that fills the same buffers for every item."""
    whole = slices(world.rank, world.size)

    def same_buffers():
        values = torch.empty(max(len(ids[0]) for _, ids, _ in whole), dtype=torch.int64)
        dense, (_, offsets), labels = whole[0]
        dense, offsets, labels = (torch.empty_like(x) for x in (dense, offsets, labels))
        for step in whole:
            dense.copy_(step[0]), offsets.copy_(step[1][1]), labels.copy_(step[2])
            own = values[: len(step[1][0])]
            own.copy_(step[1][0])
            yield dense, (own, offsets), labels

    both = ("data", "hybrid")  # the other modes take their batches as `data` does
    runs = {mode: fit(world, home / mode, same_buffers(), mode, **AUTO) for mode in both}
    runs["kept"] = fit(world, home / "kept", whole, "hybrid")
    return {name: digests(summary) for name, summary in runs.items()}


def workers_end(world, home: Path) -> dict[str, Any]:
    """Worker processes left after runs that stop early, or fail in the loader or after it."""
    seen = {}
    for bad in (None, "raises", "shape"):
        data = Endless(world.rank, world.size, 400, bad)
        loader = DataLoader(data, batch_size=None, num_workers=1)
        try:
            fit(world, home / f"workers-{bad}", loader, trainer__steps=6)
        except Exception as error:  # held, with its traceback
            seen[bad] = str(error), len(multiprocessing.active_children())
        else:
            seen[bad] = "", len(multiprocessing.active_children())
    return seen


def uneven(world, home: Path) -> dict[str, Any]:
    """Sizes, lengths and evaluations that differ between ranks, with weights, in every mode."""
    rank, shares = world.rank, [1] if world.size == 1 else [1 / 3, 2 / 3]

    def lopsided():
        return [cut(step, sum(shares[:rank]), shares[rank]) for step in range(12 - 2 * rank)]

    evals = [item(50 + n, rank, world.size, "weighted") for n in range(3 + 2 * rank)]
    more = {"eval_loader": evals, "trainer__eval_every": 4}
    seen = {mode: fit(world, home / f"uneven-{mode}", lopsided(), mode, **more) for mode in MODES}
    return seen | {"no eval": fit(world, home / "none", lopsided())}


def cut(step: int, first: float, share: float):
    """The samples of a batch from a share of them on, so many of them."""
    dense, (values, offsets), labels = item(step)
    b = len(labels)
    mine = slice(round(first * b), round((first + share) * b))
    lengths = offsets.diff().view(3, b)
    picked = torch.zeros(3, b, dtype=torch.bool)
    picked[:, mine] = True
    kept = lengths[:, mine].reshape(-1)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])
    ids = values[picked.reshape(-1).repeat_interleave(lengths.reshape(-1))]
    return dense[mine], (ids, ends, 0.5 + ids % 3), labels[mine]


def nothing_to_train(world, home: Path) -> dict[str, Any]:
    """The last rank has no data at all, neither to train nor to evaluate on; or all is done."""
    rank, last = world.rank, world.rank == world.size - 1 and world.size > 1
    evals = [] if last else slices(rank, world.size, 3)
    loader, seen = [] if last or world.size == 1 else slices(rank, world.size), {}
    for mode in ("data", "hybrid"):
        seen[mode] = error_of(fit, world, home / f"nothing-{mode}", loader, mode, eval_loader=evals)
    used = iter(slices(rank, world.size, 3))
    whole = fit(world, home / "read", used, run__save=True)["steps"]
    seen["again"] = whole, error_of(fit, world, home / "used", used)
    done = {"eval_loader": evals, "trainer__resume": str(home / "read")}
    return seen | {"resumed": fit(world, home / "done", slices(rank, world.size, 3), **done)}


BAD = {
    "raises": (("data", "hybrid"), "train batch 7 of your loader: ValueError: disk on fire"),
    "shape": (("data",), r"train batch 4 of your loader: dense is \[\d+, 2\], labels \["),
    "label": (
        ("data", "hybrid"),
        "train batch 6 of your loader: sample 3 has the label 2; 1 of its",
    ),
    "complex": (("data",), "train batch 4 of your loader: labels is of torch.complex64: give real"),
    "stride": (("data",), r"train batch 5 of your loader: stride=7 of .* contradicts"),
    "width": (("data",), "train batch 4 of your loader: dense has 1 features, those before it 5"),
    "id": (("data",), r"train batch 5: feature 't_0', sample \d+ of this .*: id 300 is not in"),
    "weights": (("hybrid",), "the ids of train batch 5 have weights, and those of the first batch"),
    "eval width": (("data",), "eval batch 4 of your loader: dense has 1 features, those before"),
}
"""What is wrong with an item of the last rank: the modes it is tried in, what that rank says."""


def raising(items: list):
    yield from items
    raise ValueError("disk on fire")


def broken(name: str, rank: int, world: int):
    """The items with the one that is wrong."""
    items = slices(rank, world)
    step = int(re.search(r"batch (\d+)", BAD[name][1])[1])
    dense, (values, offsets), labels = items[step]
    if name == "raises":
        return raising(items[:step])
    if name == "label":
        labels = labels.index_fill(0, torch.tensor(3), 2)
    if "width" in name or name == "shape":
        dense = dense[:, :1] if "width" in name else dense[:, :2]
    if name == "shape":
        labels = labels[:-1]
    if name == "complex":
        labels = labels.to(torch.complex64)
    if name == "id":
        values = values.clone()
        values[0] = 300
    weights = [torch.ones(len(values))] if name == "weights" else []
    ids: Any = (values, offsets, *weights)
    if name == "stride":
        from torchrec import KeyedJaggedTensor

        keys = [f for table in SCENARIO.tables for f in table.features]
        ids = KeyedJaggedTensor(keys, values, lengths=offsets.diff(), stride=7)
    items[step] = dense, ids, labels
    return items


def refused(world, home: Path) -> dict[str, Any]:
    """What goes wrong on the last rank, as every rank hears of it, and the steps before it."""
    last, place, seen = world.rank == world.size - 1, (world.rank, world.size), {}
    for name, (modes, _) in BAD.items():
        for mode in modes:
            bad = broken(name, *place) if last else slices(*place)
            evals = {"eval_loader": bad, "trainer__eval_every": 4} if "eval" in name else {}
            loader = slices(*place) if evals else bad
            seen[name, mode] = error_of(fit, world, home / f"{name}-{mode}", loader, mode, **evals)
    for name in ("raises", "label"):
        resume = str(home / f"{name}-data")
        rest = fit(world, home / f"{name}-rest", slices(*place), trainer__resume=resume)
        seen[name] = rest["first_step"], digests(rest)
    return seen


class Pooled(torch.nn.Module):
    """A model without parameters, or with one that is frozen."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        if frozen:
            self.scale = torch.nn.Parameter(torch.full((1,), 0.5), requires_grad=False)

    def forward(self, dense, pooled):
        return pooled.sum(1) * getattr(self, "scale", 1.0)


def without_dense(world, home: Path) -> dict[str, Any]:
    """Models in which the rows alone train, half way and on, in every mode."""
    place, seen = (world.rank, world.size), {}
    for frozen, optimizer in ((False, "adam"), (True, "adagrad")):
        for mode in MODES:
            kind = "adagrad" if mode == "hybrid" else optimizer  # which has no Adam on the CPU
            more: dict[str, Any] = {"model": lambda frozen=frozen: Pooled(frozen)}
            more |= {"optimizer": kind, "eval_loader": slices(*place, 2)}
            where = home / f"pooled-{mode}-{frozen}"
            whole = fit(world, where / "whole", slices(*place), mode, **more)
            fit(world, where, slices(*place), mode, trainer__steps=5, **more)
            more["trainer__resume"] = str(where)
            rest = fit(world, where / "rest", slices(*place), mode, **more)
            seen[frozen, mode] = digests(whole), digests(rest), whole["eval_auc"]
    return seen


class Normalising(torch.nn.Module):
    """A model that torch refuses to train on a batch without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = SCENARIO.model(), torch.nn.BatchNorm1d(5)

    def forward(self, dense, pooled):
        return self.net(self.norm(dense), pooled)


def normalised(world, home: Path) -> dict[str, Any]:
    """A model with batch normalisation, half way and on; statistics as of 12 training steps."""
    place, seen = (world.rank, world.size), {}
    for mode in MODES:
        where, models = home / f"normalised-{mode}", []

        def model(models=models) -> torch.nn.Module:
            models.append(Normalising())
            return models[-1]

        whole = fit(world, where / "whole", slices(*place), mode, model=model)
        fit(world, where, slices(*place), mode, model=Normalising, trainer__steps=5)
        more = {"model": Normalising, "trainer__resume": str(where)}
        rest = fit(world, where / "rest", slices(*place), mode, **more)
        steps = models[0].norm.num_batches_tracked.item()
        seen[mode] = digests(whole), digests(rest), steps
    return seen


def empty_batches(world, home: Path) -> dict[str, Any]:
    """Runs with and without global batches that have no sample, the last of them among these."""
    place, seen = (world.rank, world.size), {}
    no_ids = torch.zeros(0, dtype=torch.int64)
    nothing = torch.zeros(0, 5), (no_ids, torch.zeros(1, dtype=torch.int64)), torch.zeros(0)
    for mode, optimizer in (("data", "adam"), ("host", "momentum_sgd"), ("hybrid", "adagrad")):
        whole = slices(*place, count=6)
        more: dict[str, Any] = {"optimizer": optimizer, "trainer__log_every": 1}
        more |= {"model": Normalising, "eval_loader": [nothing, *slices(*place, 2), nothing]}
        some = [nothing, *whole[:2], nothing, nothing, *whole[2:], nothing]
        runs = [
            fit(world, home / f"{name}-{mode}", items, mode, **more)
            for name, items in (("full", whole), ("gaps", some))
        ]
        alike = [[*digests(run), run["eval_auc"]] for run in runs]
        seen[mode] = alike, runs[1]["steps"], runs[1]["final_loss"]
    return seen


DEEP_AND_WIDE = (
    TableSpec("deep", 300, 8, ("t_0", "t_1")),
    TableSpec("wide", 300, 4, ("t_0",), "mean"),
    TableSpec("last", 300, 8, ("t_2",)),
)
"""Tables of which two read one feature."""
COPIED = (
    DEEP_AND_WIDE[0],
    TableSpec("wide", 300, 4, ("copy",), "mean"),
    DEEP_AND_WIDE[2],
)
"""The same tables, in which the second one reads a copy of the feature."""


def wide_net() -> SmallNet:
    torch.manual_seed(3)
    return SmallNet(5, 8 + 8 + 4 + 8)


def with_copy(dense, ids, labels):
    """An item with bags of `t_0`, `t_1`, a copy of `t_0`, and `t_2`."""
    values, offsets = ids
    b = len(labels)
    bags = [values[offsets[i] : offsets[i + 1]] for i in range(3 * b)]
    bags = [*bags[: 2 * b], *bags[:b], *bags[2 * b :]]
    ends = torch.tensor([0, *map(len, bags)]).cumsum(0)
    return dense, (torch.cat(bags), ends), labels


def shared_feature(world, home: Path) -> dict[str, Any]:
    """Runs in which two tables read one feature, and runs with a copy of the feature."""
    place, seen = (world.rank, world.size), {}
    evals = slices(*place, 2)
    for mode in MODES:
        shared = {"model": wide_net, "tables": DEEP_AND_WIDE, "cache__rows": 200}
        copied = shared | {"tables": COPIED, "eval_loader": [with_copy(*each) for each in evals]}
        shared |= {"eval_loader": evals}
        copies = [with_copy(*each) for each in slices(*place)]
        half = home / f"shared-{mode}"
        fit(world, half, slices(*place), mode, trainer__steps=5, **shared)
        more = shared | {"trainer__resume": str(half)}
        runs = [
            fit(world, home / f"copied-{mode}", copies, mode, **copied),
            fit(world, home / f"whole-{mode}", slices(*place, form="kjt"), mode, **shared),
            fit(world, home / f"rest-{mode}", slices(*place), mode, **more),
        ]
        seen[mode] = [[*digests(run), run["eval_auc"]] for run in runs]
    return seen


SCENES = (
    shared_feature,
    normalised,
    empty_batches,
    without_dense,
    forms,
    resuming,
    reused,
    workers_end,
    uneven,
    nothing_to_train,
    refused,
)


def play(rank: int, size: int, folder: str) -> dict[str, Any]:
    """What each of the scenes finds on a rank, and the numbers of the whole run beside them."""
    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False  # a daemon may have no workers
    world = open_world("cpu", timeout_s=60)
    whole = fit(world, Path(folder) / "whole", slices(rank, size))
    seen: dict[str, Any] = {"whole": digests(whole), "last loss": whole["final_loss"]}
    seen |= {scene.__name__: scene(world, Path(folder)) for scene in SCENES}
    close_world(world)
    return seen


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def seen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"own{request.param}")
    return run_ranks(play, request.param, str(folder), timeout=400), request.param, folder


def test_every_kind_of_iterable_trains_alike(seen):
    ranks, _, folder = seen
    for found in ranks:
        *runs, (_, source) = found["forms"].items()
        assert source == ranks[0]["last loss"]
        for name, summary in runs:
            assert digests(summary) == ranks[0]["whole"], name
            assert summary["steps"] == 12 and summary["global_batch_size"] is None
            assert summary["lookahead"] == 64
        kept = found["reused"]["kept"]
        assert found["reused"] == {"data": found["whole"], "hybrid": kept, "kept": kept}
    assert json.loads((folder / "whole" / "summary.json").read_text())["steps"] == 12


def test_resuming_is_exact(seen):
    for found in seen[0]:
        for name in ("replayed", "state", "workers"):
            assert found["resuming"][name] == (5, 5, 7, found["whole"]), name
        assert found["resuming"]["drawn again"] == [0, *range(4, 12)]


def test_batch_normalisation_counts_training_steps_alone(seen):
    for found in seen[0]:
        for mode, (whole, rest, steps) in found["normalised"].items():
            assert rest == whole and steps == 12, mode


def test_tables_that_share_a_feature_train_as_with_a_copy_of_it(seen):
    for found in seen[0]:
        for mode, (copied, *shared) in found["shared_feature"].items():
            assert shared == [copied, copied], mode


def test_lookups_of_one_name_are_refused(tmp_path):
    for features in (("t_0", "t_0"), ("t_0", "t_0@wide")):
        tables = [TableSpec("deep", 300, 8, features), DEEP_AND_WIDE[1]]
        with pytest.raises(ConfigError, match=r"two lookups named \['t_0@(deep|wide)'\]: name a"):
            fit(None, tmp_path, [item(0)], tables=tables)


def test_malformed_offsets_of_a_shared_feature_are_refused(tmp_path):
    dense, (values, offsets), labels = item(0)
    bad = dense, (values[:-1], offsets), labels
    with pytest.raises(DataError, match="train batch 0 of your loader: offsets go from 0 to"):
        fit(None, tmp_path, [bad], model=wide_net, tables=DEEP_AND_WIDE)


def test_a_global_batch_without_samples_changes_nothing(seen):
    ranks, _, folder = seen
    for found in ranks:
        for mode, (alike, steps, final_loss) in found["empty_batches"].items():
            assert alike[0] == alike[1] and (steps, final_loss) == (10, None), mode
            lines = (folder / f"gaps-{mode}" / "metrics.jsonl").read_text().splitlines()
            losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
            assert [n for n, loss in enumerate(losses) if loss is None] == [0, 3, 4, 9]


def test_a_global_batch_without_samples_is_told_of_once(tmp_path, caplog):
    batch = item(0)
    nothing = batch[0][:0], (batch[1][0][:0], torch.zeros(1, dtype=torch.int64)), batch[2][:0]
    fit(None, tmp_path, [nothing, batch, nothing])
    assert caplog.text.count("has no sample on any rank: it changes nothing") == 1


def test_models_in_which_rows_alone_train(seen):
    for found in seen[0]:
        for (frozen, mode), (whole, rest, auc) in found["without_dense"].items():
            assert whole == rest and 0 <= auc <= 1, (frozen, mode)
            if mode != "hybrid":
                assert whole == found["without_dense"][frozen, "data"][0], (frozen, mode)


def test_no_worker_process_is_left(seen):
    for found in seen[0]:
        pairs = [found["workers_end"][bad] for bad in (None, "raises", "shape")]
        said = [text for text, _ in pairs]
        assert [left for _, left in pairs] == [0, 0, 0]
        assert said[0] == "" and "disk on fire" in said[1] and "batch 4" in said[2]


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
    ranks, world, folder = seen
    for found in ranks:
        runs = found["uneven"]
        alike = {digests(runs[name]) for name in ("data", "resident", "host", "no eval")}
        assert len(alike) == 1
        for summary in runs.values():
            assert summary["steps"] == 12 - 2 * (world - 1)  # the first rank's end
        assert runs["hybrid"]["final_loss"] == pytest.approx(runs["data"]["final_loss"], rel=1e-5)
        assert runs["hybrid"]["eval_auc"] == pytest.approx(runs["data"]["eval_auc"], abs=1e-3)
        assert 0 < runs["data"]["eval_auc"] < 1
    if world == 2:
        lines = (folder / "uneven-data" / "metrics.jsonl").read_text().splitlines()
        evaluated = [json.loads(line) for line in lines if "eval_auc" in line]
        assert [line["step"] for line in evaluated] == [4, 8, 10]


def test_what_is_wrong_is_heard_by_all_ranks_before_its_step(seen):
    ranks = seen[0]
    for rank, found in enumerate(ranks):
        heard = dict(found["refused"])
        assert heard.pop("raises") == (7, found["whole"])  # the steps before the error are saved
        assert heard.pop("label") == (6, found["whole"])
        assert heard.keys() == {(name, mode) for name, (modes, _) in BAD.items() for mode in modes}
        for (name, mode), message in heard.items():
            expected = f"DataError: {BAD[name][1]}"
            if rank < len(ranks) - 1:
                expected = "PeerError: stopped because rank 1 failed"
                if mode == "hybrid":  # agrees on each batch, so others hear of it as it is
                    expected = f"DataError: rank 1: {BAD[name][1]}"
            assert re.match(expected, message), (name, mode, message)


# In a process that has initialised torch.distributed itself.


def beside(rank: int, size: int, folder: str, launched: bool) -> dict[str, Any]:
    """Runs in the caller's world, before and after some that fail."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    if not launched:  # by mp.spawn, say
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name)
    groups, seen = len(dist.distributed_c10d._world.pg_map), {}

    def run(mode: str, bad: bool = False):
        items = broken("raises", rank, size) if bad else slices(rank, size)
        return fit(None, Path(folder, "beside"), items, mode, trainer__device="cpu")

    for mode in ("data", "hybrid"):
        seen[mode] = digests(run(mode))
        seen[f"bad {mode}"] = error_of(run, mode, rank == size - 1)
    seen["again"] = digests(run("data"))
    seen["groups"] = len(dist.distributed_c10d._world.pg_map) - groups
    number = torch.tensor([rank + 1.0])
    dist.all_reduce(number)
    dist.barrier()
    dist.destroy_process_group()
    return seen | {"sum": number.item()}


def test_the_callers_groups_are_used_and_stay(seen, tmp_path):
    (whole, *_), size, _ = seen
    ranks = run_ranks(beside, size, str(tmp_path), size == 1, timeout=200)
    for found in ranks:
        assert found["data"] == found["again"] == whole["whole"]
        assert found["hybrid"] == whole["reused"]["hybrid"]
        for mode in ("data", "hybrid"):
            said = f"rank {size - 1}{':' if mode == 'hybrid' else ' failed'}"
            assert said in found[f"bad {mode}"] or found is ranks[-1]
            assert "disk on fire" in ranks[-1][f"bad {mode}"]
        assert found["groups"] == 0 and found["sum"] == size * (size + 1) / 2


# Stopped, and gone on with: on as many ranks with the generators as they were, or on others.


class Dropping(torch.nn.Module):
    """A model that draws from torch's generator in training."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.drop = SCENARIO.model(), torch.nn.Dropout(0.5)

    def forward(self, dense, pooled):
        return self.net(self.drop(dense), pooled)


def drawn(rank: int, world: int):
    """Items of which each draws from torch's generator in this process."""
    for dense, *rest in slices(rank, world):
        yield dense + torch.rand(dense.shape), *rest


def plain(rank: int, world: int) -> DataLoader:
    return DataLoader(slices(rank, world), batch_size=None)  # which draws a seed for its workers


def shuffled(rank: int, world: int, count: int = 4) -> DataLoader:
    """Items in an order that each pass draws, as it does a seed for workers."""
    data = slices(rank, world, count)
    return DataLoader(data, batch_size=None, sampler=RandomSampler(data))


def sampled(rank: int, world: int) -> DataLoader:
    """Three batches of samples that are shuffled in each pass, with ids beyond their table."""
    samples = [SCENARIO.batch(number // 24, number % 24, 24) for number in range(72)]

    def collate(batch: list):
        lengths = torch.stack([one.ids.offsets.diff() for one in batch])
        bags = [one.ids.values.tensor_split(one.ids.offsets[1:-1]) for one in batch]
        ids = torch.cat([bag for feature in zip(*bags, strict=True) for bag in feature]) + 300
        offsets = torch.nn.functional.pad(lengths.T.reshape(-1).cumsum(0), (1, 0))
        labels = torch.cat([one.labels for one in batch])
        return torch.cat([one.dense for one in batch]), (ids, offsets), labels

    sampler = DistributedSampler(samples, world, rank)
    return DataLoader(samples, 24 // world, sampler=sampler, collate_fn=collate)


def later(rank: int, world: int) -> list:
    return slices(rank, world)[1:]


WIDE = {"trainer__dtype": "float64"}
EVALUATED = {"eval_loader": shuffled(0, 4, 6), "trainer__eval_every": 2, "trainer__eval_steps": 2}
BEGUN = {
    "plain": (plain, "data", WIDE),
    "passes": (sampled, "host", WIDE | {"epochs": 4, "data__on_bad_id": "hash"}),
    "hybrid": (slices, "hybrid", {}),
    "dropout": (plain, "data", {"model": Dropping}),
    "dropout in hybrid": (plain, "hybrid", {"model": Dropping}),
    "shuffled": (shuffled, "data", {"model": Dropping, "epochs": 3} | EVALUATED),
    "drawn": (drawn, "data", {}),
    "state": (Resumable, "data", WIDE),
    "lengths": (lambda rank, size: slices(rank, size, 4 - rank), "data", {"epochs": 3}),
}
"""Loader, mode and settings of runs that save after five of twelve steps, with more drawn."""
NEVER_MOVED = ("drawn", "dropout in hybrid", "shuffled")
MOVED = {
    **{name: (name, *BEGUN[name]) for name in BEGUN if name not in NEVER_MOVED},
    "without state": ("state", *BEGUN["plain"]),
    "other": ("plain", later, "data", WIDE),
    "short": ("plain", lambda *place: slices(*place, count=3), "data", WIDE),
    "meant": ("plain", later, "data", WIDE | {"trainer__resume_data": "any"}),
}
"""How they go on on another number of ranks, from which of them."""
DROPPING = ("dropout", "dropout in hybrid", "drawn", "shuffled")
EXACT = ("plain", "passes", "hybrid")


def go_on(rank: int, size: int, folder: str, parts: tuple[str, ...]) -> dict[str, Any]:
    """The runs of each part: digests, loss, what they warn of and the seed, or what they raise."""
    torch.set_num_threads(1)
    world, home, seen, said = open_world("cpu", timeout_s=60), Path(folder), {}, []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("distcache").addHandler(handler)
    names = {"begun": BEGUN, "moved": MOVED, "there": EXACT, "same": DROPPING}
    for part, name in ((at, name) for at in parts for name in names[at]):
        begun, make, mode, how = MOVED[name] if part == "moved" else (name, *BEGUN[name])
        more = {"run__save": True, "trainer__checkpoint_every": 5, "trainer__keep_checkpoints": 9}
        if part in ("same", "moved"):
            more["trainer__resume"] = str(home / "begun" / begun / "checkpoints/step_00000005")
        torch.manual_seed(7 + rank)
        said.clear()
        try:
            summary = fit(world, home / part / name, make(rank, size), mode, **how, **more)
            found = digests(summary), summary["final_loss"], [*said], torch.initial_seed()
        except ConfigError as error:
            found = str(error)
        seen.setdefault(part, {})[name] = found
    close_world(world)
    return seen


OTHER = "step 5 was saved by {0} rank.s., here are {1}, .* another .* before it"
BACK = "step 5 was saved by {0} rank.s., here are {1}: resume on {0}, or "
REFUSED = {
    "other": OTHER + " than was trained: .* trainer.resume_data=any",
    "short": OTHER + ", of 0 samples, than was trained, of 24: ",
    "state": BACK + "give loaders without state_dict",
    "lengths": BACK + r"begin anew .* at different \(pass, batch\) \[\(1, 1\), \(1, 2\)",
}
WAYS = [(2, 3), *(pytest.param(*way, marks=pytest.mark.slow) for way in [(1, 2), (3, 2), (3, 1)])]


@pytest.mark.parametrize(("ranks", "others"), WAYS)
def test_loaders_go_on_on_other_ranks(tmp_path, ranks, others):
    found = run_ranks(go_on, ranks, str(tmp_path), ("begun", "same"), timeout=300)[0]
    for name in DROPPING:  # the bits of never having stopped, and nothing said
        assert found["same"][name] == (*found["begun"][name][:2], [], 7)
    by_rank = run_ranks(go_on, others, str(tmp_path), ("moved", "there"), timeout=300)
    seeds = [on_rank["moved"]["dropout"][3] for on_rank in by_rank]
    assert seeds == [zlib.crc32(f"0/5/{rank}".encode()) for rank in range(others)]
    moved, there, end = by_rank[0]["moved"], by_rank[0]["there"], "checkpoints/step_00000012"
    for name, as_if in zip((*EXACT, "without state"), (*EXACT, "plain"), strict=True):
        near = 1e-5 if name == "hybrid" else 1e-10
        assert moved[name][1] == pytest.approx(there[as_if][1], rel=near), name
        whole = checkpoints.tensors(tmp_path / "there" / as_if / end)
        for key, value in checkpoints.tensors(tmp_path / "moved" / name / end).items():
            if not key.startswith("loader."):
                torch.testing.assert_close(value, whole[key], rtol=near, atol=near, msg=key)
    (said,) = moved["dropout"][2]
    assert re.search("generators, .* from trainer.seed=0, step 5 and rank", said)
    assert any(re.match(OTHER.format(ranks, others), said) for said in moved["meant"][2])
    for name in REFUSED.keys() - {"lengths" if ranks == 1 else ""}:
        assert re.match(REFUSED[name].format(ranks, others), moved[name]), moved[name]


@pytest.mark.parametrize("weighted", [False, True])
def test_digests_are_of_the_global_batch_alone(weighted):
    case = replace(SCENARIO, weighted=weighted)
    whole = case.batch(3)
    for world in (1, 2, 7, 30):  # of 24 samples
        parts = [digest_of(case.batch(3, rank, world)) for rank in reversed(range(world))]
        assert _summed(parts) == digest_of(whole), world
    ids, seen = whole.ids, {digest_of(whole)[1]}
    later = ids.offsets + (torch.arange(len(ids.offsets)) == ids.offsets.diff().argmax())
    changes = [{"offsets": later}, {"values": ids.values.flip(0)}]
    changes += [{"weights": own} for own in (None, ids.weights.flip(0))] if weighted else []
    others = [replace(whole, ids=replace(ids, **change)) for change in changes]
    others += [replace(whole, dense=whole.dense.flip(way)) for way in (0, 1)]
    for other in (case.batch(4), replace(whole, labels=1 - whole.labels), *others):
        assert digest_of(other)[1] not in seen
        seen.add(digest_of(other)[1])


# Items as batches, without ranks.


def test_global_batch_is_the_concatenation():
    whole = as_batch(item(3), READS, 3, 0)
    batch = whole.among([24, 0, 5], 2)
    assert (batch.global_size, batch.first_sample, batch.largest) == (29, 24, 24)
    assert whole.among([0, 0], 0).is_empty and not whole.among([0, 1], 0).is_empty


BAD_ITEMS = {
    "two": (lambda d, i, y: (d, i), "is a tuple of 2; give"),
    "dict": (lambda d, i, y: {"dense": d}, "is a dict; give"),
    "dense": (lambda d, i, y: (d[0], i, y), r"dense is \[5\]"),
    "labels": (lambda d, i, y: (d, i, y[1:]), r"labels \[23\], ids have 24"),
    "ids": (lambda d, i, y: (d, 7, y), "ids are a int; give a KeyedJaggedTensor"),
    "offsets": (lambda d, i, y: (d, (i[0], i[1][:-6]), y), "ids have 22 samples"),
    "text": (lambda d, i, y: ("abc", i, y), "dense is a str, no tensor"),
    "2": (lambda d, i, y: (d, i, 2 * torch.ones(24)), "sample 0 .*label 2; 24 of its labels"),
    "-1": (lambda d, i, y: (d, i, y.index_fill(0, torch.tensor(4), -1)), "sample 4 .*label -1"),
    "nan": (lambda d, i, y: (d, i, y.index_fill(0, torch.tensor(3), torch.nan)), "sample 3 .*nan;"),
    "inf": (lambda d, i, y: (d, i, y[:, None] + torch.inf), "sample 0 .*label inf"),
    "features": (lambda d, i, y: (d, JaggedIds(("a", "b", "t_2"), *i), y),
                 r"has the features \['a', 'b', 't_2'\]; the tables read \['t_0', 't_1', 't_2'\]"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_ITEMS.values(), ids=BAD_ITEMS)
def test_bad_items_are_named(change, message):
    with pytest.raises(DataError, match=rf"train batch 3 of your loader.*{message}"):
        as_batch(change(*item(3)), READS, 3, 0)


def test_probabilities_and_bools_are_labels():
    dense, ids, labels = item(3)
    for good in (labels / 2, labels.bool(), labels * 0 + 0.25, (labels[:0])):
        size = len(good)
        bags = ids if size else (ids[0][:0], ids[1][:1])
        batch = as_batch((dense[:size], bags, good), READS, 3, 0)
        assert batch.labels.tolist() == good.float().tolist()


def opened(loader, position: bytes | None = None, at: int = 0, **more):
    """A loader's batches from step `at` on, at a position."""
    own = OwnBatches(loader, READS, **more)
    if position is not None:
        own.resume(read_position(position))
    own.open()
    return own, own.batches(at)


@pytest.mark.parametrize("make", [Resumable, slices])
def test_stopped_anywhere_a_loader_goes_on_the_same(make):
    for stop in range(15):
        own, batches = opened(make(count=7), epochs=2)
        seen = [next(batches) for _ in range(stop)]
        _, rest = opened(make(count=7), own.position(stop, {}), stop, epochs=2)
        whole = seen + list(rest)
        assert [(b.index, b.epoch) for b in whole] == [(step, step // 7) for step in range(14)]
        for batch in whole:
            assert torch.equal(batch.dense, item(batch.index % 7)[0])


@pytest.mark.parametrize("given", [False, True])
def test_a_loader_whose_workers_persist_goes_on_in_the_same_order(given):
    """They draw a seed once, by the first look or as a pass begins."""

    def order(batches) -> list[float]:
        return [batch.dense.sum().item() for batch in batches]

    def make() -> DataLoader:
        data, own = slices(count=6), torch.Generator().manual_seed(3) if given else None
        how = {"sampler": RandomSampler(data, generator=own), "generator": own}
        return DataLoader(data, None, num_workers=1, persistent_workers=True, **how)

    loader = make()
    before = loader.generator
    own, batches = opened(loader, epochs=3)
    whole, positions = [], []
    for step in range(18):
        positions.append(own.position(step, {}) if step else None)
        whole += order([next(batches)])
    own.close()
    assert loader.generator is before and whole[:6] != whole[6:12]
    for step in (2, 6, 9, 15):
        for looks in (False, True):
            again = OwnBatches(make(), READS, epochs=3)
            if looks:
                again.first_look()
            again.resume(read_position(positions[step]))
            again.open()
            assert order(again.batches(step)) == whole[step:]
            again.close()
    loader = make()
    draws, found = Draws(loader), []
    for _ in range(2):
        draws.begin_again()
        found.append([dense.sum().item() for dense, *_ in loader])
    assert (found[0] == found[1]) == (not given)  # one that was given goes on


@pytest.mark.parametrize("make", [Resumable, slices])
def test_checkpoints_on_the_way_have_the_loaders_place(tmp_path, make):
    keys = {"run__save": True, "trainer__checkpoint_every": 4} | AUTO
    whole = digests(fit(None, tmp_path / "whole", make(), **keys))
    made = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    assert [path.name for path in (made[0], made[-1])] == ["step_00000004", "step_00000012"]
    for path in made:
        how = {"trainer__resume": str(path)} | AUTO
        assert digests(fit(None, tmp_path / "rest", make(), **how)) == whole


def test_positions_that_no_checkpoint_can_have_are_refused_at_the_start(tmp_path):
    class Odd(Resumable):
        def state_dict(self):
            return {"at": checkpoints.Payload(tmp_path / "executed")}

    for position in (None, pickle.dumps(Odd().state_dict()), b"", b"abc"):
        with pytest.raises(ConfigError, match=r"state_dict\(\) is no position"):
            opened(Odd(), position)
    assert not (tmp_path / "executed").exists()


class Astray(Resumable):
    """Its state leads elsewhere: so many items on, or to an error."""

    def __init__(self, on: int) -> None:
        super().__init__()
        self.on = on

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"] + self.on
        if self.on == 9:
            self.at = "nowhere"


class Shuffling(DataLoader):
    """A pass in an order that its generator draws, which its state does not bring back."""

    def __init__(self) -> None:
        super().__init__(slices(), None, generator=torch.Generator().manual_seed(5))
        self.order: list[int] = []
        self.at: int | None = None

    def __iter__(self):
        drawn = torch.randperm(12, generator=self.generator).tolist()
        if self.at is None:
            self.order, self.at = drawn, 0
        while self.at < 12:
            self.at += 1
            yield self.dataset[self.order[self.at - 1]]
        self.at = None

    def state_dict(self) -> dict:
        return {"at": self.at, "order": self.order}

    def load_state_dict(self, state: dict) -> None:
        self.at, self.order = state["at"], state["order"]


@pytest.mark.parametrize("on", [-1, 1, 7, 9])
def test_a_state_that_leads_elsewhere_is_refused(tmp_path, caplog, on):
    half = {"trainer__resume": str(tmp_path / "half")}
    fit(None, tmp_path / "half", Astray(on), trainer__steps=5)
    said = r"Astray.load_state_dict led to another place: give a loader without .*resume_data=any"
    if on == 9:
        said = r"Astray cannot go on from its state_dict \(DataError: .*: give a loader without"
    with pytest.raises(ConfigError, match=said):
        fit(None, tmp_path / "rest", Astray(on), **half)
    if on == 1:
        fit(None, tmp_path / "rest", Astray(on), trainer__resume_data="any", **half)
        assert "give another global batch before it" in caplog.text
    whole = digests(fit(None, tmp_path / "whole", slices()))
    assert digests(fit(None, tmp_path / "remedy", slices(), **half)) == whole


@pytest.mark.parametrize("stops", [(1, 2), (11, 13), (12,)])
def test_a_loader_with_a_state_goes_on_with_its_generators(tmp_path, stops):
    whole, before = fit(None, tmp_path / "whole", Shuffling(), epochs=2), {}
    for stop in (*stops, None):
        folder = tmp_path / str(stop)
        keys = {"epochs": 2, "trainer__steps": stop, "run__save": True} | before | AUTO
        last = fit(None, folder, Shuffling(), **keys)
        before = {"trainer__resume": str(folder)}
    assert (last["first_step"], digests(last)) == (stops[-1], digests(whole))


def test_positions_are_few_and_a_passed_one_is_not_known():
    own, batches = opened(Resumable(), keep=4)
    for _ in range(9):
        next(batches)
    assert len(own._positions) == 4
    with pytest.raises(DataError, match="after 2 steps is not known, only those after 6 to 9"):
        own.position(2, {})


def test_an_iterator_has_one_epoch():
    with pytest.raises(ConfigError, match="epochs=2, but the loader is an iterator"):
        list(opened(iter(slices(count=2)), epochs=2)[1])


def test_a_sampler_hears_of_its_epoch():
    class Loader(list):
        epochs: list[int] = []  # noqa: RUF012
        set_epoch = epochs.append
        sampler = property(lambda self: self)

    loader = Loader(slices(count=2))
    assert len(list(opened(loader, epochs=3)[1])) == 6 and loader.epochs == [0, 1, 2]


# Settings.

OF_OWN = "means nothing to batches of your own"
WRONG = [
    ({"parallel": "fast"}, "parallel.mode=fast"),
    ({"optimizer": "lion"}, "optim.name=lion"),
    ({"epochs": 0}, "epochs=0"),
    ({"tables": []}, "tables is empty"),
    ({"settings": ["cache.rows"]}, r"settings=\['cache.rows'\] is no mapping"),
    ({"cache.row": 3}, "cache.row: no such key: did you mean cache.rows"),
    ({"cache": 3}, "cache=3: cache is a section"),
    ({5: 3}, "5: no such key"),
    ({"model.pooling": "mean"}, r"settings\['model.pooling'\] means nothing"),
    ({"model": {"embedding_dim": 4}}, r"\['model.embedding_dim'\] means nothing"),
    ({"data.zipf": 2.0}, rf"\['data.zipf'\] {OF_OWN}"),
    ({"parallel.mode": "host"}, r"\['parallel.mode'\]: .* argument parallel="),
    ({"optim": {"name": "sgd"}}, r"\['optim.name'\]: .* argument optimizer="),
    ({"run.sweep_ranks": 2}, r"\['run.sweep_ranks'\] means nothing"),
    ({"cache.rows": "many"}, "cache.rows=many: give a whole number or null"),
    ({"cache.placement": "auto"}, r"auto .* settings\['data.global_batch_size'\]"),
    ({"cache.placement": "mixed"}, r"mixed .* give settings\['data.global_b"),
    ({"cache.split": "by_curve"}, r"cache.split=by_curve .* give settings"),
    ({"cache.policy": "static"}, r"cache.policy=static .* give settings"),
    ({"trainer.eval_every": 3}, "there is no eval_loader"),
    ({"data.batching": "hot_cold", "cache.statistics": "x"}, OF_OWN),
    ({"trainer.resume": "/no/such/run"}, "trainer.resume=/no/such/run is no folder"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_wrong_settings_are_named(given, message):
    if not given.keys() & {"parallel", "optimizer", "epochs", "tables", "settings"}:
        given = {"settings": given}
    with pytest.raises(ConfigError, match=message):
        distcache.fit(**{"loader": [], "tables": SCENARIO.tables, "model": SmallNet(5, 24)} | given)


@pytest.mark.parametrize("settings", [{"run.digest": False}, {"run": {"digest": "false"}}])
def test_words_that_python_has_as_booleans_and_sections(settings):
    batch = {"cache.placement": "auto", "data": {"global_batch_size": 64}}
    config = own_config("data", "sgd", flat_settings(settings | batch), 1)
    assert (config.run.digest, config.data.global_batch_size) == ("false", 64)


def test_one_rank_leaves_no_group(tmp_path):
    keys = ROWS | {"run.save": False, "run.dir": str(tmp_path)}
    distcache.fit(slices(count=2), SCENARIO.tables, SCENARIO.model(), settings=keys)
    assert not dist.is_initialized()


def test_what_does_not_fit_is_named(tmp_path):
    class Column(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = SCENARIO.model()

        def forward(self, dense, pooled):
            return self.net(dense, pooled).unsqueeze(1)

    settings = ROWS | {"run.dir": str(tmp_path), "run.save": False}
    (tmp_path / "bad_lines.json").touch()  # of an earlier run in this folder
    for mode in ("data", "hybrid"):
        with pytest.raises(ConfigError, match=r"returned \[\d+, 1\] for \d+ samples.*squeeze"):
            distcache.fit(slices(), SCENARIO.tables, Column(), parallel=mode, settings=settings)
    assert not (tmp_path / "bad_lines.json").exists()
    few = settings | {"cache.rows": 20}
    with pytest.raises(StepTooLargeError, match="or lower the batch size of your loaders"):
        distcache.fit(slices(), SCENARIO.tables, SCENARIO.model(), settings=few)


def test_training_draws_the_same_beside_an_evaluation(tmp_path):
    class Dropping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = SCENARIO.model()

        def forward(self, dense, pooled):
            return self.net(dense, torch.nn.functional.dropout(pooled, 0.5, self.training))

    found = []
    for held_out in (None, DataLoader([item(9)], batch_size=None)):
        torch.manual_seed(5)
        settings = ROWS | {"run.dir": str(tmp_path / str(len(found)))}
        how = {"eval_loader": held_out, "settings": settings}
        loader = DataLoader([item(step) for step in range(6)], batch_size=None)
        found.append(digests(distcache.fit(loader, SCENARIO.tables, Dropping(), **how).summary))
    assert found[0] == found[1]


def test_what_are_no_tables_and_no_model_is_named():
    """Checkpoints have tables by name: of two of one name they would have one."""
    same = replace(SCENARIO.tables[0], features=("other",), rows=7)
    for tables, said in (
        ([*SCENARIO.tables, same], "two tables are named 't'"),
        (same, "is no list: give"),
    ):
        with pytest.raises(ConfigError, match=said):
            distcache.fit(slices(), tables, SCENARIO.model(), settings=ROWS)
    with pytest.raises(ConfigError, match=r"features='user' is a text: give .*\('user',\)"):
        distcache.TableSpec("user", 50, 8, "user")
    with pytest.raises(ConfigError, match="model='dlrm' is no torch"):
        distcache.fit(slices(), SCENARIO.tables, "dlrm", settings=ROWS)


def test_torchrec_configs_are_tables():
    from torchrec import EmbeddingBagConfig, PoolingType
    from torchrec.modules.embedding_configs import DataType

    config = EmbeddingBagConfig(
        name="t", embedding_dim=8, num_embeddings=50, feature_names=["a"], pooling=PoolingType.MEAN
    )
    assert table_specs([config]) == [distcache.TableSpec("t", 50, 8, ("a",), "mean")]
    half = replace(config, data_type=DataType.BF16)
    expected = distcache.TableSpec("t", 50, 8, ("a",), "mean", torch.bfloat16)
    assert table_specs([half]) == [expected]


def test_tables_in_half_precision(tmp_path):
    """As `resident`, over a checkpoint, which is of no other dtype; not in `hybrid`."""
    tables, found = [replace(SCENARIO.tables[0], dtype=torch.float16)], {}

    def run(name: str, tables: Any = tables, mode: str = "data", **settings: Any) -> dict:
        own = ROWS | {"run.dir": str(tmp_path / name), "run.save": True} | settings
        how = {"parallel": mode, "settings": own}
        return distcache.fit(slices(), tables, SCENARIO.model(), **how).summary

    found = [digests(run(mode, mode=mode)) for mode in ("data", "resident", "host")]
    few = {"trainer.checkpoint_every": 2, "trainer.checkpoint_whole_every": 9}
    run("half", **{"trainer.steps": 5, "cache.rows": 200}, **few)
    assert Manifest.read(tmp_path / "half" / "checkpoints" / "step_00000005").base is not None
    whole = {"trainer.resume": str(tmp_path / "half")}
    found.append(digests(run("rest", **whole)))
    assert found == found[:1] * 4 and found[0] != digests(run("wide", SCENARIO.tables))
    said = "was t with 300 rows x 8 torch.float16, is t with 300 rows x 8"
    with pytest.raises(ConfigError, match=said):
        run("other", SCENARIO.tables, **whole)
    with pytest.raises(ConfigError, match="leave data_type out, or use another mode"):
        run("hybrid", mode="hybrid")
