"""A toy model, batches, and an unsharded trainer of it: what `hybrid` is held against."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distcache.comm.world import World
from distcache.data.batch import Batch, JaggedIds, slice_bounds
from distcache.layout import TableSpec
from distcache.parallel.base import OptimizerSpec
from distcache.parallel.hybrid import HybridParallel, HybridSpec
from distcache.store.rows import initial_rows

FEATURES = ("d", "a", "c", "b")
DENSE = 3
SEED = 11
RATES = (0.005, 0.005)
OPTIMIZERS = [
    OptimizerSpec("sgd"),
    OptimizerSpec("adagrad", eps=1e-8, initial_accumulator=0.1),
    OptimizerSpec("rowwise_adagrad", eps=1e-8, initial_accumulator=0.1),
]

SIZES = [8, 7, 1, 5, 2, 3] + [8] * 14
"""Samples of the global batches that `train` takes."""


def tables(pooling: str = "mean") -> tuple[TableSpec, ...]:
    """Two widths, two features on one table, one table smaller than four ranks."""
    return (
        TableSpec("t0", 37, 16, ("a", "b")),
        TableSpec("t1", 3, 16, ("c",), pooling),
        TableSpec("t2", 64, 32, ("d",)),
    )


class Toy(nn.Module):
    """Two linear layers over the dense features beside the pooled vectors."""

    def __init__(self, seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.hidden = nn.Linear(DENSE + 3 * 16 + 32, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Logits `[b]`."""
        return self.out(torch.relu(self.hidden(torch.cat([dense, pooled], 1)))).squeeze(1)


def whole_batch(index: int, size: int, weighted: bool = False) -> Batch:
    """A global batch of `size` samples, bags of 0 to 4 ids; index 3 has no id at all."""
    draw = torch.Generator().manual_seed(1000 + index)
    rows = {feature: table.rows for table in tables() for feature in table.features}
    lengths = torch.randint(0, 5, (len(FEATURES), size), generator=draw) * int(index != 3)
    values = torch.cat(
        [
            torch.randint(0, rows[feature], (int(count),), generator=draw)
            for feature, count in zip(FEATURES, lengths.sum(1), strict=True)
        ]
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.view(-1).cumsum(0)])
    weights = torch.rand(len(values), generator=draw) if weighted else None
    return Batch(
        dense=torch.randn(size, DENSE, generator=draw),
        ids=JaggedIds(FEATURES, values, offsets, weights),
        labels=torch.randint(0, 2, (size,), generator=draw).float(),
        global_size=size,
        index=index,
        epoch=0,
        first_sample=0,
    )


def rank_slice(batch: Batch, rank: int, world_size: int) -> Batch:
    """The samples of `batch` that `rank` takes."""
    low, high = slice_bounds(batch.global_size, rank, world_size)
    ids, size = batch.ids, batch.global_size
    values, weights, lengths = [], [], []
    for feature in range(len(FEATURES)):
        bounds = ids.offsets[feature * size : (feature + 1) * size + 1]
        first, last = int(bounds[low]), int(bounds[high])
        values.append(ids.values[first:last])
        if ids.weights is not None:
            weights.append(ids.weights[first:last])
        lengths.append(bounds[low : high + 1].diff())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    mine = JaggedIds(FEATURES, torch.cat(values), offsets, torch.cat(weights) if weights else None)
    return Batch(
        dense=batch.dense[low:high],
        ids=mine,
        labels=batch.labels[low:high],
        global_size=size,
        index=batch.index,
        epoch=0,
        first_sample=low,
    )


