"""What users do in training loops: exact, or a clear error; and no thread outlives its loop."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
from ebc_cases import (
    Clicks,
    assert_close,
    assert_same,
    batches,
    cached,
    configs,
    dense_optimizer,
    dlrm,
    draw,
    loss_of,
    plain_tables,
    train,
    train_plain,
    values_of,
    weights_of,
)
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

import distcache
from distcache import lookahead
from distcache.errors import ConfigError, DataError, PlanError, StepTooLargeError

pytestmark = pytest.mark.usefixtures("kind")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    yield
    gc.collect()
    left = [t for t in threading.enumerate() if t.name.startswith("distcache")]
    assert not left, "a planner's thread has outlived its loop"


def made(name="adagrad", **settings):
    ebc = cached(name, **{"rows": 200, **settings})
    return ebc, dlrm(ebc)


def expected(name="adagrad", data=None):
    """Weights of an uninterrupted run."""
    ebc, model = made(name)
    train(model, ebc, lookahead(data if data is not None else batches(), ebc))
    return weights_of(model)


# --- leaving the loop -----------------------------------------------------------------------


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


# --- batches that are not what was planned ----------------------------------------------------


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
        assert ebc.tables.planner.ingested == len(batches())  # none was planned twice


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
    assert ebc.tables.planner.ingested == len(forms)
    with pytest.raises(ConfigError, match=r"no KeyedJaggedTensor.*ids=lambda batch"):
        next(lookahead([one.labels], ebc))
    two = (one.sparse_features, draw(4).sparse_features)
    with pytest.raises(ConfigError, match="2 KeyedJaggedTensors"):
        next(lookahead([two], ebc))
    assert next(lookahead([two], ebc, ids=lambda batch: batch[1])) is two


# --- the optimizer's side ---------------------------------------------------------------------


def test_forwards_without_backward_change_nothing() -> None:
    data = batches()
    ebc, model = made()
    dense = dense_optimizer(model)
    for batch in lookahead(data, ebc):
        with torch.no_grad():
            loss_of(model, batch)
        loss_of(model, batch)
        train(model, ebc, [batch], dense)
    assert_same(weights_of(model), expected())
    before = weights_of(model)
    for batch in lookahead(data[:3], ebc):
        loss_of(model, batch)
    ebc.optimizer.zero_grad()
    assert_same(weights_of(model), before)
    with pytest.raises(PlanError, match=r"without a backward pass"):
        ebc.step()
    fresh, _ = made()
    fresh.step()
    assert fresh.tables.steps == 0


def test_two_forwards_of_one_batch_add_up() -> None:
    def run(double: bool):
        ebc, model = made("sgd")
        dense = dense_optimizer(model)
        for batch in lookahead(batches(6), ebc):
            dense.zero_grad()
            parts = [loss_of(model, batch), loss_of(model, batch)]
            (sum(parts) if double else 2 * parts[0]).backward()
            ebc.step()
            dense.step()
        return weights_of(model)

    assert_close(run(True), run(False))


def test_two_steps_on_one_batch() -> None:
    data = batches(6)
    ebc, model = made("adam")
    dense = dense_optimizer(model)
    for batch in lookahead(data, ebc):
        train(model, ebc, [batch, batch], dense)
    start = weights_of(dlrm(cached()))
    twice = [batch for batch in data for _ in range(2)]
    assert_close(weights_of(model), train_plain("adam", configs(), start, dlrm, twice)[1])


def test_gradients_left_over_are_an_error_unless_dropped() -> None:
    ebc, model = made()
    stream = lookahead(batches(), ebc)
    loss_of(model, next(stream)).backward()
    second = next(stream)
    with pytest.raises(PlanError, match=r"neither applied nor dropped.*accumulate=k"):
        loss_of(model, second)
    before = ebc.tables.steps
    ebc.optimizer.zero_grad()
    ebc.step()
    assert ebc.tables.steps == before
    train(model, ebc, [second])
    with pytest.raises(PlanError, match="neither applied nor dropped"):
        loss_of(model, next(stream)).backward()
        loss_of(model, draw(70))


def test_backward_twice_or_too_late_is_an_error() -> None:
    ebc, model = made()
    stream = lookahead(batches(), ebc)
    loss = loss_of(model, next(stream))
    loss.backward(retain_graph=True)
    with pytest.raises(PlanError, match="after its row gradients were summed"):
        loss.backward()
    ebc.optimizer.zero_grad()
    early, late = loss_of(model, next(stream)), loss_of(model, next(stream))
    with pytest.raises(PlanError, match=r"a step that has ended"):
        early.backward()
    late.backward()
    ebc.step()


def test_a_step_in_the_middle_of_its_micro_batches_is_an_error() -> None:
    ebc, model = made()
    stream = lookahead(batches(), ebc, accumulate=3)
    loss_of(model, next(stream)).backward()
    with pytest.raises(PlanError, match=r"3 micro-batches.*of which 1"):
        ebc.step()
    with pytest.raises(PlanError, match="3 micro-batches"):
        distcache.clip_grad_norm_(model.parameters(), ebc, 1.0)
    for _ in range(2):
        loss_of(model, next(stream)).backward()
    ebc.step()
    assert ebc.tables.steps == 1


def test_zero_grad_between_forward_and_backward() -> None:
    ebc, model = made()
    dense = dense_optimizer(model)
    for batch in lookahead(batches(), ebc):
        loss = loss_of(model, batch)
        dense.zero_grad()
        ebc.optimizer.zero_grad()
        loss.backward()
        ebc.step()
        dense.step()
    assert_same(weights_of(model), expected())


def plain(data, step):
    """TorchRec's tables under the same hand-made step; final weights."""
    own = plain_tables()
    model = dlrm(own)
    model.load_state_dict(weights_of(dlrm(cached())))
    rows = torch.optim.SGD(own.parameters(), lr=0.1)
    dense = dense_optimizer(model)
    for batch in data:
        step(
            model,
            batch,
            rows,
            dense,
            lambda limit: torch.nn.utils.clip_grad_norm_(
                [*own.parameters(), *dense.param_groups[0]["params"]], limit
            ),
        )
    return model.state_dict(), rows


