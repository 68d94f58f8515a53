"""The drop-in with rows moving beside the loop: the bits of moving them between its steps."""

from __future__ import annotations

import threading
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from ebc_cases import batches, draw, kind_here, of_kind, part
from ebc_models import cached, dlrm
from ebc_training import assert_same, dense_optimizer, loss_of, weights_of
from ranks import run_ranks

from distcache import lookahead
from distcache.engine import tables as engine
from distcache.engine.step import Shaker

pytestmark = pytest.mark.usefixtures("kind")

HOW = (
    {},
    {"save": 3},
    {"evaluate": 4},
    {"drawn": 3},
    {"accumulate": 2},
    {"drawn": 5, "evaluate": 5},
)
DEPTHS = ((8, 1), (0, 0), (2, 4), pytest.param((16, 8), marks=pytest.mark.slow))


def steps(model, ebc, data, dense, *, save=None, evaluate=None, drawn=1, accumulate=1):
    """A user's loop: draws batches `drawn` at a time, saves and evaluates between steps."""
    stream = iter(lookahead(data, ebc, accumulate=accumulate))
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


def outcome(schedule, lookahead_steps, prefetch, name="adagrad", rank=0, size=1, **how):
    torch.set_num_threads(1)
    schedule, _, access = schedule.partition(" ")
    depth = {"lookahead": lookahead_steps, "prefetch": prefetch}
    ebc = cached(name, rows=300, **depth, schedule=schedule, store_access=access or "staged")
    model = dlrm(ebc)
    data = [part(batch, rank, size) for batch in batches()]
    losses = steps(model, ebc, data, dense_optimizer(model), **how)
    weights = weights_of(model)
    ebc.close()
    return losses, weights


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("depth", DEPTHS)
def test_overlapped_has_the_bits_of_serial(monkeypatch, depth, how) -> None:
    serial = outcome("serial", *depth, **how)
    monkeypatch.setattr(engine, "shaker", lambda most_ms, seed: Shaker(2.0))
    access = " zero_copy" if how in HOW[1::2] else ""
    overlapped = outcome(f"overlapped{access}", *depth, **how)
    assert overlapped[0] == serial[0]
    assert_same(overlapped[1], serial[1])
    assert not [t for t in threading.enumerate() if t.name.startswith("distcache")]


def on_ranks(rank: int, size: int) -> list[tuple]:
    """Each case serial and overlapped, with random delays on this rank's threads."""
    dist.init_process_group("gloo")
    found = []
    for how in ({}, {"save": 3, "evaluate": 4}, {"drawn": 3}):
        for schedule in ("serial", "overlapped"):
            engine.shaker = lambda most_ms, seed: Shaker(2.0, seed)
            losses, weights = outcome(schedule, 2, 3, rank=rank, size=size, **how)
            found.append((losses, {name: value.numpy() for name, value in weights.items()}))
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_on_two_ranks() -> None:
    for found in run_ranks(of_kind, 2, kind_here(), on_ranks, timeout=200):
        for serial, overlapped in zip(found[::2], found[1::2], strict=True):
            assert overlapped[0] == serial[0]
            assert overlapped[1].keys() == serial[1].keys()
            for name, value in serial[1].items():
                assert value.tobytes() == overlapped[1][name].tobytes(), name
