"""What every mode is held against: the settings of each optimizer, and the independent trainer."""

from __future__ import annotations

from dataclasses import replace

import reference_trainer
import torch
from scenarios import Outcome, Scenario

from distcache.parallel.base import OptimizerSpec

OPTIMIZERS = {
    "sgd": (OptimizerSpec("sgd"), 0.1),
    "adagrad": (OptimizerSpec("adagrad", initial_accumulator=0.1), 0.005),
    "rowwise_adagrad": (OptimizerSpec("rowwise_adagrad", initial_accumulator=0.1), 0.005),
    "adam": (OptimizerSpec("adam"), 0.005),
}
"""A well-conditioned setting of each optimizer, and its learning rate."""


def check_against_trainer(
    case: Scenario, start: Outcome, found: Outcome, weights: float | None = None
) -> None:
    """Losses within 1e-9 (float64) or 1e-5, weights within 1e-10 (or `weights`), or ten times the
    drift of the trainer itself when it takes its samples in reverse."""
    readers = {f: spec.name for spec in case.tables for f in spec.features}
    settings = reference_trainer.Settings(
        optimizer=case.optimizer.name,
        feature_tables=tuple(readers[f] for f in case.features),
        dense_lr=case.lr,
        embedding_lr=case.lr,
        eps=case.optimizer.eps,
        betas=case.optimizer.betas,
        initial_accumulator=case.optimizer.initial_accumulator,
        pooling={spec.name: spec.pooling for spec in case.tables},
    )
    tables = {name: torch.from_numpy(value) for name, value in start.tables.items()}
    dense = {name: torch.from_numpy(value) for name, value in start.dense.items()}
    batches = [case.batch(step) for step in range(case.steps)]
    expected, reverse = (
        reference_trainer.train(tables, dense, case.model(), replace(settings, reverse=r), batches)
        for r in (False, True)
    )
    ours = reference_trainer.Trained(
        found.losses,
        {name: torch.from_numpy(value) for name, value in found.tables.items()},
        {name: torch.from_numpy(value) for name, value in found.dense.items()},
    )
    loss, weight = reference_trainer.difference(ours, expected)
    loss_drift, weight_drift = reference_trainer.difference(reverse, expected)
    print(
        f"{case.optimizer.name} {case.dtype}: losses differ by {loss:.1e} (the trainer itself, "
        f"reversed: {loss_drift:.1e}), weights by {weight:.1e} ({weight_drift:.1e})"
    )
    double = case.dtype is torch.float64
    assert loss <= max(1e-9 if double else 1e-5, 10 * loss_drift)
    if double or weights:
        assert weight <= max(weights or 1e-10, 10 * weight_drift)