def ours(data, step, **settings):
    ebc, model = made("sgd", **settings)
    dense = dense_optimizer(model)
    for batch in lookahead(data, ebc):
        step(
            model,
            batch,
            ebc.optimizer,
            dense,
            lambda limit: distcache.clip_grad_norm_(model.parameters(), ebc, limit),
        )
    return weights_of(model), ebc.optimizer


def test_clipping_counts_each_row_once() -> None:
    norms = []

    def step(model, batch, rows, dense, clip) -> None:
        rows.zero_grad()
        dense.zero_grad()
        loss_of(model, batch).backward()
        norms.append(float(clip(0.05)))
        rows.step()
        dense.step()

    mine, _ = ours(batches(), step)
    theirs, _ = plain(batches(), step)
    assert norms[:20] == pytest.approx(norms[20:], rel=1e-5) and max(norms) > 0.05
    assert_close(mine, theirs)
    assert_same(ours(batches(), step, rows=468)[0], mine)


def test_learning_rate_schedulers_set_the_rate() -> None:
    def run(data, make):
        scheduler = None

        def step(model, batch, rows, dense, clip) -> None:
            nonlocal scheduler
            scheduler = scheduler or torch.optim.lr_scheduler.StepLR(rows, 3, 0.5)
            rows.zero_grad()
            dense.zero_grad()
            loss_of(model, batch).backward()
            rows.step()
            dense.step()
            scheduler.step()

        return make(data, step)

    mine, optimizer = run(batches(), ours)
    theirs, own = run(batches(), plain)
    assert optimizer.param_groups[0]["lr"] == own.param_groups[0]["lr"] < 0.1
    assert_close(mine, theirs)


def test_grad_scaler_skips_the_step_of_a_bad_batch() -> None:
    data = batches(10)
    bad = data[4]
    data[4] = Clicks(bad.dense_features, bad.sparse_features, bad.labels.clone())
    data[4].labels[0, 0] = float("inf")
    scales = []

    def run(make):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def step(model, batch, rows, dense, clip) -> None:
            rows.zero_grad()
            dense.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            scaler.unscale_(rows)
            scaler.unscale_(dense)
            scaler.step(rows)
            scaler.step(dense)
            scaler.update()
            scales.append(scaler.get_scale())

        return make(data, step)

    mine, optimizer = run(ours)
    theirs, _ = run(plain)
    assert optimizer._tables.steps == 9
    assert scales[:10] == scales[10:] and scales[9] == 512.0
    assert_close(mine, theirs)


