"""Rows, and what they make ranks send, lie evenly over the homes."""

from __future__ import annotations

import numpy as np
import pytest
from plan_streams import make_layout

WORLDS = (2, 3, 4, 8, 16, 32, 64)
STREAMS = ("strided", "sorted", "skewed")
IDS, ROWS = 6000, 4_000_000


def ids_of(kind: str, world: int, seed: int) -> list[np.ndarray]:
    """A step of `IDS` ids of each rank."""
    rng = np.random.default_rng([seed, world])
    if kind == "strided":  # as plain row % W would send to one rank
        first = np.arange(world * IDS // 2) * world
        return [rng.choice(first, IDS) for _ in range(world)]
    if kind == "sorted":
        ids = np.sort(rng.integers(0, ROWS, world * IDS))
        return np.split(ids, world)
    return [(ROWS * rng.random(IDS) ** 4).astype(np.int64) for _ in range(world)]


def ratio(by_rank: np.ndarray) -> float:
    """The largest amount of a rank over the mean."""
    return float(by_rank.max() / by_rank.mean())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", STREAMS)
def test_loads_lie_evenly_over_the_homes(kind: str, world: int) -> None:
    """All bytes of a step go by how many rows each rank names at each home, and how many homes have
    in all."""
    layout = make_layout(max(ROWS, world * world * IDS), world)
    asked, rows = np.zeros((world, world)), np.zeros(world)
    for step in range(3):
        named = [np.unique(ids) for ids in ids_of(kind, world, step)]
        traffic = np.unique(np.concatenate(named), return_counts=True)[1]
        assert traffic.max() / traffic.sum() <= 1 / (5 * world), "one row has too much of it"
        asked += [np.bincount(layout.home(own), minlength=world) for own in named]
        union = np.unique(np.concatenate(named))
        rows += np.bincount(layout.home(union), minlength=world)
    np.fill_diagonal(asked, 0)  # what a rank keeps
    loads = {"rows of a home": rows, "to homes": asked.sum(1), "from homes": asked.sum(0)}
    for what, by_rank in loads.items():
        assert ratio(by_rank) <= 1.2, what


@pytest.mark.parametrize("world", WORLDS)
def test_no_stride_has_few_homes(world: int) -> None:
    layout, count = make_layout(2**34, world), 1000 * world
    strides = [*range(1, 200), 301, 447, 545, 903, 1806, 1871, 1889, 2709, 4096, 10**5, 2**17]
    for stride in strides:
        homes = np.bincount(layout.home(np.arange(count) * stride), minlength=world)
        assert ratio(homes) <= 1.2, stride
