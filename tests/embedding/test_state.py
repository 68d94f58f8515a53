"""Checkpoints: TorchRec's and the collection's are one and the same, and resume is exact."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
from ebc_cases import (
    UPDATES,
    assert_same,
    batches,
    cached,
    configs,
    dense_optimizer,
    dlrm,
    draw,
    key_of_tables,
    plain_tables,
    train,
    weights_of,
)

from distcache import lookahead
from distcache.errors import ConfigError, PlanError

pytestmark = pytest.mark.usefixtures("kind")


def saved(state):
    """`state` after a trip through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def test_state_goes_to_torchrec_and_back() -> None:
    ebc = cached(rows=200)
    model = dlrm(ebc)
    views = ebc.state_dict(prefix="a.")  # of the store, which change as training goes on
    assert list(views) == [f"a.{key_of_tables()}.t{i}.weight" for i in range(4)]
    before = {name: value.clone() for name, value in views.items()}
    train(model, ebc, lookahead(batches(), ebc))
    ebc.flush()
    assert any(not torch.equal(views[name], before[name]) for name in views)
    own = dlrm(plain_tables())
    state = saved(model.state_dict())
    assert list(state) == list(own.state_dict())
    own.load_state_dict(state)
    batch = draw(9)
    given = (batch.dense_features, batch.sparse_features)
    model.eval()
    assert torch.allclose(model(*given), own(*given))
    fresh = dlrm(plain_tables())
    model.load_state_dict(saved(fresh.state_dict()))
    assert_same(weights_of(model), fresh.state_dict())
    assert torch.allclose(model(*given), fresh(*given))


def test_missing_unexpected_and_misshapen_tables_are_reported(kind) -> None:
    ebc = cached(rows=200)
    model = dlrm(ebc)
    train(model, ebc, lookahead(batches(3), ebc))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    where = "sparse_arch.embedding_bag_collection" if kind == "bags" else "ebc"
    prefix = f"{where}.{key_of_tables()}."
    part = dict(state)
    part[f"{prefix}t0.weight"] = torch.full((400, 8), 0.5)
    del part[f"{prefix}t1.weight"]
    part[f"{prefix}t9.weight"] = torch.zeros(1, 8)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*t1\.weight.*Unexpected.*t9\.weight"):
        model.load_state_dict(part)
    result = model.load_state_dict(part, strict=False)
    assert result.missing_keys == [f"{prefix}t1.weight"]
    assert result.unexpected_keys == [f"{prefix}t9.weight"]
    now = model.state_dict()
    assert torch.equal(now[f"{prefix}t1.weight"], state[f"{prefix}t1.weight"])
    assert (now[f"{prefix}t0.weight"] == 0.5).all()
    with pytest.raises(RuntimeError, match=r"size mismatch for .*t2\.weight"):
        model.load_state_dict({**state, f"{prefix}t2.weight": torch.zeros(8, 8)})


@pytest.mark.parametrize("name", UPDATES)
def test_stop_and_resume_is_exact(name) -> None:
    data = batches()

    def parts(rows: int):
        ebc = cached(name, rows=rows)
        return dlrm(ebc), ebc, torch.optim.lr_scheduler.ExponentialLR(ebc.optimizer, 0.9)

    def run(model, ebc, scheduler, chosen) -> None:
        dense = dense_optimizer(model)
        for batch in lookahead(chosen, ebc):
            train(model, ebc, [batch], dense)
            scheduler.step()

    def stateful(model, ebc, scheduler) -> tuple:
        return model, ebc.optimizer, scheduler

    whole = parts(200)
    run(*whole, data)
    first = parts(200)
    run(*first, data[:9])
    state = saved([part.state_dict() for part in stateful(*first)])
    second = parts(300)
    train(*second[:2], lookahead(batches(2), second[1]))  # to be overwritten
    for part, own in zip(stateful(*second), state, strict=True):
        part.load_state_dict(own)
    run(*second, data[9:])
    assert_same(weights_of(second[0]), weights_of(whole[0]))
    ends = [ebc.optimizer.state_dict() for _, ebc, _ in (second, whole)]
    assert ends[0]["param_groups"] == ends[1]["param_groups"]
    for table in ends[0]["state"]:
        assert_same(ends[0]["state"][table], ends[1]["state"][table])


def test_loading_in_the_middle_of_a_look_ahead() -> None:
    ebc = cached(rows=200)
    model = dlrm(ebc)
    start = weights_of(model)
    stream = iter(lookahead(batches(), ebc))
    dense = dense_optimizer(model)
    for _ in range(7):
        train(model, ebc, [next(stream)], dense)
    model.load_state_dict(start)
    ebc.optimizer.load_state_dict(cached(rows=200).optimizer.state_dict())
    train(model, ebc, stream, dense)
    other = cached(rows=200)
    plain = dlrm(other)
    train(plain, other, batches()[7:])
    assert_same(weights_of(model), weights_of(plain))
    batch = draw(1)
    plain(batch.dense_features, batch.sparse_features).sum().backward()
    with pytest.raises(PlanError, match="before loading"):
        plain.load_state_dict(start)


def test_optimizer_state_that_does_not_fit_is_refused() -> None:
    adam, adagrad = cached("adam", rows=200), cached("adagrad", rows=200)
    state = adam.optimizer.state_dict()
    assert set(state["state"]["t0"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["param_groups"][0]["params"] == ["t0", "t1", "t2", "t3"]
    with pytest.raises(ConfigError, match=r"t0.*exp_avg.*Adagrad keeps \['sum'\]"):
        adagrad.optimizer.load_state_dict(state)
    own = saved(adagrad.optimizer.state_dict())
    own["state"]["t1"]["sum"] = torch.zeros(3, 8)
    with pytest.raises(ConfigError, match=r"t1\.sum: shape \(3, 8\), must be \(60, 8\)"):
        adagrad.optimizer.load_state_dict(own)
    del own["state"]["t1"]
    with pytest.raises(ConfigError, match="optimizer state of tables"):
        adagrad.optimizer.load_state_dict(own)


def test_initial_rows_are_what_the_configs_ask_for() -> None:
    plain = weights_of(cached(seed=3))
    assert_same(weights_of(cached(seed=3)), plain)
    key = f"{key_of_tables()}.t0.weight"
    assert not torch.equal(weights_of(cached(seed=4))[key], plain[key])
    bound = 400**-0.5
    assert plain[key].min() >= -bound and plain[key].max() <= bound
    assert plain[key].std() == pytest.approx(bound / 3**0.5, rel=0.05)
    ranged = weights_of(cached(tables=configs(weight_init_min=1.0, weight_init_max=3.0)))[key]
    assert 1 <= ranged.min() < 1.1 and 2.9 < ranged.max() <= 3
    torch.manual_seed(1)
    before = torch.get_rng_state()
    normal = partial(torch.nn.init.normal_, mean=5.0)
    told = [weights_of(cached(tables=configs(init_fn=normal), seed=s)) for s in (1, 1, 2)]
    assert torch.equal(before, torch.get_rng_state())
    assert_same(told[0], told[1])
    assert not torch.equal(told[0][key], told[2][key])
    assert told[0][key].mean() == pytest.approx(5.0, abs=0.1)
