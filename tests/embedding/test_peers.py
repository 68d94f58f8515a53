"""An exception of any type on one rank ends the waits of the others with PeerError."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from ebc_cases import (
    Clicks,
    assert_same,
    cached,
    dlrm,
    job,
    loss_of,
    mine,
    ranks,
    train,
    weights_of,
)
from torch import Tensor
from torchrec import KeyedJaggedTensor

from distcache import lookahead
from distcache.errors import DistcacheError, PeerError

LIMIT_S = 20.0
"""`timeout_s` of the collections. No rank waits that long, or its error names no cause."""


class NoValues(KeyedJaggedTensor):
    """Ids that cannot be read."""

    def values(self) -> Tensor:
        raise ZeroDivisionError("no values")


class NoWeights(KeyedJaggedTensor):
    """Ids whose weights cannot be read, which happens after the step has been opened."""

    def weights_or_none(self) -> Tensor | None:
        raise ZeroDivisionError("no weights")


def broken(batch: Clicks, kind: type) -> Clicks:
    """`batch` with ids of a class that raises."""
    ids = batch.sparse_features
    parts = ids.keys(), ids.values(), ids.weights_or_none(), ids.lengths()
    return replace(batch, sparse_features=kind(*parts))


def failing(batches: list[Clicks], rank: int, how: str) -> Iterator[Clicks]:
    """The batches; the fourth of rank 1 fails as `how` says."""
    for at, batch in enumerate(batches):
        is_bad = rank == 1 and at == 3
        if is_bad and how == "loader":
            raise ZeroDivisionError("no batch")
        kinds = {"values": NoValues, "weights": NoWeights}
        yield broken(batch, kinds[how]) if is_bad and how in kinds else batch


def error_of(work: Callable[[], Any]) -> str:
    """What `work` raises."""
    try:
        work()
    except (ZeroDivisionError, DistcacheError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@job
def one_cannot_read(rank: int, size: int, how: str, ahead: bool) -> dict:
    ebc = cached(timeout_s=LIMIT_S, **({"is_weighted": True} if how == "weights" else {}))
    batches = failing(mine(rank, size, 8, weighted=how == "weights"), rank, how)
    stream = lookahead(batches, ebc) if ahead else batches
    found = {"error": error_of(lambda: train(dlrm(ebc), ebc, stream))}
    ebc.close()
    return found


@pytest.mark.parametrize("how", ["values", "weights"])
def test_an_error_in_a_forward_reaches_the_other_rank(how: str) -> None:
    for found in ranks(one_cannot_read, how, False):
        assert f"ZeroDivisionError: no {how}" in found["error"]


@pytest.mark.parametrize("how", ["values", "weights", "loader"])
def test_an_error_of_a_loader_or_forward_reaches_the_other_rank_behind_a_lookahead(
    how: str,
) -> None:
    for found in ranks(one_cannot_read, how, True):
        assert f"ZeroDivisionError: no {how.replace('loader', 'batch')}" in found["error"]


@pytest.mark.usefixtures("sequences")
def test_an_error_in_a_forward_of_sequences_reaches_the_other_rank() -> None:
    for found in ranks(one_cannot_read, "values", False):
        assert "ZeroDivisionError: no values" in found["error"]


@job
def one_of_two_collections(rank: int, size: int) -> dict:
    """Rank 1 fails in the first of two collections; rank 0 waits in the second."""
    first = cached(timeout_s=LIMIT_S)
    second = cached("sgd", timeout_s=LIMIT_S)
    models = [dlrm(first), dlrm(second)]
    batches = mine(rank, size, 8)

    def loop() -> None:
        for at, batch in enumerate(lookahead(batches, [first, second])):
            is_bad = rank == 1 and at == 3
            loss = loss_of(models[0], broken(batch, NoValues) if is_bad else batch)
            (loss + loss_of(models[1], batch)).backward()
            first.step()
            second.step()

    found = {"error": error_of(loop)}
    first.close()
    second.close()
    return found


def test_an_error_in_one_collection_reaches_a_rank_that_waits_in_another() -> None:
    for found in ranks(one_of_two_collections):
        assert "ZeroDivisionError" in found["error"]


@job
def one_calls_backward_twice(rank: int, size: int) -> dict:
    """The second backward pass of rank 1 is refused in a hook of the collection."""
    ebc = cached(timeout_s=LIMIT_S)
    model = dlrm(ebc)

    def loop() -> None:
        for at, batch in enumerate(mine(rank, size, 8)):
            loss = loss_of(model, batch)
            loss.backward(retain_graph=True)
            if rank == 1 and at == 3:
                loss.backward()
            ebc.step()

    found = {"error": error_of(loop)}
    ebc.close()
    return found


def test_an_error_in_a_backward_hook_reaches_the_other_rank() -> None:
    for found in ranks(one_calls_backward_twice):
        assert "a backward pass came after its row gradients were summed" in found["error"]


@job
def steps_too_early(rank: int, size: int, who: list[int]) -> dict:
    """The ranks `who` call `step` after the first of two micro-batches, and then go on."""
    ebc = cached(timeout_s=LIMIT_S)
    model = dlrm(ebc)
    refused = []

    def loop() -> None:
        for at, batch in enumerate(lookahead(mine(rank, size, 8), ebc, accumulate=2)):
            loss_of(model, batch).backward()
            if at == 4 and rank in who:
                refused.append(error_of(ebc.step))
                assert len(who) == size, "stops"
                model.state_dict()
            if at % 2:
                ebc.step()

    found: dict[str, Any] = {"error": "nothing"}
    try:
        loop()
    except (AssertionError, PeerError) as error:
        found["error"] = str(error)
    else:
        found |= weights_of(ebc)
    found["refused"] = "".join(refused)
    ebc.close()
    return found


def test_an_error_in_a_step_reaches_the_other_rank() -> None:
    first, second = ranks(steps_too_early, [1])
    assert "call step() after the last" in second["refused"]
    assert "call step() after the last" in first["error"]


def test_a_step_that_all_ranks_are_refused_leaves_the_collection_usable() -> None:
    expected, _ = ranks(steps_too_early, [])
    for found in ranks(steps_too_early, [0, 1]):
        assert "call step() after the last" in found.pop("refused")
        assert found.pop("error") == "nothing"
        assert_same(found, {name: expected[name] for name in found})


@job
def caught_and_gone_on(rank: int, size: int) -> dict:
    """Errors that are caught, on one rank or on all, of two collections; then a wait of 2 s."""
    first = cached(timeout_s=LIMIT_S)
    second = cached(timeout_s=LIMIT_S)
    models = [dlrm(first), dlrm(second)]
    data = mine(rank, size, 8)

    def step(batch: Clicks, pause_s: float = 0.0) -> None:
        loss_of(models[0], batch).backward()
        time.sleep(pause_s)
        first.step()

    step(data[0])
    loss_of(models[1], data[0]).backward()
    second.step()
    refusals = [error_of(lambda: first(torch.zeros(3)))]  # on all ranks alike
    step(data[1], pause_s=2.0 * rank)
    step(data[2])
    if rank == 1:
        refusals.append(error_of(lambda: first(torch.zeros(3))))  # on this rank alone
    step(data[3])
    time.sleep(2.0 * rank)
    weights = weights_of(second)
    loss_of(models[1], data[4]).backward()
    second.step()
    first.close()
    second.close()
    return {"refusals": refusals, "tables": len(weights)}


def test_errors_that_were_caught_end_no_later_wait() -> None:
    for rank, found in enumerate(ranks(caught_and_gone_on)):
        assert len(found["refusals"]) == 1 + rank and found["tables"]
        assert all("Tensor is no KeyedJaggedTensor" in text for text in found["refusals"])


@job
def failed_after_an_error_of_another(rank: int, size: int) -> dict:
    """Rank 0 catches an error of its own; later rank 1 fails, and its process stays alive."""
    ebc = cached(timeout_s=LIMIT_S)
    model = dlrm(ebc)
    data = mine(rank, size, 4)

    def evaluate(batch: Clicks) -> None:
        with torch.no_grad():
            model(batch.dense_features, batch.sparse_features)

    evaluate(data[0])
    if rank == 0:
        error_of(lambda: ebc(torch.zeros(3)))
    evaluate(data[1])
    if rank == 1:
        found = {"error": error_of(lambda: ebc(torch.zeros(3)))}
        time.sleep(4)
    else:
        found = {"error": error_of(lambda: evaluate(data[2]))}
    ebc.close()
    return found


def test_an_earlier_error_of_a_rank_does_not_hide_one_of_another() -> None:
    waiting, failed = ranks(failed_after_an_error_of_another)
    assert "Tensor is no KeyedJaggedTensor" in failed["error"]
    assert waiting["error"].startswith("PeerError: stopped because rank 1 failed: ")


@job
def going_on_after_peer_error(rank: int, size: int) -> list[str]:
    """Rank 1 is refused a batch, and both ranks go on after every error."""
    ebc = cached(timeout_s=LIMIT_S)
    model = dlrm(ebc)
    data = mine(rank, size, 5)

    def step(batch: Clicks) -> None:
        loss_of(model, batch).backward()
        ebc.step()

    step(data[0])
    if rank == 1:
        error_of(lambda: ebc(torch.zeros(3)))
        time.sleep(3)
    found = [error_of(lambda batch=batch: step(batch)) for batch in data[1:]]
    ebc.close()
    return found


def test_a_rank_that_left_an_exchange_begins_no_other() -> None:
    for found in ranks(going_on_after_peer_error):
        assert all("PeerError" in text for text in found)
        assert "cannot begin, because rank" in found[-1]
