"""The optimizer's side of training loops: exact, or a clear error."""

from __future__ import annotations

import pytest
import torch
from ebc_cases import Clicks, batches, configs, draw
from ebc_models import cached, dlrm, plain_tables
from ebc_training import (
    assert_close,
    assert_same,
    dense_optimizer,
    expected,
    loss_of,
    made,
    train,
    train_plain,
    weights_of,
)

import distcache
from distcache import lookahead
from distcache.errors import PlanError

pytestmark = pytest.mark.usefixtures("one_thread", "kind")


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
