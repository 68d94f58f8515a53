"""The synthetic stream: unlimited, learnable, its ids and numbers distributed as stated."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from batch_sources import samples_of

from distcache.data import synthetic
from distcache.data.synthetic import SyntheticSource, SyntheticSpec, ZipfTables
from distcache.trainer.record import auc


def source(batch: int = 37, **spec) -> SyntheticSource:
    return SyntheticSource(SyntheticSpec(global_batch_size=batch, **spec))


@pytest.mark.parametrize(
    "spec",
    [
        {"table_rows": [7, 1000], "bag_size": [3, 1], "zipf": 1.0},
        {"table_rows": [7, 1000, 50], "bag_size": [2, 0.7, 0], "zipf": 0, "weighted": True},
        {"table_rows": [7, 100_000, 1], "dense_features": 0},
    ],
)
def test_an_unlimited_stream_in_slices_of_any_number_of_ranks(spec):
    stream = source(**spec)
    assert stream.steps_per_epoch is None and stream.eval_batches is None
    for take in (stream.train_batch, stream.eval_batch):
        whole = samples_of(take(10**9, 0, 1))
        parts = [take(10**9, rank, 40) for rank in range(40)]
        assert [sample for part in parts for sample in samples_of(part)] == whole
        assert sorted(len(part.labels) for part in parts) == [0] * 3 + [1] * 37


def test_an_unlimited_stream_does_not_repeat_and_held_out_samples_are_others():
    stream = source(batch=500, table_rows=[50, 1000])
    batches = [stream.train_batch(step, 0, 1) for step in (0, 1, 2, 3, 10**9)]
    batches += [stream.eval_batch(index, 0, 1) for index in range(3)]
    rows = [row.numpy().tobytes() for batch in batches for row in batch.dense]
    assert len(set(rows)) == len(rows)


def test_bag_lengths_and_weights_have_their_distributions():
    stream = source(batch=20_000, table_rows=[50] * 4, bag_size=[2, 0.5, 30.0, 0], weighted=True)
    ids = stream.train_batch(0, 0, 1).ids
    lengths, weights = ids.offsets.diff().reshape(4, -1).double(), ids.weights
    assert torch.all(lengths[0] == 2) and torch.all(lengths[3] == 0)
    for table, mean in ((1, 0.5), (2, 30.0)):
        assert lengths[table].mean().item() == pytest.approx(mean, rel=0.03)
        assert lengths[table].var().item() == pytest.approx(mean, rel=0.05)
    assert (lengths[1] == 0).double().mean().item() == pytest.approx(np.exp(-0.5), abs=0.02)
    assert 0.5 <= weights.min() < 0.501 and 1.499 < weights.max() < 1.5
    assert weights.mean().item() == pytest.approx(1.0, abs=0.005)


def test_ids_of_a_bag_are_independent_draws():
    stream = source(batch=4000, table_rows=[1000], bag_size=4, zipf=0.0)
    ids = stream.train_batch(0, 0, 1).ids.values.reshape(-1, 4).double()
    assert torch.corrcoef(ids.T).fill_diagonal_(0).abs().max() < 0.06


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
    plain = synthetic.Teacher.probabilities
    monkeypatch.setattr(
        synthetic.Teacher,
        "probabilities",
        lambda self, *args: chances.append(plain(self, *args)) or chances[-1],
    )
    stream = source(batch=30_000, **spec)
    labels = stream.train_batch(0, 0, 1).labels.numpy()
    assert set(labels) == {0.0, 1.0}
    assert 0.25 < labels.mean() < 0.30
    assert 0.75 < auc(chances[0], labels) < 0.81
    assert labels.mean() == pytest.approx(chances[0].mean(), abs=0.01)


def test_popular_ids_are_learnt_in_two_hundred_steps():
    """A logistic regression on one-hot ids and dense features, Adagrad, against dense alone."""
    rows = [1000, 50, 20_000, 100_000, 300, 7]
    stream = source(batch=1024, table_rows=rows)
    offsets = torch.tensor([0, *rows]).cumsum(0)[:-1]
    ids_weight, line = torch.zeros(sum(rows), requires_grad=True), torch.nn.Linear(13, 1)
    optimizer = torch.optim.Adagrad([ids_weight, *line.parameters()], 0.05)

    def logits(batch) -> tuple[torch.Tensor, torch.Tensor]:
        dense = line(batch.dense)[:, 0]
        ids = batch.ids.values.reshape(len(rows), -1).T + offsets
        return dense, dense + ids_weight[ids].sum(1)

    for step in range(200):
        batch = stream.train_batch(step, 0, 1)
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(
            logits(batch)[1], batch.labels
        ).backward()
        optimizer.step()
    held_out = [stream.eval_batch(index, 0, 1) for index in range(12)]
    labels = torch.cat([batch.labels for batch in held_out]).numpy()
    with torch.no_grad():
        found = zip(*map(logits, held_out), strict=True)
        dense_only, both = (auc(torch.cat(part).double().numpy(), labels) for part in found)
    assert both > 0.74 and both > dense_only + 0.04


EXPONENTS = [0.0, 0.5, 0.999999, 1.0, 1.05, 2.0]


def theory(rows: int, exponent: float) -> np.ndarray:
    """Masses of x^-a on [k + .5, k + 1.5), by fine numerical integration, k in [0, rows)."""
    nodes, weights = np.polynomial.legendre.leggauss(20)
    x = 1.0 + np.arange(rows)[:, None] + nodes / 2
    mass = (x**-exponent * weights).sum(axis=1)
    return mass / mass.sum()


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("rows", [1, 2, 3, 1000])
def test_masses_are_those_of_the_integrated_distribution(rows, exponent):
    tables = ZipfTables([rows], exponent, seed=0)
    mass = np.diff(tables.mass_below(0, np.arange(rows + 1)))
    np.testing.assert_allclose(mass, theory(rows, exponent), rtol=1e-7, atol=1e-12)
    assert tables.mass_below(0, np.array([rows]))[0] == pytest.approx(1.0)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_drawn_ids_follow_the_distribution(exponent):
    rows, n = 1000, 400_000
    tables = ZipfTables([7, rows], exponent, seed=5)
    ids = tables.draw_ids(np.random.default_rng(0).random(n + 3), np.array([3, n]))[3:]
    by_rank = np.bincount(ids, minlength=rows)[tables.ids_of_ranks(1, np.arange(rows))]
    expected = theory(rows, exponent) * n
    # Pearson's statistic has mean 999 and deviation 45; pool cells of fewer than 5.
    large = expected >= 5
    chi = np.sum((by_rank - expected)[large] ** 2 / expected[large])
    freedom = large.sum()
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom)
    rest = expected[~large].sum()
    assert abs(by_rank[~large].sum() - rest) <= 5 * math.sqrt(rest + 1)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_inverse_meets_every_boundary_of_a_large_table(exponent):
    rows = 40_000_000
    tables = ZipfTables([rows], exponent, seed=1)
    ranks = np.unique(np.geomspace(1, rows - 1, 2000).astype(np.int64))
    if exponent == 2.0:
        ranks = ranks[ranks < 1_000_000]  # beyond, a float64 has few numbers left below 1
    middle = tables.mass_below(0, ranks + 0.5)
    ids = tables.draw_ids(middle, np.array([len(ranks)]))
    assert np.array_equal(ids, tables.ids_of_ranks(0, ranks))
    for rows in (1, 2, 3, 4096, 10_131_227, 3_000_000_000):  # and the ends stay inside
        tables = ZipfTables([rows], exponent, seed=1)
        ids = tables.draw_ids(np.array([0.0, 1 - 2.0**-53]), np.array([2]))
        assert ids[0] == tables.ids_of_ranks(0, np.array([0]))[0]
        assert np.all((ids >= 0) & (ids < rows))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 12, 97, 1000, 5461])
def test_ranks_to_ids_is_a_bijection(rows):
    for seed in range(5):
        ids = ZipfTables([rows], 1.0, seed).ids_of_ranks(0, np.arange(rows))
        assert np.array_equal(np.sort(ids), np.arange(rows))


def test_hot_ids_are_scattered_and_differ_between_tables():
    tables = ZipfTables([100_000] * 4, 1.0, seed=2)
    hot = [tables.ids_of_ranks(table, np.arange(100)) for table in range(4)]
    for table, ids in enumerate(hot):  # every quarter of the table holds some of the hottest ids
        assert np.bincount(ids // 25_000, minlength=4).min() >= 10
        assert all(len(np.intersect1d(ids, other)) < 20 for other in hot[:table])


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("rows", [1, 3, 5000, 200_000])
@pytest.mark.parametrize("lookups", [0, 1, 50, 100_000])
def test_expected_distinct_is_the_sum_over_rows(rows, lookups, exponent):
    tables = ZipfTables([rows], exponent, seed=0)
    mass = np.clip(np.diff(tables.mass_below(0, np.arange(rows + 1))), 0, 1)
    with np.errstate(divide="ignore"):
        exact = np.sum(-np.expm1(lookups * np.log1p(-mass))) if lookups else 0.0
    assert tables.expected_distinct(0, lookups) == pytest.approx(exact, rel=1e-4)
