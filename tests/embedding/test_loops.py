"""A user's loops: steps, batches and epochs, exact or a clear error; tables that are frozen, all of
them or one by one, as torch's parameters without `requires_grad`.
"""

from __future__ import annotations

import functools
import logging
import threading

import pytest
import torch
from ebc_cases import (
    UPDATES,
    Clicks,
    assert_close,
    assert_same,
    batches,
    cached,
    configs,
    dense_optimizer,
    dlrm,
    draw,
    expected,
    job,
    key_of_tables,
    loss_of,
    made,
    mine,
    plain_optimizer,
    plain_tables,
    ranks,
    train,
    train_plain,
    unwrapped,
    weights_of,
    wrapped,
    written_back,
)
from torchrec import KeyedJaggedTensor

import distcache
from distcache import lookahead
from distcache.embedding import stream
from distcache.embedding.ids import bytes_of
from distcache.errors import ConfigError, DistcacheError, PlanError

pytestmark = pytest.mark.usefixtures("one_thread", "kind")


def test_forwards_without_backward_and_zeroed_gradients_change_nothing() -> None:
    data = batches()
    ebc, model = made()
    dense = dense_optimizer(model)
    for number, batch in enumerate(lookahead(data, ebc)):
        with torch.no_grad():
            loss_of(model, batch)
        loss_of(model, batch)
        if number % 2:
            train(model, ebc, [batch], dense)
            continue
        loss = loss_of(model, batch)
        dense.zero_grad()
        ebc.optimizer.zero_grad()  # between forward and backward
        loss.backward()
        ebc.step()
        dense.step()
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


def test_a_second_forward_is_not_taken_for_another_batch_of_the_same_ids() -> None:
    ebc, model = made()
    stream = lookahead([draw(1), draw(1)], ebc, accumulate=2)
    both = list(stream)
    with torch.no_grad():
        loss_of(model, both[0])
    for batch in both:
        loss_of(model, batch).backward()
    ebc.step()
    assert ebc.tables.steps == 1


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


def test_an_evaluation_between_the_micro_batches_of_a_step_is_named() -> None:
    ebc, model = made()
    stream = lookahead(batches(), ebc, accumulate=3)
    first = next(stream)
    loss_of(model, first).backward()
    with torch.no_grad(), pytest.raises(PlanError, match=r"as 3 micro-batches.*evaluate.*between"):
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
    early.backward()
    with pytest.raises(PlanError, match=r"accumulate=2"):
        late.backward()
    ebc.optimizer.zero_grad()
    late = loss_of(model, next(stream))
    late.backward(retain_graph=True)
    ebc.step()
    with pytest.raises(PlanError, match=r"a step that has ended"):
        late.backward()


def test_a_step_in_the_middle_of_its_micro_batches_is_an_error() -> None:
    ebc, model = made()
    stream = lookahead(batches(), ebc, accumulate=3)
    loss_of(model, next(stream)).backward()
    for early in (ebc.step, lambda: distcache.clip_grad_norm_(model.parameters(), ebc, 1.0)):
        with pytest.raises(PlanError, match=r"3 micro-batches.*of which 1"):
            early()
    for _ in range(2):
        loss_of(model, next(stream)).backward()
    ebc.step()
    assert ebc.tables.steps == 1


def test_micro_batches_may_be_gone_through_again() -> None:
    def run(times: int) -> dict:
        ebc, model = made()
        stream = iter(lookahead(batches(4), ebc, accumulate=2))
        for pair in zip(stream, stream, strict=True):
            for _ in range(times):
                ebc.optimizer.zero_grad()
                for batch in pair:
                    loss_of(model, batch).backward()
            ebc.step()
        ebc.optimizer.zero_grad()
        ebc.step()
        assert ebc.tables.steps == 2
        return weights_of(model)

    assert_same(run(2), run(1))


def clipped_and_scheduled(model, data, rows, clip) -> list[float]:
    """A loop with one norm for all gradients and a schedule of rates; the norms."""
    dense, norms = dense_optimizer(model), []
    rates = torch.optim.lr_scheduler.StepLR(rows, 3, 0.5)
    for batch in data:
        rows.zero_grad()
        dense.zero_grad()
        loss_of(model, batch).backward()
        norms.append(float(clip(dense.param_groups[0]["params"])))
        rows.step()
        dense.step()
        rates.step()
    assert rows.param_groups[0]["lr"] < 0.1
    return norms


