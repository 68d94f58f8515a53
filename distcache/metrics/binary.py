"""AUC, log loss and normalised entropy of click predictions: NumPy, float64, exact.

torchmetrics' `binary_auroc` squeezes logits through a float32 sigmoid and sums a float32
trapezoid, which merges scores that differ and depends on their range; the rank formula does not.
"""

from __future__ import annotations

import numpy as np


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
