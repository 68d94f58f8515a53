"""Several ranks: loops under DDP, ranks that are not alike, a group of only some, failures."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from ebc_cases import (
    Clicks,
    as_arrays,
    assert_close,
    assert_same,
    batches,
    cached,
    dlrm,
    draw,
    job,
    loss_of,
    mine,
    part,
    picked,
    ranks,
    train,
    unwrapped,
    values_of,
    weights_of,
    wrapped,
)
from torchrec import KeyedJaggedTensor

import distcache
from distcache import lookahead
from distcache.embedding import stream as ahead
from distcache.engine.queue import StepStream
from distcache.errors import ConfigError, DataError, DistcacheError, PeerError

pytestmark = pytest.mark.usefixtures("kind")


def accumulated(rank: int, size: int, ebc, model, dense) -> list[float]:
    """Two micro-batches a step, DDP's gradients summed once, clipped; the norms."""
    norms = []
    for number, batch in enumerate(lookahead(mine(rank, size), ebc, accumulate=2)):
        last = model.require_backward_grad_sync = number % 2 == 1
        (loss_of(model, batch) / 2).backward()
        if last:
            norms.append(float(distcache.clip_grad_norm_(model.parameters(), ebc, 0.1)))
            ebc.step()
            dense.step()
            dense.zero_grad()
    return norms


def scaled(rank: int, size: int, ebc, model, dense) -> list[float]:
    """A gradient that is not finite, on one rank alone, skips the step of all."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number, batch in enumerate(lookahead(mine(rank, size), ebc)):
        ebc.optimizer.zero_grad()
        dense.zero_grad()
        loss = loss_of(model, batch)
        if number == 4 and rank == size - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(ebc.optimizer)
        scaler.step(dense)
        scaler.update()
    assert ebc.tables.steps == 19
    return [scaler.get_scale()]


def uneven(rank: int, size: int, ebc, model, dense) -> None:
    """Evaluation and a broken loop in the middle; then a different number of batches per rank."""
    data = mine(rank, size)
    for number, batch in enumerate(lookahead(data, ebc)):
        if number % 5 == 2:
            model.eval()
            with torch.no_grad():
                [loss_of(model, part(draw(500 + at), rank, size)) for at in range(2)]
            model.train()
        train(model, ebc, [batch], dense)
        if number == 12:
            break
    train(model, ebc, lookahead(data[13 : 20 if rank else 17], ebc), dense)


def emptied(rank: int, size: int, ebc, model, dense) -> None:
    """A rank without a single id in every second step."""

    def without_ids(batch: Clicks) -> Clicks:
        old = batch.sparse_features
        zeros = torch.zeros_like(old.lengths())
        none = KeyedJaggedTensor(old.keys(), old.values()[:0], lengths=zeros)
        return Clicks(batch.dense_features, none, batch.labels)

    data = mine(rank, size, 8)
    for at in range(1, 8, 2):
        if size == 1:
            data[at] = picked([part(data[at], 0, 2), without_ids(part(data[at], 1, 2))])
        elif rank == 1:
            data[at] = without_ids(data[at])
    train(model, ebc, lookahead(data, ebc), dense)


def one_loss(rank: int, size: int, ebc, model, dense) -> None:
    """Only the loss of rank 0 needs the embeddings."""
    other = torch.ones(1, requires_grad=True)
    for batch in mine(rank, 2, 6):
        total = values_of(ebc(batch.sparse_features)).sum()
        (total if rank == 0 else total.detach() * other).backward()
        if rank == 1:
            ebc.reduce()
        ebc.step()


LOOPS = {
    accumulated: ("sgd", {}),
    scaled: ("sgd", {}),
    uneven: ("adagrad", {}),
    emptied: ("adagrad", {}),
    one_loss: ("sgd", {"gradient_reduction": "sum"}),
}
"""What a loop may do, on ranks and in one process; optimizer and settings."""


@job
def loops(rank: int, size: int) -> dict:
    """What comes of every loop, under DDP."""
    found = {}
    for loop, (name, settings) in LOOPS.items():
        ebc, ddp, dense = wrapped(name, rows=400, **settings)
        told = loop(rank, size, ebc, ddp, dense)
        found[loop.__name__] = told, as_arrays(unwrapped(ddp))
        ebc.close()
    return found


def test_loops_on_two_ranks_are_those_of_one_process() -> None:
    first, second = ranks(loops)
    for loop, (name, settings) in LOOPS.items():
        (told, one), (also, other) = first[loop.__name__], second[loop.__name__]
        one = as_arrays(one, back=True)
        assert_same(one, as_arrays(other, back=True))
        ebc = cached(name, rows=400, **settings)
        model = dlrm(ebc)
        expected = loop(0, 1, ebc, model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert told == also and (told is None or told == pytest.approx(expected, rel=1e-5))
        assert_close(one, weights_of(model), atol=5e-6)


@job
def left(rank: int, size: int) -> dict:
    """Evaluation leaves its look-ahead early, on one rank with moves that come late."""
    next_unmoved, found = StepStream._next_unmoved, {}
    for late in (False, True):

        def slow(self, late=late):
            time.sleep(0.3 * (late and rank == 1))
            return next_unmoved(self)

        StepStream._next_unmoved = slow
        try:
            found[f"late {late}"] = evaluated_and_trained(rank, size)
        finally:
            StepStream._next_unmoved = next_unmoved
    return found


def evaluated_and_trained(rank: int, size: int) -> dict:
    ebc = cached("sgd", ratio=1.0, rows=None, prefetch=5, timeout_s=20)
    model = dlrm(ebc)
    with torch.no_grad():
        for at, batch in enumerate(lookahead(mine(rank, size, 12), ebc)):
            loss_of(model, batch)
            if at == 3:
                break
    for batch in lookahead(mine(rank, size, 16)[12:], ebc):
        loss_of(model, batch).backward()
        ebc.step()
    found = weights_of(ebc)
    ebc.close()
    return as_arrays(found)


def test_an_evaluation_left_early_leaves_the_ranks_with_the_same_rows() -> None:
    first, second = ranks(left)
    for found in (first, second):
        assert_same(found["late True"], first["late False"])


@job
def one_fails(rank: int, size: int) -> dict:
    """An error of the loop of one rank, whose planner waits for the other's last word."""
    ahead.LEAVING_S = 0.2
    ebc = cached("sgd", ratio=1.0, rows=None, timeout_s=60)
    model, found = dlrm(ebc), {}
    try:
        for at, batch in enumerate(lookahead(mine(rank, size, 12), ebc)):
            if rank == 1 and at == 3:
                raise ValueError("on purpose")
            loss_of(model, batch).backward()
            ebc.step()
    except (ValueError, PeerError) as error:
        running = [t for t in threading.enumerate() if t.name.startswith("distcache-")]
        closing = any(thread.name == "distcache-closing" for thread in running)
        found = {"closing": closing, "error": str(error), "steps": ebc.tables.steps}
        if rank == 1:
            ebc.tables.failed(error)  # as at the interpreter's end
        ebc.close()
        for thread in running:
            thread.join(60)
    return found


