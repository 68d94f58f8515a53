"""Forwards of several batches before one backward, as contrastive losses have them: one step of the
rows of all, in a look-ahead (`accumulate`) and out of it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from ebc_cases import (
    UPDATES,
    Clicks,
    Pooled,
    assert_close,
    assert_same,
    batches,
    cached,
    configs,
    dense_optimizer,
    draw,
    job,
    loss_of,
    made,
    mine,
    mixed_configs,
    plain_optimizer,
    plain_tables,
    ranks,
    train,
    using,
    weights_of,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec import KeyedJaggedTensor, KeyedTensor

import distcache
from distcache import lookahead
from distcache.errors import PlanError, StepTooLargeError

pytestmark = pytest.mark.usefixtures("one_thread")

PAIRS = 6


def contrast(model: nn.Module, *views: Clicks) -> Tensor:
    """A loss that needs the logits of all views at once."""
    logits = [model(view.dense_features, view.sparse_features).tanh() for view in views]
    first, *others = logits
    return sum((first - other).square().mean() + (first * other).mean() for other in others)


def pairs(steps: int = PAIRS, views: int = 2, **how) -> list[list[Clicks]]:
    """The views of each step."""
    data = batches(steps * views, **how)
    return [data[at : at + views] for at in range(0, len(data), views)]


def train_pairs(model: nn.Module, rows, steps, zero=lambda: None, loss=contrast) -> None:
    """A loop with one backward for all views of a step."""
    dense = dense_optimizer(model)
    for views in steps:
        dense.zero_grad()
        zero()
        loss(model, *views).backward()
        rows.step()
        dense.step()


def ahead(ebc: nn.Module, steps: list[list[Clicks]]):
    """The same steps, read ahead."""
    views = len(steps[0])
    stream = iter(lookahead([view for step in steps for view in step], ebc, accumulate=views))
    return zip(*[stream] * views, strict=True)


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("views", [2, 3])
@pytest.mark.parametrize("name", sorted(UPDATES))
def test_in_and_out_of_look_ahead_they_are_those_of_torch(name: str, views: int) -> None:
    found = []
    for read_ahead in (True, False):
        ebc = cached(name, mixed_configs(), rows=500)
        model, start = Pooled(ebc), weights_of(ebc)
        steps = pairs(views=views, tables=mixed_configs())
        train_pairs(model, ebc, ahead(ebc, steps) if read_ahead else steps)
        assert ebc.tables.steps == PAIRS
        found.append(weights_of(model))
    if views == 2:  # more are added in the order in which backward comes to them
        assert_same(*found)
    plain = plain_tables(mixed_configs())
    plain.load_state_dict(start)
    model = Pooled(plain)
    rows = plain_optimizer(name, plain)
    train_pairs(model, rows, pairs(views=views, tables=mixed_configs()), zero=rows.zero_grad)
    for own in found:
        assert_close(own, weights_of(model), atol=1e-5)


class Bags(nn.Module):
    """Sums of bags in float64, which TorchRec's collection rounds to float32."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.tables = nn.ParameterDict({k.split(".")[1]: v.clone() for k, v in weights.items()})

    def forward(self, ids: KeyedJaggedTensor) -> KeyedTensor:
        pooled = {}
        for table in configs():
            for key in table.feature_names:
                bags, rows = ids[key], self.tables[table.name]
                pooled[key] = nn.functional.embedding_bag(
                    bags.values(), rows, bags.offsets(), mode="sum", include_last_offset=True
                )
        return KeyedTensor(list(pooled), [8] * len(pooled), torch.cat(list(pooled.values()), 1))


def test_they_are_torchs_in_float64() -> None:
    ebc = cached("sgd", dtype=torch.float64)
    plain = Bags(weights_of(ebc))
    for rows in (ebc, plain):
        rows.embedding_bag_configs = configs
        model = Pooled(rows).double()
        step = ebc.step if rows is ebc else lambda: None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for views in pairs():
            optimizer.zero_grad()
            contrast(model, *views).backward()
            step()
            optimizer.step()
    for name, weight in plain.tables.items():
        own = ebc.state_dict()[f"embedding_bags.{name}.weight"]
        torch.testing.assert_close(own, weight.detach(), rtol=1e-12, atol=1e-14)


def test_a_forward_without_backward_between_two_changes_nothing() -> None:
    def run(forgotten: bool) -> dict:
        ebc, model = made("adam")
        dense, kept = dense_optimizer(model), []
        for one, other in pairs():
            dense.zero_grad()
            first = loss_of(model, one)
            if forgotten:
                kept.append(loss_of(model, draw(500)))
                loss_of(model, draw(501))
                with torch.no_grad():
                    loss_of(model, draw(502))
            loss = first + loss_of(model, other)
            ebc.optimizer.zero_grad()  # between forward and backward
            loss.backward()
            ebc.step()
            dense.step()
        return weights_of(model)

    assert_same(run(True), run(False))


def test_one_backward_for_each_forward() -> None:
    def run(apart: bool) -> dict:
        ebc, model = made("sgd")
        dense = dense_optimizer(model)
        for one, other in pairs():
            dense.zero_grad()
            losses = [loss_of(model, one), loss_of(model, other)]
            if apart:
                losses[0].backward()
                losses[1].backward()
            else:
                sum(losses).backward()
            ebc.step()
            dense.step()
        return weights_of(model)

    assert_close(run(True), run(False))
    ebc, model = made()
    losses = [loss_of(model, view) for view in pairs()[0]]
    losses[1].backward()
    with pytest.raises(PlanError, match=r"after its row gradients were summed.*call backward once"):
        losses[0].backward()
    ebc.step()
    ebc, model = made()
    first = loss_of(model, draw(1))
    loss_of(model, draw(2)).backward()
    ebc.step()
    with pytest.raises(PlanError, match="a step that has ended"):
        first.backward()


