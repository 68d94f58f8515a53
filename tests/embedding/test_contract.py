"""The contract through both doors: one model and one stream of batches give the trainer's bits in
the drop-in, in every placement, and under DDP in float64 what `nn.EmbeddingBag` gives.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from scenarios import (
    OPTIMIZERS,
    Outcome,
    Scenario,
    Shaker,
    check_against_trainer,
    count,
    run_mode,
    table,
)
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

import distcache
from distcache.comm.world import close_world, open_world
from distcache.data.batch import Batch
from distcache.engine.tables import CachedTables
from distcache.errors import ConfigError, PlanError
from distcache.optim import dense_optimizer
from distcache.parallel.cached import CachedSettings

TABLES = (table("a", 300), table("b", 40, features=2), table("c", 200, dim=4), table("d", 1))
STEPS = 12
PLACEMENTS = {
    "replicated": {},
    "home": {"state": "home"},
    "sharded": {"placement": "sharded"},
    "mixed": {"placement": "mixed", "replicated_share": 0.1},
    "mixed_home": {"placement": "mixed", "replicated_rows": {"a": 30, "b": 5}, "state": "home"},
}
WAYS = {
    "auto": {"rows": 400},
    "window": {"rows": 360, "lookahead": 6, "prefetch": 2},
    "inline": {"rows": 400, "read_ahead": False},
    "serial": {"rows": 360, "lookahead": 0, "prefetch": 0, "schedule": "serial"},
    "lru": {"rows": 400, "policy": "lru", "lookahead": 2, "prefetch": 3},
    "whole": {"ratio": 1.0, "store_access": "zero_copy"},
    "warm": {"rows": 400, "statistics": True, "policy": "lru"},
    "static": {"rows": 420, "statistics": True, "policy": "static"},
    "tail": {"rows": 400, "statistics": True, "tail": "frequency", "warm_start": 0.5},
    "curve": {"rows": 420, "statistics": True, "split": "by_curve"},
    "given": {"split": {"a": 200, "b": 40, "c": 150, "d": 1}},
}
Job = tuple[str, str, str]
"""Optimizer, placement, and way of keeping rows."""


def scenario(optimizer: str, **changes: object) -> Scenario:
    spec, lr = OPTIMIZERS[optimizer]
    case = Scenario(TABLES, spec, lr, steps=STEPS, weighted=True, last_batch=3)
    return replace(case, **changes)


class OfBatches(nn.Module):
    """The trainer's dense part over a collection, its features in the trainer's order."""

    def __init__(self, ebc: nn.Module, case: Scenario) -> None:
        super().__init__()
        self.ebc, self.net, self.features = ebc, case.model(), case.features

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        found = self.ebc(ids)
        return self.net(dense, torch.cat([found[name] for name in self.features], dim=1))


def collection(case: Scenario, placement: str, way: str, **settings: object):
    """A collection over the tables of `case`, and whether its batches are read ahead."""
    how = PLACEMENTS[placement] | WAYS[way] | settings
    if how.pop("statistics", False) or placement == "mixed":  # "mixed_home" gives its rows
        how |= {"statistics": count(case, range(6)), "batch_size": case.global_batch}
    ahead = how.pop("read_ahead", True)
    configs = [
        EmbeddingBagConfig(
            name=spec.name,
            num_embeddings=spec.rows,
            embedding_dim=spec.dim,
            feature_names=list(spec.features),
            pooling=PoolingType[spec.pooling.upper()],
        )
        for spec in case.tables
    ]
    ebc = distcache.CachedEmbeddingBagCollection(
        configs,
        is_weighted=case.weighted,
        optimizer=how.pop("optimizer", replace(case.optimizer, lr=case.lr)),
        timeout_s=60,
        seed=0,
        dtype=case.dtype,
        **how,
    )
    return ebc, ahead


def drop_in(
    rank: int, size: int, case: Scenario, placement: str, way: str, ddp: bool, **settings: object
) -> Outcome:
    """A user's loop over the batches of `case`; losses are of the global batch."""
    CachedTables.delay_hook = Shaker(rank)  # random delays at hand-overs
    of_ranks = {} if ddp else {"gradient_reduction": "sum"}
    ebc, ahead = collection(case, placement, way, **of_ranks, **settings)
    model = OfBatches(ebc, case)
    wrapped = DistributedDataParallel(model) if ddp and size > 1 else model
    dense = None if ddp else distcache.DenseGradients(model, gradient_reduction="sum")
    optimizer = dense_optimizer(model.net.parameters(), case.optimizer, case.lr)
    batches = [as_user_batch(case.batch(step, rank, size)) for step in range(case.steps)]
    losses = []
    for floats, ids, labels, whole in distcache.lookahead(batches, ebc) if ahead else batches:
        optimizer.zero_grad()
        logits = wrapped(floats, ids)
        total = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        loss = total / (len(labels) if ddp else whole)
        loss.backward()
        if dense is not None:
            dense.sum()
        ebc.step()
        optimizer.step()
        losses.append(added(loss, size) / (size if ddp else 1))
    found = outcome(model, losses)
    ebc.close()
    return found


