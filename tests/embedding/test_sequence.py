"""What sequence embeddings have of their own; the rest is tested as `kind=sequences`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ebc_cases import batches, configs, draw, mixed_configs, using
from ebc_models import Pooled, cached, plain_tables
from ebc_training import assert_close, assert_same, loss_of, weights_of
from torchrec import JaggedTensor, KeyedJaggedTensor

from distcache import lookahead
from distcache.errors import ConfigError


@pytest.fixture(autouse=True)
def sequences():
    torch.set_num_threads(1)
    using("sequences")
    yield
    using("bags")


def test_indices_come_along_where_they_are_wanted() -> None:
    ebc = cached(need_indices=True)
    assert ebc.need_indices() and ebc.embedding_dim() == 8
    ids = draw(3).sparse_features
    found = ebc(ids)
    for name, one in ids.to_dict().items():
        assert torch.equal(found[name].weights(), one.values())
        assert torch.equal(found[name].lengths(), one.lengths())


def test_ids_of_one_occurrence_train_with_torchrecs_bits() -> None:
    """No row is named twice, so there is no order of summation: SGD gives the very same bits."""
    tables = configs()[:1]
    ebc, own = cached("sgd", tables, rows=60), plain_tables(tables)
    own.load_state_dict(weights_of(ebc))
    rows = torch.optim.SGD(own.parameters(), lr=0.1)
    data = []
    for step in range(12):
        torch.manual_seed(step)
        lengths = torch.tensor([3, 0, 7, 1])
        data.append(KeyedJaggedTensor(["f0"], torch.randperm(400)[:11], lengths=lengths))
    for ids in lookahead(data, ebc):
        for found in (ebc(ids), own(ids)):
            found["f0"].values().square().sum().backward()
        ebc.step()
        rows.step()
        rows.zero_grad()
    assert_same(weights_of(ebc), own.state_dict())


def test_values_may_be_changed_in_place() -> None:
    """As those of torchrec.EmbeddingCollection."""

    ebc, own = cached("sgd"), plain_tables()
    own.load_state_dict(weights_of(ebc))
    found = ebc(draw(2).sparse_features)
    theirs = own(draw(2).sparse_features)
    for one in (found, theirs):
        sum(part.values().mul_(2).relu_().square().sum() for part in one.values()).backward()
    ebc.step()
    torch.optim.SGD(own.parameters(), lr=0.1).step()
    assert_close(weights_of(ebc), own.state_dict())


def test_a_loss_of_one_feature_alone() -> None:
    ebc, own = cached("adagrad", mixed_configs(), rows=800), plain_tables(mixed_configs())
    own.load_state_dict(weights_of(ebc))
    batch = draw(4, tables=mixed_configs())
    for collection in (ebc, own):
        collection(batch.sparse_features)["f1"].values().square().sum().backward()
    ebc.step()
    found = weights_of(ebc)
    for name, gradient in ((n, p.grad) for n, p in own.named_parameters()):
        unchanged = torch.equal(found[name], own.state_dict()[name])
        assert unchanged == (gradient is None or not gradient.any()), name


@pytest.mark.parametrize("size", [0, 1])
def test_batches_without_any_id(size) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    keys = list(draw(0).sparse_features.keys())
    lengths = torch.zeros(len(keys) * size, dtype=torch.int32)
    empty = KeyedJaggedTensor(keys, none, lengths=lengths)
    ebc = cached("adam")
    before = weights_of(ebc)
    found = ebc(empty)
    for one in found.values():
        assert one.values().shape == (0, 8) and one.lengths().shape == (size,)
        assert one.lengths().dtype == torch.int32
    sum(one.values().sum() for one in found.values()).backward()
    ebc.step()
    assert_same(weights_of(ebc), before)
    assert ebc.tables.steps == 1


def test_several_widths_have_no_common_one() -> None:
    ebc = cached("sgd", mixed_configs(), rows=800)
    assert {name: one.values().shape[1] for name, one in widths(ebc).items()} == {
        "f0@t0": 8, "f1": 8, "g": 8, "f2": 4, "f0@t2": 4, "f3": 8,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"several widths, \[4, 8\]"):
        ebc.embedding_dim()


def widths(ebc) -> dict[str, JaggedTensor]:
    return ebc(draw(1, tables=mixed_configs()).sparse_features)


class Both(torch.nn.Module):
    """Pooled and sequence embeddings of one batch in one model."""

    def __init__(self, ebc, ec) -> None:
        super().__init__()
        self.bags, self.rows = Pooled(ebc), Pooled(ec)

    def forward(self, dense, ids):
        return self.bags(dense, ids) + self.rows(dense, ids)


def test_beside_a_bag_collection() -> None:
    """A look-ahead for either; the other plans its batches when they come."""
    data = batches(12)

    def run(ahead: int | None) -> dict:
        using("bags")
        ebc = cached("adagrad", rows=300)
        using("sequences")
        ec = cached("adagrad", [replace(t, name=f"s{t.name}") for t in configs()], rows=300)
        model = Both(ebc, ec)
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in data if ahead is None else lookahead(data, (ebc, ec)[ahead]):
            dense.zero_grad()
            loss_of(model, batch).backward()
            ebc.step()
            ec.step()
            dense.step()
        return weights_of(model)

    inline = run(None)
    assert_same(run(0), inline)
    assert_same(run(1), inline)


def test_a_look_ahead_in_another_is_refused() -> None:
    ebc, ec = cached(), cached()
    with pytest.raises(ConfigError, match="cannot read another look-ahead"):
        lookahead(lookahead(batches(), ebc), ec)
