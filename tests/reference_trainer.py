"""The independent trainer: plain PyTorch, one process, the global batch, whole tables.

It shares no code with the package: `nn.EmbeddingBag` with sparse gradients, torch.optim, and ten
lines of row-wise Adagrad. It takes the initial weights, a dense model and global batches, and gives
the losses and final weights that every mode must reproduce up to summation order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from distcache.data.batch import Batch


@dataclass(frozen=True)
class Settings:
    """Optimizer and pooling.

    `feature_tables`: the table of each feature, in feature order; `pooling`: by table name, others
    are sums; `reverse`: take the samples of each batch, and the ids of each bag, from last to
    first (what changes then is rounding alone).
    """

    optimizer: str
    feature_tables: tuple[str, ...]
    dense_lr: float
    embedding_lr: float
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    initial_accumulator: float = 0.0
    pooling: Mapping[str, str] = field(default_factory=dict)
    reverse: bool = False


@dataclass
class Trained:
    """`losses`: mean over each global batch; final `tables` by name, and `dense` state_dict."""

    losses: list[float] = field(default_factory=list)
    tables: dict[str, Tensor] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)


class RowWiseAdagrad(torch.optim.Optimizer):
    """One sum of mean squared gradients per row, as FBGEMM's; sparse gradients only."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, eps: float, initial_accumulator_value: float
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})
        for table in self.param_groups[0]["params"]:
            self.state[table]["sum"] = table.new_full((len(table),), initial_accumulator_value)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        group = self.param_groups[0]
        for table in group["params"]:
            if table.grad is None:  # as torch's optimizers
                continue
            gradient = table.grad.coalesce()
            rows, values, total = gradient.indices()[0], gradient.values(), self.state[table]["sum"]
            total[rows] += values.square().mean(dim=1)
            table[rows] -= group["lr"] * values / (total[rows].sqrt() + group["eps"]).unsqueeze(1)


def optimizers(
    settings: Settings, dense: nn.Module, tables: Mapping[str, nn.EmbeddingBag]
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """The optimizers of the dense parameters and of the tables."""
    optim, more = torch.optim, {"eps": settings.eps}
    if settings.optimizer == "sgd":
        kinds, more = (optim.SGD, optim.SGD), {}
    elif settings.optimizer == "adam":
        kinds, more["betas"] = (optim.Adam, optim.SparseAdam), settings.betas
    else:
        by_row = settings.optimizer == "rowwise_adagrad"
        kinds = (optim.Adagrad, RowWiseAdagrad if by_row else optim.Adagrad)
        more["initial_accumulator_value"] = settings.initial_accumulator
    weights = [bag.weight for bag in tables.values()]
    over_dense = kinds[0](list(dense.parameters()), lr=settings.dense_lr, **more)
    return over_dense, kinds[1](weights, lr=settings.embedding_lr, **more)


def logits_of(
    batch: Batch, settings: Settings, dense: nn.Module, tables: Mapping[str, nn.EmbeddingBag]
) -> tuple[Tensor, Tensor]:
    """Logits and labels `[B]` of a global batch, in float32 or float64 as the model is."""
    dtype, ids, pooled = next(dense.parameters()).dtype, batch.ids, []

    def turned(values: Tensor) -> Tensor:
        return values.flip(0) if settings.reverse else values

    for feature, table in enumerate(settings.feature_tables):
        offsets = ids.offsets[feature * ids.batch_size : (feature + 1) * ids.batch_size + 1]
        mine = slice(int(offsets[0]), int(offsets[-1]))
        ends = functional.pad(turned(offsets.diff()).cumsum(0), (1, 0))
        weights = None if ids.weights is None else turned(ids.weights[mine]).to(dtype)
        pooled.append(tables[table](turned(ids.values[mine]), ends, per_sample_weights=weights))
    logits = dense(turned(batch.dense).to(dtype), torch.cat(pooled, dim=1))
    return logits.reshape(-1), turned(batch.labels).to(dtype)


def train(
    tables: Mapping[str, Tensor],
    dense_state: Mapping[str, Tensor],
    model: nn.Module,
    settings: Settings,
    batches: Iterable[Batch],
) -> Trained:
    """Train copies of the given weights on global batches (world size 1), one step for each.

    `tables`: initial weights `[rows, D]` by table name; `dense_state`: the state_dict of `model`,
    an instance of the dense class, of which a copy is trained. The dtype is that of the weights.
    """
    model = copy.deepcopy(model).to(next(iter(tables.values())).dtype)
    model.load_state_dict(dense_state)
    how = {"freeze": False, "sparse": True, "include_last_offset": True}
    bags = {
        name: nn.EmbeddingBag.from_pretrained(
            weight.detach().clone(), mode=settings.pooling.get(name, "sum"), **how
        )
        for name, weight in tables.items()
    }
    result, both = Trained(), optimizers(settings, model, bags)
    for batch in batches:
        loss = functional.binary_cross_entropy_with_logits(*logits_of(batch, settings, model, bags))
        for optimizer in both:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in both:
            optimizer.step()
        result.losses.append(loss.item())
    result.tables = {name: bag.weight.detach() for name, bag in bags.items()}
    result.dense = model.state_dict()
    return result


def difference(one: Trained, other: Trained) -> tuple[float, float]:
    """The largest relative difference of losses, and the largest absolute one of weights."""
    pairs = zip(one.losses, other.losses, strict=True)
    losses = max((abs(a - b) / abs(b) for a, b in pairs), default=0.0)
    ours, theirs = {**one.tables, **one.dense}, {**other.tables, **other.dense}
    weights = max((ours[name] - theirs[name]).abs().max().item() for name in theirs)
    return losses, weights
