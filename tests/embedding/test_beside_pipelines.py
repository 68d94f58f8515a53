"""Cached tables beside sharded ones: checkpoints, and TorchRec's own plan and train pipeline."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ebc_cases import Clicks
from ebc_models import cached
from ebc_training import assert_same
from ranks import run_ranks
from sharded_sides import (
    HALF,
    STEPS,
    Sides,
    close,
    in_job,
    mine,
    of,
    plain_bags,
    sharded_model,
    tensors,
    train,
    whole,
)
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim import optimizers
from torchrec.streamable import Pipelineable

from distcache import lookahead


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


class Both:
    """Several optimizers as one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for one in self.optimizers:
            one.zero_grad()

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


def resumed(rank: int, size: int, folder: str) -> dict:
    """Stop and resume, from a state in memory and from one in a folder."""
    found: dict = {}
    data = mine(rank, size)
    dmp, bags, rows, dense = sharded_model("sgd", rows=300)
    train(dmp, lookahead(data[:HALF], bags), (bags.optimizer, rows.optimizer), dense)
    dcp.save(dmp.state_dict(), checkpoint_id=folder)
    for how in ("memory", "folder"):
        other, more, sequences, own = sharded_model("sgd", rows=260)
        train(other, data[:2], (more.optimizer, sequences.optimizer), own)  # to be overwritten
        state = dmp.state_dict()
        if how == "folder":
            state = other.state_dict()
            dcp.load(state, checkpoint_id=folder)
        assert other.load_state_dict(state) == ([], [])
        train(other, lookahead(data[HALF:], more), (more.optimizer, sequences.optimizer), own)
        found[how] = whole(other)
        close(more, sequences)
    train(dmp, lookahead(data[HALF:], bags), (bags.optimizer, rows.optimizer), dense)
    found["straight"] = whole(dmp)
    close(bags, rows)
    return found


def in_pipeline(rank: int, size: int) -> dict:
    """TorchRec's own plan and its train pipeline, which takes batches ahead of the model."""
    found: dict = {}
    for how in ("loop", "pipeline"):
        bags = of("bags", "c", lambda tables: cached("sgd", tables, rows=300))
        rows = of("sequences", "q", lambda tables: cached("sgd", tables, rows=300))
        sharded = plain_bags()
        _apply_optimizer_in_backward(optimizers.SGD, sharded.parameters(), {"lr": 0.1})
        dmp = DistributedModelParallel(WithLoss(Sides(sharded, bags, rows)))
        assert list(dmp.plan.plan) == ["model.sharded"]
        assert not [name for name in dmp.fused_optimizer.params if "sharded" not in name]
        dmp.load_state_dict(
            {
                key: torch.full_like(value, 0.1) if isinstance(value, ShardedTensor) else value
                for key, value in dmp.state_dict().items()
            }
        )
        named = dict(dmp.named_parameters())
        dense = torch.optim.SGD([p for n, p in named.items() if "sharded" not in n], lr=0.1)
        both = Both([dense, bags.optimizer, rows.optimizer])
        stream = lookahead([Item(*vars(batch).values()) for batch in mine(rank, size)], bags)
        if how == "loop":
            for item in stream:
                both.zero_grad()
                dmp(item)[0].backward()
                both.step()
        else:
            pipeline = TrainPipelineSparseDist(dmp, both, torch.device("cpu"))
            batches = iter(stream)
            for _ in range(STEPS):
                pipeline.progress(batches)
            with pytest.raises(StopIteration):
                pipeline.progress(batches)
        found[how] = whole(dmp)
        found[f"{how} planned"] = bags.tables.engine.planner.ingested
        close(bags, rows)
    return found


def more(rank: int, size: int, folder: str) -> dict:
    return in_job(rank, size, lambda *at: resumed(*at, folder) | in_pipeline(*at))


def test_checkpoints_and_train_pipelines(tmp_path) -> None:
    found, _ = run_ranks(more, 2, str(tmp_path))
    for how in ("memory", "folder"):
        assert_same(tensors(found[how]), tensors(found["straight"]))
    assert_same(tensors(found["pipeline"]), tensors(found["loop"]))
    assert found["pipeline planned"] == found["loop planned"] == STEPS
