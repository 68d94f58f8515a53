"""One rank: the collection is TorchRec's, exactly, whatever the cache holds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ebc_cases import STEPS, batches, configs, draw, joined, key_of_tables, mixed_configs
from ebc_models import UPDATES, Pooled, cached, dlrm, plain_tables, values_of
from ebc_training import (
    assert_close,
    assert_same,
    loss_of,
    train,
    train_plain,
    weights_of,
    written_back,
)
from torchrec import KeyedJaggedTensor

from distcache import lookahead

pytestmark = pytest.mark.usefixtures("kind")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", UPDATES)
def test_dlrm_trains_as_with_torchrecs_own_tables(name) -> None:
    ebc = cached(name)
    model = dlrm(ebc)
    start = weights_of(model)
    losses = train(model, ebc, lookahead(batches(), ebc))
    plain, final = train_plain(name, configs(), start, dlrm, batches())
    assert losses == pytest.approx(plain, rel=1e-5)
    assert_close(weights_of(model), final)
    assert written_back(ebc.tables) > 0
    assert all(not torch.equal(final[key], start[key]) for key in final if "over" in key)


@pytest.mark.parametrize("weighted", [False, True])
def test_widths_means_and_shared_features_train_as_torchrecs(kind, weighted) -> None:
    tables = mixed_configs()
    pooled, how = kind == "bags", {}
    if pooled and weighted:
        tables = [dataclasses.replace(t, pooling=configs()[0].pooling) for t in tables]
    data = batches(tables=tables, weighted=weighted)
    if pooled:
        how["is_weighted"] = weighted  # TorchRec's sequences ignore weights
    ebc = cached("adagrad", tables, rows=700, **how)
    model = Pooled(ebc)
    start = weights_of(model)
    losses = train(model, ebc, lookahead(data, ebc))

    def plain(own: torch.nn.Module) -> Pooled:
        if pooled:
            own._is_weighted = weighted
        return Pooled(own)

    expected, final = train_plain("adagrad", tables, start, plain, data)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close(weights_of(model), final)


@pytest.mark.parametrize(("steps", "weighted"), [(20, False), (19, True)])
def test_accumulated_micro_batches_are_one_step(kind, steps, weighted) -> None:
    how = {"tables": mixed_configs()}
    if kind == "bags":
        how["is_weighted"] = weighted
    data = batches(steps, tables=how["tables"], weighted=weighted)

    def run(rows: int | None):
        ebc = cached("adagrad", rows=rows, ratio=None if rows else 1.0, **how)
        model = Pooled(ebc)
        dense = torch.optim.SGD(model.parameters(), 0.1)
        for i, batch in enumerate(lookahead(data, ebc, accumulate=4)):
            size = 4 if i < 16 or steps == 20 else 3
            (loss_of(model, batch) / size).backward()
            if i % 4 == 3 or i == steps - 1:
                ebc.step()
                dense.step()
                dense.zero_grad()
        assert ebc.tables.steps == 5
        return weights_of(model)

    small = run(1000)
    assert_same(small, run(None))
    big = cached("adagrad", rows=1000, **how)
    model = Pooled(big)
    train(model, big, lookahead([joined(data[at : at + 4]) for at in range(0, steps, 4)], big))
    assert_close(small, weights_of(model))


@pytest.mark.parametrize("how", ["inline", "before the batch", "read ahead", "pulled ahead"])
def test_evaluation_in_the_middle_changes_nothing(how) -> None:
    plain = cached("adam", rows=170)
    twin = dlrm(plain)
    losses = train(twin, plain, lookahead(batches(), plain))
    ebc = cached("adam", rows=170)
    model = dlrm(ebc)
    held_out = [draw(1000 + step) for step in range(3)]

    def evaluate() -> list[torch.Tensor]:
        model.eval()
        stream = lookahead(held_out, ebc) if how == "read ahead" else held_out
        with torch.no_grad():
            out = [model(b.dense_features, b.sparse_features) for b in stream]
        model.train()
        return out

    def loop(stream):
        pulled = None
        for number, batch in enumerate(stream):
            if how == "before the batch" and number % 4 == 1:
                evaluate()
            if how == "pulled ahead":  # as a loop that copies the next batch meanwhile
                pulled, batch = batch, pulled
                if batch is None:
                    continue
            yield batch
            if how != "before the batch" and number % 4 == 1:
                first = evaluate()
                assert all(torch.equal(a, b) for a, b in zip(first, evaluate(), strict=True))
        if pulled is not None:
            yield pulled

    found = train(model, ebc, loop(lookahead(batches(), ebc)))
    assert found == losses
    assert_same(weights_of(model), weights_of(twin))
    assert ebc.tables.steps == STEPS


def test_an_evaluation_batch_sees_the_trained_rows() -> None:
    ebc = cached("sgd", rows=170)
    model = dlrm(ebc)
    train(model, ebc, lookahead(batches(), ebc))
    own = plain_tables()
    own.load_state_dict(ebc.state_dict())
    batch = draw(77)
    model.eval()
    with torch.inference_mode():
        mine, theirs = ebc(batch.sparse_features), own(batch.sparse_features)
    torch.testing.assert_close(values_of(mine), values_of(theirs))
    train(model.train(), ebc, lookahead(batches(3), ebc))


def test_keys_names_and_dtypes_are_torchrecs(kind) -> None:
    tables = mixed_configs()
    ebc, own = cached("sgd", tables, rows=800), plain_tables(tables)
    own.load_state_dict(ebc.state_dict())
    ids = draw(4, tables=tables).sparse_features
    parts = {key: ids[key] for key in ids.keys()}  # noqa: SIM118
    more = draw(5, tables=[dataclasses.replace(configs()[0], feature_names=["other"])])
    parts["other"] = more.sparse_features["other"]
    order = ["other", *reversed(ids.keys())]
    shuffled = KeyedJaggedTensor(
        order,
        torch.cat([parts[key].values() for key in order]).int(),
        offsets=torch.cat(
            [torch.zeros(1, dtype=torch.int64)] + [parts[key].lengths() for key in order]
        ).cumsum(0),
    )
    for given in (ids, shuffled):
        mine, theirs = ebc(given), own(given)
        assert list(mine.keys()) == ["f0@t0", "f1", "g", "f2", "f0@t2", "f3"]
        if kind == "bags":
            assert mine.keys() == theirs.keys() == ebc.embedding_names
            assert mine.length_per_key() == theirs.length_per_key()
            assert mine.values().dtype == torch.float32
            torch.testing.assert_close(mine.values(), theirs.values())
        else:
            assert_same_sequences(mine, theirs)
    if kind == "bags":
        assert ebc.embedding_bag_configs() == tables and not ebc.is_weighted()
    else:
        assert ebc.embedding_configs() == tables and not ebc.need_indices()
        assert [len(names) for names in ebc.embedding_names_by_table()] == [1, 2, 2, 1]
    assert ebc.device == torch.device("cpu")
    assert [p.numel() for p in ebc.parameters()] == [0] and list(ebc.buffers()) == []


def assert_same_sequences(mine, theirs) -> None:
    """Values, lengths, offsets and weights have the same bits and types, key by key."""
    assert list(mine) == list(theirs)
    for name, one in mine.items():
        for part in ("values", "lengths", "offsets", "weights_or_none"):
            found, wanted = getattr(one, part)(), getattr(theirs[name], part)()
            assert (found is None) == (wanted is None)
            if found is not None:
                torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=f"{name} {part}")


def test_the_dense_part_may_be_compiled() -> None:
    ebc = cached("adagrad", rows=170)
    model = dlrm(ebc)
    compiled = torch.compile(model, backend="eager")
    losses = train(compiled, ebc, lookahead(batches(4), ebc), dense_of(model))
    ebc.close()
    other = cached("adagrad", rows=170)
    plain = dlrm(other)
    assert losses == pytest.approx(train(plain, other, batches(4)), rel=1e-6)


def dense_of(model):
    """The dense optimizer of a model that is wrapped."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_float64_tables_give_float64() -> None:
    ebc = cached("sgd", rows=200, dtype=torch.float64)
    model = Pooled(ebc).double()
    train(model, ebc, lookahead(batches(3), ebc), dense_of(model))
    assert weights_of(model)[f"ebc.{key_of_tables()}.t0.weight"].dtype == torch.float64
