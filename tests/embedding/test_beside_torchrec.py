"""Cached collections under TorchRec's DistributedModelParallel, beside sharded tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ebc_cases import (
    DENSE,
    Clicks,
    assert_close,
    assert_same,
    cached,
    configs,
    draw,
    job,
    loss_of,
    part,
    plain_optimizer,
    plain_tables,
    ranks,
    scored_sum,
    using,
    weights_of,
)
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import optimizers
from torchrec.streamable import Pipelineable

from distcache import lookahead

STEPS, HALF = 12, 5
FEATURES = ("f0", "f1", "g", "f2", "f3")
SHARDED = {"sgd": (optimizers.SGD, {"lr": 0.1}), "adagrad": (optimizers.Adagrad, {"lr": 0.05})}


class Sides(nn.Module):
    """Linear over pooled rows of two collections and the scored sequences of a third."""

    def __init__(self, sharded: nn.Module, bags: nn.Module, rows: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.sharded, self.bags, self.rows = sharded, bags, rows
        self.query = nn.Parameter(torch.randn(8))
        self.over = nn.Linear(DENSE + 3 * 5 * 8, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        sharded, bags, rows = self.sharded(ids), self.bags(ids), self.rows(ids)
        pooled = [found[name] for found in (sharded, bags) for name in FEATURES]
        summed = [scored_sum(rows[name], self.query) for name in FEATURES]
        return self.over(torch.cat([dense, *pooled, *summed], dim=1))


torch.fx.wrap("scored_sum")  # TorchRec's pipelines trace the model


def of(kind: str, prefix: str, make):
    """`make` of this kind's tables, named with a prefix."""
    using(kind)
    return make([replace(table, name=f"{prefix}{table.name}") for table in configs()])


def plain_bags() -> nn.Module:
    """The collection that is sharded, always from the same weights."""
    torch.manual_seed(7)
    return of("bags", "s", plain_tables)


class Both:
    """Several optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for one in self.optimizers:
            one.zero_grad()

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


def train(model: nn.Module, data, both: Both) -> list[float]:
    """A user's loop; the losses."""
    losses = []
    for batch in data:
        both.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        both.step()
        losses.append(loss.item())
    return losses


def collections(make) -> list[nn.Module]:
    """A pooled collection and one of sequences."""
    return [of("bags", "c", make), of("sequences", "q", make)]


def sharded_model(name: str, wrap=lambda model: model, plan: bool = True, rows: int = 300):
    """`Sides` of a sharded collection and cached ones, these, and the optimizer of all but the
    sharded one's; `plan`: by hand, else TorchRec's own."""
    sharded, sharder = plain_bags(), EmbeddingBagCollectionSharder()
    kind, options = SHARDED[name]
    _apply_optimizer_in_backward(kind, sharded.parameters(), options)
    cached_ones = collections(lambda tables: cached(name, tables, timeout_s=60, rows=rows))
    how = {}
    if plan:
        ways = {"st0": row_wise(), "st1": table_wise(0), "st2": table_wise(1), "st3": table_wise(0)}
        ranks_of = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
        own = construct_module_sharding_plan(sharded, ways, sharder, **ranks_of)
        how = {"plan": ShardingPlan({"sharded": own}), "sharders": [sharder]}
    model = wrap(Sides(sharded, *cached_ones))
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), **how)
    dense = [p for n, p in dmp.named_parameters() if "sharded" not in n]
    both = Both(torch.optim.SGD(dense, lr=0.1), *(one.optimizer for one in cached_ones))
    return dmp, cached_ones, both


def whole(dmp: nn.Module) -> dict[str, Tensor]:
    """All weights of all ranks; tables that are sharded put together on rank 0."""
    found = {}
    for key, value in dmp.state_dict().items():
        if isinstance(value, ShardedTensor):
            out = torch.empty(value.size()) if dist.get_rank() == 0 else None
            value.gather(0, out)
            value = torch.zeros(0) if out is None else out
        found[key] = value.detach().clone()
    return found


def mine(rank: int, size: int) -> list[Clicks]:
    """This rank's part of every global batch."""
    using("bags")
    return [part(draw(step), rank, size) for step in range(STEPS)]


