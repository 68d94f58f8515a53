"""Metrics against hand values and against their definitions, pair by pair."""

from __future__ import annotations

import math

import numpy as np
import pytest

from distcache.trainer.record import auc, log_loss, normalized_entropy


def auc_by_pairs(scores, labels):
    pairs = [(p, n) for p in scores[labels > 0] for n in scores[labels == 0]]
    return sum((p > n) + 0.5 * (p == n) for p, n in pairs) / len(pairs)


def test_auc_by_hand():
    labels = np.array([0, 0, 1, 1])
    assert auc(np.array([0.1, 0.4, 0.35, 0.8]), labels) == 0.75
    assert auc(np.array([-9.0, -1.0, 2.0, 3.0]), labels) == 1.0
    assert auc(np.array([3.0, 2.0, 1.0, 0.0]), labels) == 0.0
    assert auc(np.zeros(4), labels) == 0.5


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_auc_equals_its_definition_with_ties(levels):
    rng = np.random.default_rng(levels)
    scores = rng.integers(levels, size=200) / 7
    labels = (rng.random(200) < 0.3).astype(float)
    assert auc(scores, labels) == pytest.approx(auc_by_pairs(scores, labels), abs=1e-15)


def test_auc_keeps_scores_apart_that_a_sigmoid_would_merge():
    scores = np.array([40.0, 41.0, 42.0, 43.0])
    assert auc(scores, np.array([0, 0, 1, 1])) == 1.0
    assert auc(np.array([-np.inf, 0.0, 1.0, np.inf]), np.array([0, 0, 1, 1])) == 1.0


def test_undefined_is_none():
    for labels in (np.zeros(3), np.ones(3), np.zeros(0)):
        scores = np.arange(float(len(labels)))
        assert auc(scores, labels) is None
        assert normalized_entropy(0.3, labels) is None
    assert auc(np.array([0.0, np.nan]), np.array([0.0, 1.0])) is None
    assert log_loss(np.array([0.0, np.nan]), np.array([0.0, 1.0])) is None
    assert log_loss(np.zeros(0), np.zeros(0)) is None
    assert normalized_entropy(None, np.array([0.0, 1.0])) is None


def test_log_loss_by_hand_and_at_extremes():
    logits, labels = np.array([0.0, 2.0, -1.0]), np.array([1.0, 1.0, 0.0])
    chance = 1 / (1 + np.exp(-logits))
    expected = -np.mean(labels * np.log(chance) + (1 - labels) * np.log(1 - chance))
    assert log_loss(logits, labels) == pytest.approx(expected, rel=1e-15)
    assert log_loss(np.array([800.0]), np.array([0.0])) == 800.0
    assert log_loss(np.array([np.inf]), np.array([1.0])) == 0.0
    assert log_loss(np.array([np.inf]), np.array([0.0])) is None


def test_log_loss_of_probabilities_is_that_of_training():
    logits, labels = np.array([0.3, -2.0, 5.0, 1.0]), np.array([0.25, 0.9, 0.0, 1.0])
    chance = 1 / (1 + np.exp(-logits))
    expected = -np.mean(labels * np.log(chance) + (1 - labels) * np.log(1 - chance))
    assert log_loss(logits, labels) == pytest.approx(expected, rel=1e-12)
    even = np.full(4, 0.25)
    assert normalized_entropy(log_loss(np.full(4, math.log(1 / 3)), even), even) == pytest.approx(1)


def test_normalized_entropy_of_the_base_rate_is_one():
    labels = np.array([1.0, 0.0, 0.0, 0.0])
    base = math.log(0.25 / 0.75)
    assert normalized_entropy(log_loss(np.full(4, base), labels), labels) == pytest.approx(1.0)
