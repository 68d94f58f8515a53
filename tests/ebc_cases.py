"""Small TorchRec models over cached and over plain tables, and batches for both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from reference_trainer import RowWiseAdagrad
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.models.dlrm import DLRM

import distcache
from distcache import CachedEmbeddingBagCollection
from distcache.embedding.core import CachedTables

DENSE = 4
BATCH = 24
STEPS = 20
ROWS = (400, 60, 7, 1)

UPDATES = {
    "sgd": distcache.optim.SGD(lr=0.1),
    "adagrad": distcache.optim.Adagrad(lr=0.005, initial_accumulator=0.1),
    "rowwise_adagrad": distcache.optim.RowWiseAdagrad(lr=0.005, initial_accumulator=0.1),
    "adam": distcache.optim.Adam(lr=0.005),
}


@dataclass
class Clicks:
    """A user's batch."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor


def configs(**changes: Any) -> list[EmbeddingBagConfig]:
    """Tables `t0`, ... of ROWS rows x 8, one feature each; `t1` is read by two."""
    return [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=rows,
            embedding_dim=8,
            feature_names=[f"f{i}", "g"] if i == 1 else [f"f{i}"],
            **changes,
        )
        for i, rows in enumerate(ROWS)
    ]


def mixed_configs() -> list[EmbeddingBagConfig]:
    """Two widths, a mean, and a feature `f0` that two tables read."""
    tables = configs()
    tables[1] = replace(tables[1], pooling=PoolingType.MEAN)
    tables[2] = replace(tables[2], embedding_dim=4, feature_names=["f2", "f0"], num_embeddings=400)
    return tables


def features_of(tables: list[EmbeddingBagConfig]) -> dict[str, int]:
    """Every feature with the rows of the smallest table that reads it, in order of appearance."""
    rows: dict[str, int] = {}
    for table in tables:
        for feature in table.feature_names:
            rows[feature] = min(rows.get(feature, 1 << 60), table.num_embeddings)
    return rows


def draw(
    seed: int,
    size: int = BATCH,
    tables: list[EmbeddingBagConfig] | None = None,
    weighted: bool = False,
) -> Clicks:
    """One batch: bags of 0 to 3 ids, skewed so that rows come again."""
    generator = torch.Generator().manual_seed(seed)
    rows = features_of(tables if tables is not None else configs())
    lengths = torch.randint(0, 4, (len(rows) * size,), generator=generator)
    counts = lengths.view(len(rows), size).sum(1).tolist()
    ids = [
        (torch.rand(count, generator=generator) ** 2 * limit).long()
        for count, limit in zip(counts, rows.values(), strict=True)
    ]
    values = torch.cat(ids)
    weights = torch.rand(len(values), generator=generator) + 0.5 if weighted else None
    dense = torch.randn(size, DENSE, generator=generator)
    label = (dense[:, :1] + torch.randn(size, 1, generator=generator) > 0).float()
    return Clicks(dense, KeyedJaggedTensor(list(rows), values, weights, lengths), label)


def batches(steps: int = STEPS, size: int = BATCH, **how: Any) -> list[Clicks]:
    """Fresh batches, always the same."""
    return [draw(step, size, **how) for step in range(steps)]


def part(batch: Clicks, rank: int, world_size: int) -> Clicks:
    """One rank's samples of a global batch."""
    size = len(batch.labels)
    low, high = rank * size // world_size, (rank + 1) * size // world_size
    ids = batch.sparse_features
    keys = ids.keys()
    offsets = ids.offsets().tolist()
    cuts = [slice(offsets[f * size + low], offsets[f * size + high]) for f in range(len(keys))]
    weights = ids.weights_or_none()
    local = KeyedJaggedTensor(
        keys,
        torch.cat([ids.values()[cut] for cut in cuts]),
        None if weights is None else torch.cat([weights[cut] for cut in cuts]),
        ids.lengths().view(len(keys), size)[:, low:high].reshape(-1),
    )
    return Clicks(batch.dense_features[low:high], local, batch.labels[low:high])


def joined(parts: list[Clicks]) -> Clicks:
    """Several batches as one, their samples in order."""
    keys = list(parts[0].sparse_features.keys())
    dicts = [batch.sparse_features.to_dict() for batch in parts]
    pieces = [one[key] for key in keys for one in dicts]
    weighted = parts[0].sparse_features.weights_or_none() is not None
    ids = KeyedJaggedTensor(
        keys,
        torch.cat([piece.values() for piece in pieces]),
        torch.cat([piece.weights() for piece in pieces]) if weighted else None,
        torch.cat([piece.lengths() for piece in pieces]),
    )
    return Clicks(
        torch.cat([batch.dense_features for batch in parts]),
        ids,
        torch.cat([batch.labels for batch in parts]),
    )


class Pooled(nn.Module):
    """A model for tables of different widths: linear over all pooled embeddings."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        torch.manual_seed(5)
        width = sum(
            table.embedding_dim * len(table.feature_names) for table in ebc.embedding_bag_configs()
        )
        self.over = nn.Linear(width + DENSE, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        values = self.ebc(ids).values()
        return self.over(torch.cat([values, dense.to(values)], dim=1))


def dlrm(ebc: nn.Module) -> nn.Module:
    """TorchRec's DLRM as it is, always from the same dense weights."""
    torch.manual_seed(5)
    return DLRM(ebc, DENSE, [8, 8], [8, 1])


def cached(name: str = "adagrad", tables: Any = None, **settings: Any):
    """A collection over `tables` with the optimizer `name`."""
    settings.setdefault("rows", 300)
    return CachedEmbeddingBagCollection(
        tables if tables is not None else configs(), optimizer=UPDATES[name], **settings
    )


def loss_of(model: nn.Module, batch: Clicks) -> Tensor:
    """The local mean loss."""
    logits = model(batch.dense_features, batch.sparse_features)
    return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.to(logits))


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD over all that are not tables."""
    named = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
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


def plain_optimizer(name: str, ebc: EmbeddingBagCollection) -> torch.optim.Optimizer:
    """What `UPDATES[name]` is on whole tables in torch, on sparse gradients."""
    update, weights = UPDATES[name], list(ebc.parameters())
    for bag in ebc.embedding_bags.values():
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
    name: str, tables: list[EmbeddingBagConfig], start: dict, make, stream: Iterable[Clicks]
) -> tuple[list[float], dict[str, Tensor]]:
    """TorchRec's own collection on the same batches from the weights `start`; final weights."""
    ebc = EmbeddingBagCollection(tables)
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


def written_back(tables: CachedTables) -> int:
    """Rows that have left the cache changed."""
    return sum(rows.counts.rows_written_back for rows in tables.rows)