class Unsharded:
    """The same training in one process on whole batches, float64, by `nn.EmbeddingBag`."""

    def __init__(self, optimizer: OptimizerSpec, pooling: str = "mean") -> None:
        self.optimizer = optimizer
        self.model = Toy().double()
        self.bags: dict[str, nn.EmbeddingBag] = {}
        self.reader: dict[str, str] = {}
        for index, table in enumerate(tables(pooling)):
            start = initial_rows(SEED, index, table.rows, table.dim, 0, table.rows).double()
            bag = nn.EmbeddingBag.from_pretrained(start, freeze=False, mode=table.pooling)
            self.bags[table.name] = bag
            self.reader |= dict.fromkeys(table.features, table.name)
        self.rows = [bag.weight for bag in self.bags.values()]
        self.sums = [torch.full((len(w), 1), optimizer.initial_accumulator) for w in self.rows]
        adagrad = {"initial_accumulator_value": optimizer.initial_accumulator, "eps": optimizer.eps}
        dense, rows = list(self.model.parameters()), list(self.rows)
        if optimizer.name == "sgd":
            self.steppers = [torch.optim.SGD(dense + rows, lr=RATES[0])]
        elif optimizer.name == "adagrad":
            self.steppers = [torch.optim.Adagrad(dense + rows, lr=RATES[0], **adagrad)]
        else:
            self.steppers = [torch.optim.Adagrad(dense, lr=RATES[0], **adagrad)]

    def logits(self, batch: Batch) -> Tensor:
        """Logits of a whole batch."""
        ids, size, pooled = batch.ids, batch.global_size, []
        for position, feature in enumerate(FEATURES):
            bounds = ids.offsets[position * size : (position + 1) * size + 1]
            inside = slice(int(bounds[0]), int(bounds[-1]))
            weights = None if ids.weights is None else ids.weights[inside].double()
            bag = self.bags[self.reader[feature]]
            pooled.append(bag(ids.values[inside], bounds[:-1] - bounds[0], weights))
        return self.model(batch.dense.double(), torch.cat(pooled, 1))

    def train(self, batch: Batch) -> float:
        """One step; the mean loss."""
        for parameter in [*self.model.parameters(), *self.rows]:
            parameter.grad = None
        loss = nn.functional.binary_cross_entropy_with_logits(
            self.logits(batch), batch.labels.double()
        )
        loss.backward()
        for stepper in self.steppers:
            stepper.step()
        if self.optimizer.name == "rowwise_adagrad":
            with torch.no_grad():
                for weight, total in zip(self.rows, self.sums, strict=True):
                    total += weight.grad.square().mean(1, keepdim=True)
                    weight -= RATES[1] * weight.grad / (total.sqrt() + self.optimizer.eps)
        return loss.item()


def hybrid_of(
    world: World,
    optimizer: OptimizerSpec,
    sharding: str,
    weighted: bool = False,
    amp: str = "off",
) -> HybridParallel:
    """The toy model under `hybrid`."""
    pooling = "sum" if weighted else "mean"
    spec = HybridSpec(
        tables=tables(pooling),
        features=FEATURES,
        optimizer=optimizer,
        seed=SEED,
        sharding=sharding,
        weighted=weighted,
        amp=amp,
    )
    hybrid = HybridParallel(world, spec, Toy())
    hybrid.set_lr(*RATES)
    return hybrid


def train(hybrid: HybridParallel, rank: int, size: int, weighted: bool = False) -> list[float]:
    """The losses of this rank's steps over global batches of SIZES."""
    whole = [whole_batch(i, b, weighted) for i, b in enumerate(SIZES)]
    steps = hybrid.stream(rank_slice(batch, rank, size) for batch in whole)
    results = [hybrid.train_step(step) for step in steps]
    assert not any(result.bad_ranks or result.stop for result in results)
    return [result.loss for result in results]


def whole_tables(hybrid: HybridParallel) -> list:
    """All tables on rank 0, as NumPy arrays, read ten rows at a time."""
    hybrid.flush()
    blocks = []
    for index, table in enumerate(tables()):
        parts = [
            hybrid.table_block(index, low, min(low + 10, table.rows))
            for low in range(0, table.rows, 10)
        ]
        blocks.append(None if parts[0] is None else torch.cat(parts).numpy())
    return blocks


def copy_state(hybrid: HybridParallel) -> dict:
    """Copies of all local tensors of the state."""
    copies = {}
    for key, value in hybrid.state_dict().items():
        shards = value.local_shards() if hasattr(value, "local_shards") else None
        if shards is not None:
            copies |= {f"{key}/{i}": s.tensor.clone() for i, s in enumerate(shards)}
        else:
            copies[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return copies