def reference(name: str, start: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """One process with everything in torch; losses and final weights."""
    bags, rows = collections(plain_tables)
    model = Sides(plain_bags(), bags, rows)
    model.load_state_dict(start)
    plain = torch.optim.SGD if name == "sgd" else torch.optim.Adagrad
    eps = {"eps": 1e-8} if name == "adagrad" else {}
    optimizers = [plain(model.sharded.parameters(), lr=SHARDED[name][1]["lr"], **eps)]
    for kind, own in (("bags", bags), ("sequences", rows)):
        using(kind)
        optimizers.append(plain_optimizer(name, own))
    dense = torch.optim.SGD([model.query, *model.over.parameters()], lr=0.1)
    losses = train(model, [draw(step) for step in range(STEPS)], Both(*optimizers, dense))
    return losses, weights_of(model)


@job
def beside(rank: int, size: int, name: str) -> dict:
    dmp, (bags, rows), both = sharded_model(name)
    assert isinstance(dmp.module.sharded, ShardedEmbeddingBagCollection)
    assert dmp.module.bags is bags and dmp.module.rows is rows
    for names in (dict(dmp.named_parameters()), dict(dmp.named_buffers())):
        assert not [name for name in names if name.startswith(("bags", "rows"))]
    found: dict = {"start": whole(dmp), "losses": []}
    for at, batch in enumerate(lookahead(mine(rank, size), bags)):
        if at == HALF:
            dmp.eval()
            with torch.no_grad():
                loss_of(dmp, part(draw(900), rank, size))
            dmp.train()
        found["losses"] += train(dmp, [batch], both)
    found["final"] = whole(dmp)
    bags.close()
    rows.close()
    return found


@pytest.mark.parametrize("name", [pytest.param("sgd", marks=pytest.mark.slow), "adagrad"])
def test_cached_tables_train_beside_sharded_ones(name) -> None:
    first, second = ranks(beside, name)
    losses, final = reference(name, first["start"])
    means = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    assert_close(first["final"], final, atol=2e-6)


class WithLoss(nn.Module):
    """A model as TorchRec's pipelines call it."""

    def __init__(self, model: Sides) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Item) -> tuple[Tensor, Tensor]:
        logits = self.model(batch.dense_features, batch.sparse_features)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits.detach()


class Item(Clicks, Pipelineable):
    """A batch that TorchRec's pipelines can move."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Item:
        ids = self.sparse_features.to(device, non_blocking)
        return Item(self.dense_features.to(device), ids, self.labels.to(device))

    def record_stream(self, stream: torch.Stream) -> None:
        pass


@job
def resumed(rank: int, size: int, folder: str) -> dict:
    """Stop and resume, from a state in memory and from one in a folder; then a pipeline."""
    found = in_pipeline(rank, size)
    data = mine(rank, size)
    dmp, (bags, rows), both = sharded_model("sgd")
    train(dmp, lookahead(data[:HALF], bags), both)
    dcp.save(dmp.state_dict(), checkpoint_id=folder)
    for how in ("memory", "folder"):
        other, (more, sequences), own = sharded_model("sgd", rows=260)
        train(other, data[:2], own)  # to be overwritten
        state = dmp.state_dict()
        if how == "folder":
            state = other.state_dict()
            dcp.load(state, checkpoint_id=folder)
        assert other.load_state_dict(state) == ([], [])
        train(other, lookahead(data[HALF:], more), own)
        found[how] = whole(other)
        more.close()
        sequences.close()
    train(dmp, lookahead(data[HALF:], bags), both)
    found["straight"] = whole(dmp)
    bags.close()
    rows.close()
    return found


def in_pipeline(rank: int, size: int) -> dict:
    """TorchRec's own plan and its train pipeline, which takes batches ahead of the model."""
    found: dict = {}
    for how in ("loop", "pipeline"):
        dmp, (bags, rows), both = sharded_model("sgd", WithLoss, plan=False)
        assert list(dmp.plan.plan) == ["model.sharded"]
        assert not [name for name in dmp.fused_optimizer.params if "sharded" not in name]
        dmp.load_state_dict(
            {
                key: torch.full_like(value, 0.1) if isinstance(value, ShardedTensor) else value
                for key, value in dmp.state_dict().items()
            }
        )
        stream = lookahead([Item(*vars(batch).values()) for batch in mine(rank, size)], bags)
        if how == "loop":
            for item in stream:
                both.zero_grad()
                dmp(item)[0].backward()
                both.step()
        else:
            pipeline, batches = (
                TrainPipelineSparseDist(dmp, both, torch.device("cpu")),
                iter(stream),
            )
            for _ in range(STEPS):
                pipeline.progress(batches)
            with pytest.raises(StopIteration):
                pipeline.progress(batches)
        found[how] = whole(dmp)
        found[f"{how} planned"] = bags.tables.engine.planner.ingested
        bags.close()
        rows.close()
    return found


def test_checkpoints_and_train_pipelines(tmp_path) -> None:
    found, _ = ranks(resumed, str(tmp_path))
    for how in ("memory", "folder"):
        assert_same(found[how], found["straight"])
    assert_same(found["pipeline"], found["loop"])
    assert found["pipeline planned"] == found["loop planned"] == STEPS
