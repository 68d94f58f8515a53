"""The independent trainer: plain PyTorch, one process, the global batch, whole tables.

It shares no code with the package: `nn.EmbeddingBag` with sparse gradients, torch.optim, and what
that lacks, from the papers and from FBGEMM's and TensorFlow's sources (`Lazy`). It takes the
initial weights, a dense model and global batches, and gives the losses and final weights that every
mode must reproduce up to summation order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from distcache.data.batch import Batch


@dataclass(frozen=True)
class Settings:
    """Optimizer and pooling.

    `feature_tables`: the table of each feature, in feature order; `pooling`: by table name, others
    are sums; `by_table`: other settings of the rows of a table; `reverse`: take the samples of each
    batch, and the ids of each bag, from last to first (what changes then is rounding alone).
    """

    optimizer: str
    feature_tables: tuple[str, ...]
    dense_lr: float
    embedding_lr: float
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    momentum: float = 0.9
    l1: float = 0.0
    l2: float = 0.0
    lr_power: float = -0.5
    pooling: Mapping[str, str] = field(default_factory=dict)
    by_table: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    reverse: bool = False


@dataclass
class Trained:
    """`losses`: mean over each global batch; final `tables` by name, and `dense` state_dict."""

    losses: list[float] = field(default_factory=list)
    tables: dict[str, Tensor] = field(default_factory=dict)
    dense: dict[str, Tensor] = field(default_factory=dict)


class Lazy(torch.optim.Optimizer):
    """Optimizers that torch.optim lacks: of a table with a sparse gradient the rows that it names,
    of a dense parameter all."""

    def __init__(self, params: Iterable[Tensor], lr: float, settings: Settings) -> None:
        super().__init__(params, {"lr": lr})
        self.settings, name = settings, settings.optimizer
        by_row, adam, start = (*("rowwise" in name, "adam" in name), settings.initial_accumulator)
        for table in self.param_groups[0]["params"]:
            shape = (len(table), 1) if by_row else table.shape
            parts = {"momentum_buffer": torch.zeros_like(table)} if "momentum" in name else {}
            if "adagrad" in name or name == "ftrl":
                parts["sum"] = table.new_full(shape, start)
            if name == "ftrl":
                parts["linear"] = torch.zeros_like(table)
            if adam:
                parts |= {"exp_avg": torch.zeros_like(table), "exp_avg_sq": table.new_zeros(shape)}
                parts["row_counter"] = table.new_zeros(len(table), 1)
            self.state[table].update(parts | {"steps": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        own, lr = self.settings, self.param_groups[0]["lr"]
        for table in self.param_groups[0]["params"]:
            if table.grad is None:  # as torch's optimizers
                continue
            rows, g = slice(None), table.grad
            if g.is_sparse:
                rows, g = g.coalesce().indices()[0], g.coalesce().values()
            state = self.state[table]
            state["steps"] += 1
            w = table[rows]
            if own.decoupled_weight_decay:
                w = (1 - lr * own.weight_decay) * w
            else:
                g = g + own.weight_decay * w
            parts = {name: value[rows] for name, value in state.items() if name != "steps"}
            table[rows] = self._updated(w, g, parts, lr, state["steps"])
            for name, value in parts.items():
                state[name][rows] = value

    def _updated(self, w: Tensor, g: Tensor, s: dict[str, Tensor], lr: float, step: int) -> Tensor:
        """The new weights; the parts of the state are replaced."""
        own, name = self.settings, self.settings.optimizer
        square = (g**2).mean(dim=1, keepdim=True) if "rowwise" in name else g**2
        if name == "sgd":
            return w - lr * g
        if name == "momentum_sgd":
            s["momentum_buffer"] = own.momentum * s["momentum_buffer"] + g
            return w - lr * s["momentum_buffer"]
        if "adagrad" in name:
            s["sum"] = s["sum"] + square
            return w - lr * g / (s["sum"].sqrt() + own.eps)
        if name == "ftrl":  # as in TensorFlow's training_ops.cc
            before, s["sum"] = s["sum"], s["sum"] + square
            sigma = (s["sum"] ** -own.lr_power - before**-own.lr_power) / lr
            s["linear"] = s["linear"] + g - sigma * w
            quadratic = s["sum"] ** -own.lr_power / lr + 2 * own.l2
            shrunk = (s["linear"].sign() * own.l1 - s["linear"]) / quadratic
            return torch.where(s["linear"].abs() > own.l1, shrunk, 0.0)
        (beta1, beta2), eps = own.betas, own.eps
        s["row_counter"] = s["row_counter"] + 1
        count = s["row_counter"] if name == "counted_adam" else step
        s["exp_avg"] = beta1 * s["exp_avg"] + (1 - beta1) * g
        s["exp_avg_sq"] = beta2 * s["exp_avg_sq"] + (1 - beta2) * square
        first, second = 1 - beta1**count, 1 - beta2**count
        if name in ("adam", "adamw"):  # as torch.optim.SparseAdam
            return w - lr * second**0.5 / first * s["exp_avg"] / (s["exp_avg_sq"].sqrt() + eps)
        return w - lr * (s["exp_avg"] / first) / ((s["exp_avg_sq"] / second).sqrt() + eps)


def optimizers(
    settings: Settings, dense: nn.Module, tables: Mapping[str, nn.EmbeddingBag]
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """The optimizers of the dense parameters and of the tables: torch's where it has them."""
    optim, name, decays = torch.optim, settings.optimizer, settings.weight_decay > 0
    apart = decays and settings.decoupled_weight_decay
    decay = {"weight_decay": settings.weight_decay}
    weights, parameters = [bag.weight for bag in tables.values()], list(dense.parameters())
    lr, row_lr = settings.dense_lr, settings.embedding_lr
    lazy = Lazy(weights, row_lr, settings)
    if name == "ftrl" or (apart and "adam" not in name):
        of_dense = replace(settings, optimizer=name.removeprefix("rowwise_"))
        return Lazy(parameters, lr, of_dense), lazy
    if "sgd" in name:
        momentum = settings.momentum if name == "momentum_sgd" else 0.0
        over_dense = optim.SGD(parameters, lr=lr, momentum=momentum, **decay)
        rows = optim.SGD(weights, lr=row_lr)
    elif "adagrad" in name:
        more = {"initial_accumulator_value": settings.initial_accumulator, "eps": settings.eps}
        over_dense = optim.Adagrad(parameters, lr=lr, **more, **decay)
        rows = optim.Adagrad(weights, lr=row_lr, **more)
    else:
        more = {"eps": settings.eps, "betas": settings.betas}
        over_dense = (optim.AdamW if apart else optim.Adam)(parameters, lr=lr, **more, **decay)
        rows = optim.SparseAdam(weights, lr=row_lr, **more)
    return over_dense, rows if name in ("sgd", "adagrad", "adam") and not decays else lazy


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
    result, every = Trained(), [optimizers(settings, model, bags)[0]]
    for name, bag in bags.items():
        own = replace(settings, **settings.by_table.get(name, {}))
        every.append(optimizers(own, model, {name: bag})[1])
    for batch in batches:
        loss = functional.binary_cross_entropy_with_logits(*logits_of(batch, settings, model, bags))
        for optimizer in every:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in every:
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