def test_only_the_first_of_two_may_have_a_gradient() -> None:
    def run(both: bool) -> dict:
        ebc, model = made("adam")
        dense = dense_optimizer(model)
        for one, other in pairs():
            dense.zero_grad()
            loss = loss_of(model, one)
            if both:
                loss_of(model, other)
            loss.backward()
            ebc.step()
            dense.step()
        return weights_of(model)

    assert_same(run(True), run(False))


def test_several_steps_that_were_read_ahead_are_told_the_way() -> None:
    ebc, model = made()
    stream = iter(lookahead(batches(), ebc))
    with pytest.raises(PlanError, match="accumulate=2"):
        contrast(model, next(stream), next(stream)).backward()
    ebc.optimizer.zero_grad()
    ebc, model = made()
    for batch in lookahead(batches(PAIRS), ebc):  # beside one that was not
        contrast(model, batch, draw(700 + ebc.tables.steps)).backward()
        ebc.step()
    other, same = made()
    for at, batch in enumerate(batches(PAIRS)):
        contrast(same, batch, draw(700 + at)).backward()
        other.step()
    assert_same(weights_of(model), weights_of(same))


def test_the_rows_of_all_have_to_fit() -> None:
    ebc, model = made(rows=90)
    one, other = (draw(seed) for seed in (1, 2))
    for batch in (one, other):
        train(model, ebc, [batch])
    with pytest.raises(StepTooLargeError, match="rows"):
        contrast(model, one, other).backward()


def test_clipping_schedules_and_updates_inside_backward() -> None:
    def run(read_ahead: bool, in_backward: bool) -> dict:
        how = {"optimizer": UPDATES["adagrad"]}
        if in_backward:
            how = {"optimizer_type": torch.optim.Adagrad, "optimizer_kwargs": {"lr": 0.01}}
        make = distcache.CachedEmbeddingBagCollection
        ebc = make(configs(), device="cpu", rows=200, seed=0, **how)
        model = Pooled(ebc)
        dense = dense_optimizer(model)
        for views in ahead(ebc, pairs()) if read_ahead else pairs():
            dense.zero_grad()
            contrast(model, *views).backward()
            if not in_backward:
                distcache.clip_grad_norm_(model.parameters(), ebc, 0.1)
            ebc.optimizer.param_groups[0]["lr"] *= 0.9
            ebc.step()
            dense.step()
        return weights_of(model)

    for in_backward in (False, True):
        assert_same(run(True, in_backward), run(False, in_backward))


def test_what_is_computed_once_more_in_backward_looks_up_the_same() -> None:
    def run(again: bool) -> dict:
        ebc, model = made("sgd")

        def view(batch: Clicks) -> Tensor:
            call = lambda: model(batch.dense_features, batch.sparse_features)  # noqa: E731
            return checkpoint(call, use_reentrant=False) if again else call()

        dense = dense_optimizer(model)
        for one, other in pairs():
            dense.zero_grad()
            (view(one) - view(other)).square().mean().backward()
            ebc.step()
            dense.step()
        return weights_of(model)

    assert_same(run(True), run(False))


def test_a_graph_that_somebody_keeps_holds_no_tables() -> None:
    ebc, model = made()
    kept = contrast(model, *pairs()[0])
    tables = weakref.ref(ebc.tables)
    del ebc, model
    gc.collect()
    assert tables() is None and kept.requires_grad


PLACEMENTS = ({}, {"placement": "sharded"}, {"state": "home"})


@job
def on_ranks(rank: int, size: int) -> dict:
    """Each placement, read ahead and not; then one whose losses differ from rank to rank."""
    found: dict = {}
    for at, how in enumerate(PLACEMENTS):
        for read_ahead in (True, False):
            ebc, model = made(timeout_s=60, rows=300, **how)
            data = mine(rank, size, 2 * PAIRS)
            steps = [data[at : at + 2] for at in range(0, len(data), 2)]
            train_pairs(model, ebc, ahead(ebc, steps) if read_ahead else steps)
            found[f"{at} {read_ahead}"] = weights_of(ebc)["embedding_bags.t0.weight"]
            ebc.close()
    ebc, model = made("sgd", timeout_s=60)
    for at, (one, other) in enumerate(pairs()):
        losses = [loss_of(model, one), loss_of(model, other)]
        if at % 2 == rank:  # the other rank's second forward alone has a gradient
            losses = losses[1:]
        sum(losses).backward()
        ebc.step()
    found["apart"] = weights_of(ebc)["embedding_bags.t0.weight"]
    ebc.close()
    return found


def test_on_two_ranks() -> None:
    first, second = ranks(on_ranks)
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
        assert torch.equal(weight, first["0 True"]) or name == "apart", name
    using("bags")
    ebc, model = made("sgd")
    for at, (one, other) in enumerate(pairs()):
        by_rank = [(one, other) if at % 2 != rank else (other,) for rank in range(2)]
        loss = sum(loss_of(model, view) for views in by_rank for view in views)
        (loss / 2).backward()
        ebc.step()
    found = weights_of(ebc)["embedding_bags.t0.weight"]
    torch.testing.assert_close(first["apart"], found, rtol=1e-5, atol=2e-6)
