"""Several ranks: loops under DDP, ranks that are not alike, a group of only some, failures."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from ebc_cases import (
    Clicks,
    Pooled,
    as_arrays,
    assert_close,
    assert_same,
    batches,
    cached,
    dlrm,
    draw,
    job,
    joined,
    kind_here,
    loss_of,
    mine,
    of_kind,
    part,
    ranks,
    train,
    unwrapped,
    values_of,
    weights_of,
    wrapped,
)
from ranks import run_ranks
from torchrec import KeyedJaggedTensor

import distcache
from distcache import lookahead
from distcache.embedding import stream as ahead
from distcache.engine.queue import StepStream
from distcache.errors import ConfigError, DataError, DistcacheError, PeerError

pytestmark = pytest.mark.usefixtures("kind")


@job
def loops(rank: int, size: int) -> dict:
    """What a loop may do, one after the other in one job; weights to compare with one rank's."""
    found = gaps(rank, size)
    # Micro-batches, with DDP's gradients summed once; clipped.
    ebc, ddp, dense = wrapped("sgd", rows=400)
    norms = []
    for number, batch in enumerate(lookahead(mine(rank, size), ebc, accumulate=2)):
        last = number % 2 == 1
        ddp.require_backward_grad_sync = last
        (loss_of(ddp, batch) / 2).backward()
        if last:
            norms.append(float(distcache.clip_grad_norm_(ddp.parameters(), ebc, 0.1)))
            ebc.step()
            dense.step()
            dense.zero_grad()
    found["accumulated"], found["norms"] = unwrapped(ddp), norms
    # A gradient that is not finite on one rank alone skips the step of all.
    ebc, ddp, dense = wrapped("sgd", rows=400)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number, batch in enumerate(lookahead(mine(rank, size), ebc)):
        ebc.optimizer.zero_grad()
        dense.zero_grad()
        loss = loss_of(ddp, batch)
        if number == 4 and rank == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(ebc.optimizer)
        scaler.step(dense)
        scaler.update()
    found["scaled"], found["steps"] = unwrapped(ddp), ebc.tables.steps
    found["scale"] = scaler.get_scale()
    # Evaluation and a broken loop in the middle; then a different number of batches per rank.
    ebc, ddp, dense = wrapped("adagrad", rows=400)
    data = mine(rank, size)
    for number, batch in enumerate(lookahead(data, ebc)):
        if number % 5 == 2:
            ddp.eval()
            with torch.no_grad():
                held_out = [part(draw(500 + at), rank, size) for at in range(2)]
                found["eval"] = [float(loss_of(ddp, one)) for one in held_out]
            ddp.train()
        train(ddp, ebc, [batch], dense)
        if number == 12:
            break
    train(ddp, ebc, lookahead(data[13 : 20 if rank else 17], ebc), dense)
    found["uneven"] = unwrapped(ddp)
    return found


def gaps(rank: int, size: int) -> dict:
    """Ranks that have nothing to say about the embeddings in some steps."""
    found: dict = {}
    # A rank without a single id in every second step.
    ebc, ddp, dense = wrapped("adagrad", rows=400)
    data = [emptied(batch) if rank and at % 2 else batch for at, batch in enumerate(mine(1, 2, 8))]
    data = data if rank else mine(0, 2, 8)
    train(ddp, ebc, lookahead(data, ebc), dense)
    found["emptied"] = unwrapped(ddp)
    # A loss of one rank that does not need the embeddings.
    ebc = cached("sgd", rows=400, gradient_reduction="sum")
    model = Pooled(ebc)
    for batch in lookahead(mine(rank, size, 6), ebc):
        values = values_of(ebc(batch.sparse_features))
        (values.sum() if rank == 0 else values.sum().detach() * model.over.bias).backward()
        if rank == 1:
            ebc.reduce()
        ebc.step()
    found["one loss"] = weights_of(ebc)
    return found


def emptied(batch: Clicks) -> Clicks:
    """The batch without any id."""
    old = batch.sparse_features
    none, zeros = old.values()[:0], torch.zeros_like(old.lengths())
    ids = KeyedJaggedTensor(old.keys(), none, lengths=zeros)
    return Clicks(batch.dense_features, ids, batch.labels)


def test_loops_on_two_ranks_are_those_of_one_process() -> None:
    both = ranks(loops)
    for key in ("accumulated", "scaled", "emptied", "one loss", "uneven"):
        assert_same(both[0][key], both[1][key])
    assert both[0]["norms"] == both[1]["norms"]
    assert both[0]["steps"] == both[1]["steps"] == 19
    assert both[0]["scale"] == both[1]["scale"] == 128.0

    ebc = cached("sgd", rows=400)
    model, norms = dlrm(ebc), []
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, batch in enumerate(lookahead(batches(), ebc, accumulate=2)):
        (loss_of(model, batch) / 2).backward()
        if number % 2:
            norms.append(float(distcache.clip_grad_norm_(model.parameters(), ebc, 0.1)))
            ebc.step()
            dense.step()
            dense.zero_grad()
    assert both[0]["norms"] == pytest.approx(norms, rel=1e-5)
    assert_close(both[0]["accumulated"], weights_of(model), atol=5e-6)

    data = batches()
    halves = [(part(batch, 0, 2), part(batch, 1, 2)) for batch in data[:8]]
    holed = [joined([a, emptied(b) if at % 2 else b]) for at, (a, b) in enumerate(halves)]
    for key, chosen, name in (
        ("scaled", data[:4] + data[5:], "sgd"),
        ("uneven", data[:17], "adagrad"),
        ("emptied", holed, "adagrad"),
    ):
        ebc = cached(name, rows=400)
        model = dlrm(ebc)
        train(model, ebc, lookahead(chosen, ebc))
        assert_close(both[0][key], weights_of(model), atol=5e-6)
    alone = cached("sgd", rows=400)
    for batch in [part(batch, 0, 2) for batch in batches(6)]:
        values_of(alone(batch.sparse_features)).sum().backward()
        alone.step()
    assert_close(both[0]["one loss"], weights_of(alone))


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
        for at, batch in enumerate(lookahead(shares(rank, size, 500), ebc)):
            loss_of(model, batch)
            if at == 3:
                break
    for batch in lookahead(shares(rank, size, 0)[:4], ebc):
        loss_of(model, batch).backward()
        ebc.step()
    found = weights_of(ebc)
    ebc.close()
    return as_arrays(found)


def shares(rank: int, size: int, start: int) -> list[Clicks]:
    return [part(draw(start + at), rank, size) for at in range(12)]


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
        for at, batch in enumerate(lookahead(shares(rank, size, 0), ebc)):
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
    found = [as_arrays(own, back=True) for own in run_ranks(of_kind, 3, kind_here(), some_ranks)]
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
