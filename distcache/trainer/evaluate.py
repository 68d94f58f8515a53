"""Evaluation on held-out batches: logits and labels of all ranks, AUC, log loss."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distcache.comm.world import World

# -----------------------------------------------------------------------------
# AUC, log loss and normalised entropy of click predictions: NumPy, float64, exact.
#
# torchmetrics' `binary_auroc` squeezes logits through a float32 sigmoid and sums a float32
# trapezoid, which merges scores that differ and depends on their range; the rank formula does not.


def auc(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Area under the ROC curve: the share of (positive, negative) pairs that are in order.

    `scores` `[n]` on any monotone scale (logits), `labels` `[n]`, positive above 0.5. Tied pairs
    count one half; pairs are counted in integers. None where a class is missing or a score is NaN.
    """
    positive = labels > 0.5
    total = int(positive.sum())
    if total in (0, len(labels)) or np.isnan(scores).any():
        return None
    _, level = np.unique(scores, return_inverse=True)
    positives = np.bincount(level, weights=positive).astype(np.int64)
    negatives = np.bincount(level, weights=~positive).astype(np.int64)
    below = np.cumsum(negatives) - negatives
    twice = int((positives * (2 * below + negatives)).sum())
    return twice / (2 * total * (len(labels) - total))


def log_loss(logits: np.ndarray, labels: np.ndarray) -> float | None:
    """Mean binary cross-entropy in nats of `logits` `[n]` against `labels` `[n]` in [0, 1].

    None for no samples or where it is not finite (a NaN logit, or an infinite one that is wrong).
    """
    if len(logits) == 0:
        return None
    logits = logits.astype(np.float64)
    with np.errstate(all="ignore"):
        negative, positive = np.logaddexp(0.0, logits), np.logaddexp(0.0, -logits)
        mixed = (1.0 - labels) * negative + labels * positive
        hard = np.where(labels == 1, positive, negative)  # 0 * inf would be NaN
        mean = float(np.where((labels == 0) | (labels == 1), hard, mixed).mean())
    return mean if np.isfinite(mean) else None


def normalized_entropy(loss: float | None, labels: np.ndarray) -> float | None:
    """`loss` over the entropy of the base rate of `labels` (He et al., 2014); below 1 is useful.

    None where the loss is, or where only one class is there (the entropy is 0).
    """
    if loss is None or len(labels) == 0:
        return None
    rate = float(labels.mean())
    if rate in (0.0, 1.0):
        return None
    return loss / -(rate * np.log(rate) + (1.0 - rate) * np.log1p(-rate))


# -----------------------------------------------------------------------------
# Evaluation on held-out batches: logits and labels of all ranks, exact metrics on rank 0.

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalResult:
    """Metrics over `samples` held-out samples of all ranks; None where one does not exist."""

    auc: float | None
    logloss: float | None
    ne: float | None
    samples: int


class Evaluation:
    """Collects this rank's logits and labels of one evaluation; the same batches on all ranks."""

    def __init__(self) -> None:
        self.batches = 0
        self._parts: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Keep the logits `[b]` (any device) and labels `[b]` of one slice (b may be 0)."""
        pair = [logits.detach().reshape(-1), labels.reshape(-1)]
        self._parts.append(torch.stack([part.to("cpu", torch.float64) for part in pair]))
        self.batches += 1

    def finish(self, world: World) -> EvalResult:
        """The metrics over all ranks, equal on every rank; all ranks call this."""
        local = torch.cat(self._parts, dim=1) if self._parts else torch.zeros(2, 0).double()
        gathered = gather_columns(local, world)
        values = torch.full((4,), torch.nan, dtype=torch.float64)
        if gathered is not None:
            logits, labels = gathered.numpy()
            result = measure(logits, labels)
            found = (result.auc, result.logloss, result.ne)
            values = torch.tensor(
                [torch.nan if value is None else value for value in found] + [result.samples],
                dtype=torch.float64,
            )
        dist.broadcast(values, src=0, group=world.host_group)
        *found, samples = values.tolist()
        area, loss, ne = (None if np.isnan(value) else value for value in found)
        return EvalResult(area, loss, ne, int(samples))


def gather_columns(local: Tensor, world: World) -> Tensor | None:
    """Float64 `[k, n_r]` of every rank side by side in rank order on rank 0; None on the others.

    gloo refuses to gather uneven shapes, so columns are padded to the longest and cut again.
    """
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    dist.all_gather(lengths, torch.tensor([local.shape[1]]), group=world.host_group)
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(local.shape[0], longest, dtype=torch.float64)
    padded[:, : local.shape[1]] = local
    parts = [torch.empty_like(padded) for _ in range(world.size)] if world.is_first else None
    dist.gather(padded, parts, dst=0, group=world.host_group)
    if parts is None:
        return None
    return torch.cat([p[:, : int(n)] for p, n in zip(parts, lengths, strict=True)], dim=1)


def measure(logits: np.ndarray, labels: np.ndarray) -> EvalResult:
    """All metrics of float64 `logits` `[n]` and `labels` `[n]`, warning of what does not exist."""
    bad = int(np.isnan(logits).sum())
    positives = int((labels > 0.5).sum())
    if bad:
        logger.warning(
            "evaluation: %d of %d logits are NaN, so AUC, log loss and NE do not exist",
            bad,
            len(logits),
        )
    elif positives in (0, len(labels)):
        logger.warning(
            "evaluation: %d of %d held-out labels are 1, so AUC and NE do not exist: both classes "
            "are needed; raise trainer.eval_steps or data.global_batch_size",
            positives,
            len(labels),
        )
    loss = log_loss(logits, labels)
    return EvalResult(auc(logits, labels), loss, normalized_entropy(loss, labels), len(labels))
