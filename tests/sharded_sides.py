"""A model of cached and of TorchRec's sharded tables under DistributedModelParallel, on 2 ranks."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch
import torch.distributed as dist
from ebc_cases import DENSE, Clicks, configs, draw, part, using
from ebc_models import cached, plain_tables, scored_sum
from ebc_training import loss_of
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim import optimizers

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


def train(model, data, optimizers, dense) -> list[float]:
    """A user's loop; the losses."""
    losses = []
    for batch in data:
        for one in (*optimizers, dense):
            one.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        for one in (*optimizers, dense):
            one.step()
        losses.append(loss.item())
    return losses


def sharded_model(name: str, **settings):
    """`Sides` of cached collections and a sharded one, and its dense optimizer."""
    sharded = plain_bags()
    kind, options = SHARDED[name]
    _apply_optimizer_in_backward(kind, sharded.parameters(), options)
    bags = of("bags", "c", lambda tables: cached(name, tables, timeout_s=60, **settings))
    rows = of("sequences", "q", lambda tables: cached(name, tables, timeout_s=60, **settings))
    model = Sides(sharded, bags, rows)
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        sharded,
        {"st0": row_wise(), "st1": table_wise(0), "st2": table_wise(1), "st3": table_wise(0)},
        sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    dmp = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({"sharded": plan}),
        sharders=[sharder],
    )
    named = dict(dmp.named_parameters())
    dense = torch.optim.SGD([p for n, p in named.items() if "sharded" not in n], lr=0.1)
    return dmp, bags, rows, dense


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


def in_job(rank: int, size: int, work, *args) -> dict:
    """What `work` finds inside a job that ends in order, with arrays for tensors."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        found = work(rank, size, *args)
        gc.collect()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return {
        key: {n: v.numpy() for n, v in value.items()} if isinstance(value, dict) else value
        for key, value in found.items()
    }


def tensors(arrays: dict) -> dict[str, Tensor]:
    """Weights as `in_job` returned them."""
    return {key: torch.from_numpy(value) for key, value in arrays.items()}


def mine(rank: int, size: int) -> list[Clicks]:
    """This rank's part of every global batch."""
    using("bags")
    return [part(draw(step), rank, size) for step in range(STEPS)]


def close(*collections) -> None:
    """Close each of them."""
    for one in collections:
        one.close()
