"""A collection is made as TorchRec's is: arguments, initial rows, 'meta' and a device later, no
tables, no optimizer; its tables as parameters that are read and written at any time.
"""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from ebc_cases import (
    Pooled,
    assert_same,
    batches,
    cached,
    configs,
    draw,
    key_of_tables,
    loss_of,
    made,
    mixed_configs,
    train,
    values_of,
    weights_of,
    written_back,
)
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor

import distcache
from distcache import CachedEmbeddingBagCollection, CachedEmbeddingCollection, lookahead
from distcache.embedding import weights
from distcache.errors import ConfigError, PlanError

PAIRS = {
    "bags": (EmbeddingBagCollection, CachedEmbeddingBagCollection),
    "sequences": (EmbeddingCollection, CachedEmbeddingCollection),
}


def views(ebc) -> nn.ModuleDict:
    """The tables of a collection as a user reaches them."""
    return getattr(ebc, key_of_tables())


def test_arguments_stand_where_torchrecs_do(kind) -> None:
    theirs, ours = (list(inspect.signature(c).parameters.values()) for c in PAIRS[kind])
    for one, other in zip(theirs, ours, strict=False):
        assert (one.name, one.default, one.kind) == (other.name, other.default, other.kind)
    assert all(own.kind is not own.POSITIONAL_OR_KEYWORD for own in ours[len(theirs) :])
    tables = configs()
    ours = PAIRS[kind][1](tables)
    assert ours.embedding_configs() == tables
    if kind == "bags":
        assert ours.embedding_bag_configs() == tables and not ours.is_weighted()
    else:
        assert PAIRS[kind][1](tables, "cpu", True, True).use_gather_select()
        assert ours.use_gather_select_per_sharding() is None and ours.embedding_dim() == 8


# -----------------------------------------------------------------------------
# Initial rows.

