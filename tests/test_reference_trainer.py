"""The independent trainer by hand on a tiny case; every mode is held against it elsewhere."""

from __future__ import annotations

import math

import pytest
import reference_trainer as reference
import torch

from distcache.data.batch import Batch, JaggedIds

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]


class Line(torch.nn.Module):
    """logit = a * dense + pooled."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, dense, pooled):
        return self.a * dense[:, 0] + pooled[:, 0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_step_by_hand(optimizer):
    """Two samples, bags [0, 1] and [1], table [0.1, 0.2, 0.3], dense 1 and 2, labels 1 and 0."""
    ids = JaggedIds(("f",), torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3]))
    dense, labels = torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 0.0])
    table = torch.tensor([[0.1], [0.2], [0.3]], dtype=torch.float64)
    chosen = reference.Settings(
        optimizer,
        ("t",),
        dense_lr=9.0,
        embedding_lr=9.0,
        initial_accumulator=0.25,
        dense_schedule=lambda step: 0.1 / (step + 1),
        embedding_schedule=lambda step: 0.2 / (step + 1),
    )
    batch = Batch(dense, ids, labels, 2, 0, 0, 0)
    model = Line()
    trained = reference.train({"t": table}, model.state_dict(), model, chosen, [batch])

    logits = [0.5 * 1 + 0.1 + 0.2, 0.5 * 2 + 0.2]
    errors = [(1 / (1 + math.exp(-logits[0])) - 1) / 2, 1 / (1 + math.exp(-logits[1])) / 2]
    loss = (math.log1p(math.exp(-logits[0])) + math.log1p(math.exp(logits[1]))) / 2
    assert trained.losses == [pytest.approx(loss, rel=1e-14)]

    def step(weight, gradient, lr, adam_eps):
        if optimizer == "sgd":
            return weight - lr * gradient
        if optimizer == "adam":
            return weight - lr * gradient / (abs(gradient) + adam_eps)
        return weight - lr * gradient / (math.sqrt(0.25 + gradient**2) + 1e-8)

    late = 1e-8 / math.sqrt(1 - 0.999)  # SparseAdam adds eps before its bias correction
    both = errors[0] + errors[1]
    expected = [step(0.1, errors[0], 0.2, late), step(0.2, both, 0.2, late), 0.3]
    assert trained.tables["t"].flatten().tolist() == pytest.approx(expected, rel=1e-13, abs=1e-14)
    expected_a = step(0.5, errors[0] * 1 + errors[1] * 2, 0.1, 1e-8)
    assert trained.dense["a"].item() == pytest.approx(expected_a, rel=1e-13)
