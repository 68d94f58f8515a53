"""Frozen tables: as torch's parameters without `requires_grad`, all of them or one by one."""

from __future__ import annotations

import pytest
from ebc_cases import (
    UPDATES,
    assert_close,
    assert_same,
    batches,
    cached,
    dense_optimizer,
    dlrm,
    job,
    key_of_tables,
    loss_of,
    made,
    mine,
    plain_optimizer,
    plain_tables,
    ranks,
    train,
    unwrapped,
    weights_of,
    wrapped,
    written_back,
)
from torch import nn

import distcache
from distcache import lookahead
from distcache.errors import ConfigError, PlanError

pytestmark = pytest.mark.usefixtures("one_thread", "kind")


def tables_of(weights: dict) -> dict:
    return {name: value for name, value in weights.items() if key_of_tables() in name}


def by_loop(ebc: nn.Module, model: nn.Module, flag: bool) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(flag)


WAYS = {
    "collection": lambda ebc, model, flag: ebc.requires_grad_(flag),
    "parent": lambda ebc, model, flag: model.requires_grad_(flag),
    "loop": by_loop,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_collection_is_left_as_it_is(way: str) -> None:
    """In the middle of training, and back: as a run without the steps between."""
    data = batches(9)
    ebc, model = made("adam")
    keys = list(model.state_dict())
    train(model, ebc, lookahead(data[:3], ebc))
    before, moved = tables_of(weights_of(model)), written_back(ebc.tables)
    WAYS[way](ebc, model, False)
    for batch in lookahead(data[3:6], ebc):
        loss = loss_of(model, batch)
        assert loss.requires_grad == (way == "collection")
        if loss.requires_grad:
            loss.backward()
        ebc.step()  # nothing to do, with a backward or without
    assert_same(tables_of(weights_of(model)), before)
    assert ebc.tables.steps == 3 and list(model.state_dict()) == keys
    assert not any(rows.cache.dirty.any() for rows in ebc.tables.rows)
    assert written_back(ebc.tables) == moved, "a frozen row is not dirty"
    WAYS[way](ebc, model, True)
    for parameter in model.parameters():
        parameter.grad = None
    train(model, ebc, lookahead(data[6:], ebc))
    other, twin = made("adam")
    train(twin, other, [*data[:3], *data[6:]])
    assert_same(weights_of(model), weights_of(twin))


def frozen_plain(name: str, schedule, data) -> dict:
    """TorchRec's own tables; `schedule(step)`: the names that are frozen then."""
    own = plain_tables()
    model = dlrm(own)
    model.load_state_dict(weights_of(dlrm(cached())))
    rows, dense = plain_optimizer(name, own), dense_optimizer(model)
    for at, batch in enumerate(data):
        for table, bag in getattr(own, key_of_tables()).items():
            bag.weight.requires_grad_(table not in schedule(at))
        train(model, rows, [batch], dense, zero=rows.zero_grad)
    return weights_of(model)


def some(step: int) -> set[str]:
    """`t0` in the middle, so that step counters differ afterwards; `t2` at first."""
    return ({"t0"} if 4 <= step < 9 else set()) | ({"t2"} if step < 3 else set())


@pytest.mark.parametrize("name", UPDATES)
def test_tables_frozen_one_by_one_are_as_torchs(name: str) -> None:
    data = batches(14)
    ebc, model = made(name)
    dense = dense_optimizer(model)
    for at, batch in enumerate(lookahead(data, ebc)):
        ebc.unfreeze("t0", "t2")
        ebc.freeze(*some(at))
        assert set(ebc.frozen) == some(at)
        train(model, ebc, [batch], dense)
    assert ebc.tables.counts == [9, 14, 11, 14]
    assert_close(weights_of(model), frozen_plain(name, some, data))
    state = ebc.optimizer.state_dict()
    assert [int(own["step"]) for own in state["state"].values()] == [9, 14, 11, 14]
    other, twin = made(name)
    twin.load_state_dict(model.state_dict())
    other.optimizer.load_state_dict(state)
    for batch in batches(16)[14:]:
        train(model, ebc, [batch], dense)
        train(twin, other, [batch], dense_optimizer(twin))
    assert other.tables.counts == ebc.tables.counts == [11, 16, 13, 16]
    assert_same(tables_of(weights_of(model)), tables_of(weights_of(twin)))


def test_frozen_rows_are_not_clipped() -> None:
    """The norm is that of what trains; the others' gradients do not count."""
    batch, norms = batches(1)[0], []
    for frozen in ((), ("t0",), ("t0", "t1", "t2", "t3")):
        ebc, model = made("sgd")
        ebc.freeze(*frozen)
        loss_of(model, batch).backward()
        norms.append(float(distcache.clip_grad_norm_([], ebc, 1e6)))
        ebc.step()
    assert norms[0] > norms[1] > norms[2] == 0.0


def test_the_flag_binds_when_a_step_opens() -> None:
    batch, other = batches(2)
    ebc, model = made("sgd")
    loss = loss_of(model, batch)
    ebc.requires_grad_(False)
    loss.backward()
    ebc.step()
    assert ebc.tables.steps == 1
    loss_of(model, other)
    ebc.requires_grad_(True)
    ebc.step()
    assert ebc.tables.steps == 1
    with pytest.raises(ConfigError, match="no table is named 't9': there are t0"):
        ebc.freeze("t9")


@job
def frozen_ddp(rank: int, size: int) -> dict:
    """Under DDP with its default arguments, whole and in part; ranks that disagree are refused."""
    found, data = {}, mine(rank, size, 8)
    for rows in (260, 468):
        ebc, ddp, dense = wrapped("adam", rows=rows)
        for at, batch in enumerate(lookahead(data, ebc)):
            ebc.requires_grad_(at not in (1, 2))
            if at >= 4:
                ebc.freeze("t0")
            if at >= 6:
                ebc.unfreeze("t0")
            train(ddp, ebc, [batch], dense)
        assert ebc.tables.counts == [4, 6, 6, 6]
        found[str(rows)] = unwrapped(ddp)
        ebc.close()
    assert_same(found["260"], found["468"])
    for freeze in (lambda ebc: ebc.freeze("t1"), lambda ebc: ebc.requires_grad_(False)):
        ebc = cached("sgd", timeout_s=60)  # without DDP, which an error in backward leaves hanging
        model = dlrm(ebc)
        if rank:
            freeze(ebc)
        with pytest.raises(PlanError, match=r"is frozen on rank\(s\) 1 and not on the others"):
            for batch in data[:2]:
                train(model, ebc, [batch])
        ebc.optimizer.zero_grad()
        ebc.close()
    return found["260"]


def test_ddp_and_frozen_tables() -> None:
    assert_same(*ranks(frozen_ddp))