INITS = {
    "default": {},
    "range": {"weight_init_min": 1.0, "weight_init_max": 2.0},
    "function": {"init_fn": partial(nn.init.normal_, std=3.0)},
    "of what is there": {"init_fn": lambda weight: weight.abs_().mul_(2)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("init", INITS)
def test_initial_rows_and_the_generator_are_torchrecs(kind, init, dtype) -> None:
    theirs, ours = PAIRS[kind]
    torch.manual_seed(7)
    with torch.no_grad():
        plain = theirs(configs(**INITS[init]))
    after = torch.rand(3)
    torch.manual_seed(7)
    ebc = ours(configs(**INITS[init]), dtype=dtype)
    assert torch.equal(torch.rand(3), after)  # and before the tables are made
    want = {k: value.to(dtype, copy=True) for k, value in plain.state_dict().items()}
    for at in range(2):  # before they are made, and afterwards
        torch.manual_seed(8)
        with torch.no_grad():
            plain.reset_parameters()
        after = torch.rand(3)
        torch.manual_seed(8)
        ebc.reset_parameters()
        if dtype is torch.float32 or not at:  # float64 draws other numbers
            assert torch.equal(torch.rand(3), after)
            assert_same(weights_of(ebc), {k: v.to(dtype) for k, v in plain.state_dict().items()})
    torch.manual_seed(7)
    assert_same(weights_of(ours(configs(**INITS[init]), dtype=dtype)), want)


def test_beyond_a_size_rows_are_drawn_by_seed(kind, monkeypatch, caplog) -> None:
    numbers = sum(table.num_embeddings * 8 for table in configs())
    assert weights.DRAWN_BYTES == 256 << 20
    seeded, make = weights_of(cached(seed=0)), partial(cached, seed=None)
    for limit, by_seed in ((numbers * 4, False), (numbers * 4 - 1, True)):
        monkeypatch.setattr(weights, "DRAWN_BYTES", limit)
        torch.manual_seed(1)
        before = torch.get_rng_state()
        with caplog.at_level(logging.INFO):
            found = weights_of(make())
        assert torch.equal(torch.get_rng_state(), before) == by_seed
        said = [r for r in caplog.records if "initial rows of the Cached" in r.getMessage()]
        assert len(said) == by_seed
        key = f"{key_of_tables()}.t0.weight"
        assert torch.equal(found[key], seeded[key]) == by_seed
        torch.manual_seed(1)
        drawn = weights_of(make(init="torch"))
        assert not torch.equal(drawn[key], seeded[key])
        assert_same(weights_of(make(init="seed")), seeded)
    with pytest.raises(ConfigError, match=r"seed=3 with init='torch'.* call torch.manual_seed"):
        cached(init="torch", seed=3)


# -----------------------------------------------------------------------------
# Where it lies.


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("how", ["to_empty", "to", "context", "flag"])
def test_a_collection_on_meta_gets_its_device_later(how) -> None:
    device = None if how == "context" else "meta"
    with torch.device("meta" if how == "context" else "cpu"):
        ebc = cached("sgd", mixed_configs(), device=device, seed=None)
    assert ebc.device == torch.device("meta")
    found = ebc.state_dict()
    assert all(value.is_meta for value in found.values()) and len(found) == 4
    assert views(ebc)["t1"].weight.is_meta and views(ebc)["t1"].weight.shape == (60, 8)
    on_meta = KeyedJaggedTensor(["f0", "f1", "g", "f2", "f3"], torch.zeros(5, dtype=torch.int64),
                                lengths=torch.ones(5, dtype=torch.int64)).to("meta")  # fmt: skip
    if key_of_tables() == "embedding_bags":
        found = ebc(on_meta).values()
        assert found.is_meta and found.shape == (1, 40)
    with pytest.raises(ConfigError, match="lies on 'meta', without rows: give it a device first"):
        ebc.flush()
    views(ebc)["t2"].weight.requires_grad_(False)
    if how == "to":
        ebc.to("cpu")
    elif how == "flag":  # as DistributedModelParallel materialises a model
        ebc._parameters["trainable"] = nn.Parameter(torch.empty(0))
    else:
        ebc.to_empty(device="cpu")
    torch.manual_seed(3)
    ebc.reset_parameters()
    assert ebc.device == torch.device("cpu") and ebc.frozen == ("t2",)
    torch.manual_seed(3)
    for table in mixed_configs():
        weight = torch.empty(table.num_embeddings, table.embedding_dim)
        table.init_fn(weight)
        assert torch.equal(views(ebc)[table.name].weight, weight)
    before, model = weights_of(ebc), Pooled(ebc)
    train(model, ebc, lookahead(batches(3, tables=mixed_configs()), ebc))
    after = weights_of(ebc)
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed == {key for key in after if ".t2." not in key}


@pytest.mark.usefixtures("kind")
def test_a_device_may_be_told_until_the_first_use() -> None:
    ebc = cached()
    assert nn.ModuleList([ebc]).to("cpu") and ebc.device == torch.device("cpu")
    ebc.to("meta")
    assert ebc.device == torch.device("meta")
    ebc.to_empty(device="cpu")
    with pytest.raises(ConfigError, match=r"in torch.float32 and cannot become cpu, torch.float16"):
        ebc.half()
    ebc.flush()  # the first use
    with pytest.raises(ConfigError, match=r"cannot become meta.* move it before its first use"):
        ebc.to("meta")
    ebc.to_empty(device="cpu")
    values_of(ebc(draw(1).sparse_features))


@pytest.mark.usefixtures("kind")
def test_a_collection_without_tables(tmp_path) -> None:
    ebc = cached(tables=[])
    assert ebc.embedding_configs() == [] and not views(ebc) and ebc.state_dict() == {}
    ebc.load_state_dict({})
    ebc.optimizer.load_state_dict(ebc.optimizer.state_dict())
    ebc.step()
    ebc.optimizer.zero_grad()
    ebc.reset_parameters()
    with pytest.raises(ConfigError, match=r"has no tables \(tables=\[\]\)"):
        ebc(draw(0).sparse_features)
    other = cached()  # which does not wait for the one without
    model = nn.ModuleList([ebc, other])
    distcache.save(tmp_path / "step_1", model, step=1)
    assert distcache.load(tmp_path, model) == (1, {})


# -----------------------------------------------------------------------------
# No optimizer.


def test_without_an_optimizer_it_evaluates_and_training_is_told_the_way_out(kind) -> None:
    ours = PAIRS[kind][1]
    torch.manual_seed(2)
    ebc, plain = ours(configs(), rows=200), cached(init="torch")
    plain.load_state_dict(ebc.state_dict())
    ids = draw(1).sparse_features
    with torch.no_grad():
        want = values_of(plain(ids))
        assert torch.equal(values_of(ebc(ids)), want)
    assert torch.equal(values_of(ebc.eval()(ids)), want)
    ebc.train()
    for source in ([ids, ids], lookahead([ids, ids], ebc)):
        for batch in source:  # a forward alone trains nothing
            pooled = values_of(ebc(batch))
            assert torch.equal(pooled, want)
            with pytest.raises(
                ConfigError, match=r"no optimizer was given.* optimizer=distcache.optim"
            ):
                pooled.sum().backward()
    assert ebc.optimizer.state_dict()["state"]["t0"] == {"step": torch.tensor(0)}
    ebc.load_state_dict(ebc.state_dict())
    ebc.requires_grad_(False)
    assert torch.equal(values_of(ebc(ids)), want)  # nothing of it trains
    ebc.close()


# -----------------------------------------------------------------------------
# Tables as parameters.


def half(weight: Tensor) -> None:
    """A slice under no_grad."""
    with torch.no_grad():
        weight[3:40] *= 0.5


def view_kept(weight: Tensor) -> Callable[[Tensor], None]:
    """Writes through a view that was made when gradients are recorded, before training."""
    view = weight[2:30, 1:3]

    def write(weight: Tensor) -> None:
        with torch.no_grad():
            view.fill_(0.25)

    return write


WRITES = {
    "init": lambda weight: nn.init.uniform_(weight, -0.1, 0.1),
    "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.1),
    "orthogonal": nn.init.orthogonal_,
    "data": lambda weight: weight.data.mul_(0.5),
    "data set": lambda weight: setattr(weight, "data", torch.full(weight.shape, 0.5)),
    "halves": lambda weight: weight.data.fill_(0.5),
    "slice": half,
    "ids": lambda weight: weight.data.__setitem__(torch.tensor([0, 5]), 1.0),
    "rows": lambda weight: [row.mul_(0.5) for row in weight.data],
    "columns": lambda weight: weight.data[:, :3].normal_(),
    "out": lambda weight: torch.add(weight.data, 1.0, out=weight.data),
    "module": lambda weight: nn.Module.load_state_dict(
        Weights(weight), {"weight": torch.ones(weight.shape)}
    ),
}


class Weights(nn.Module):
    """One parameter, as some code of a user's takes it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("write", [*WRITES, "kept view"])
@pytest.mark.parametrize("ahead", [True, False])
def test_what_is_written_to_a_weight_is_what_the_next_step_reads(write, ahead) -> None:
    """As if the tables had been saved, changed and loaded, with Adam's state where it was."""

    def run(through: bool) -> dict[str, Tensor]:
        ebc, model = made("adam")
        weight = views(ebc)["t1"].weight if through else torch.empty(60, 8)
        change = WRITES[write] if write in WRITES else view_kept(weight)
        if not through and write == "data set":  # which leaves the tensor that it was given
            change = WRITES["halves"]
        torch.manual_seed(11)

        def stream():
            for at, batch in enumerate(lookahead(batches(), ebc) if ahead else batches()):
                if at in (5, 6, 11) and through:
                    change(weight)
                elif at in (5, 6, 11):
                    tables = weights_of(ebc)
                    weight.copy_(tables[f"{key_of_tables()}.t1.weight"])
                    change(weight if write == "kept view" else nn.Parameter(weight))
                    tables[f"{key_of_tables()}.t1.weight"] = weight
                    ebc.load_state_dict(tables)
                yield batch

        losses = train(model, ebc, stream())
        assert written_back(ebc.tables) > 0
        return weights_of(model) | {"losses": torch.tensor(losses), "drawn": torch.rand(1)}

    assert_same(run(True), run(False))


@pytest.mark.usefixtures("kind")
def test_tables_of_several_widths_are_written_at_once() -> None:
    ebc = cached("adam", mixed_configs(), rows=700)
    model, names = Pooled(ebc), [f"t{i}" for i in range(4)]
    train(model, ebc, batches(2, tables=mixed_configs()))
    before, mark = weights_of(ebc), ebc.mark()
    torch._foreach_mul_([views(ebc)[name].weight.data for name in names], 0.5)
    assert all(len(ids) for ids in ebc.changed_since(mark).values())
    train(model, ebc, [])
    assert_same(weights_of(ebc), {key: value * 0.5 for key, value in before.items()})
    mark = ebc.mark()
    views(ebc)["t1"].weight.data.copy_(torch.zeros(60, 8))
    found = ebc.changed_since(mark)
    assert [name for name in names if len(found[name])] == ["t1"]
    train(model, ebc, batches(2, tables=mixed_configs()))


@pytest.mark.usefixtures("kind")
def test_a_weight_reads_what_the_last_step_left() -> None:
    ebc, model = made()
    weight = views(ebc)["t0"].weight
    assert isinstance(weight, nn.Parameter) and weight.is_leaf and weight.requires_grad
    assert views(ebc)["t0"].weight is weight and weight.device == torch.device("cpu")
    train(model, ebc, lookahead(batches(4), ebc))
    rows = weight[:50]
    for read in (
        lambda: weight.detach().clone(),
        lambda: torch.tensor(weight.tolist()),
        lambda: torch.from_numpy(weight.detach().numpy().copy()),
        lambda: copy.deepcopy(weight),
        lambda: pickle.loads(pickle.dumps(weight)),
        lambda: nn.functional.embedding(torch.arange(400), weight).detach(),
        lambda: torch.cat([rows, weight[50:]]).detach(),
    ):
        train(model, ebc, batches(1))
        found = read()  # before anything else flushes
        assert type(found) in (Tensor, nn.Parameter)
        assert torch.equal(found, ebc.state_dict()[f"{key_of_tables()}.t0.weight"])
    with pytest.raises(ValueError, match="read-only"):
        weight.detach().numpy()[0] = 1.0
    assert repr(weight).startswith("Parameter")
    with pytest.raises(PlanError, match="is not called: look rows up through the collection"):
        views(ebc)["t0"](torch.arange(3))


@pytest.mark.usefixtures("kind")
def test_the_first_use_may_be_in_inference_mode() -> None:
    (ebc, model), (twin, other) = made("adam"), made("adam")
    with torch.inference_mode():
        weight = views(ebc)["t1"].weight
        weight.fill_(0.25)
        state = next(iter(ebc.optimizer.state.values()))["exp_avg"].state_dict()
        loss_of(model, draw(3))
    views(twin)["t1"].weight.data.fill_(0.25)
    for own, of in ((ebc, model), (twin, other)):
        train(of, own, lookahead(batches(4), own))
        with torch.inference_mode():
            views(own)["t1"].weight[:9].mul_(0.5)
        train(of, own, batches(2))
    assert_same(weights_of(model), weights_of(other))
    assert not state.is_inference() and state.any()


@pytest.mark.usefixtures("kind")
def test_tables_are_no_parameters_of_the_model() -> None:
    ebc, model = made()
    assert len(views(ebc)) == 4 and len(list(views(ebc).parameters())) == 4
    assert [name for name, _ in ebc.named_parameters()] == ["trainable"]
    assert [name for name, _ in ebc.named_modules()] == [""] and not list(ebc.buffers())
    assert not [name for name, _ in model.named_parameters() if key_of_tables() in name]
    assert set(ebc.state_dict()) == {f"{key_of_tables()}.t{i}.weight" for i in range(4)}


@pytest.mark.usefixtures("kind")
def test_what_a_weight_does_not_take_is_refused() -> None:
    ebc, model = made()
    weight, data = views(ebc)["t1"].weight, batches(3)
    with pytest.raises(PlanError, match="a gradient reached the weights of a whole table"):
        weight.square().sum().backward()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        weight.fill_(0.0)
    before = weights_of(ebc)
    loss_of(model, data[0]).backward()
    with pytest.raises(PlanError, match=r"row gradients wait: call ebc.step.* before writing"):
        weight.data.zero_()
    assert_same(weights_of(ebc), before)
    ebc.step()
    with torch._C.DisableTorchFunctionSubclass():
        weight.data.detach().add_(0.0)  # on .data, which counts for itself
        weight.detach().add_(1.0)
    with pytest.raises(PlanError, match=r"weight of table 't1' was written past torch's functions"):
        loss_of(model, data[1])
    ebc.load_state_dict(before)
    loss_of(model, data[1]).backward()
    ebc.step()


@pytest.mark.usefixtures("kind")
def test_a_weight_that_wants_no_gradient_freezes_its_table() -> None:
    ebc, model = made()
    views(ebc)["t1"].requires_grad_(False)
    twin, other = made()
    twin.freeze("t1")
    for own, of in ((ebc, model), (twin, other)):
        assert own.frozen == ("t1",)
        train(of, own, lookahead(batches(5), own))
    assert_same(weights_of(model), weights_of(other))
    views(ebc)["t1"].weight.requires_grad = True
    assert ebc.frozen == ()