def test_an_error_of_one_rank_shows_before_the_planners_have_ended() -> None:
    first, second = ranks(one_fails)
    assert second == {"closing": True, "error": "on purpose", "steps": 3}
    assert "rank 1" in first["error"] and "on purpose" in first["error"]
    assert first["steps"] == 3


@job
def some_ranks(rank: int, size: int) -> dict:
    """Ranks 1 and 2 of three train without rank 0."""
    group = dist.new_group([1, 2])
    found = {}
    if rank:
        ebc = cached("sgd", rows=400, process_group=group, timeout_s=60)
        assert (ebc.tables.world.rank, ebc.tables.world.size) == (rank - 1, 2)
        for batch in lookahead(mine(rank - 1, 2, 6), ebc):
            values_of(ebc(batch.sparse_features)).sum().backward()
            ebc.step()
        found = weights_of(ebc)
    return found


@pytest.mark.slow
def test_a_group_of_some_ranks() -> None:
    found = ranks(some_ranks, size=3)
    assert_same(found[1], found[2])
    alone = cached("sgd", rows=400)
    for batch in batches(6):
        (values_of(alone(batch.sparse_features)).sum() / 2).backward()
        alone.step()
    assert_close(found[1], weights_of(alone))


@job
def failures(rank: int, size: int) -> dict:
    """Errors on one rank reach the other."""
    found = {}
    with pytest.raises(
        ConfigError, match=r"^the ranks differ: seed is 0 on rank 0 and 1 on rank 1;"
    ):
        cached("sgd", seed=rank)
    ebc, ddp, dense = wrapped("sgd", rows=400)
    data = mine(rank, size, 6)
    if rank == 1:
        data[3].sparse_features.values()[0] = 10**6
    try:
        train(ddp, ebc, lookahead(data, ebc), dense)
    except DistcacheError as error:
        found["error"] = (type(error), str(error))
    found["steps"] = ebc.tables.steps
    train(ddp, ebc, lookahead(mine(rank, size, 3), ebc), dense)
    found["after"] = unwrapped(ddp)
    return found


def test_failures_of_one_rank_reach_the_other() -> None:
    first, second = ranks(failures)
    assert_same(first["after"], second["after"])
    kinds, texts = zip(*(found["error"] for found in (first, second)), strict=True)
    assert kinds == (PeerError, DataError)
    assert "rank 1 failed" in texts[0] and "id 1000000" in texts[0] and "id 1000000" in texts[1]
    assert first["steps"] == second["steps"] == 3
