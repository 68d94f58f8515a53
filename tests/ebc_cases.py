"""Collections in small loops: TorchRec's tables and batches for them, models over cached and over
plain tables, loops over these in one process and on ranks.

Tables come pooled or as sequences: `using("sequences")` says which from then on, and the fixture
`kind` runs a test with either.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import run_ranks
from reference_trainer import Settings, optimizers
from scenarios import count_ids
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.models.dlrm import DLRM

import distcache
from distcache import CachedEmbeddingBagCollection, CachedEmbeddingCollection, lookahead
from distcache.data.batch import JaggedIds
from distcache.embedding.step import CollectionTables
from distcache.popularity.statistics import Statistics

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
    """Tables `t0`, ... of ROWS rows x 8, one feature each; `t1` is read by `f1` and `g`."""
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
    tables = two_widths()
    if _kind == "bags":
        tables[1] = replace(tables[1], pooling=PoolingType.MEAN)
    tables[2] = replace(tables[2], feature_names=["f2", "f0"])
    return tables


def features_of(tables: list[Any]) -> dict[str, int]:
    """Every feature with the rows of the smallest table that reads it, in order of appearance."""
    rows: dict[str, int] = {}
    for table in tables:
        for feature in table.feature_names:
            rows[feature] = min(rows.get(feature, 1 << 60), table.num_embeddings)
    return rows


def draw(seed: int, size: int = BATCH, tables: Any = None, weighted: bool = False) -> Clicks:
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


def picked(parts: list[Clicks], low: int | None = None, high: int | None = None) -> Clicks:
    """Samples [low, high) of each of several batches, as one batch."""
    at, ids = slice(low, high), [one.sparse_features for one in parts]
    pieces = [one[key] for key in ids[0].keys() for one in ids]  # noqa: SIM118

    def of_samples(piece: JaggedTensor, values: Tensor) -> Tensor:
        return torch.cat([values[:0], *values.split(piece.lengths().tolist())[at]])

    weights = [of_samples(p, p.weights()) for p in pieces if p.weights_or_none() is not None]
    chosen = KeyedJaggedTensor(
        ids[0].keys(),
        torch.cat([of_samples(piece, piece.values()) for piece in pieces]),
        torch.cat(weights) if weights else None,
        torch.cat([piece.lengths()[at] for piece in pieces]),
    )
    dense, labels = (
        [getattr(one, name)[at] for one in parts] for name in ("dense_features", "labels")
    )
    return Clicks(torch.cat(dense), chosen, torch.cat(labels))


def part(batch: Clicks, rank: int, world_size: int) -> Clicks:
    """One rank's samples of a global batch."""
    size = len(batch.labels)
    return picked([batch], rank * size // world_size, (rank + 1) * size // world_size)


def two_widths() -> list[Any]:
    """`configs`, of two widths."""
    tables = configs()
    tables[2] = replace(tables[2], embedding_dim=4, num_embeddings=400)
    return tables


def counted(steps: int = 6) -> Statistics:
    """Lookups of the first batches, by feature, in another order than the tables'."""
    rows = {f: t.num_embeddings for t in two_widths() for f in t.feature_names}
    drawn = (batch.sparse_features for batch in batches(steps, tables=two_widths()))
    ids = (JaggedIds(tuple(one.keys()), one.values(), one.offsets()) for one in drawn)
    return count_ids(dict(sorted(rows.items(), reverse=True)), ids)


UPDATES = {
    "sgd": distcache.optim.SGD(lr=0.1),
    "adagrad": distcache.optim.Adagrad(lr=0.005, initial_accumulator=0.1),
    "rowwise_adagrad": distcache.optim.RowWiseAdagrad(lr=0.005, initial_accumulator=0.1),
    "adam": distcache.optim.Adam(lr=0.005),
}


MORE = {
    "counted_adam": distcache.optim.CountedAdam(lr=0.005),
    "ftrl": distcache.optim.Ftrl(0.05, 1e-4, 1e-3),
    "by table": {
        f"t{i}": distcache.optim.Adam(lr=0.005 * (i + 1), weight_decay=0.1 * (i % 2))
        for i in range(len(ROWS))
    },
}
"""Others, and one for each table."""


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
    place = torch.arange(len(values), device=values.device) - rows.offsets()[sample] + 1
    scored = values * torch.sigmoid(values @ query).mul(place).unsqueeze(1)
    return values.new_zeros(len(lengths), values.shape[1]).index_add(0, sample, scored)


def dlrm(ebc: nn.Module) -> nn.Module:
    """TorchRec's DLRM as it is, always from the same dense weights; a `Pooled` of sequences."""
    torch.manual_seed(5)
    if not hasattr(ebc, "embedding_bag_configs"):
        return Pooled(ebc)
    return DLRM(ebc, DENSE, [8, 8], [8, 1])


def values_of(found: Any) -> Tensor:
    """All values that a collection has given out, in the order of its keys, `[n]`."""
    parts = found.values() if isinstance(found, dict) else [found]
    return torch.cat([part.values().reshape(-1) for part in parts])


def plain_tables(tables: list[Any] | None = None) -> nn.Module:
    """TorchRec's own collection; that of sequences takes one width: the others are put in."""
    tables = tables if tables is not None else configs()
    if _kind == "bags":
        return EmbeddingBagCollection(tables)
    own = EmbeddingCollection([replace(t, embedding_dim=tables[0].embedding_dim) for t in tables])
    own._embedding_configs = tables
    for table in tables:
        own.embeddings[table.name] = nn.Embedding(table.num_embeddings, table.embedding_dim)
    return own


def cached(name: str = "adagrad", tables: Any = None, **settings: Any):
    """A collection over `tables` with the optimizer `name`, and always the same initial rows."""
    make = CachedEmbeddingBagCollection if _kind == "bags" else CachedEmbeddingCollection
    settings.setdefault("rows", 300)
    if settings.get("init") != "torch":
        settings.setdefault("seed", 0)
    update = (UPDATES | MORE)[name]
    return make(tables if tables is not None else configs(), optimizer=update, **settings)


def loss_of(model: nn.Module, batch: Clicks) -> Tensor:
    """The local mean loss."""
    logits = model(batch.dense_features, batch.sparse_features)
    return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.to(logits))


