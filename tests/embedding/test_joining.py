"""Collections that are made before the process group, and when their ranks meet."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ebc_cases import (
    as_arrays,
    assert_same,
    batches,
    cached,
    configs,
    dlrm,
    loss_of,
    mine,
    part,
    ranks,
    train,
    using,
    values_of,
    weights_of,
)
from torch.nn.parallel import DistributedDataParallel

from distcache import lookahead
from distcache.errors import ConfigError, PlanError


def made_before(rank: int, size: int, kind: str) -> dict:
    """A model that is made before its ranks know each other trains as one made after that."""
    using(kind)
    torch.set_num_threads(1)
    found = {}
    early = cached("adagrad", timeout_s=60)
    early_model, early_lr = dlrm(early), early.optimizer.param_groups[0]["lr"]
    unused, closed = cached("sgd"), cached("sgd")
    closed.close()
    del unused
    with pytest.raises(ConfigError, match=rf"WORLD_SIZE={size}, but torch.distributed is not"):
        early_model.load_state_dict(early_model.over_arch.state_dict(), strict=False)
    waiting = [  # used by each rank in another order at first
        cached("sgd", timeout_s=60),
        cached("adagrad", configs()[:2], timeout_s=60, rows=250),
    ]
    dist.init_process_group("gloo")
    try:
        for ebc in waiting if rank == 0 else waiting[::-1]:
            assert ebc.tables.world.size == size
        for name, ebc, model in (("early", early, early_model), ("late", None, None)):
            ebc = ebc or cached("adagrad", timeout_s=60)
            ddp = DistributedDataParallel(model or dlrm(ebc))
            dense = torch.optim.SGD(ddp.parameters(), lr=0.1)
            train(ddp, ebc, lookahead(mine(rank, size, 6), ebc), dense)
            assert ebc.tables.world.size == size
            found[name] = as_arrays(weights_of(ddp))
            ebc.close()
        assert early_lr == 0.005
        for batch in mine(rank, size, 4):
            for ebc in waiting:
                values_of(ebc(batch.sparse_features)).square().sum().backward()
                ebc.step()
        for at, ebc in enumerate(waiting):
            found[f"waiting {at}"] = as_arrays(weights_of(ebc))
            ebc.close()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return found


def test_a_collection_made_before_the_group_joins_it() -> None:
    first, second = ranks(made_before)
    for found in (first, second):
        assert_same(found["early"], found["late"])
    for name in first:
        assert_same(first[name], second[name])


def used_alone(rank: int, size: int, kind: str) -> dict:
    """Used by each process alone, then with a group of several ranks."""
    using(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE")
        ebc = cached("sgd")
        model = dlrm(ebc)
        loss_of(model, part(batches(1)[0], rank, size)).backward()
        ebc.step()
    dist.init_process_group("gloo")
    try:
        with pytest.raises(ConfigError, match=r"used before init_process_group and trains alone"):
            loss_of(model, part(batches(1)[0], rank, size))
        ebc.close()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return {}


def test_a_collection_used_alone_does_not_train_with_others() -> None:
    ranks(used_alone)


def test_errors_of_settings_come_at_once_and_no_store_before_the_first_use() -> None:
    for wrong in ({"rows": 5, "ratio": 0.5}, {"ratio": 2.0, "rows": None}, {"policy": "mru"}):
        with pytest.raises(ConfigError):
            cached("sgd", **wrong)
    with pytest.raises(ConfigError, match="names no table"):
        cached("sgd", rows=None, split={"nothing": 5})
    huge = cached("sgd", configs()[:1])
    assert huge._member.made is None and huge.optimizer.param_groups[0]["lr"] == 0.1
    assert [tuple(leaf.shape) for leaf in huge.optimizer.param_groups[0]["params"]] == [(0, 8)]
    assert "400 x 8" in repr(huge) and huge.to("cpu") is huge
    huge.optimizer.zero_grad()
    huge.close()
    with pytest.raises(PlanError, match="is closed"):
        huge.state_dict()
