"""Several collections of one model, read ahead together."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from ebc_cases import (
    BATCH,
    DENSE,
    Clicks,
    assert_same,
    batches,
    cached,
    configs,
    draw,
    job,
    loss_of,
    mine,
    ranks,
    weights_of,
)
from torch import Tensor, nn
from torchrec import EmbeddingConfig, KeyedJaggedTensor

import distcache
from distcache import CachedEmbeddingCollection, lookahead
from distcache.errors import ConfigError, PlanError


class Three(nn.Module):
    """Two collections of bags, of which one has a small cache, and one of sequences over the
    features of both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = cached("adagrad", configs()[:2]), cached("adam", configs()[2:])
        own = EmbeddingConfig(name="s", num_embeddings=400, embedding_dim=8, feature_names=["f0"])
        how = {"optimizer": distcache.optim.SGD(lr=0.1), "rows": 90, "seed": 0}
        self.third = CachedEmbeddingCollection([own], **how)
        torch.manual_seed(5)
        self.over = nn.Linear(6 * 8 + DENSE, 1)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        rows = self.third(ids)["f0"]
        sample = torch.repeat_interleave(rows.lengths())
        last = rows.values().new_zeros(len(dense), 8).index_add(0, sample, rows.values())
        parts = [self.first(ids).values(), self.second(ids).values(), last, dense]
        return self.over(torch.cat(parts, dim=1))


def trained(data, how: str, epochs: int = 2, copies: bool = False) -> dict[str, Tensor]:
    """All weights after a loop; `how`: what is read ahead."""
    model = Three()
    dense = torch.optim.SGD(model.over.parameters(), lr=0.1)
    ahead = {"none": data, "first": None, "all": None}[how]
    if ahead is None:
        ahead = lookahead(data, model.first if how == "first" else model)
    for _ in range(epochs):
        count = 0
        for batch in ahead:
            count += 1
            if copies:
                ids = batch.sparse_features.to(torch.device("cpu"), non_blocking=True)
                batch = Clicks(batch.dense_features.clone(), ids, batch.labels)
            loss_of(model, batch).backward()
            for own in (model.first, model.second, model.third):
                own.step()
            dense.step()
            dense.zero_grad()
        assert count == len(data)
    if how == "all":
        assert all(own.tables.steps == epochs * len(data) for own in (model.first, model.third))
    return weights_of(model)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("copies", [False, True])
def test_all_collections_of_a_model_are_read_ahead_to_the_same_bits(copies: bool) -> None:
    data = batches(9)
    whole = trained(data, "none")
    assert_same(trained(data, "first"), whole)
    assert_same(trained(data, "all", copies=copies), whole)


@job
def on_ranks(rank: int, size: int) -> dict[str, dict[str, Tensor]]:
    data = mine(rank, size, steps=6)
    left_early(data)
    return {how: trained(data, how) for how in ("none", "all")}


def test_on_several_ranks() -> None:
    for found in ranks(on_ranks):
        assert_same(found["all"], found["none"])


@pytest.mark.usefixtures("one_thread")
def test_each_batch_is_taken_once_and_errors_come_at_their_turn() -> None:
    taken, threads = [], set()

    def some():
        for number, batch in enumerate(batches(5)):
            taken.append(number)
            threads.add(threading.current_thread().name)
            yield batch
        raise ValueError("no more disks")

    model, seen = Three(), 0
    ahead = lookahead(some(), [model.first, model.third])
    with pytest.raises(ValueError, match="no more disks"):
        for batch in ahead:
            model.first(batch.sparse_features), model.third(batch.sparse_features)
            seen += 1
    assert seen == 5 and taken == list(range(5)) and len(threads) >= 1
    ahead.close()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.usefixtures("one_thread")
def test_errors_stay_where_they_are_when_planning_begins_anew(several: bool) -> None:
    def some():
        yield from batches(3)
        raise ValueError("no more disks")

    model, seen = Three(), 0
    model.requires_grad_(False)
    ahead = lookahead(some(), [model.first, model.third] if several else model.third)
    with pytest.raises(ValueError, match="no more disks"):
        for batch in ahead:
            if several:
                model.first(batch.sparse_features)
            model.third(batch.sparse_features)
            seen += 1
            with torch.no_grad():  # what is planned ahead, the error too, is planned again
                model.third.embeddings["s"].weight[3] = 0.5
    assert seen == 3
    for _ in range(2):
        with pytest.raises(PlanError, match="an epoch of this look-ahead has no batch"):
            list(ahead)


