"""TorchRec's pipelines over cached collections, with and without sharded tables beside them: the
numbers of a plain loop, bit for bit, under every wrapper of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from ebc_cases import (
    DENSE,
    Clicks,
    assert_same,
    cached,
    configs,
    job,
    mine,
    plain_tables,
    ranks,
)
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelinePT2,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.train_pipelines import TorchCompileConfig
from torchrec.streamable import Pipelineable

from distcache import lookahead

STEPS = 6
CPU = torch.device("cpu")
COMPILED = TorchCompileConfig(backend="eager", compile_on_iter=1)
PIPELINES: dict[str, Callable] = {
    "base": TrainPipelineBase,
    "sparse": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
    "pt2": partial(TrainPipelinePT2, compile_configs=COMPILED),
}


class WithLoss(nn.Module):
    """A model as the pipelines call it: loss and logits, over a cached collection and, where there
    is one, over another that is sharded."""

    def __init__(self, ebc: nn.Module, sharded: nn.Module | None = None) -> None:
        super().__init__()
        self.ebc = ebc
        if sharded is not None:
            self.sharded = sharded
        torch.manual_seed(5)
        self.over = nn.Linear(DENSE + 5 * 8 * (1 if sharded is None else 2), 4)
        self.last = nn.Linear(4, 1)

    def forward(self, batch: Item) -> tuple[Tensor, Tensor]:
        ids = batch.sparse_features
        parts = [batch.dense_features, self.ebc(ids).values()]
        if hasattr(self, "sharded"):
            found = self.sharded(ids)
            parts += [found[name] for name in ("f0", "f1", "g", "f2", "f3")]
        logits = self.last(self.over(torch.cat(parts, dim=1)).relu())
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, logits.detach()


class Item(Clicks, Pipelineable):
    """A batch that the pipelines can move."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Item:
        ids = self.sparse_features.to(device, non_blocking)
        return Item(self.dense_features.to(device), ids, self.labels.to(device))

    def record_stream(self, stream: torch.Stream) -> None:
        pass


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


class Around(nn.Module):
    """DDP inside a model: TorchRec's tracer does not take it as the outermost one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = DistributedDataParallel(model)

    def forward(self, batch: Item) -> tuple[Tensor, Tensor]:
        return self.model(batch)


def as_fsdp(model: nn.Module) -> nn.Module:
    """The dense part's parameters sharded."""
    for part in (model.over, model.last):
        fully_shard(part)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": Around,
    "fsdp": as_fsdp,
    "dmp": lambda model: DistributedModelParallel(model, device=CPU),
}


def made(wrapper: str, beside: bool) -> tuple[nn.Module, nn.Module, Both]:
    """A collection, the model around it, and what updates both."""
    ebc, sharded = cached("adagrad", timeout_s=60, rows=200), None
    if beside:
        torch.manual_seed(7)
        sharded = plain_tables([replace(table, name=f"s{table.name}") for table in configs()])
        apply_optimizer_in_backward(torch.optim.SGD, sharded.parameters(), {"lr": 0.1})
    model = WRAPPERS[wrapper](WithLoss(ebc, sharded))
    if beside:
        state = model.state_dict().items()
        same = {k: torch.full_like(v, 0.1) for k, v in state if isinstance(v, ShardedTensor)}
        model.load_state_dict(same, strict=False)
    dense = [p for name, p in model.named_parameters() if "sharded" not in name]
    return ebc, model, Both(torch.optim.SGD(dense, lr=0.1), ebc.optimizer)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All weights of the model that this rank has whole, and its shards of others."""
    found = {}
    for name, value in model.state_dict().items():
        own = value.full_tensor() if isinstance(value, DTensor) else value
        if isinstance(value, ShardedTensor):
            own = torch.cat([torch.zeros(0), *(s.tensor.flatten() for s in value.local_shards())])
        found[name] = own.detach().clone()
    return found


def data(rank: int, size: int, first: int = 0) -> list[Item]:
    return [Item(*vars(batch).values()) for batch in mine(rank, size, first + STEPS)[first:]]


def all_of(pipeline, stream: Iterator) -> list[Tensor]:
    """What a pipeline gives out, batch by batch."""
    found = []
    while True:
        try:
            found.append(pipeline.progress(stream))
        except StopIteration:
            return found


def run(how: str, wrapper: str, beside: bool, place: tuple[int, int]) -> dict[str, Tensor]:
    """Train by a pipeline, or by the plain `loop`, then evaluate; weights and logits."""
    ebc, model, both = made(wrapper, beside)
    stream = iter(lookahead(data(*place), ebc))
    if how == "loop":
        out = []
        for item in stream:
            both.zero_grad()
            loss, logits = model(item)
            loss.backward()
            both.step()
            out.append(logits)
    else:
        out = all_of(PIPELINES[how](model, both, CPU), stream)
    found = whole(model) | {f"train {at}": logits for at, logits in enumerate(out)}
    model.eval()
    items = data(*place, first=STEPS)
    with torch.no_grad():
        if how in ("sparse", "prefetch"):  # whose batches a thread takes, read ahead or not
            stream = iter(items) if how == "sparse" else iter(lookahead(items, ebc))
            out = all_of(EvalPipelineSparseDist(model, both, CPU), stream)
        elif how == "base":
            out = all_of(TrainPipelineBase(model, both, CPU), iter(items))
        else:
            out = [model(item)[1] for item in items]
    ebc.close()
    return found | {f"eval {at}": logits for at, logits in enumerate(out)}


CASES = [(wrapper, False) for wrapper in WRAPPERS] + [("dmp", True)]


@job
def in_pipelines(rank: int, size: int) -> dict:
    found: dict = {}
    for wrapper, beside in CASES:
        # Beside sharded tables TorchRec's prefetching one needs a GPU's streams.
        for how in ("loop", *(how for how in PIPELINES if not (beside and how == "prefetch"))):
            for name, value in run(how, wrapper, beside, (rank, size)).items():
                found[f"{wrapper} {beside}/{how}/{name}"] = value
    return found


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_pipelines_have_the_numbers_of_a_plain_loop(size: int) -> None:
    for found in ranks(in_pipelines, size=size):
        by_case: dict[str, dict[str, dict[str, Tensor]]] = {}
        for key, value in found.items():
            case, how, name = key.split("/")
            by_case.setdefault(case, {}).setdefault(how, {})[name] = value
        for by_how in by_case.values():
            assert len([name for name in by_how["loop"] if "train" in name]) == STEPS
            for own in by_how.values():
                assert_same(own, by_how["loop"])
