"""Cached collections in a model under TorchRec's DistributedModelParallel, beside sharded tables.

The reference is one process on the joined batches: TorchRec's own collections, unsharded, under
torch.optim, from the same weights.
"""

from __future__ import annotations

import pytest
import torch
from ebc_cases import draw, part, using
from ebc_models import plain_tables
from ebc_training import assert_close, loss_of, plain_optimizer, weights_of
from ranks import run_ranks
from sharded_sides import (
    HALF,
    SHARDED,
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
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

from distcache import lookahead


def reference(name: str, start: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """One process with everything in torch; losses and final weights."""
    bags, rows = of("bags", "c", plain_tables), of("sequences", "q", plain_tables)
    model = Sides(plain_bags(), bags, rows)
    model.load_state_dict(start)
    using("bags")
    optimizers = [plain_optimizer(name, bags)]
    using("sequences")
    optimizers.append(plain_optimizer(name, rows))
    lr = SHARDED[name][1]["lr"]
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    eps = {"eps": 1e-8} if name == "adagrad" else {}
    optimizers.append(kinds[name](model.sharded.parameters(), lr=lr, **eps))
    dense = torch.optim.SGD([model.query, *model.over.parameters()], lr=0.1)
    return train(model, [draw(step) for step in range(STEPS)], optimizers, dense), weights_of(model)


def beside(rank: int, size: int, name: str) -> dict:
    dmp, bags, rows, dense = sharded_model(name, rows=300)
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
        found["losses"] += train(dmp, [batch], (bags.optimizer, rows.optimizer), dense)
    found["final"] = whole(dmp)
    close(bags, rows)
    return found


def beside_in_job(rank: int, size: int, name: str) -> dict:
    return in_job(rank, size, beside, name)


@pytest.mark.parametrize("name", SHARDED)
def test_cached_tables_train_beside_sharded_ones(name) -> None:
    first, second = run_ranks(beside_in_job, 2, name)
    losses, final = reference(name, tensors(first["start"]))
    means = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    assert_close(tensors(first["final"]), final, atol=2e-6)
