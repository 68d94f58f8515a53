"""Outputs of the collections may be modified in place, as those of the stock modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import distcache

LR = 0.5


def relu(values: Tensor) -> Tensor:
    return nn.ReLU(inplace=True)(values)


def double(values: Tensor) -> Tensor:
    values *= 2.0
    return values


def add_square(values: Tensor) -> Tensor:
    values += values.detach() ** 2
    return values


OPERATIONS = [relu, double, add_square]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 2)])
def test_bags_are_modified_in_place(
    operation: Callable[[Tensor], Tensor], mode: str, sizes: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    stock = nn.EmbeddingBag(9, 4, mode=mode)
    cached = distcache.CachedEmbeddingBag(
        9,
        4,
        mode=mode,
        _weight=stock.weight.detach().clone(),
        device="cpu",
        optimizer=distcache.optim.SGD(lr=LR),
    )
    ids = torch.tensor([1, 2, 2, 8, 0][: sum(sizes)])
    offsets = torch.tensor([0, sizes[0]])
    for module in (stock, cached):
        operation(module(ids, offsets)).square().sum().backward()
    torch.optim.SGD(stock.parameters(), LR).step()
    cached.step()
    assert torch.allclose(cached.state_dict()["weight"], stock.weight, atol=1e-6)
    cached.close()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("widths", [(4, 4), (4, 8)])
@pytest.mark.parametrize("part", ["values", "feature"])
def test_keyed_tensors_are_modified_in_place(
    operation: Callable[[Tensor], Tensor], widths: tuple[int, int], part: str
) -> None:
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(name=f"t{f}", num_embeddings=9, embedding_dim=width, feature_names=[f])
        for f, width in zip("ab", widths, strict=True)
    ]
    stock = EmbeddingBagCollection(configs)
    optimizer = distcache.optim.SGD(lr=LR)
    cached = distcache.CachedEmbeddingBagCollection(configs, device="cpu", optimizer=optimizer)
    cached.load_state_dict(stock.state_dict())
    features = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2, 2, 8, 0]), lengths=torch.tensor([2, 1, 0, 2])
    )
    for module in (stock, cached):
        pooled = module(features)
        output = pooled.values() if part == "values" else pooled["a"]
        loss = operation(output).square().sum()
        loss.backward()
    torch.optim.SGD(stock.parameters(), LR).step()
    cached.step()
    state = cached.state_dict()
    for name, weight in stock.state_dict().items():
        assert torch.allclose(state[name], weight, atol=1e-6)
    cached.close()


def test_the_pooled_rows_of_fit_are_modified_in_place(tmp_path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 1))

        def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
            return self.layers(pooled).squeeze(1) + dense.sum(1)

    tables = [distcache.TableSpec(name, rows=9, dim=4, features=(name,)) for name in "ui"]
    ids = torch.tensor([1, 2, 3, 4]), torch.arange(5)
    batch = torch.ones(2, 1), ids, torch.tensor([0.0, 1.0])
    torch.manual_seed(0)
    result = distcache.fit(
        [batch] * 3, tables=tables, model=Model(), settings={"run.dir": str(tmp_path / "run")}
    )
    assert result.summary["steps"] == 3