def as_user_batch(batch: Batch) -> tuple:
    ids = KeyedJaggedTensor(
        list(batch.ids.features), batch.ids.values, batch.ids.weights, offsets=batch.ids.offsets
    )
    return batch.dense, ids, batch.labels, batch.global_size


def added(loss: Tensor, size: int) -> float:
    """The ranks' losses, added up in their order in float64."""
    said = [torch.zeros(1, dtype=torch.float64) for _ in range(size)]
    if size > 1:
        dist.all_gather(said, loss.detach().double().reshape(1))
    return float(sum(said)) if size > 1 else float(loss.detach().double())


def outcome(model: OfBatches, losses: list[float]) -> Outcome:
    state = model.ebc.state_dict()
    tables = {name.split(".")[1]: value.clone().numpy() for name, value in state.items()}
    dense = {name: value.detach().clone().numpy() for name, value in model.net.named_parameters()}
    return Outcome(losses, tables, dense, model.ebc.summary())


def through_both_doors(rank: int, size: int, jobs: list[Job]) -> None:
    """The trainer's bits in the drop-in."""
    world = open_world("cpu", "gloo", 60)
    trainers: dict[str, Outcome] = {}
    for optimizer, placement, way in jobs:
        case = scenario(optimizer)
        if optimizer not in trainers:
            trainers[optimizer] = run_mode(world, case, CachedSettings("data", (236, 160), 6, 2))
        want, found = trainers[optimizer], drop_in(rank, size, case, placement, way, ddp=False)
        about = f"{optimizer}, {placement}, {way}"
        assert found.losses == want.losses, about
        for name, value in (want.tables | want.dense).items():
            own = (found.tables | found.dense)[name]
            assert own.tobytes() == value.tobytes(), f"{about}: {name}"
        assert found.summary["steps"] == STEPS
        assert way == "whole" or found.summary["rows_written_back"] > 0, f"{about}: no row left"
    close_world(world)


ALL = [(o, p, w) for o in OPTIMIZERS for p in PLACEMENTS for w in WAYS]
SAMPLE = {
    1: "sgd replicated window, adagrad replicated inline, adam replicated lru, "
    "sgd replicated static, adagrad replicated curve",
    2: "adam replicated auto, adam home window, adam sharded inline, adam mixed serial, "
    "adam mixed_home lru, sgd mixed_home window, adam replicated warm, adam sharded tail, "
    "adam home given, adamw mixed_home inline, partial_rowwise_adam home tail",
    3: "rowwise_adagrad replicated window, rowwise_adagrad home inline, adagrad sharded window, "
    "rowwise_adagrad sharded serial, rowwise_adagrad mixed lru, rowwise_adagrad mixed_home whole, "
    "ftrl home window, counted_adam sharded lru, decoupled mixed serial",
}