@pytest.mark.usefixtures("one_thread")
def test_epochs_end_and_begin_for_all() -> None:
    model = Three()
    model.requires_grad_(False)

    def through(batch: Clicks) -> None:
        model(batch.dense_features, batch.sparse_features)

    ahead = lookahead(batches(6), model)
    assert len(ahead) == 6
    old = iter(ahead)
    through(next(old))
    for batch in ahead:
        through(batch)
    with pytest.raises(PlanError, match="ended by a later iter"):
        next(old)
    once = lookahead(iter(batches(3)), model)
    through(next(once))
    assert [len(batch.labels) for batch in _looked_up(once, through)] == [BATCH, BATCH]
    with pytest.raises(PlanError, match="has no batch, but the one before had some"):
        next(iter(once))
    with pytest.raises(ConfigError, match="give all collections to one"):
        lookahead(ahead, model.first)
    for wrong in ([], [model.first, model.first], nn.Linear(1, 1), [model]):
        with pytest.raises(ConfigError, match="a list of such, or a module that has some"):
            lookahead(batches(1), wrong)


def _looked_up(ahead, through):
    for batch in ahead:
        through(batch)
        yield batch


def _stepped(model: Three, batch: Clicks) -> None:
    loss_of(model, batch).backward()
    for own in (model.first, model.second, model.third):
        own.step()


def left_early(data: list[Clicks]) -> None:
    """A loop that leaves with a batch in hand, and goes on without a look-ahead, as if it had had
    none; nothing is left to the garbage collector, which comes at other times on each rank."""
    whole, model = Three(), Three()
    gc.disable()
    try:
        for number, batch in enumerate(lookahead(data, model)):
            if number == 4:
                break
            _stepped(model, batch)
            _stepped(whole, batch)
        for batch in data[5:]:
            _stepped(model, batch)
            _stepped(whole, batch)
    finally:
        gc.enable()
    assert_same(weights_of(model), weights_of(whole))


@pytest.mark.usefixtures("one_thread")
def test_leaving_the_loop_ends_the_threads_of_all() -> None:
    left_early(batches(9))


@pytest.mark.usefixtures("one_thread")
def test_a_pass_that_not_all_began_is_over_for_all() -> None:
    model, passes, data = Three(), [], batches(4)
    model.requires_grad_(False)

    class Shuffled:
        def __iter__(self):
            passes.append(len(passes))
            return iter([draw(-1 - number) for number in range(2)] if passes == [0] else data)

    def broken(batch: Clicks) -> KeyedJaggedTensor:
        if passes == [0]:
            raise ValueError("no ids yet")
        return batch.sparse_features

    ahead = lookahead(Shuffled(), [model.first, model.third], ids=broken)
    with pytest.raises(ValueError, match="no ids yet"):
        next(iter(ahead))
    for batch in ahead:
        model.first(batch.sparse_features), model.third(batch.sparse_features)
        assert any(batch is own for own in data)
    assert passes == [0, 1]


@pytest.mark.usefixtures("one_thread")
def test_a_collection_without_tables_is_not_read_ahead() -> None:
    model = nn.ModuleList([cached(tables=[]), cached()])
    for batch in lookahead(batches(2), model):
        model[1](batch.sparse_features).values().sum().backward()
        model[1].step()
    assert model[1].tables.steps == 2


@pytest.mark.usefixtures("one_thread")
def test_a_copy_is_read_ahead_as_the_first() -> None:
    ebc = cached(rows=200)
    model = nn.Module()
    model.own, model.teacher = ebc, copy.deepcopy(ebc).requires_grad_(False)
    data = [(draw(2 * at).sparse_features, draw(2 * at + 1).sparse_features) for at in range(6)]
    for given in (model, [ebc, model.teacher]):
        for named in (ebc, model.teacher):
            for ids, _ in lookahead(data, given, ids={named: lambda pair: pair[0]}):
                with torch.no_grad():
                    seen = model.teacher(ids).values()
                found = ebc(ids).values()
                assert torch.equal(seen, found)
                found.sum().backward()
                ebc.step()
    assert ebc.tables.steps == 4 * len(data)
    other = cached()
    for wrong in (other, model):
        with pytest.raises(ConfigError, match=r"ids=\{\.\.\.\} has a .* none of the collections"):
            lookahead(data, model, ids={wrong: lambda pair: pair[0]})
    for own in (ebc, other):
        own.close()