def test_clipping_counts_each_row_once_and_schedulers_set_the_rate() -> None:
    found = []
    for rows in (200, 468):
        ebc, model = made("sgd", rows=rows)
        clip = functools.partial(distcache.clip_grad_norm_, ebc=ebc, max_norm=0.05)
        norms = clipped_and_scheduled(model, lookahead(batches(), ebc), ebc.optimizer, clip)
        found.append((norms, weights_of(model)))
    assert found[0][0] == found[1][0] and max(found[0][0]) > 0.05
    assert_same(found[0][1], found[1][1])
    own = plain_tables()
    model = dlrm(own)
    model.load_state_dict(weights_of(dlrm(cached())))

    def clip_all(dense):
        return torch.nn.utils.clip_grad_norm_([*own.parameters(), *dense], 0.05)

    rows = torch.optim.SGD(own.parameters(), lr=0.1)
    norms = clipped_and_scheduled(model, batches(), rows, clip_all)
    assert found[0][0] == pytest.approx(norms, rel=1e-5)
    assert_close(found[0][1], model.state_dict())


def test_loops_that_break_or_fail_go_on_exactly_where_they_stopped() -> None:
    data = batches()
    ebc, model = made()
    dense = dense_optimizer(model)

    def failing():
        yield from data[:4]
        raise OSError("the disk is gone")

    def some(stream, count: int, error: type[Exception] | None = None) -> None:
        for number, batch in enumerate(stream):
            if number == count:
                if error is not None:
                    raise error
                break
            train(model, ebc, [batch], dense)

    with pytest.raises(OSError, match="the disk is gone"):
        some(lookahead(failing(), ebc), 9)
    some(lookahead(iter(data[4:]), ebc), 2)
    assert [t for t in threading.enumerate() if t.name.startswith("distcache")] == []
    train(model, ebc, data[6:8], dense)
    with pytest.raises(ZeroDivisionError):
        some(lookahead(data[8:], ebc), 3, ZeroDivisionError)
    kept = lookahead(data[11:], ebc)
    some(kept, 2)
    train(model, ebc, lookahead(data[13:], ebc), dense)
    assert_same(weights_of(model), expected())
    assert next(kept, None) is not None  # a look-ahead that was only left may go on
    kept.close()
    assert next(kept, None) is None


def test_close_ends_everything() -> None:
    ebc, model = made()
    stream = lookahead(batches(), ebc)
    train(model, ebc, [next(stream)])
    ebc.close()
    ebc.close()
    assert next(stream, None) is None
    for use in (lambda: loss_of(model, draw(1)), ebc.state_dict):
        with pytest.raises(PlanError, match="closed"):
            use()


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
    stream = lookahead(batches(3), ebc)
    batch = next(stream)
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


