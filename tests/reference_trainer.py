"""The independent trainer: plain PyTorch, one process, the global batch, whole tables.

It shares no code with the package: `nn.EmbeddingBag` with sparse gradients, torch.optim, and ten
lines of row-wise Adagrad. It takes the initial weights, a dense model and global batches, and gives
the losses and final weights that every mode must reproduce up to summation order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from distcache.data.batch import Batch, JaggedIds


@dataclass(frozen=True)
class Settings:
    """Optimizer and pooling; `*_schedule` maps a step from 0 to its rate, instead of `*_lr`.

    `feature_tables`: the table of each feature, in feature order; `pooling`: of every table, or by
    table name; `reverse`: take the samples of each batch, and the ids of each bag, from last to
    first (what changes then is rounding alone).
    """

    optimizer: str
    feature_tables: tuple[str, ...]
    dense_lr: float
    embedding_lr: float
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    initial_accumulator: float = 0.0
    pooling: str | Mapping[str, str] = "sum"
    dense_schedule: Callable[[int], float] | None = None
    embedding_schedule: Callable[[int], float] | None = None
    reverse: bool = False


@dataclass
class Trained:
    """`losses`: mean over each global batch; final `tables` by name, and `dense` state_dict."""

    losses: list[float] = field(default_factory=list)
    tables: dict[str, Tensor] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)


class RowWiseAdagrad(torch.optim.Optimizer):
    """One sum of mean squared gradients per row, as FBGEMM's; sparse gradients only."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, eps: float, initial: float) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})
        for table in self.param_groups[0]["params"]:
            self.state[table]["sum"] = table.new_full((len(table),), initial)

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
    weights, parameters = [bag.weight for bag in tables.values()], list(dense.parameters())
    lr, rate, eps = settings.dense_lr, settings.embedding_lr, settings.eps
    initial, betas = settings.initial_accumulator, settings.betas
    adagrad = torch.optim.Adagrad
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=lr), torch.optim.SGD(weights, lr=rate)
    if settings.optimizer == "adam":
        return (
            torch.optim.Adam(parameters, lr=lr, betas=betas, eps=eps),
            torch.optim.SparseAdam(weights, lr=rate, betas=betas, eps=eps),
        )
    over_dense = adagrad(parameters, lr=lr, eps=eps, initial_accumulator_value=initial)
    if settings.optimizer == "rowwise_adagrad":
        return over_dense, RowWiseAdagrad(weights, rate, eps, initial)
    return over_dense, adagrad(weights, lr=rate, eps=eps, initial_accumulator_value=initial)


def feature_bags(ids: JaggedIds, feature: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids `[m]`, ids per bag `[B]` and weights `[m]` of one feature."""
    batch = ids.batch_size
    offsets = ids.offsets[feature * batch : (feature + 1) * batch + 1]
    start, stop = int(offsets[0]), int(offsets[-1])
    weights = None if ids.weights is None else ids.weights[start:stop]
    return ids.values[start:stop], offsets.diff(), weights


def logits_of(
    batch: Batch, settings: Settings, dense: nn.Module, tables: Mapping[str, nn.EmbeddingBag]
) -> tuple[Tensor, Tensor]:
    """Logits and labels `[B]` of a global batch, in float32 or float64 as the model is."""
    dtype = next(dense.parameters()).dtype

    def turned(values: Tensor) -> Tensor:
        return values.flip(0) if settings.reverse else values

    pooled = []
    for feature, table in enumerate(settings.feature_tables):
        ids, lengths, weights = feature_bags(batch.ids, feature)
        offsets = functional.pad(turned(lengths).cumsum(0), (1, 0))
        weights = None if weights is None else turned(weights).to(dtype)
        pooled.append(tables[table](turned(ids), offsets, per_sample_weights=weights))
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
    pooling = settings.pooling
    bags = {
        name: nn.EmbeddingBag.from_pretrained(
            weight.detach().clone(),
            freeze=False,
            sparse=True,
            include_last_offset=True,
            mode=pooling if isinstance(pooling, str) else pooling[name],
        )
        for name, weight in tables.items()
    }
    over_dense, over_tables = optimizers(settings, model, bags)
    result = Trained()
    for step, batch in enumerate(batches):
        if settings.dense_schedule is not None:
            over_dense.param_groups[0]["lr"] = settings.dense_schedule(step)
        if settings.embedding_schedule is not None:
            over_tables.param_groups[0]["lr"] = settings.embedding_schedule(step)
        over_dense.zero_grad()
        over_tables.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(*logits_of(batch, settings, model, bags))
        loss.backward()
        over_dense.step()
        over_tables.step()
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