# --- what is refused --------------------------------------------------------------------------


def test_bad_ids_keys_and_sizes_are_named(kind) -> None:
    ebc, model = made()
    ids = draw(0).sparse_features
    wrong = KeyedJaggedTensor(["f0", "f1", "h", "f2", "f3"], ids.values(), lengths=ids.lengths())
    with pytest.raises(DataError, match=r"feature 'g' of table 't1' is not among .*'h'"):
        ebc(wrong)
    with pytest.raises(DataError, match="feature 'g' of table 't1'"):
        next(lookahead([wrong], ebc))
    values = ids.values().clone()
    values[0] = 400
    beyond = KeyedJaggedTensor(ids.keys(), values, lengths=ids.lengths())
    with pytest.raises(DataError, match=r"feature 'f0'.*id 400 is not in table 't0'.*on_bad_id='h"):
        ebc(beyond)
    assert torch.isfinite(values_of(made(on_bad_id="hash")[0](beyond))).all()
    tight, other = made(rows=40)
    with pytest.raises(StepTooLargeError, match=r"set rows=(\d+)") as refusal:
        train(other, tight, lookahead(batches(), tight))
    enough = int(str(refusal.value).split("rows=")[1].split()[0])
    tight, other = made(rows=enough)
    train(other, tight, [draw(0)])
    if kind == "bags":
        with pytest.raises(DataError, match="is_weighted=True, but"):
            cached(is_weighted=True)(ids)
    else:
        with pytest.raises(ConfigError, match="Collection: is_weighted=True: no such setting"):
            cached(is_weighted=True)
    with pytest.raises(DataError, match="no KeyedJaggedTensor"):
        ebc(ids.values())
    train(model, ebc, lookahead(batches(), ebc))  # none of it has done harm
    assert_same(weights_of(model), expected())


def test_wrong_arguments_are_named(kind) -> None:
    ebc, model = made()
    with pytest.raises(ConfigError, match=r"give one of distcache.optim"):
        type(ebc)(configs(), optimizer=torch.optim.SGD)
    other = EmbeddingConfig if kind == "bags" else EmbeddingBagConfig
    with pytest.raises(ConfigError, match=rf"^tables: {other.__name__}\(.* is no torchrec\.Embed"):
        cached(tables=[other(4, 8, "t")])
    for settings, message in (
        ({"rows": 10, "ratio": 0.5}, "at most one of rows, ratio, bytes"),
        ({"policy": "belady"}, "policy='belady' is not 'lookahead' or 'lfu'"),
        ({"policy": "lru", "tail": "lru"}, "tail='lru' is for policy='lookahead'"),
        ({"tail": "frequency"}, "tail='frequency' needs to know .* give statistics="),
        ({"policy": "lfu", "half_life": 0.5}, "^half_life=0.5 is out of range"),
        ({"lookahead": -1}, "lookahead=-1"),
        ({"dtype": torch.float16}, "dtype=torch.float16"),
        ({"window": 3}, "window=3: no such setting: there are rows, ratio, bytes, lookahead"),
        ({"cache_row": 3}, "cache_row=3: no such setting: did you mean rows"),
        ({"tables": []}, "at least one"),
        ({"device": "meta"}, "device=meta"),
    ):
        with pytest.raises(ConfigError, match=message):
            cached(**settings)
    with pytest.raises(ConfigError, match="CachedEmbeddingCollection, got list"):
        lookahead([], [ebc])
    with pytest.raises(ConfigError, match="accumulate=0"):
        lookahead([], ebc, accumulate=0)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PlanError, match=r"neither copied nor pickled.*state_dict\(\)"):
            copied(model)
    with pytest.raises(ConfigError, match=r"cannot become cpu, torch.float64"):
        model.double()
    assert model.to("cpu") is model
    with pytest.raises(ConfigError, match="no other group"):
        ebc.optimizer.add_param_group({"params": [torch.zeros(1)]})
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = distcache.nothing