def test_copies_and_batches_built_anew_are_recognised() -> None:
    def rebuilt(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(list(ids.keys()), ids.values().clone(), lengths=ids.lengths())

    for change in (lambda ids: ids.to("cpu"), rebuilt):
        ebc, model = made()
        for batch in lookahead(batches(), ebc):
            own = Clicks(batch.dense_features, change(batch.sparse_features), batch.labels)
            train(model, ebc, [own])
        assert_same(weights_of(model), expected())
        assert ebc.tables.engine.planner.ingested == len(batches())  # none was planned twice


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


EPOCHS = 3


def by_hand(data) -> dict:
    """The weights after these batches, each planned when it comes."""
    ebc, model = made("adagrad")
    train(model, ebc, data)
    return weights_of(model)


@pytest.mark.parametrize(
    ("read_by", "stop"), [("list", None), ("loader", None), ("list", 7), ("list", 4)]
)
def test_epochs_train_all_batches_or_as_many_as_were_taken(read_by: str, stop, caplog) -> None:
    """A loop that counts need not ask for the end, as Lightning does with a known length;
    evaluation, by a look-ahead with epochs of its own, changes nothing in and between them."""
    data = batches(7)
    again = data if read_by == "list" else torch.utils.data.DataLoader(data, batch_size=None)
    ebc, model = made("adagrad", prefetch=3 if stop == 4 else 1)
    stream, held_out = lookahead(again, ebc), lookahead([draw(90), draw(91)], ebc)
    for _ in range(EPOCHS):
        for count, batch in enumerate(stream):
            train(model, ebc, [batch])
            if stop is None and count in (2, 6):
                with torch.no_grad():
                    assert sum(1 for own in held_out if loss_of(model, own) > 0) == 2
            if count + 1 == stop:
                break
    assert len(stream) == 7 and ebc.tables.steps == (stop or 7) * EPOCHS
    assert_same(weights_of(model), by_hand(data[:stop] * EPOCHS))
    assert caplog.text.count("was ended after 4 batches, before its last") == (stop == 4)
    assert "was ended" not in caplog.text or stop == 4


def test_the_iterator_of_an_epoch_that_was_replaced_raises(caplog) -> None:
    data = batches(9)
    ebc, model = made("adagrad")
    stream = lookahead(data, ebc)
    with caplog.at_level(logging.WARNING, "distcache"):
        first = iter(stream)
        assert next(stream) is data[0] and next(stream) is data[1]
        iter(stream)
    with pytest.raises(PlanError, match="ended by a later iter"):
        next(first)
    train(model, ebc, [next(stream)])
    assert_same(weights_of(model), by_hand(data[:1]))
    stream.close()


def test_micro_batches_are_an_epochs_own() -> None:
    """An epoch's last step may have fewer; the next begins with a whole one."""
    ebc, model = made("sgd")
    sizes, stream = [], lookahead(batches(5), ebc, accumulate=2)
    for _ in range(EPOCHS):
        for at, batch in enumerate(stream):
            loss_of(model, batch).backward()
            if at % 2 or at == 4:
                ebc.step()
                sizes.append(at)
    assert ebc.tables.steps == 3 * EPOCHS and sizes == [1, 3, 4] * EPOCHS


def test_batches_that_are_read_once_have_one_epoch() -> None:
    ebc, model = made("sgd")
    stream = lookahead(iter(batches(5)), ebc)
    for _, batch in zip(range(2), stream, strict=False):
        train(model, ebc, [batch])
    for batch in stream:  # goes on: what was read ahead is not lost
        train(model, ebc, [batch])
    assert ebc.tables.steps in (4, 5)
    with pytest.raises(PlanError, match=r"has no batch, but the one before had some.*DataLoader"):
        next(iter(stream))
    empty = lookahead([], ebc)
    assert list(empty) == [] and list(empty) == []


@job
def windows(rank: int, size: int) -> dict:
    """`lookahead="auto"` by the first batch of the rank that has most."""
    found = {}
    for name, kept, settings in (
        ("small", 1 << 10, {}),
        ("batches", (256 << 20) // 18 if rank else 1, {}),  # 16 + 1 + 1 of them are kept
        ("large", 1 << 30, {}),
        ("given", 1 << 30, {"lookahead": 3}),
        ("no window", 1, {"policy": "lru"}),
    ):
        stream.bytes_of = lambda batch, kept=kept: kept
        ebc = cached("sgd", rows=400, timeout_s=60, **settings)
        train(dlrm(ebc), ebc, lookahead(mine(rank, size, 2), ebc))
        found[name] = ebc.tables.engine.planner.settings.lookahead
        ebc.close()
    assert bytes_of(mine(rank, size, 1)[0]) > 4 * 12 * (4 + 1)
    ebc = cached("sgd", rows=400, timeout_s=60)
    data = [None, *mine(rank, size, 2)] if rank else mine(rank, size, 3)
    with pytest.raises(DistcacheError, match="NoneType has no KeyedJaggedTensor"):
        train(dlrm(ebc), ebc, lookahead(data, ebc))  # at its turn, on all ranks
    ebc.close()
    return found


def test_ranks_choose_one_window_by_their_first_batches() -> None:
    first, second = ranks(windows)
    assert first == second
    assert first == {"small": 64, "batches": 16, "large": 8, "given": 3, "no window": 8}


def tables_of(weights: dict) -> dict:
    return {name: value for name, value in weights.items() if key_of_tables() in name}


WAYS = {
    "collection": lambda ebc, model, flag: ebc.requires_grad_(flag),
    "parent": lambda ebc, model, flag: model.requires_grad_(flag),
    "loop": lambda ebc, model, flag: [p.requires_grad_(flag) for p in model.parameters()],
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
    assert not any(rows.cache.dirty.any() for rows in ebc.tables.engine.rows)
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
    ebc = cached("sgd", timeout_s=60, placement="sharded", rows=200)
    ebc.requires_grad_(False)
    for batch in lookahead(data, ebc):  # rows move meanwhile, on the group that a norm would use
        ebc(batch.sparse_features)
        sent = ebc.tables.engine.counters.planning_bytes
        assert float(distcache.clip_grad_norm_([], ebc, 1.0)) == 0.0
        assert ebc.tables.engine.counters.planning_bytes == sent
    ebc.close()
    return found["260"]


def test_ddp_and_frozen_tables() -> None:
    assert_same(*ranks(frozen_ddp))


def test_the_log_states_which_rows_are_cached(caplog: pytest.LogCaptureFixture) -> None:
    rows = sum(config.num_embeddings for config in configs())
    for settings, text in (
        ({"rows": 1_000_000}, f"all {rows:,} rows are cached: "),
        ({"rows": rows // 2}, f" of {rows:,} rows are cached on each rank ("),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="distcache"):
            ebc = cached("sgd", **settings)
            ebc(draw(0).sparse_features)
        assert text in caplog.text
