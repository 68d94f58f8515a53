"""Two ranks under DDP: the numbers of one process with the global batch, the bits of any cache."""

from __future__ import annotations

import pytest
import torch
from ebc_cases import Clicks, batches, configs, draw, joined, mixed_configs, part
from ebc_models import Pooled, cached, dlrm, values_of
from ebc_ranks import EXACT_STEPS, in_job, mine, ranks, run_once, unwrapped, wrapped
from ebc_training import assert_close, assert_same, loss_of, train, train_plain, weights_of
from torchrec import KeyedJaggedTensor

import distcache
from distcache import lookahead

pytestmark = pytest.mark.usefixtures("kind")


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
