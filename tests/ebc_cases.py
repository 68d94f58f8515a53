"""Tables of TorchRec's configs, and batches for them.

Tables come pooled or as sequences: `using("sequences")` says which from then on, and the fixture
`kind` runs a test with either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType

KINDS = ("bags", "sequences")
_kind = "bags"

DENSE = 4
BATCH = 24
STEPS = 20
ROWS = (400, 60, 7, 1)


def using(kind: str) -> None:
    """From now on tables, collections and models are of this kind."""
    global _kind
    assert kind in KINDS
    _kind = kind


def kind_here() -> str:
    """The kind in use."""
    return _kind


def of_kind(rank: int, size: int, kind: str, work: Callable, *args: Any) -> Any:
    """`work(rank, size, *args)` with a kind; for processes of their own."""
    using(kind)
    return work(rank, size, *args)


def key_of_tables() -> str:
    """The name of a collection's tables in a `state_dict`."""
    return "embedding_bags" if _kind == "bags" else "embeddings"


@dataclass
class Clicks:
    """A user's batch."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor


def configs(**changes: Any) -> list[Any]:
    """Tables `t0`, ... of ROWS rows x 8, one feature each; `t1` is read by two."""
    table = EmbeddingBagConfig if _kind == "bags" else EmbeddingConfig
    return [
        table(
            name=f"t{i}",
            num_embeddings=rows,
            embedding_dim=8,
            feature_names=[f"f{i}", "g"] if i == 1 else [f"f{i}"],
            **changes,
        )
        for i, rows in enumerate(ROWS)
    ]


def mixed_configs() -> list[Any]:
    """Two widths, a mean if pooled, and a feature `f0` that two tables read."""
    tables = configs()
    if _kind == "bags":
        tables[1] = replace(tables[1], pooling=PoolingType.MEAN)
    tables[2] = replace(tables[2], embedding_dim=4, feature_names=["f2", "f0"], num_embeddings=400)
    return tables


def features_of(tables: list[Any]) -> dict[str, int]:
    """Every feature with the rows of the smallest table that reads it, in order of appearance."""
    rows: dict[str, int] = {}
    for table in tables:
        for feature in table.feature_names:
            rows[feature] = min(rows.get(feature, 1 << 60), table.num_embeddings)
    return rows


def draw(
    seed: int,
    size: int = BATCH,
    tables: list[Any] | None = None,
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
