"""The optimizer as TorchRec gives it: a class and its arguments, or `apply_optimizer_in_backward`
on the tables' weights; and ours inside TorchRec's optimizers.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ebc_cases import (
    Pooled,
    assert_close,
    assert_same,
    batches,
    cached,
    configs,
    dlrm,
    job,
    key_of_tables,
    loss_of,
    mine,
    mixed_configs,
    plain_tables,
    ranks,
    train,
    weights_of,
)
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as in_backward
from torch.nn.parallel import DistributedDataParallel
from torchrec.optim import RowWiseAdagrad, optimizers
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import distcache
from distcache import CachedEmbeddingBagCollection, CachedEmbeddingCollection, lookahead, optim
from distcache.embedding.optimizer import convert_optimizer
from distcache.errors import ConfigError, PeerError, PlanError

GIVEN = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}, optim.SGD(0.1)),
    "adagrad": (
        torch.optim.Adagrad,
        {"lr": 0.02, "initial_accumulator_value": 0.1},
        optim.Adagrad(0.02, 1e-10, 0.1),
    ),
    "rowwise": (RowWiseAdagrad, {"lr": 0.02, "eps": 1e-6}, optim.RowWiseAdagrad(0.02, 1e-6)),
    "adam": (torch.optim.Adam, {"lr": 0.02, "betas": (0.8, 0.9)}, optim.Adam(0.02, (0.8, 0.9))),
}


def views(ebc) -> nn.ModuleDict:
    """The tables of a collection as a user reaches them."""
    return getattr(ebc, key_of_tables())


def fused(tables=None, **how):
    """A collection as `cached`, without ours for an optimizer."""
    pooled = key_of_tables() == "embedding_bags"
    make = CachedEmbeddingBagCollection if pooled else CachedEmbeddingCollection
    return make(tables if tables is not None else configs(), rows=200, seed=0, **how)


def given(name: str, how: str):
    """A collection with the optimizer in one of TorchRec's ways."""
    kind, settings, _ = GIVEN[name]
    if how == "module":
        ebc = fused()
        in_backward(kind, nn.ModuleDict({"collection": ebc}).parameters(), settings)
        return ebc
    if how != "applied":
        about = {"optimizer" if how == "class" else "optimizer_type": kind}
        return fused(optimizer_kwargs=settings, **about)
    ebc = fused()
    in_backward(kind, views(ebc).parameters(), settings)
    return ebc


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("how", ["class", "fused", "applied", "module"])
@pytest.mark.parametrize("name", GIVEN)
def test_rows_are_updated_inside_backward(name, how) -> None:
    """With the bits of ours and its `step`, and as TorchRec's own tables are."""
    kind, settings, own = GIVEN[name]
    ebc, twin = given(name, how), fused(optimizer=own)
    assert isinstance(ebc.fused_optimizer(), KeyedOptimizer)
    model, other = dlrm(ebc), dlrm(twin)
    start, dense = weights_of(model), torch.optim.SGD(other.parameters(), 0.1)
    losses = []
    for batch in lookahead(batches(), twin):
        dense.zero_grad()
        loss = loss_of(other, batch)
        loss.backward()
        twin.step()
        dense.step()
        losses.append(loss.item())
    assert train(model, ebc, lookahead(batches(), ebc)) == losses  # calls `step`, for nothing
    assert_same(weights_of(model), weights_of(other))
    assert ebc.tables.steps == 20 and ebc.optimizer.in_backward
    mine, theirs = (one.optimizer.state_dict() for one in (ebc, twin))
    assert mine["param_groups"] == theirs["param_groups"]
    for table, state in theirs["state"].items():
        assert_same(mine["state"][table], state)
    if name == "adam":  # torch's own is not lazy
        return
    plain = plain_tables()
    stock = dlrm(plain)
    stock.load_state_dict(start)
    in_backward(kind, getattr(plain, key_of_tables()).parameters(), settings)
    dense = torch.optim.SGD([p for n, p in stock.named_parameters() if "ebc." not in n
                             and "embedding_bag_collection" not in n], 0.1)  # fmt: skip
    for batch in batches():
        dense.zero_grad()
        loss_of(stock, batch).backward()
        dense.step()
    assert_close(weights_of(model), stock.state_dict())


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("how", ["applied", "module"])
def test_the_first_step_of_a_plain_loop_updates_rows(how) -> None:
    """Without a look-ahead the first forward is the first use of the tables."""
    ebc, twin = given("adagrad", how), fused(optimizer=GIVEN["adagrad"][2])
    model, other = dlrm(ebc), dlrm(twin)
    for step in range(2):
        assert train(model, ebc, batches(3)[step:][:1]) == train(other, twin, batches(3)[step:][:1])
        assert_same(weights_of(model), weights_of(other))
    assert ebc.tables.steps == 2


