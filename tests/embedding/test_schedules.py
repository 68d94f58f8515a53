"""The drop-in with rows moving beside the loop: the bits of moving them between its steps."""

from __future__ import annotations

import threading
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from ebc_cases import batches, draw, kind_here, of_kind, part
from ebc_training import assert_same, dense_optimizer, loss_of, made, weights_of
from ranks import run_ranks

from distcache import lookahead
from distcache.engine import tables as engine
from distcache.engine.step import Shaker

pytestmark = pytest.mark.usefixtures("kind")

HOW = (
    {},
    {"save": 3, "evaluate": 4},
    {"drawn": 3},
    {"accumulate": 2},
    {"drawn": 5, "evaluate": 5},
)
DEPTHS = ((8, 1), (0, 0), (2, 4), pytest.param((16, 8), marks=pytest.mark.slow))


def steps(model, ebc, data, *, save=None, evaluate=None, drawn=1, accumulate=1):
    """A user's loop: draws batches `drawn` at a time, saves and evaluates between steps."""
    stream, dense = iter(lookahead(data, ebc, accumulate=accumulate)), dense_optimizer(model)
    losses, number = [], 0
    while some := list(islice(stream, drawn)):
        for batch in some:
            if number % accumulate == 0:
                dense.zero_grad()
            loss = loss_of(model, batch) / accumulate
            loss.backward()
            losses.append(loss.item())
            number += 1
            if number % accumulate == 0:
                ebc.step()
                dense.step()
            if save and number % save == 0:
                weights_of(model)
            if evaluate and number % evaluate == 0 and number % drawn == 0:
                with torch.no_grad():
                    loss_of(model, draw(1000 + number))
    return losses


def both(rank: int, size: int, depth: tuple[int, int]) -> None:
    """Each loop serial and overlapped, with random delays on this rank's threads."""
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo")
    engine.shaker = lambda most_ms, seed: Shaker(2.0, seed)
    data = [part(batch, rank, size) for batch in batches()]
    for number, how in enumerate(HOW):
        found = []
        for schedule in ("serial", "overlapped"):
            access = "zero_copy" if number % 2 else "staged"
            ebc, model = made(
                rows=300,
                lookahead=depth[0],
                prefetch=depth[1],
                schedule=schedule,
                store_access=access,
            )
            found.append((steps(model, ebc, data, **how), weights_of(model)))
            ebc.close()
        assert found[0][0] == found[1][0], how
        assert_same(found[0][1], found[1][1])
    assert not [t for t in threading.enumerate() if t.name.startswith("distcache")]
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("size", [1, 2])
def test_overlapped_has_the_bits_of_serial(size: int, depth: tuple[int, int]) -> None:
    run_ranks(of_kind, size, kind_here(), both, depth, timeout=200)