@pytest.mark.parametrize("size", SAMPLE)
def test_the_drop_in_has_the_trainers_bits(size: int) -> None:
    jobs = [tuple(job.split()) for job in SAMPLE[size].split(", ")]
    run_ranks(through_both_doors, size, jobs, timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", SAMPLE)
def test_every_optimizer_placement_and_way(size: int, optimizer: str) -> None:
    run_ranks(through_both_doors, size, [j for j in ALL if j[0] == optimizer], timeout=280)


def as_torch(rank: int, size: int, jobs: list[Job]) -> None:
    """Under DDP with its means, in float64: losses and weights of whole tables in torch."""
    world = open_world("cpu", "gloo", 60)
    for optimizer, placement, way in jobs:
        for pooling in ("sum", "mean"):
            tables = tuple(replace(spec, pooling=pooling) for spec in TABLES)
            weighted = pooling == "sum"
            case = scenario(
                optimizer, dtype=torch.float64, last_batch=None, tables=tables, weighted=weighted
            )
            ebc, _ = collection(case, placement, way)
            start = outcome(OfBatches(ebc, case), [])
            ebc.close()
            found = drop_in(rank, size, case, placement, way, ddp=True)
            check_against_trainer(case, start, found)
            assert all((found.tables[n] != start.tables[n]).any() for n in found.tables)
    close_world(world)


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_under_ddp_it_is_torchs_embedding_bag(size: int) -> None:
    names = list(PLACEMENTS) if size > 1 else ["replicated"]
    jobs = list(zip(OPTIMIZERS, cycle(names[::-1]), WAYS, strict=False))
    run_ranks(as_torch, size, jobs, timeout=200)


OWN = {
    "a": {"embedding_lr": 0.004, "weight_decay": 0.0},
    "b": {"embedding_lr": 0.004, "weight_decay": 0.2},
    "c": {"embedding_lr": 0.001, "weight_decay": 0.0},
    "d": {"embedding_lr": 0.02, "weight_decay": 0.1},
}
"""Of each table of `TABLES`, of which three have one width."""


def each_its_own(rank: int, size: int, jobs: list[Job]) -> None:
    """Rates and weight decay by table: an independent trainer's numbers, the same bits however the
    rows lie."""
    world = open_world("cpu", "gloo", 60)
    first: dict[str, Outcome] = {}
    for optimizer, placement, way in jobs:
        case = scenario(optimizer, dtype=torch.float64)
        kind = case.optimizer
        updates = {
            name: replace(kind, lr=own["embedding_lr"], weight_decay=own["weight_decay"])
            for name, own in OWN.items()
        }
        ebc, _ = collection(case, placement, way, optimizer=updates)
        groups = ebc.optimizer.state_dict()["param_groups"]
        assert [group["params"] for group in groups] == [["a"], ["b"], ["c"], ["d"]]
        assert [group["lr"] for group in groups] == [own["embedding_lr"] for own in OWN.values()]
        start = outcome(OfBatches(ebc, case), [])
        ebc.close()
        found = drop_in(rank, size, case, placement, way, ddp=False, optimizer=updates)
        check_against_trainer(case, start, found, by_table=OWN)
        want = first.setdefault(optimizer, found)
        assert found.losses == want.losses
        assert all(np.array_equal(found.tables[name], want.tables[name]) for name in OWN)
    close_world(world)


@pytest.mark.parametrize("size", [1, 2])
def test_tables_of_one_width_have_rates_of_their_own(size: int) -> None:
    jobs = [("rowwise_adagrad", "replicated", "window"), ("adam", "replicated", "inline")]
    if size > 1:
        jobs += [("adam", "home", "window"), ("adam", "mixed", "serial")]
        jobs += [("rowwise_adagrad", "sharded", "lru"), ("adam", "mixed_home", "whole")]
    run_ranks(each_its_own, size, jobs, timeout=200)


def dense_apart(rank: int, size: int) -> dict:
    """Dense gradients that are dropped, left out, or of ranks that began apart."""
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    means, found = distcache.DenseGradients(model), {}
    assert means.flat.numel() == sum(p.numel() for p in model.parameters()) - 2
    for step in range(3):
        model.zero_grad(set_to_none=step < 2)  # its views are put back
        model(torch.full((4, 3), rank + step + 1.0)).mean().backward()
        if step == 1:
            model[1].bias.grad = None
        means.sum()
        found[f"sum {step}"] = means.flat.tolist()
        assert all(
            p.grad.untyped_storage().data_ptr() == means.flat.data_ptr() for p in means.parameters
        )
    model[1].weight.requires_grad_(False)
    means.sum()
    assert model[1].weight.grad is None, "an optimizer would move it by zeros"
    model[0].bias.requires_grad_(True)
    with pytest.raises(PlanError, match=r"shape \[2\] was frozen when DenseGradients was made"):
        means.sum()
    means.close()
    other = nn.Linear(3, 1)
    torch.nn.init.constant_(other.weight, float(rank))
    apart = distcache.DenseGradients(other.parameters(), gradient_reduction="sum")
    with pytest.raises(ConfigError, match=r"the ranks differ: the checksums of their weights"):
        apart.sum()
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_dense_gradients_by_themselves() -> None:
    first, second = run_ranks(dense_apart, 2)
    assert first == second and first["sum 1"][-1] == 0.0
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    alone = distcache.DenseGradients(p for n, p in model.named_parameters() if n != "0.bias")
    (sum(model(torch.full((4, 3), v)).mean() for v in (1.0, 2.0)) / 2).backward()
    alone.sum()
    assert first["sum 0"] == pytest.approx(alone.flat.tolist())
    alone.zero()
    assert all(parameter.grad is None for parameter in alone.parameters)
    with pytest.raises(ConfigError, match="gradient_reduction='max' is not 'mean' or 'sum'"):
        distcache.DenseGradients(model, gradient_reduction="max")
    with pytest.raises(ConfigError, match="make one DenseGradients for each kind"):
        distcache.DenseGradients(nn.Sequential(model, nn.Linear(2, 2).double()))
    empty = distcache.DenseGradients([])
    empty.sum()
    assert empty.flat.numel() == 0


def traced(rank: int, size: int, folder: str) -> None:
    """A loop with an evaluation in it, traced; and one that an error ends."""
    world = open_world("cpu", "gloo", 60)
    case = scenario("adagrad", last_batch=None)
    ebc, _ = collection(case, "sharded", "window", gradient_reduction="sum")
    model = OfBatches(ebc, case)
    batches = [as_user_batch(case.batch(step, rank, size)) for step in range(6)]
    with ebc.trace(folder):
        for at, (dense, ids, labels, _) in enumerate(distcache.lookahead(batches, ebc)):
            if at == 4:
                with torch.no_grad():
                    model(dense, ids)
                continue
            binary_cross_entropy_with_logits(model(dense, ids), labels).backward()
            ebc.step()
    with pytest.raises(ZeroDivisionError), ebc.trace(Path(folder, "failed")):
        model(batches[0][0], batches[0][1]).sum().backward()
        ebc.step()
        raise ZeroDivisionError
    words = r"trace\('/dev/null/.*name another folder, or leave"
    with pytest.raises(ConfigError, match=words), ebc.trace("/dev/null/no"):
        pass
    assert not ebc.tables.clock.watchers and ebc.stage_ms()["sync"] > 0
    ebc.close()
    close_world(world)


def test_a_loop_leaves_a_trace_of_all_ranks(tmp_path: Path) -> None:
    run_ranks(traced, 2, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failed", "trace.json"]
    parts = [(tmp_path / f"failed/trace.rank{rank}.json").read_text() for rank in (0, 1)]
    whole, failed = ((tmp_path / "trace.json").read_text(), ""), ("".join(parts), "{}]")
    for (text, end), kinds in (
        (whole, {"train": {0, 1, 2, 3, 5}, "eval": {4}}),
        (failed, {"train": {6}}),
    ):
        found = json.loads(text.replace(",\n[\n", ",\n") + end)
        spans = [e for e in found if e.get("ph") == "X"]
        assert {e["pid"] for e in spans} == {1, 2}
        for kind, steps in kinds.items():
            own = [e for e in spans if e["args"]["kind"] == kind]
            assert {e["args"]["step"] for e in own} == steps, kind
            names = {e["cat"] for e in own}
            loop = {"forward_backward", "sync", "apply"} if kind == "train" else {"forward"}
            assert {"ingest", "plan", "fill", "share_late"} | loop <= names
            assert kind == "train" or not {"sync", "apply"} & names