@pytest.mark.parametrize("how", ["applied", "module"])
def test_the_first_step_of_a_module_updates_rows(how) -> None:
    for kind, ids in (
        (distcache.CachedEmbeddingBag, torch.arange(3).view(3, 1)),
        (distcache.CachedEmbedding, torch.arange(3)),
    ):
        embedding = kind(9, 4, name="t", device="cpu")
        in_backward(
            torch.optim.SGD,
            [embedding.weight] if how == "applied" else embedding.parameters(),
            {"lr": 0.5},
        )
        before = embedding(ids)
        before.sum().backward()
        assert torch.equal(embedding(ids), before - 0.5)
        embedding.close()


@pytest.mark.usefixtures("kind")
def test_it_may_be_given_between_evaluation_and_training() -> None:
    """In the middle of a look-ahead, with rows of it cached."""
    ebc, twin = fused(), fused(optimizer=GIVEN["adagrad"][2])
    model, other = dlrm(ebc).eval(), dlrm(twin).eval()
    for own, of in ((ebc, model), (twin, other)):
        stream = iter(lookahead(batches(), own))
        with torch.no_grad():
            first = [loss_of(of, next(stream)) for _ in range(5)]
        weight = views(own)["t0"].weight
        nn.init.constant_(weight, 0.01)
        if own is ebc:
            in_backward(GIVEN["adagrad"][0], views(own).parameters(), GIVEN["adagrad"][1])
            assert views(own)["t0"].weight is weight
        of.train()
        losses = train(of, own, stream)
        assert len(losses) == 15 and len(first) == 5
        weight.data[7] = 0.5
        losses += train(of, own, batches(3))
        if own is ebc:
            want = losses
    assert losses == want
    assert_same(weights_of(model), weights_of(other))


@pytest.mark.usefixtures("kind")
def test_checkpoints_have_it(tmp_path) -> None:
    def loop(how: str):
        ebc = given("adagrad", how)
        model = dlrm(ebc)
        return ebc, model, torch.optim.SGD(model.parameters(), 0.1)

    whole, model, dense = loop("fused")
    train(model, whole, lookahead(batches(), whole), dense)
    first, begun, dense = loop("applied")
    train(begun, first, lookahead(batches(8), first), dense)
    distcache.save(tmp_path / "step_8", begun, [dense], step=8)
    second, after, dense = loop("applied")
    assert distcache.load(tmp_path, after, [dense]) == (8, {})
    train(after, second, lookahead(batches()[8:], second), dense)
    assert_same(weights_of(after), weights_of(model))
    assert second.tables.steps == 20


@pytest.mark.usefixtures("kind")
def test_its_rate_is_that_of_all_who_have_it() -> None:
    ebc = given("sgd", "applied")
    model, weight = dlrm(ebc), views(ebc)["t1"].weight
    train(model, ebc, batches(1))
    own = weight._in_backward_optimizers[0]
    assert own.param_groups is not ebc.optimizer.param_groups
    own.param_groups[0]["lr"] = 0.0
    assert ebc.optimizer.param_groups[0]["lr"] == 0.0
    before = weights_of(ebc)
    train(model, ebc, batches(2))
    assert_same(weights_of(ebc), before)
    torch.optim.lr_scheduler.LambdaLR(ebc.optimizer, lambda step: 3.0)
    assert own.param_groups[0]["lr"] == pytest.approx(0.3) or own.param_groups[0]["lr"] == 0.0


@pytest.mark.usefixtures("kind")
def test_micro_batches_are_applied_after_the_last() -> None:
    ebc, twin = given("adagrad", "class"), fused(optimizer=GIVEN["adagrad"][2])
    for own in (ebc, twin):
        model = Pooled(own)
        for at, batch in enumerate(lookahead(batches(6), own, accumulate=3)):
            (loss_of(model, batch) / 3).backward()
            assert own is twin or own.tables.steps == (at + 1) // 3
            if at % 3 == 2:
                own.step()
    assert_same(weights_of(ebc), weights_of(twin))


