"""Ranks that are not alike: one that is late with its moves, and a group of only some."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from ebc_cases import Clicks, batches, draw, kind_here, of_kind, part
from ebc_models import cached, dlrm, values_of
from ebc_ranks import as_arrays, in_job, mine, ranks
from ebc_training import assert_close, assert_same, loss_of, weights_of
from ranks import run_ranks

from distcache import lookahead
from distcache.embedding import stream as ahead
from distcache.engine.queue import StepStream
from distcache.errors import PeerError

pytestmark = pytest.mark.usefixtures("kind")


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


def left_in_job(rank: int, size: int) -> dict:
    return in_job(left)(rank, size)


def test_an_evaluation_left_early_leaves_the_ranks_with_the_same_rows() -> None:
    first, second = ranks(left_in_job)
    for found in (first, second):
        assert_same(found["late True"], first["late False"])


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


def one_fails_in_job(rank: int, size: int) -> dict:
    return in_job(one_fails)(rank, size)


def test_an_error_of_one_rank_shows_before_the_planners_have_ended() -> None:
    first, second = ranks(one_fails_in_job)
    assert second == {"closing": True, "error": "on purpose", "steps": 3}
    assert "rank 1" in first["error"] and "on purpose" in first["error"]
    assert first["steps"] == 3


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


def some_ranks_of_three(rank: int, size: int) -> dict:
    return in_job(some_ranks)(rank, size)


@pytest.mark.slow
def test_a_group_of_some_ranks() -> None:
    found = [
        as_arrays(own, back=True) for own in run_ranks(of_kind, 3, kind_here(), some_ranks_of_three)
    ]
    assert_same(found[1], found[2])
    alone = cached("sgd", rows=400)
    for batch in batches(6):
        (values_of(alone(batch.sparse_features)).sum() / 2).backward()
        alone.step()
    assert_close(found[1], weights_of(alone))
