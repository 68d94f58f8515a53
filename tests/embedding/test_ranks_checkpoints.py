"""Two ranks under DDP: checkpoints on one node and on two, and failures of one rank."""

from __future__ import annotations

import copy
import socket

import pytest
from ebc_models import cached
from ebc_ranks import in_job, mine, ranks, run_once, unwrapped, wrapped
from ebc_training import assert_same, train

from distcache import lookahead
from distcache.errors import ConfigError, DataError, DistcacheError, PeerError

pytestmark = pytest.mark.usefixtures("kind")


def state_and_nodes(rank: int, size: int) -> dict:
    """Checkpoints with a store for both ranks, and with a node (and a store) for each."""
    found = {}
    for nodes in (1, 2):
        own = socket.gethostname
        if nodes == 2:
            socket.gethostname = lambda: f"node{rank}"
        try:
            ebc, ddp, dense = wrapped("adam", rows=400)
            assert ebc.tables.world.local_size == size // nodes
            data = mine(rank, size)
            train(ddp, ebc, lookahead(data[:10], ebc), dense)
            state = copy.deepcopy((ddp.state_dict(), ebc.optimizer.state_dict()))
            found[f"half {nodes}"] = unwrapped(ddp)
            second, again, dense = wrapped("adam", rows=300)
        finally:
            socket.gethostname = own
        again.load_state_dict(state[0])
        second.optimizer.load_state_dict(state[1])
        train(again, second, lookahead(data[10:], second), dense)
        found[f"whole {nodes}"] = unwrapped(again)
    _, _, found["straight"], _ = run_once(rank, size, "adam", rows=400, steps=20)
    return found


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


def more(rank: int, size: int) -> dict:
    return in_job(lambda rank, size: state_and_nodes(rank, size) | failures(rank, size))(rank, size)


def test_checkpoints_nodes_and_failures() -> None:
    first, second = ranks(more)
    for key in ("half 1", "half 2", "whole 1", "whole 2", "straight", "after"):
        assert_same(first[key], second[key])
    assert_same(first["half 1"], first["half 2"])
    assert_same(first["whole 1"], first["straight"])
    assert_same(first["whole 2"], first["straight"])
    kinds, texts = zip(*(found["error"] for found in (first, second)), strict=True)
    assert kinds == (PeerError, DataError)
    assert "rank 1 failed" in texts[0] and "id 1000000" in texts[0] and "id 1000000" in texts[1]
    assert first["steps"] == second["steps"] == 3
