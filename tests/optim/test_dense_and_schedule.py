"""The dense optimizer and the learning-rate schedule."""

from __future__ import annotations

import pytest
import torch

from distcache.errors import ConfigError
from distcache.optim import LearningRate, dense_optimizer


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adagrad", torch.optim.Adagrad),
        ("rowwise_adagrad", torch.optim.Adagrad),
        ("adam", torch.optim.Adam),
    ],
)
def test_dense_optimizer_has_the_settings_it_is_given(name, kind):
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = dense_optimizer(iter([parameter]), name, 0.1, 1e-3, (0.5, 0.75), 0.25)
    assert type(optimizer) is kind
    gradient = torch.tensor([2.0, 0.5], dtype=torch.float64)
    parameter.grad = gradient.clone()
    optimizer.step()
    if name == "sgd":
        change = 0.1 * gradient
    elif name == "adam":  # at the first step both corrected moments are those of the gradient
        change = 0.1 * gradient / (gradient.abs() + 1e-3)
    else:
        change = 0.1 * gradient / ((0.25 + gradient**2).sqrt() + 1e-3)
    expected = torch.tensor([1.0, -2.0], dtype=torch.float64) - change
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-14, atol=0)
    assert optimizer.param_groups[0]["foreach"] is False
    assert optimizer.param_groups[0].get("betas", (0.5, 0.75)) == (0.5, 0.75)


def test_dense_optimizer_names_an_unknown_name():
    with pytest.raises(ConfigError, match="'lion'"):
        dense_optimizer([torch.nn.Parameter(torch.ones(1))], "lion", 0.1)


def test_schedule_at_its_corners():
    rate = LearningRate(2.0, warmup_steps=4, decay_start=10, decay_steps=5)
    assert [rate(t) for t in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rate(9) == rate(10) == 2.0
    assert rate(11) == pytest.approx(2.0 * 0.8**2, rel=1e-15)
    assert rate(14) == pytest.approx(2.0 * 0.2**2, rel=1e-15)
    assert rate(15) == rate(16) == rate(10**9) == 0.0


def test_schedule_without_parts():
    constant = LearningRate(0.3)
    assert constant(0) == constant(10**9) == 0.3
    assert LearningRate(0.3, warmup_steps=1)(0) == 0.3
    at_once = LearningRate(1.0, warmup_steps=2, decay_start=2, decay_steps=2)
    assert [at_once(t) for t in range(5)] == [0.5, 1.0, 1.0, 0.25, 0.0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.1, -1), "optim.warmup_steps=-1"),
        ((0.1, 5, 3, 10), "optim.decay_start=3"),
        ((-0.1,), "-0.1"),
        ((float("inf"),), "inf"),
    ],
)
def test_schedule_names_bad_settings(arguments, words):
    with pytest.raises(ConfigError, match=words):
        LearningRate(*arguments)