def dense_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD over all that are not tables."""
    named = [p for name, p in model.named_parameters() if f"{key_of_tables()}." not in name]
    return torch.optim.SGD(named, lr=0.1)


def train(model, rows, stream: Iterable[Clicks], dense=None, zero=None) -> list[float]:
    """The loop of a user, over a look-ahead or plain batches; the losses. `rows`: whose `step`
    updates the tables, and `zero`: what forgets their gradients, if anything must."""
    dense = dense if dense is not None else dense_optimizer(model)
    losses = []
    for batch in stream:
        dense.zero_grad()
        if zero is not None:
            zero()
        loss = loss_of(model, batch)
        loss.backward()
        rows.step()
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
    update, own = UPDATES[name], getattr(ebc, key_of_tables())
    for bag in own.values():
        bag.sparse = True
    settings = Settings(name, (), update.lr, update.lr, initial_accumulator=0.1)
    return optimizers(settings, nn.Linear(1, 1), dict(own.items()))[1]


def train_plain(
    name: str, tables: list[Any], start: dict, make, stream: Iterable[Clicks]
) -> tuple[list[float], dict[str, Tensor]]:
    """TorchRec's own collection on the same batches from the weights `start`; final weights."""
    ebc = plain_tables(tables)
    model = make(ebc)
    model.load_state_dict(start)
    rows = plain_optimizer(name, ebc)
    losses = train(model, rows, stream, zero=rows.zero_grad)
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
    return sum(rows.counts.rows_written_back for rows in tables.engine.rows)


def job(work):
    """`work(rank, size, ...)` inside a job of its own, which ends in order; of the kind given
    first, where `ranks` calls it."""

    @functools.wraps(work)
    def run(rank: int, size: int, kind: str, *args):
        using(kind)
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        try:
            found = work(rank, size, *args)
            gc.collect()
            left = [t.name for t in threading.enumerate() if t.name.startswith("distcache")]
            assert not left, left
            dist.barrier()
        finally:
            dist.destroy_process_group()
        return as_arrays(found)

    return run


def as_arrays(value, back: bool = False):
    """Tensors as NumPy arrays, which travel between processes, or the way back."""
    if isinstance(value, dict):
        return {key: as_arrays(own, back) for key, own in value.items()}
    if back:
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return value.numpy() if isinstance(value, torch.Tensor) else value


def ranks(work, *args, size: int = 2) -> list[dict]:
    """What a `job` found on `size` ranks."""
    return [as_arrays(own, back=True) for own in run_ranks(work, size, _kind, *args)]


def mine(rank: int, size: int, steps: int = 20, **how) -> list[Clicks]:
    """This rank's part of every global batch."""
    return [part(batch, rank, size) for batch in batches(steps, **how)]


def wrapped(name: str = "adagrad", model=dlrm, **settings):
    """A collection, the DDP model around it and its dense optimizer."""
    ebc = cached(name, timeout_s=60, **settings)
    ddp = DistributedDataParallel(model(ebc))
    assert not [n for n, _ in ddp.named_parameters() if key_of_tables() in n]
    return ebc, ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def unwrapped(ddp) -> dict:
    """Weights without DDP's prefix; asked for through it."""
    found = weights_of(ddp)
    assert all(name.startswith("module.") for name in found)
    return {name.removeprefix("module."): value for name, value in found.items()}
