"""Tables of the collections: sizes, names, loading, attributes, optimizer state as a mapping."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from ebc_cases import job, ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

import distcache
from distcache.errors import ConfigError, PlanError

SGD = distcache.optim.SGD(lr=0.5)


def collection(name: str = "t", rows: object = 9, width: object = 4, **settings):
    config = EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=width, feature_names=["f"]
    )
    settings = {"device": "cpu", "optimizer": SGD} | settings
    return distcache.CachedEmbeddingBagCollection([config], **settings)


def ids(*values: int) -> KeyedJaggedTensor:
    lengths = torch.ones(len(values), dtype=torch.int64)
    return KeyedJaggedTensor(["f"], torch.tensor(values), lengths=lengths)


# -----------------------------------------------------------------------------
# Sizes.


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, torch.tensor])
def test_every_integer_type_is_a_size(kind) -> None:
    embedding = distcache.CachedEmbedding(
        kind(9), kind(4), padding_idx=kind(2), device="cpu", optimizer=SGD, rows=np.int64(5)
    )
    assert embedding(torch.tensor([0, 1])).shape == (2, 4)
    assert embedding.weight.shape == (9, 4)
    embedding.close()
    ebc = collection(rows=kind(9), width=kind(4))
    assert ebc.embedding_bags["t"].weight.shape == (9, 4)
    assert type(ebc.embedding_bag_configs()[0].num_embeddings) is int
    ebc.close()
    spec = distcache.TableSpec("t", rows=kind(9), dim=kind(4), features=("f",))
    assert (type(spec.rows), type(spec.dim)) == (int, int)


@pytest.mark.parametrize("size", [9.0, "9", None])
def test_other_sizes_are_refused_by_name(size) -> None:
    with pytest.raises(ConfigError, match=r"table 't': rows=.* must be a whole number"):
        distcache.TableSpec("t", rows=size, dim=4, features=("f",))
    with pytest.raises(ConfigError, match=r"table 'embedding': num_embeddings=.* whole number"):
        distcache.CachedEmbedding(size, 4, device="cpu")


def test_an_attribute_error_inside_a_property_is_not_hidden() -> None:
    class Broken(distcache.CachedEmbedding):
        @property
        def broken(self) -> int:
            return self.padding_idx.missing_name

    embedding = Broken(9, 4, device="cpu", optimizer=SGD)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'missing_name'"):
        embedding.broken  # noqa: B018
    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'absent'"):
        embedding.absent  # noqa: B018
    embedding.close()


# -----------------------------------------------------------------------------
# Names.

NAMES = ["items", "values", "type", "training", "forward", "pop", "a.b", "weight", "keys"]


@pytest.mark.parametrize("name", NAMES)
def test_a_table_may_be_named_as_a_method(name: str) -> None:
    embedding = distcache.CachedEmbedding(9, 4, name=name, device="cpu", optimizer=SGD)
    rows = embedding(torch.arange(9)).detach()
    assert torch.equal(embedding.weight.detach().as_subclass(torch.Tensor), rows)
    embedding.close()
    ebc = collection(name)
    weight = ebc.embedding_bags[name].weight.detach().as_subclass(torch.Tensor)
    assert torch.equal(ebc(ids(*range(9))).values(), weight)
    assert list(ebc.embedding_bags) == [name]
    ebc.close()
    config = EmbeddingConfig(name=name, num_embeddings=9, embedding_dim=4, feature_names=["f"])
    sequences = distcache.CachedEmbeddingCollection([config], device="cpu", optimizer=SGD)
    assert sequences.embeddings[name].weight.shape == (9, 4)
    sequences.close()


# -----------------------------------------------------------------------------
# Loading.


def test_load_table_writes_store_and_cached_rows() -> None:
    ebc = collection()
    start = torch.arange(36.0).view(9, 4)
    ebc.load_table("t", start)  # before the first step
    assert torch.equal(ebc(ids(1, 8)).values(), start[[1, 8]])
    ebc(ids(1, 8)).values().sum().backward()
    with pytest.raises(PlanError, match="row gradients wait"):
        ebc.load_table("t", start)
    ebc.step()
    expected = start.clone()
    expected[[1, 8]] -= 0.5
    assert torch.equal(ebc.state_dict()["embedding_bags.t.weight"], expected)
    expected[2:5] = -1.0
    ebc.load_table("t", torch.full((3, 4), -1.0), rows=slice(2, 5))
    assert torch.equal(ebc(ids(1, 2, 4, 5)).values(), expected[[1, 2, 4, 5]])
    ebc.load_table("t", 2 * start)
    assert torch.equal(ebc(ids(1, 2, 8)).values(), 2 * start[[1, 2, 8]])
    ebc.close()


def test_load_table_refuses_by_name() -> None:
    ebc = collection()
    with pytest.raises(ConfigError, match="no table is named 'u': there are t"):
        ebc.load_table("u", torch.zeros(9, 4))
    with pytest.raises(ConfigError, match=r"\[8, 4\] for 9 rows of width 4: .* shape \[9, 4\]"):
        ebc.load_table("t", torch.zeros(8, 4))
    with pytest.raises(ConfigError, match="for 2 rows of width 4"):
        ebc.load_table("t", torch.zeros(3, 4), rows=slice(7, 12))
    before = ebc.state_dict()["embedding_bags.t.weight"].clone()
    for rows in (5, [1, 2], torch.tensor([1, 2]), slice("a", 3), slice(0, 9, 0)):
        with pytest.raises(ConfigError, match=r"load_table\('t'\): .* rows=slice\(first, end\)"):
            ebc.load_table("t", torch.ones(2, 4), rows=rows)
    for values, rows in (
        (torch.ones(9, 4), slice(None, None, -1)),
        (torch.ones(9, 4, dtype=torch.complex64), None),
        (torch.ones(9, 4, device="meta"), None),
    ):
        with pytest.raises(ConfigError, match="give an ascending slice and real numbers"):
            ebc.load_table("t", values, rows=rows)
    with pytest.raises(ConfigError, match=r"give a tensor .* and a str"):
        ebc.load_table("t", "weights")
    ebc(ids(1)).values().sum().backward()
    with pytest.raises(PlanError, match="row gradients wait"):
        ebc.load_table("t", torch.ones(2, 4), rows=slice(0, 2))
    ebc.optimizer.zero_grad()
    assert torch.equal(ebc.state_dict()["embedding_bags.t.weight"], before)
    ebc.close()


@job
def load_on_ranks(rank: int, size: int, placement: dict) -> dict:
    """Tables before, between and after steps of two ranks."""
    ebc = collection(timeout_s=60, **placement)
    start = torch.arange(36.0).view(9, 4)
    ebc.load_table("t", start)
    ebc(ids(rank, 8)).values().sum().backward()
    ebc.step()
    rows = ebc(ids(rank, 8)).values()
    assert not torch.equal(rows, start[[rank, 8]])
    ebc.load_table("t", torch.full((2, 4), -1.0), rows=slice(7, 9))
    rows = ebc(ids(7, 8)).values()
    assert torch.equal(rows, torch.full((2, 4), -1.0))
    ebc.optimizer.zero_grad()
    ebc.load_table("t", start)
    rows = ebc(ids(rank, 8)).values()
    assert torch.equal(rows, start[[rank, 8]])
    ebc.optimizer.zero_grad()
    weights = ebc.state_dict()["embedding_bags.t.weight"].clone()
    ebc.close()
    return {"weights": weights}


@pytest.mark.parametrize(
    "placement",
    [{}, {"placement": "sharded"}, {"placement": "mixed", "replicated_rows": {"t": 3}}],
    ids=["replicated", "sharded", "mixed"],
)
def test_load_table_writes_the_copies_of_all_ranks(placement: dict) -> None:
    for result in ranks(load_on_ranks, placement, size=2):
        assert torch.equal(result["weights"], torch.arange(36.0).view(9, 4))


def test_assigning_a_weight_loads_the_table() -> None:
    embedding = distcache.CachedEmbedding(9, 4, device="cpu", optimizer=SGD)
    embedding.weight = nn.Parameter(torch.full((9, 4), 2.0))
    assert torch.equal(embedding(torch.tensor([3])), torch.full((1, 4), 2.0))
    with pytest.raises(ConfigError, match=r"shape \[3, 4\] for 9 rows"):
        embedding.weight = torch.zeros(3, 4)
    assert [name for name, _ in embedding.named_parameters()] == ["trainable"]
    embedding.close()
    ebc = collection()
    ebc.embedding_bags["t"].weight = nn.Parameter(torch.full((9, 4), 3.0))
    assert torch.equal(ebc(ids(3)).values(), torch.full((1, 4), 3.0))
    with pytest.raises(ConfigError, match=r"shape \[3, 4\]: the table has \[9, 4\]"):
        ebc.embedding_bags["t"].weight = torch.zeros(3, 4)
    ebc.close()


# -----------------------------------------------------------------------------
# Optimizer state.


def test_optimizer_state_can_be_built_anew_from_its_items() -> None:
    ebc = collection(optimizer=distcache.optim.Adagrad(lr=0.1))
    ebc(ids(1)).values().sum().backward()
    ebc.step()
    before = ebc.optimizer.state_dict()["state"]["t"]
    for parameter, state in ebc.optimizer.state.items():
        ebc.optimizer.state[parameter] = type(state)(OrderedDict(state))
    after = ebc.optimizer.state_dict()["state"]["t"]
    assert before.keys() == after.keys() and len(before) > 1
    assert all(torch.equal(before[name], after[name]) for name in before)
    ebc.close()


def test_state_by_parameter_names_is_refused_with_the_remedy() -> None:
    model = nn.ModuleDict({"ebc": collection(), "top": nn.Linear(4, 1)})
    dense = torch.optim.Adam(model["top"].parameters())
    for optimizer in (model["ebc"].optimizer, distcache.RowsAndDense(dense, model)):
        with pytest.raises(PlanError, match=r"distcache\.save and distcache\.load"):
            get_state_dict(model, optimizer)
        with pytest.raises(PlanError, match=r"distcache\.save and distcache\.load"):
            set_state_dict(
                model,
                optimizer,
                model_state_dict=model.state_dict(),
                optim_state_dict={"state": {}, "param_groups": []},
            )
    model["top"](model["ebc"](ids(1)).values()).sum().backward()
    dense.step()
    model["ebc"].step()
    weights, state = get_state_dict(model, dense)
    assert weights["ebc.embedding_bags.t.weight"].shape == (9, 4)
    assert "top.weight" in state["state"]
    set_state_dict(model, dense, model_state_dict=weights, optim_state_dict=state)
    model["ebc"].close()


# -----------------------------------------------------------------------------
# Loops over parameters.


def initialise(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.constant_(parameter.data, 0.5)


def penalise(module: nn.Module) -> None:
    sum((parameter**2).sum() for parameter in module.parameters())


def add_norms(module: nn.Module) -> None:
    sum(parameter.norm(2) for parameter in module.parameters())


def train(module: nn.Module) -> None:
    module(torch.arange(3)).sum().backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    torch.optim.AdamW(module.parameters()).step()
    module.step()
    module.zero_grad()
    module.requires_grad_(False).requires_grad_(True)
    torch.optim.swa_utils.AveragedModel(module).update_parameters(module)


@pytest.mark.parametrize("loops", [("initialise",), ("train", "penalise", "add_norms")])
def test_a_loop_over_parameters_that_misses_the_tables_warns_once(loops) -> None:
    program = f"""
import sys, warnings
sys.path[:0] = {sys.path!r}
import torch, distcache
from embedding import test_tables
embedding = distcache.CachedEmbedding(9, 4, device="cpu", optimizer=distcache.optim.SGD(lr=0.5))
messages = []
for loop in {[loop for loop in loops for _ in range(2)]}:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(test_tables, loop)(embedding)
    new = [str(warning.message) for warning in caught if "cached collection" in str(warning)]
    assert not new or loop != "train", new
    messages += new
assert len(messages) == 1, messages
assert all(word in messages[0] for word in ("init_fn", "load_table", "weight_decay")), messages
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_scheduler_that_cycles_momentum_is_refused() -> None:
    embedding = distcache.CachedEmbedding(9, 4, device="cpu", optimizer=SGD)
    dense = nn.Linear(4, 1)
    model = nn.ModuleList([embedding, dense])
    sgd = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
    optimizer = distcache.RowsAndDense(sgd, model)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
    dense(embedding(torch.arange(3))).sum().backward()
    with pytest.raises(ConfigError, match=r"has momentum=.* cycle_momentum=False"):
        optimizer.step()
    embedding.close()
