"""The independent trainer: by hand on a tiny case, and against the package's own operations."""

from __future__ import annotations

import math

import pytest
import reference_trainer as reference
import torch
from torch.nn import functional

from distcache import ops
from distcache.data.batch import Batch, JaggedIds
from distcache.models import build_model, initialise
from distcache.optim import apply_rows, dense_optimizer, row_update

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]
TABLES = {"a": 30, "b": 7, "c": 200}
FEATURE_TABLES = ("a", "b", "a", "c")  # two features read table a
DIM, DENSE, SAMPLES = 4, 3, 24


@pytest.fixture(autouse=True)
def one_thread():
    """Many tiny operations: a second thread only waits, and on a busy machine for long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_batches(steps, seed=0, weighted=False, samples=SAMPLES):
    """Multi-hot global batches with empty bags; the last one is ragged."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        size = samples if step + 1 < steps else samples // 2 + 1
        values, lengths = [], []
        for name in FEATURE_TABLES:
            length = torch.randint(0, 4, (size,), generator=generator)
            ids = torch.rand(int(length.sum()), generator=generator) ** 3 * TABLES[name]
            values.append(ids.long())
            lengths.append(length)
        offsets = functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
        ids = torch.cat(values)
        weights = torch.rand(len(ids), generator=generator) if weighted else None
        features = tuple(f"f{f}" for f in range(len(FEATURE_TABLES)))
        yield Batch(
            dense=torch.rand(size, DENSE, generator=generator),
            ids=JaggedIds(features, ids, offsets, weights),
            labels=(torch.rand(size, generator=generator) < 0.4).float(),
            global_size=size,
            index=step,
            epoch=0,
            first_sample=0,
        )


def start(dtype=torch.float64):
    generator = torch.Generator().manual_seed(9)
    tables = {
        name: torch.randn(count, DIM, generator=generator).to(dtype) * 0.3
        for name, count in TABLES.items()
    }
    model = build_model("dlrm", DENSE, [DIM] * len(FEATURE_TABLES), [6, DIM], [8, 1])
    return tables, initialise(model, 1, dtype)


def settings(optimizer, **changes):
    return reference.Settings(
        **{
            "optimizer": optimizer,
            "feature_tables": FEATURE_TABLES,
            "dense_lr": 0.01,
            "embedding_lr": 0.02,
            "initial_accumulator": 0.1,
            **changes,
        }
    )


def own_steps(tables, model, chosen, batches):
    """The same training by the package's operations, with a row per (table, id)."""
    base = dict(zip(TABLES, torch.tensor([0, *TABLES.values()]).cumsum(0).tolist(), strict=False))
    weight = torch.cat(list(tables.values()))
    common = (chosen.eps, chosen.betas, chosen.initial_accumulator)
    rows = row_update(chosen.optimizer, chosen.embedding_lr, *common)
    dense = dense_optimizer(model.parameters(), chosen.optimizer, chosen.dense_lr, *common)
    width = rows.state_width(DIM)
    state = weight.new_full((len(weight), width), rows.initial_state(DIM)) if width else None
    losses = []
    for step, batch in enumerate(batches, start=1):
        ids, size = batch.ids, batch.ids.batch_size
        bag_of = torch.repeat_interleave(torch.arange(len(ids.offsets) - 1), ids.offsets.diff())
        shift = torch.tensor([base[name] for name in FEATURE_TABLES])
        row_of = ids.values + shift[bag_of // size]
        distinct, positions = row_of.unique(return_inverse=True)
        order = positions.sort(stable=True).indices
        segments = functional.pad(positions.bincount(minlength=len(distinct)).cumsum(0), (1, 0))
        scale = 1.0
        if chosen.pooling == "mean":
            scale = ids.offsets.diff().clamp(min=1).to(weight.dtype).reciprocal().unsqueeze(1)
        bags = ops.pooled_lookup(weight[distinct], positions, ids.offsets, ids.weights) * scale
        bags.requires_grad_()
        pooled = bags.view(len(FEATURE_TABLES), size, DIM).transpose(0, 1).reshape(size, -1)
        logits = model(batch.dense.to(weight.dtype), pooled)
        labels = batch.labels.to(weight.dtype)
        loss = functional.binary_cross_entropy_with_logits(logits, labels)
        dense.zero_grad()
        loss.backward()
        gradient = ops.row_gradients(bags.grad * scale, bag_of, order, segments, ids.weights)
        apply_rows(rows, weight, state, distinct, gradient, chosen.embedding_lr, step)
        dense.step()
        losses.append(loss.item())
    final = dict(zip(TABLES, weight.split(list(TABLES.values())), strict=True))
    return reference.Trained(losses, final, model.state_dict())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["sum", "weighted", "mean"])
def test_equal_to_the_operations_of_the_package(optimizer, kind):
    chosen = settings(optimizer, pooling="mean" if kind == "mean" else "sum")
    batches = list(make_batches(25, weighted=kind == "weighted"))
    tables, model = start()
    expected = reference.train(tables, model.state_dict(), model, chosen, batches)
    losses, weights = reference.difference(own_steps(tables, model, chosen, batches), expected)
    assert losses < 1e-10 and weights < 1e-10
    assert not torch.equal(expected.tables["a"], tables["a"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_reversed_samples_change_rounding_alone(optimizer):
    tables, model = start()
    batches = list(make_batches(20, weighted=True))
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    runs = [
        reference.train(tables, initial, model, settings(optimizer, reverse=flag), batches)
        for flag in (False, True, False)
    ]
    losses, weights = reference.difference(runs[1], runs[0])
    assert losses < 1e-9 and 0 < weights < 1e-9
    assert reference.difference(runs[2], runs[0]) == (0.0, 0.0)
    for key, value in model.state_dict().items():  # the caller's model is left alone
        assert torch.equal(value, initial[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_loss_falls(optimizer, dtype):
    tables, model = start(dtype)
    batch = next(make_batches(2))
    chosen = settings(optimizer, dense_lr=0.1, embedding_lr=0.1)
    trained = reference.train(tables, model.state_dict(), model, chosen, [batch] * 60)
    assert trained.losses[-1] < 0.9 * trained.losses[0]
    assert trained.tables["c"].dtype == dtype


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_table_that_no_sample_reads_keeps_its_weights(optimizer):
    tables, model = start()
    empty = torch.zeros(0, dtype=torch.int64)
    offsets = torch.zeros(4 * 2 + 1, dtype=torch.int64)
    ids = JaggedIds(("f0", "f1", "f2", "f3"), empty, offsets)
    batch = Batch(torch.rand(2, DENSE), ids, torch.tensor([0.0, 1.0]), 2, 0, 0, 0)
    trained = reference.train(tables, model.state_dict(), model, settings(optimizer), [batch] * 3)
    for name, weight in tables.items():
        assert torch.equal(trained.tables[name], weight)
    assert any(not torch.equal(trained.dense[k], v) for k, v in model.state_dict().items())


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