@pytest.mark.usefixtures("kind")
def test_what_rows_do_not_have_is_refused() -> None:
    for kind, settings, message in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, r"momentum=0.9 .*leave it at 0"),
        (torch.optim.SGD, {"eps": 0.1}, r"SGD: eps=0.1 is nothing that rows have: leave it out"),
        (torch.optim.Adam, {"amsgrad": True}, "amsgrad=True .*leave it at False"),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, "lr_decay=0.1 .*leave it at 0"),
        (torch.optim.RMSprop, {}, "optimizer RMSprop: rows have those of distcache.optim, and of"),
        (optimizers.LAMB, {}, "optimizer LAMB: rows have"),
    ):
        with pytest.raises(ConfigError, match=message):
            fused(optimizer_type=kind, optimizer_kwargs=settings)
    with pytest.raises(ConfigError, match="optimizer_kwargs is given without optimizer_type"):
        fused(optimizer_kwargs={"lr": 0.1})
    with pytest.raises(ConfigError, match="give optimizer= or optimizer_type=, not both"):
        fused(optimizer=optim.SGD(0.1), optimizer_type=torch.optim.SGD)
    data, sgd = batches(1), partial(in_backward, torch.optim.SGD)
    ebc = fused()
    sgd([views(ebc)["t0"].weight], {"lr": 0.1})
    with pytest.raises(ConfigError, match=r"no optimizer was given.* weights of all its tables"):
        loss_of(dlrm(ebc), data[0]).backward()
    sgd([views(ebc)[f"t{i}"].weight for i in (1, 2, 3)], {"lr": 0.2})
    with pytest.raises(ConfigError, match=r"'t0' was given .*'lr': 0.1.* and 't1' .*'lr': 0.2"):
        loss_of(dlrm(ebc), data[0])
    ebc = given("sgd", "applied")
    sgd([views(ebc)["t1"].weight], {"lr": 0.1})
    with pytest.raises(ConfigError, match="table 't1' was given 2 optimizers in backward"):
        loss_of(dlrm(ebc), data[0])
    for how in ({"optimizer": optim.Adam(0.1)}, {"optimizer_type": torch.optim.Adam}):
        for some in (4, 1):
            ebc = fused(**how)
            sgd([views(ebc)[f"t{i}"].weight for i in range(some)], {"lr": 0.1})
            with pytest.raises(ConfigError, match=r"given SGD in backward, but have Adam\("):
                loss_of(dlrm(ebc), data[0])
    ebc = given("sgd", "applied")
    loss_of(dlrm(ebc), data[0])
    sgd(views(ebc).parameters(), {"lr": 0.2})
    with pytest.raises(ConfigError, match="table 't0' was given 2 optimizers in backward"):
        loss_of(dlrm(ebc), data[0])
    ebc = given("sgd", "class")
    model = dlrm(ebc)
    loss_of(model, data[0]).backward()
    with pytest.raises(ConfigError, match="rows were updated inside backward, before their norm"):
        distcache.clip_grad_norm_(model.parameters(), ebc, 1.0)


@pytest.mark.usefixtures("kind")
def test_torchrecs_filter_tells_which_tables_have_an_optimizer() -> None:
    ebc, keys = fused(), [f"{key_of_tables()}.t{i}.weight" for i in range(4)]
    assert list(dict(ebc.named_parameters())) == ["trainable"]
    in_backward(torch.optim.SGD, views(ebc)["t1"].parameters(), {"lr": 0.1})
    for include, wanted in ((True, keys[1:2]), (False, keys[:1] + keys[2:])):
        found = dict(in_backward_optimizer_filter(ebc.named_parameters("a"), include))
        assert list(found) == [f"a.{key}" for key in wanted]
    weights = ebc.state_dict()
    assert all(torch.equal(own, weights[key]) for key, own in ebc.named_parameters())
    around = nn.Sequential(ebc)
    assert list(dict(around.named_parameters())) == ["0.trainable"]
    assert [own.numel() for own in (*ebc.parameters(), *around.parameters())] == [0, 0]
    assert not list(ebc.named_parameters(recurse=False)) + list(ebc.parameters(recurse=False))
    assert list(dict(copy.deepcopy(ebc).named_parameters())) == ["trainable"]
    ebc.requires_grad_(False)
    assert len(ebc.frozen) == 4


