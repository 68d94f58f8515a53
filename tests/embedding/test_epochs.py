"""A look-ahead over batches that can be read again: epochs, ended or left, and one that is not."""

from __future__ import annotations

import logging

import pytest
import torch
from ebc_cases import batches, draw
from ebc_models import cached, dlrm
from ebc_ranks import in_job, mine, ranks, unwrapped, wrapped
from ebc_training import assert_same, loss_of, made, train, weights_of

from distcache import lookahead
from distcache.embedding import stream
from distcache.embedding.ids import bytes_of
from distcache.errors import DistcacheError, PlanError

pytestmark = pytest.mark.usefixtures("one_thread", "kind")

EPOCHS = 3


def by_epochs(stream, model, ebc, stop=None) -> list[int]:
    """Train; the batches of each epoch."""
    counts = []
    for _ in range(EPOCHS):
        count = 0
        for batch in stream:
            train(model, ebc, [batch])
            count += 1
            if count == stop:
                break
        counts.append(count)
    return counts


def by_hand(data) -> dict:
    """The weights after these batches, each planned when it comes."""
    ebc, model = made("adagrad")
    train(model, ebc, data)
    return weights_of(model)


@pytest.mark.parametrize("read_by", ["list", "loader"])
def test_every_epoch_trains_all_batches(read_by: str, caplog) -> None:
    data = batches(7)
    again = data
    if read_by == "loader":
        again = torch.utils.data.DataLoader(data, batch_size=None)
    ebc, model = made("adagrad")
    stream = lookahead(again, ebc)
    assert by_epochs(stream, model, ebc) == [7] * EPOCHS and len(stream) == 7
    assert ebc.tables.steps == 7 * EPOCHS
    assert_same(weights_of(model), by_hand(data * EPOCHS))
    assert "was ended" not in caplog.text


def test_a_loop_that_counts_need_not_ask_for_the_end(caplog) -> None:
    """As Lightning does with a loader that knows its length."""
    data = batches(6)
    ebc, model = made("adagrad")
    stream = lookahead(data, ebc)
    assert by_epochs(stream, model, ebc, stop=len(stream)) == [6] * EPOCHS
    assert_same(weights_of(model), by_hand(data * EPOCHS))
    assert "was ended" not in caplog.text


def test_an_epoch_that_is_left_is_ended_by_the_next(caplog) -> None:
    data = batches(9)
    ebc, model = made("adagrad", prefetch=3)
    stream = lookahead(data, ebc)
    with caplog.at_level(logging.WARNING, "distcache"):
        assert by_epochs(stream, model, ebc, stop=4) == [4] * EPOCHS
        first = iter(stream)
        assert next(stream) is data[0] and next(stream) is data[1]
    assert caplog.text.count("was ended after 4 batches, before its last") == 1
    iter(stream)
    with pytest.raises(PlanError, match="ended by a later iter"):
        next(first)
    train(model, ebc, [next(stream)])
    assert_same(weights_of(model), by_hand([*data[:4] * EPOCHS, data[0]]))
    stream.close()


def test_evaluation_between_epochs_and_inside_them() -> None:
    data = batches(5)
    ebc, model = made("adagrad")
    training, held_out = lookahead(data, ebc), lookahead([draw(90), draw(91)], ebc)
    for _ in range(EPOCHS):
        for at, batch in enumerate(training):
            train(model, ebc, [batch])
            if at in (2, 4):
                with torch.no_grad():
                    assert sum(1 for own in held_out if loss_of(model, own) > 0) == 2
    assert_same(weights_of(model), by_hand(data * EPOCHS))


def test_micro_batches_are_an_epochs_own() -> None:
    """An epoch's last step may have fewer; the next begins with a whole one."""
    data = batches(5)
    ebc, model = made("sgd")
    sizes, stream = [], lookahead(data, ebc, accumulate=2)
    for _ in range(EPOCHS):
        for at, batch in enumerate(stream):
            loss_of(model, batch).backward()
            if at % 2 or at == 4:
                ebc.step()
                sizes.append(at)
    assert ebc.tables.steps == 3 * EPOCHS and sizes == [1, 3, 4] * EPOCHS


def test_batches_that_are_read_once_have_one_epoch() -> None:
    ebc, model = made("sgd")
    stream = lookahead(iter(batches(5)), ebc)
    for _, batch in zip(range(2), stream, strict=False):
        train(model, ebc, [batch])
    for batch in stream:  # goes on: what was read ahead is not lost
        train(model, ebc, [batch])
    assert ebc.tables.steps in (4, 5)
    with pytest.raises(PlanError, match=r"has no batch, but the one before had some.*DataLoader"):
        next(iter(stream))
    empty = lookahead([], ebc)
    assert list(empty) == [] and list(empty) == []


def epochs(rank: int, size: int) -> dict:
    found = {}
    for name, settings in (("whole", {"ratio": 1.0, "rows": None}), ("few", {"rows": 260})):
        ebc, ddp, dense = wrapped("adagrad", **settings)
        stream = lookahead(mine(rank, size, 6), ebc)
        for epoch in range(EPOCHS):
            for at, batch in enumerate(stream):
                train(ddp, ebc, [batch], dense)
                if epoch == 1 and at == 3:
                    break
        assert ebc.tables.steps == 6 + 4 + 6
        found[name] = unwrapped(ddp)
        ebc.close()
    assert_same(found["whole"], found["few"])
    return found["few"]


def in_ranks(rank: int, size: int) -> dict:
    return in_job(epochs)(rank, size)


def test_ranks_start_epochs_together() -> None:
    first, second = ranks(in_ranks)
    assert_same(first, second)
    ebc = cached("adagrad", rows=300)
    assert set(weights_of(dlrm(ebc))) == set(first)
    ebc.close()


def windows(rank: int, size: int) -> dict:
    """`lookahead="auto"` by the first batch of the rank that has most."""
    found = {}
    for name, kept, settings in (
        ("small", 1 << 10, {}),
        ("batches", (256 << 20) // 18 if rank else 1, {}),  # 16 + 1 + 1 of them are kept
        ("large", 1 << 30, {}),
        ("given", 1 << 30, {"lookahead": 3}),
        ("no window", 1, {"policy": "lru"}),
    ):
        stream.bytes_of = lambda batch, kept=kept: kept
        ebc = cached("sgd", rows=400, timeout_s=60, **settings)
        train(dlrm(ebc), ebc, lookahead(mine(rank, size, 2), ebc))
        found[name] = ebc.tables.engine.planner.settings.lookahead
        ebc.close()
    assert bytes_of(mine(rank, size, 1)[0]) > 4 * 12 * (4 + 1)
    ebc = cached("sgd", rows=400, timeout_s=60)
    data = [None, *mine(rank, size, 2)] if rank else mine(rank, size, 3)
    with pytest.raises(DistcacheError, match="NoneType has no KeyedJaggedTensor"):
        train(dlrm(ebc), ebc, lookahead(data, ebc))  # at its turn, on all ranks
    ebc.close()
    return found


def windows_in_job(rank: int, size: int) -> dict:
    return in_job(windows)(rank, size)


def test_ranks_choose_one_window_by_their_first_batches() -> None:
    first, second = ranks(windows_in_job)
    assert first == second
    assert first == {"small": 64, "batches": 16, "large": 8, "given": 3, "no window": 8}
