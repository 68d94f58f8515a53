"""Loops that are left, and batches that are not what was planned: exact, or a clear error."""

from __future__ import annotations

import threading

import pytest
from ebc_cases import Clicks, batches, configs, draw
from ebc_models import cached, dlrm
from ebc_training import (
    assert_close,
    assert_same,
    dense_optimizer,
    expected,
    made,
    train,
    train_plain,
    weights_of,
)
from torchrec import KeyedJaggedTensor

from distcache import lookahead
from distcache.errors import ConfigError, PlanError

pytestmark = pytest.mark.usefixtures("one_thread", "kind")


def test_a_broken_loop_goes_on_exactly_where_it_stopped() -> None:
    data = batches()
    ebc, model = made()
    dense = dense_optimizer(model)
    for number, batch in enumerate(lookahead(iter(data), ebc)):
        train(model, ebc, [batch], dense)
        if number == 5:
            break
    assert [t for t in threading.enumerate() if t.name.startswith("distcache")] == []
    train(model, ebc, data[6:8], dense)
    kept = lookahead(data[8:], ebc)
    for number, batch in enumerate(kept):
        train(model, ebc, [batch], dense)
        if number == 3:
            break
    train(model, ebc, lookahead(data[12:], ebc), dense)
    assert_same(weights_of(model), expected())
    assert next(kept, None) is not None  # a look-ahead that was only left may go on
    kept.close()
    assert next(kept, None) is None


def test_an_exception_in_the_loop_and_one_in_the_data() -> None:
    data = batches()
    ebc, model = made()
    dense = dense_optimizer(model)

    def failing():
        yield from data[:4]
        raise OSError("the disk is gone")

    seen = 0
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in lookahead(failing(), ebc):
            train(model, ebc, [batch], dense)
            seen += 1
    assert seen == 4
    with pytest.raises(ZeroDivisionError):
        for batch in lookahead(data[4:], ebc):
            if seen == 9:
                raise ZeroDivisionError
            train(model, ebc, [batch], dense)
            seen += 1
    train(model, ebc, lookahead(data[9:], ebc), dense)
    assert_same(weights_of(model), expected())


def test_close_ends_everything() -> None:
    ebc, model = made()
    stream = lookahead(batches(), ebc)
    train(model, ebc, [next(stream)])
    ebc.close()
    ebc.close()
    assert next(stream, None) is None
    with pytest.raises(PlanError, match="closed"):
        model(draw(1).dense_features, draw(1).sparse_features)
    with pytest.raises(PlanError, match="closed"):
        ebc.state_dict()


def test_a_skipped_batch_is_an_error() -> None:
    ebc, model = made()
    stream = lookahead(batches(), ebc)
    train(model, ebc, [next(stream)])
    next(stream)
    with pytest.raises(PlanError, match=r"batch 1 was skipped.*filter the batches before"):
        train(model, ebc, [next(stream)])


@pytest.mark.parametrize("how", ["in place", "another batch", "after a copy"])
def test_an_altered_batch_is_an_error(how) -> None:
    ebc, model = made()
    for batch in lookahead(batches(3), ebc):
        if how == "another batch":
            batch = draw(55)
        elif how == "in place":
            batch.sparse_features.values()[0] += 1
        else:
            ids = batch.sparse_features.to("cpu")
            ids._values = ids.values() // 2
            batch = Clicks(batch.dense_features, ids, batch.labels)
        with pytest.raises(PlanError, match=r"not those of batch 0.*before lookahead reads them"):
            train(model, ebc, [batch])
        break


def test_copies_and_batches_built_anew_are_recognised() -> None:
    def moved(stream):
        for batch in stream:
            ids = batch.sparse_features.to("cpu")
            yield Clicks(batch.dense_features, ids, batch.labels)

    def rebuilt(stream):
        for batch in stream:
            old = batch.sparse_features
            ids = KeyedJaggedTensor(list(old.keys()), old.values().clone(), lengths=old.lengths())
            yield Clicks(batch.dense_features, ids, batch.labels)

    for change in (moved, rebuilt):
        ebc, model = made()
        train(model, ebc, change(lookahead(batches(), ebc)))
        assert_same(weights_of(model), expected())
        assert ebc.tables.engine.planner.ingested == len(batches())  # none was planned twice


def test_the_same_batch_again_and_again() -> None:
    batch = draw(3)
    ebc, model = made()
    train(model, ebc, lookahead([batch] * 6, ebc))
    other, inline = made()
    train(inline, other, [batch] * 6)
    assert_same(weights_of(model), weights_of(inline))
    start = weights_of(dlrm(cached()))
    assert_close(weights_of(model), train_plain("adagrad", configs(), start, dlrm, [batch] * 6)[1])


def test_batches_of_many_forms() -> None:
    one = draw(3)
    forms = [
        one.sparse_features,
        (one.dense_features, one.sparse_features, one.labels),
        [one.labels, {"ids": one.sparse_features}],
        {"x": one.dense_features, "ids": one.sparse_features},
        one,
    ]
    ebc, model = made()
    for batch, form in zip(lookahead(forms, ebc), forms, strict=True):
        assert batch is form
        train(model, ebc, [one])
    assert ebc.tables.engine.planner.ingested == len(forms)
    with pytest.raises(ConfigError, match=r"no KeyedJaggedTensor.*ids=lambda batch"):
        next(lookahead([one.labels], ebc))
    two = (one.sparse_features, draw(4).sparse_features)
    with pytest.raises(ConfigError, match="2 KeyedJaggedTensors"):
        next(lookahead([two], ebc))
    assert next(lookahead([two], ebc, ids=lambda batch: batch[1])) is two