def test_names_and_defaults_are_theirs() -> None:
    fbgemm = {"learning_rate": 0.3, "beta1": 0.5, "eps": 1e-4}
    assert convert_optimizer(torch.optim.Adam, fbgemm) == optim.Adam(0.3, (0.5, 0.999), 1e-4)
    assert convert_optimizer(optimizers.Adagrad, {}) == optim.Adagrad(0.01, 1e-10)
    assert convert_optimizer(torch.optim.SGD, {"foreach": True, "momentum": 0}) == optim.SGD(1e-3)
    decays = {"lr": 0.1, "weight_decay": 0.5}
    assert convert_optimizer(torch.optim.SGD, decays) == optim.SGD(0.1, weight_decay=0.5)
    assert convert_optimizer(RowWiseAdagrad, {"lr": torch.tensor(0.5)}) == optim.RowWiseAdagrad(
        0.5, 1e-10
    )


# -----------------------------------------------------------------------------
# Inside TorchRec's optimizers.


def combined(ebc, model) -> CombinedOptimizer:
    """Rows with a warm-up, and the dense part."""
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=6, value=0.1)]
    dense = {n: p for n, p in model.named_parameters() if p.numel()}
    plain = KeyedOptimizerWrapper(dense, lambda own: torch.optim.Adagrad(own, lr=0.05))
    return CombinedOptimizer([("rows", WarmupOptimizer(ebc.optimizer, stages, lr=0.1)), plain])


@pytest.mark.usefixtures("kind")
def test_it_is_one_of_torchrecs_combined_optimizers_and_resumes_exactly() -> None:
    def make():
        ebc = cached("adam", mixed_configs(), rows=700)
        model = Pooled(ebc)
        return ebc, model, combined(ebc, model)

    def run(model, both, data) -> list[float]:
        rates = []
        for batch in data:
            both.zero_grad()
            loss_of(model, batch).backward()
            both.step()
            rates.append(both.param_groups[0]["lr"])
        return rates

    data = batches(12, tables=mixed_configs())
    ebc, model, both = make()
    rates = run(model, both, data)
    assert rates[0] < rates[4] < rates[6] == pytest.approx(0.1)
    first, begun, half = make()
    assert run(begun, half, data[:5]) == rates[:5]
    tables, state = copy.deepcopy(begun.state_dict()), copy.deepcopy(half.state_dict())
    keys = {f"rows.{key_of_tables()}.t{i}.weight" for i in range(4)}
    assert keys | {"rows.__warmup"} <= set(state["state"])
    assert set(state["state"][min(keys)]) == {"step", "exp_avg", "exp_avg_sq"}
    second, after, rest = make()
    run(after, rest, data[7:8])  # state of its own, in the cache, that the load replaces
    after.load_state_dict(tables)
    mark = second.mark()
    rest.load_state_dict(state)
    changed = second.changed_since(mark)
    assert all(len(changed[own.name]) == own.num_embeddings for own in mixed_configs())
    assert run(after, rest, data[5:]) == rates[5:]
    assert_same(weights_of(after), weights_of(model))
    assert second.tables.counts == ebc.tables.counts == [12] * 4
    own = first.optimizer.state_dict()
    assert set(own["state"]) == {"t0", "t1", "t2", "t3", "__warmup"}
    third, _, warm = make()
    third.optimizer.load_state_dict(copy.deepcopy(own))
    warm.post_load_state_dict()
    assert third.tables.counts == [5] * 4 and warm.param_groups[0]["lr"] == rates[4]


@pytest.mark.usefixtures("kind")
def test_a_combined_optimizer_takes_nothing_inside_a_step_nor_of_another_shape() -> None:
    found = {}
    for name in ("adagrad", "rowwise_adagrad", "sgd"):
        ebc = cached(name)
        model = dlrm(ebc)
        both = combined(ebc, model)
        loss_of(model, batches(1)[0]).backward()
        both.step()
        found[name] = ebc, model, both, copy.deepcopy(both.state_dict())
    for name, (ebc, model, both, state) in found.items():
        loss_of(model, batches(1)[0]).backward()
        ebc.tables.counts = [7] * len(ebc.tables.counts)
        with pytest.raises(PlanError, match="row gradients wait"):
            both.load_state_dict(state)
        assert set(ebc.tables.counts) == {7}, name  # nothing was taken
        both.zero_grad()
    *_, both, _ = found["adagrad"]
    with pytest.raises(ConfigError, match=r"state of \(\d+, 1\), but Adagrad keeps"):
        both.load_state_dict(found["rowwise_adagrad"][3])  # would fill a row with one value


