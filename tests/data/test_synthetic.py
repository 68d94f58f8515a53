"""The synthetic stream: sliceable, repeatable, unlimited, learnable."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batch_checks import check_slices, equal, joined

from distcache.data import synthetic as teacher_module
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.errors import ConfigError, DataError

SHAPES = {
    "single": {"table_rows": [7, 100_000, 1]},
    "fixed": {"table_rows": [7, 1000], "bag_size": [3, 1], "zipf": 1.0},
    "mean": {"table_rows": [7, 1000, 50], "bag_size": 1.5, "weighted": True},
    "mixed": {"table_rows": [7, 1000, 50], "bag_size": [2, 0.7, 0], "zipf": 0, "weighted": True},
    "no dense": {"table_rows": [7, 1000], "dense_features": 0},
    "ragged": {"table_rows": [7, 1000], "samples": 100, "eval_samples": 50},
    "float64": {"table_rows": [7, 1000], "bag_size": 2.0, "weighted": True, "dtype": torch.float64},
}


def source(batch: int = 37, **spec) -> SyntheticSource:
    return SyntheticSource(SyntheticSpec(global_batch_size=batch, **spec))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_slices_of_any_world_size_are_the_same_batch(shape):
    stream = source(**shape)
    for index in (0, 2, 5):
        check_slices(stream, index, "train")
    for index in (0, 1):
        check_slices(stream, index, "eval")


def test_world_size_larger_than_the_batch_gives_empty_slices():
    stream = source(batch=3, table_rows=[10, 20], bag_size=[1, 2.0], weighted=True)
    check_slices(stream, 4, "train", world_sizes=(1, 3, 8))
    sizes = [stream.train_batch(4, rank, 8).ids.batch_size for rank in range(8)]
    assert sorted(sizes) == [0] * 5 + [1] * 3
    empty = stream.train_batch(4, 0, 8)
    assert empty.dense.shape == (0, 13) and empty.ids.offsets.tolist() == [0]


def test_same_seed_same_stream_other_seed_another():
    spec = {"table_rows": [50, 1000], "bag_size": 1.5, "weighted": True}
    one, same, other = source(**spec), source(**spec), source(seed=1, **spec)
    assert equal(joined([one.train_batch(3, 0, 1)]), joined([same.train_batch(3, 0, 1)]))
    for key in ("dense", "labels", "lengths", "weights"):
        mine, theirs = (joined([s.train_batch(3, 0, 1)])[key] for s in (one, other))
        assert not torch.equal(mine, theirs), key


def test_float32_and_float64_are_the_same_numbers():
    spec = {"table_rows": [50, 1000], "bag_size": 1.5, "weighted": True}
    single = joined([source(**spec).train_batch(1, 0, 1)])
    double = joined([source(dtype=torch.float64, **spec).train_batch(1, 0, 1)])
    assert single["dense"].dtype == torch.float32 and double["dense"].dtype == torch.float64
    assert equal(
        {key: value.double() for key, value in single.items()},
        {key: value.double() for key, value in double.items()},
    )


def dense_rows(batches) -> list[bytes]:
    return [row.numpy().tobytes() for batch in batches for row in batch.dense]


def test_epochs_are_permutations_of_the_same_samples():
    stream = source(batch=40, table_rows=[50, 1000], samples=100)
    assert stream.steps_per_epoch == 3
    epochs = [
        [stream.train_batch(3 * epoch + step, 0, 1) for step in range(3)] for epoch in range(3)
    ]
    assert [batch.global_size for batch in epochs[0]] == [40, 40, 20]
    assert [batch.epoch for batches in epochs for batch in batches] == [0] * 3 + [1] * 3 + [2] * 3
    rows = [dense_rows(batches) for batches in epochs]
    assert len(set(rows[0])) == 100
    assert set(rows[0]) == set(rows[1]) == set(rows[2])
    assert rows[0] != rows[1] != rows[2]


def test_unlimited_stream_does_not_repeat_and_held_out_samples_are_others():
    stream = source(batch=500, table_rows=[50, 1000])
    assert stream.steps_per_epoch is None and stream.eval_batches is None
    steps = [0, 1, 2, 3, 10**9]
    rows = dense_rows([stream.train_batch(step, 0, 1) for step in steps])
    held_out = dense_rows([stream.eval_batch(index, 0, 1) for index in range(3)])
    assert len(set(rows) | set(held_out)) == len(rows) + len(held_out)


def test_limited_evaluation():
    stream = source(batch=40, table_rows=[50], samples=100, eval_samples=50)
    assert stream.eval_batches == 2
    assert [stream.eval_batch(index, 0, 1).global_size for index in range(2)] == [40, 10]
    with pytest.raises(DataError, match="batch 2 of 2"):
        stream.eval_batch(2, 0, 1)


def test_bag_lengths_and_weights_have_their_distributions():
    stream = source(batch=20_000, table_rows=[50] * 4, bag_size=[2, 0.5, 30.0, 0], weighted=True)
    batch = joined([stream.train_batch(0, 0, 1)])
    lengths = batch["lengths"].double()
    assert torch.all(lengths[0] == 2) and torch.all(lengths[3] == 0)
    for table, mean in ((1, 0.5), (2, 30.0)):
        assert lengths[table].mean().item() == pytest.approx(mean, rel=0.03)
        assert lengths[table].var().item() == pytest.approx(mean, rel=0.05)
    assert (lengths[1] == 0).double().mean().item() == pytest.approx(np.exp(-0.5), abs=0.02)
    weights = batch["weights"]
    assert 0.5 <= weights.min() < 0.501 and 1.499 < weights.max() < 1.5
    assert weights.mean().item() == pytest.approx(1.0, abs=0.005)


def test_ids_of_a_bag_are_independent_draws():
    stream = source(batch=4000, table_rows=[1000], bag_size=4, zipf=0.0)
    ids = stream.train_batch(0, 0, 1).ids.values.reshape(-1, 4).double()
    assert torch.corrcoef(ids.T).fill_diagonal_(0).abs().max() < 0.06


def test_expected_distinct_is_what_a_batch_holds():
    stream = source(batch=4096, table_rows=[300, 1_000_000], bag_size=[1, 3.0])
    found = [[], []]
    for step in range(5):
        ids = stream.train_batch(step, 0, 1).ids
        middle = int(ids.offsets[4096])
        found[0].append(len(ids.values[:middle].unique()))
        found[1].append(len(ids.values[middle:].unique()))
    for table in range(2):
        lookups = round(4096 * stream.lookups_per_sample(table))
        assert stream.expected_distinct(table, lookups) == pytest.approx(
            np.mean(found[table]), rel=0.02
        )


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positive = labels.sum()
    return (ranks[labels > 0].sum() - positive * (positive + 1) / 2) / (
        positive * (len(labels) - positive)
    )


@pytest.mark.parametrize(
    "spec",
    [
        {"table_rows": [1000, 50, 20_000, 3, 7, 300], "seed": 0},
        {"table_rows": [1_000_000] * 4, "bag_size": 2.5, "weighted": True, "seed": 1},
        {"table_rows": [1000, 50, 20_000, 1], "bag_size": [3, 1, 1, 2], "zipf": 0.0, "seed": 2},
    ],
)
def test_teacher_has_the_stated_rate_and_attainable_auc(spec, monkeypatch):
    chances = []
    plain = teacher_module.Teacher.probabilities
    monkeypatch.setattr(
        teacher_module.Teacher,
        "probabilities",
        lambda self, *args: chances.append(plain(self, *args)) or chances[-1],
    )
    stream = source(batch=30_000, **spec)
    labels = stream.train_batch(0, 0, 1).labels.numpy()
    assert set(labels) == {0.0, 1.0}
    assert 0.25 < labels.mean() < 0.30
    assert 0.75 < auc(labels, chances[0]) < 0.81
    assert labels.mean() == pytest.approx(chances[0].mean(), abs=0.01)


def test_popular_ids_are_learnt_in_two_hundred_steps():
    """A logistic regression on one-hot ids and dense features, Adagrad, against dense alone."""
    rows = [1000, 50, 20_000, 100_000, 300, 7]
    stream = source(batch=1024, table_rows=rows)
    offsets = np.cumsum([0, *rows])[:-1]
    ids_weight, ids_square = np.zeros(sum(rows)), np.full(sum(rows), 1e-8)
    dense_weight, dense_square = np.zeros(14), np.full(14, 1e-8)

    def inputs(batch):
        ids = batch.ids.values.numpy().reshape(len(rows), -1) + offsets[:, None]
        return ids, np.c_[batch.dense.numpy(), np.ones(ids.shape[1])], batch.labels.numpy()

    for step in range(200):
        ids, dense, labels = inputs(stream.train_batch(step, 0, 1))
        logits = ids_weight[ids].sum(axis=0) + dense @ dense_weight
        error = (1 / (1 + np.exp(-logits)) - labels) / len(labels)
        gradient = np.bincount(ids.ravel(), np.tile(error, len(rows)), sum(rows))
        ids_square += gradient**2
        ids_weight -= 0.05 * gradient / np.sqrt(ids_square)
        gradient = dense.T @ error
        dense_square += gradient**2
        dense_weight -= 0.05 * gradient / np.sqrt(dense_square)
    both, dense_only = [], []
    held_out = [inputs(stream.eval_batch(index, 0, 1)) for index in range(12)]
    for ids, dense, _ in held_out:
        dense_only.append(dense @ dense_weight)
        both.append(dense_only[-1] + ids_weight[ids].sum(axis=0))
    labels = np.concatenate([y for _, _, y in held_out])
    assert auc(labels, np.concatenate(both)) > 0.74
    assert auc(labels, np.concatenate(both)) > auc(labels, np.concatenate(dense_only)) + 0.04


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"table_rows": []}, r"data\.table_rows"),
        ({"table_rows": [5, 0]}, r"data\.table_rows"),
        ({"table_rows": [5], "samples": 0}, r"data\.samples=0"),
        ({"table_rows": [5], "eval_samples": 0}, "eval_samples=0"),
        ({"table_rows": [5], "bag_size": [1, 2]}, "2 entries for 1"),
        ({"table_rows": [5], "bag_size": -1}, r"data\.bag_size: -1"),
        ({"table_rows": [5], "bag_size": float("nan")}, r"data\.bag_size: nan"),
        ({"table_rows": [5], "bag_size": True}, r"data\.bag_size: True"),
        ({"table_rows": [5], "bag_size": "x"}, r"data\.bag_size: 'x'"),
        ({"table_rows": [5], "zipf": -1.0}, r"data\.zipf"),
        ({"table_rows": [5], "dense_features": -1}, r"data\.dense_features"),
        ({"table_rows": [5], "global_batch_size": 0}, r"data\.global_batch_size=0"),
        ({"table_rows": [5], "dtype": torch.float16}, "float16"),
    ],
)
def test_bad_settings_are_named(spec, message):
    with pytest.raises(ConfigError, match=message):
        SyntheticSource(SyntheticSpec(**spec))
