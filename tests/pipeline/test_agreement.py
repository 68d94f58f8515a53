"""What all ranks make of the words of each at a step's end."""

from __future__ import annotations

import math

import torch

from distcache.engine.gradients import Agreement, agreement, words


def said(*parts: tuple[float, bool]) -> torch.Tensor:
    """The words of ranks with these losses and wishes."""
    return torch.stack([words(torch.tensor([loss]), stop) for loss, stop in parts])


def test_losses_add_up_in_rank_order_and_in_float64() -> None:
    shares = (0.1, 0.2, 0.7)
    exact = [float(torch.tensor(share)) for share in shares]  # float32, as the model gave them
    found = agreement(said(*((share, False) for share in shares)))
    assert found == Agreement((exact[0] + exact[1]) + exact[2], (), False)
    assert words(torch.tensor(0.5), False).dtype is torch.float64


def test_one_rank_that_wants_to_stop_stops_all() -> None:
    assert agreement(said((1.0, False), (1.0, True), (0.0, False))).stop is True
    assert agreement(said((1.0, False), (1.0, False))).stop is False


def test_who_has_a_loss_that_is_not_finite() -> None:
    found = agreement(said((1.0, False), (math.nan, False), (2.0, False), (-math.inf, False)))
    assert found.bad_ranks == (1, 3) and math.isnan(found.loss)
    assert agreement(said((math.inf, True), (1.0, False))) == Agreement(math.inf, (0,), True)


def test_a_sum_that_overflows_is_nobodys_or_everybodys() -> None:
    large = torch.full((2, 2), 1e308, dtype=torch.float64)
    large[:, 1] = 0
    assert agreement(large) == Agreement(math.inf, (0, 1), False)