@pytest.mark.usefixtures("kind")
def test_a_wrapper_with_its_parameters_by_name_steps_it() -> None:
    ebc, twin = cached("adagrad"), cached("adagrad")
    by_name = KeyedOptimizerWrapper(ebc.optimizer.params, lambda params: ebc.optimizer)
    for own, optimizer in ((ebc, by_name), (twin, twin.optimizer)):
        model = dlrm(own)
        for batch in lookahead(batches(4), own):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    assert_same(weights_of(ebc), weights_of(twin))
    found = by_name.state_dict()["state"]
    assert_same(
        {name.split(".")[1]: state["sum"] for name, state in found.items()},
        {name: state["sum"] for name, state in twin.optimizer.state_dict()["state"].items()},
    )


# -----------------------------------------------------------------------------
# Several ranks.


@job
def on_ranks(rank: int, size: int, how: str) -> dict:
    """Rank 0's draws are the tables', whatever the others' generators; under DDP."""
    torch.manual_seed(rank)
    kind, settings, own = GIVEN["adagrad"]
    ebc = fused(**({} if how == "applied" else {"optimizer": own}), timeout_s=60)
    torch.manual_seed(10 + rank)
    nn.init.uniform_(views(ebc)["t0"].weight)
    drawn = torch.rand(4)
    torch.manual_seed(10 + rank)
    nn.init.uniform_(torch.empty(400, 8))
    assert torch.equal(drawn, torch.rand(4))  # generators go on as if each rank had a table
    torch.manual_seed(10 + rank)
    columns, plain = views(ebc)["t0"].weight.data[:, :3], torch.zeros(60, 8)
    columns.normal_()
    drawn = torch.rand(4)
    torch.manual_seed(10 + rank)
    torch.empty(400, 8)[:, :3].normal_()  # laid out otherwise it would draw others
    assert torch.equal(drawn, torch.rand(4))
    torch.manual_seed(10)
    nn.init.uniform_(views(ebc)["t0"].weight)
    torch._foreach_copy_([views(ebc)["t1"].weight.data, plain], [torch.ones(60, 8)] * 2)
    assert plain.all() and views(ebc)["t1"].weight.all()
    start = weights_of(ebc)
    if how == "applied":
        in_backward(kind, views(ebc).parameters(), settings)
    model = DistributedDataParallel(dlrm(ebc))
    assert not [name for name, _ in model.named_parameters() if key_of_tables() in name]
    dense = torch.optim.SGD(model.parameters(), 0.1)
    for at, batch in enumerate(lookahead(mine(rank, size, 12), ebc)):
        dense.zero_grad()
        loss_of(model, batch).backward()
        ebc.step()
        dense.step()
        if at == 6:
            with torch.no_grad():
                views(ebc)["t1"].weight[5:40] *= 0.5
    found = {f"start {key}": value for key, value in start.items()} | weights_of(ebc)
    ebc.close()
    return found


@job
def alone(rank: int, size: int) -> dict:
    """Rank 0 alone writes a weight, is told so, and nothing has changed."""
    from distcache.embedding import step

    step.ALONE_S = 0.3
    ebc = fused(optimizer=optim.SGD(0.1), timeout_s=60)
    weight, before = views(ebc)["t1"].weight, weights_of(ebc)
    if rank == 0:
        with pytest.raises(PeerError, match="asked for writing a table's weight, and rank 1 did"):
            weight.data.zero_()
    dist.barrier()
    assert_same(weights_of(ebc), before)
    step.ALONE_S = 60.0
    weight.data.zero_()
    found = weights_of(ebc)
    ebc.close()
    return found


@pytest.mark.usefixtures("kind")
def test_ranks_write_and_update_as_one() -> None:
    runs = [ranks(on_ranks, how, size=2) for how in ("applied", "step")]
    want = runs[1][0]
    for found in (*runs[0], runs[1][1]):
        assert_same(found, want)
    torch.manual_seed(10)
    weight = nn.init.uniform_(torch.empty(400, 8))
    assert torch.equal(want[f"start {key_of_tables()}.t0.weight"], weight)
    assert not torch.equal(want[f"{key_of_tables()}.t0.weight"], weight)


def test_a_rank_alone_writes_nothing() -> None:
    for found in ranks(alone, size=2):
        assert (
            not found["embedding_bags.t1.weight"].any() and found["embedding_bags.t0.weight"].any()
        )
