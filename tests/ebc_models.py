"""Small TorchRec models over cached and over plain tables, of the kind that `ebc_cases` says."""

from __future__ import annotations

from typing import Any

import torch
from ebc_cases import DENSE, configs, kind_here
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_modules import get_embedding_names_by_table

import distcache
from distcache import CachedEmbeddingBagCollection, CachedEmbeddingCollection

UPDATES = {
    "sgd": distcache.optim.SGD(lr=0.1),
    "adagrad": distcache.optim.Adagrad(lr=0.005, initial_accumulator=0.1),
    "rowwise_adagrad": distcache.optim.RowWiseAdagrad(lr=0.005, initial_accumulator=0.1),
    "adam": distcache.optim.Adam(lr=0.005),
}


class Pooled(nn.Module):
    """A model for tables of different widths: linear over all embeddings, pooled by the table or,
    for sequences, here: each row by a score of its own, later ones more."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.ebc = ebc
        torch.manual_seed(5)
        pooled = hasattr(ebc, "embedding_bag_configs")
        tables = ebc.embedding_bag_configs() if pooled else ebc.embedding_configs()
        widths = [table.embedding_dim for table in tables for _ in table.feature_names]
        self.over = nn.Linear(sum(widths) + DENSE, 1)
        self.queries = nn.ParameterList([] if pooled else [torch.randn(dim) for dim in widths])

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        found = self.ebc(ids)
        if isinstance(found, dict):
            pairs = zip(found.values(), self.queries, strict=True)
            values = torch.cat([scored_sum(rows, query) for rows, query in pairs], dim=1)
        else:
            values = found.values()
        return self.over(torch.cat([values, dense.to(values)], dim=1))


def scored_sum(rows: JaggedTensor, query: Tensor) -> Tensor:
    """`[b, D]`: every sequence's rows, each times its score and its place."""
    values, lengths = rows.values(), rows.lengths()
    sample = torch.repeat_interleave(lengths)
    place = torch.arange(len(values)) - rows.offsets()[sample] + 1
    scored = values * torch.sigmoid(values @ query).mul(place).unsqueeze(1)
    return values.new_zeros(len(lengths), values.shape[1]).index_add(0, sample, scored)


def dlrm(ebc: nn.Module) -> nn.Module:
    """TorchRec's DLRM as it is, always from the same dense weights; a `Pooled` of sequences."""
    torch.manual_seed(5)
    if not hasattr(ebc, "embedding_bag_configs"):
        return Pooled(ebc)
    return DLRM(ebc, DENSE, [8, 8], [8, 1])


class ByWidth(nn.Module):
    """TorchRec's EmbeddingCollections, one for each width (they take only one), as if one."""

    def __init__(self, tables: list[EmbeddingConfig]) -> None:
        super().__init__()
        self.tables, self.parts, named = tables, [], {}
        for width in {table.embedding_dim for table in tables}:
            part = EmbeddingCollection([t for t in tables if t.embedding_dim == width])
            self.parts.append(part)
            named |= dict(part.embeddings.items())
        self.embeddings = nn.ModuleDict({table.name: named[table.name] for table in tables})

    def embedding_configs(self) -> list[EmbeddingConfig]:
        return self.tables

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        found = {}
        for part in self.parts:
            out = part(ids)
            pairs = zip(part.embedding_configs(), part.embedding_names_by_table(), strict=True)
            found |= {table.name: [out[name] for name in names] for table, names in pairs}
        names = get_embedding_names_by_table(self.tables)
        return {
            name: rows
            for table, own in zip(self.tables, names, strict=True)
            for name, rows in zip(own, found[table.name], strict=True)
        }


def values_of(found: Any) -> Tensor:
    """All values that a collection has given out, in the order of its keys, `[n]`."""
    parts = found.values() if isinstance(found, dict) else [found]
    return torch.cat([part.values().reshape(-1) for part in parts])


def plain_tables(tables: list[Any] | None = None) -> nn.Module:
    """TorchRec's own collection."""
    tables = tables if tables is not None else configs()
    if kind_here() == "bags":
        return EmbeddingBagCollection(tables)
    one_width = len({table.embedding_dim for table in tables}) == 1
    return EmbeddingCollection(tables) if one_width else ByWidth(tables)


def cached(name: str = "adagrad", tables: Any = None, **settings: Any):
    """A collection over `tables` with the optimizer `name`."""
    settings.setdefault("rows", 300)
    collection = (
        CachedEmbeddingBagCollection if kind_here() == "bags" else CachedEmbeddingCollection
    )
    return collection(
        tables if tables is not None else configs(), optimizer=UPDATES[name], **settings
    )
