"""Two ranks under DDP: the numbers of one process with the global batch, the bits of any cache."""

from __future__ import annotations

import copy
import gc
import socket
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ebc_cases import (
    Clicks,
    Pooled,
    assert_close,
    assert_same,
    batches,
    cached,
    configs,
    dlrm,
    draw,
    joined,
    key_of_tables,
    kind_here,
    loss_of,
    mixed_configs,
    of_kind,
    part,
    train,
    train_plain,
    values_of,
    weights_of,
    written_back,
)
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel
from torchrec import KeyedJaggedTensor

import distcache
from distcache import lookahead
from distcache.errors import ConfigError, DataError, DistcacheError, PeerError
from distcache.pipeline.step_queue import StepQueue

pytestmark = pytest.mark.usefixtures("kind")


def in_job(work):
    """Run `work(rank, size)` inside a job that ends in order."""

    def run(rank: int, size: int, *args):
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        try:
            found = work(rank, size, *args)
            gc.collect()
            left = [t.name for t in threading.enumerate() if t.name.startswith("distcache")]
            assert not left, left
            dist.barrier()
        finally:
            dist.destroy_process_group()
        return as_arrays(found)

    return run


def as_arrays(value, back: bool = False):
    """Tensors as NumPy arrays, which travel between processes, or the way back."""
    if isinstance(value, dict):
        return {key: as_arrays(own, back) for key, own in value.items()}
    if back:
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return value.numpy() if isinstance(value, torch.Tensor) else value


def ranks(work, *args) -> list[dict]:
    """What `work` found on two ranks."""
    found = [as_arrays(own, back=True) for own in run_ranks(of_kind, 2, kind_here(), work, *args)]
    torch.set_num_threads(1)
    return found


def mine(rank: int, size: int, steps: int = 20, **how) -> list[Clicks]:
    """This rank's part of every global batch."""
    return [part(batch, rank, size) for batch in batches(steps, **how)]


def wrapped(name: str = "adagrad", model=dlrm, **settings):
    """A collection, the DDP model around it and its dense optimizer."""
    ebc = cached(name, timeout_s=60, **settings)
    ddp = DistributedDataParallel(model(ebc))
    assert not [n for n, _ in ddp.named_parameters() if key_of_tables() in n]
    return ebc, ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def unwrapped(ddp) -> dict:
    """Weights without DDP's prefix; asked for through it."""
    found = weights_of(ddp)
    assert all(name.startswith("module.") for name in found)
    return {name.removeprefix("module."): value for name, value in found.items()}


EXACT_STEPS = 12


def run_once(rank, size, name="adagrad", model=dlrm, tables=None, inline=False, **settings):
    data = mine(rank, size, settings.pop("steps", EXACT_STEPS), tables=tables)
    ebc, ddp, dense = wrapped(name, model, tables=tables, **settings)
    start = unwrapped(ddp)
    losses = train(ddp, ebc, data if inline else lookahead(data, ebc), dense)
    found = unwrapped(ddp)
    moved = written_back(ebc.tables)
    ebc.close()
    return start, losses, found, moved


def exactness(rank: int, size: int, name: str) -> dict:
    whole = {"ratio": 1.0, "rows": None}
    start, losses, final, _ = run_once(rank, size, name, **whole)
    for settings in (
        {"rows": 260},
        {"rows": 260, "lookahead": 0, "prefetch": 0},
        {"rows": 300, "policy": "lru", "prefetch": 3},
        {"rows": 260, "inline": True},
    ):
        _, own_losses, own, moved = run_once(rank, size, name, **settings)
        assert own_losses == losses
        assert_same(own, final)
        assert moved > 0
    if name == "adagrad":
        tables = mixed_configs()
        how = {"model": Pooled, "tables": tables}
        first = run_once(rank, size, name, **how, **whole)
        assert_same(run_once(rank, size, name, **how, rows=800)[2], first[2])
    return {"start": start, "losses": losses, "final": final}


def exact(rank: int, size: int, name: str) -> dict:
    return in_job(exactness)(rank, size, name)


@pytest.mark.parametrize("name", ["adagrad", pytest.param("adam", marks=pytest.mark.slow)])
def test_ddp_trains_as_one_process_and_the_cache_does_not_matter(name) -> None:
    first, second = ranks(exact, name)
    assert_same(first["final"], second["final"])
    losses, final = train_plain(name, configs(), first["start"], dlrm, batches(EXACT_STEPS))
    means = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    assert means == pytest.approx(losses, rel=1e-5)
    assert_close(first["final"], final, atol=5e-6)


def loops(rank: int, size: int) -> dict:
    """What a loop may do, one after the other in one job; weights to compare with one rank's."""
    found: dict = {}
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


def loops_joined(rank: int, size: int) -> dict:
    return in_job(lambda rank, size: loops(rank, size) | gaps(rank, size))(rank, size)


def test_loops_on_two_ranks_are_those_of_one_process() -> None:
    both = ranks(loops_joined)
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


def left(rank: int, size: int) -> dict:
    """Evaluation leaves its look-ahead early, on one rank with moves that come late."""
    next_unmoved, found = StepQueue.next_unmoved, {}
    for late in (False, True):

        def slow(self, late=late):
            time.sleep(0.3 * (late and rank == 1))
            return next_unmoved(self)

        StepQueue.next_unmoved = slow
        try:
            found[f"late {late}"] = evaluated_and_trained(rank, size)
        finally:
            StepQueue.next_unmoved = next_unmoved
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
