"""Loops over the models of `ebc_models`, with cached or plain tables, and their weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from ebc_cases import Clicks, batches, key_of_tables
from ebc_models import UPDATES, cached, dlrm, plain_tables
from reference_trainer import RowWiseAdagrad
from torch import Tensor, nn

from distcache import lookahead
from distcache.embedding.step import CollectionTables


def loss_of(model: nn.Module, batch: Clicks) -> Tensor:
    """The local mean loss."""
    logits = model(batch.dense_features, batch.sparse_features)
    return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.to(logits))


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD over all that are not tables."""
    named = [p for name, p in model.named_parameters() if f"{key_of_tables()}." not in name]
    return torch.optim.SGD(named, lr=0.1)


def train(model: nn.Module, ebc, stream: Iterable[Clicks], dense=None) -> list[float]:
    """The loop of a user, over a look-ahead or plain batches; the losses."""
    dense = dense if dense is not None else dense_optimizer(model)
    losses = []
    for batch in stream:
        dense.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        ebc.step()
        dense.step()
        losses.append(loss.item())
    return losses


def made(name: str = "adagrad", **settings: Any):
    """A collection of few rows, and the model over it."""
    ebc = cached(name, **{"rows": 200, **settings})
    return ebc, dlrm(ebc)


def expected() -> dict[str, Tensor]:
    """Weights of an uninterrupted run."""
    ebc, model = made()
    train(model, ebc, lookahead(batches(), ebc))
    return weights_of(model)


def plain_optimizer(name: str, ebc: nn.Module) -> torch.optim.Optimizer:
    """What `UPDATES[name]` is on whole tables in torch, on sparse gradients."""
    update, weights = UPDATES[name], list(ebc.parameters())
    for bag in getattr(ebc, key_of_tables()).values():
        bag.sparse = True
    if name == "sgd":
        return torch.optim.SGD(weights, lr=update.lr)
    if name == "adam":
        return torch.optim.SparseAdam(weights, lr=update.lr)
    if name == "adagrad":
        return torch.optim.Adagrad(
            weights, lr=update.lr, eps=update.eps, initial_accumulator_value=0.1
        )
    return RowWiseAdagrad(weights, update.lr, update.eps, 0.1)


def train_plain(
    name: str, tables: list[Any], start: dict, make, stream: Iterable[Clicks]
) -> tuple[list[float], dict[str, Tensor]]:
    """TorchRec's own collection on the same batches from the weights `start`; final weights."""
    ebc = plain_tables(tables)
    model = make(ebc)
    model.load_state_dict(start)
    rows, dense, losses = plain_optimizer(name, ebc), dense_optimizer(model), []
    for batch in stream:
        rows.zero_grad()
        dense.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        rows.step()
        dense.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all weights; called by all ranks."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """All weights have the same bits."""
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 2e-6) -> None:
    """All weights agree up to rounding."""
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=atol, msg=name)


def written_back(tables: CollectionTables) -> int:
    """Rows that have left the cache changed."""
    return sum(rows.counts.rows_written_back for rows in tables.rows)
