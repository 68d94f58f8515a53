"""Several ranks: loops under DDP, ranks that are not alike, a group of only some, failures; every
placement and place of the state, in loops of all kinds; collections made before the process group.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ebc_cases import (
    Clicks,
    Pooled,
    as_arrays,
    assert_close,
    assert_same,
    batches,
    cached,
    configs,
    counted,
    dlrm,
    draw,
    job,
    loss_of,
    mine,
    part,
    picked,
    ranks,
    train,
    two_widths,
    unwrapped,
    using,
    values_of,
    weights_of,
    wrapped,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchrec import KeyedJaggedTensor

import distcache
from distcache import lookahead
from distcache.embedding import step as asking
from distcache.embedding import stream as ahead
from distcache.engine.pipeline import StepStream
from distcache.errors import (
    ConfigError,
    NonFiniteLossError,
    PeerError,
    PlanError,
)


def accumulated(rank: int, size: int, ebc, model, dense) -> list[float]:
    """Two micro-batches a step, DDP's gradients summed once, clipped; the norms."""
    norms = []
    for number, batch in enumerate(lookahead(mine(rank, size), ebc, accumulate=2)):
        last = model.require_backward_grad_sync = number % 2 == 1
        (loss_of(model, batch) / 2).backward()
        if last:
            norms.append(float(distcache.clip_grad_norm_(model.parameters(), ebc, 0.1)))
            ebc.step()
            dense.step()
            dense.zero_grad()
    return norms


def scaled(rank: int, size: int, ebc, model, dense) -> list[float]:
    """A gradient that is not finite, on one rank alone, skips the step of all."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number, batch in enumerate(lookahead(mine(rank, size), ebc)):
        ebc.optimizer.zero_grad()
        dense.zero_grad()
        loss = loss_of(model, batch)
        if number == 4 and rank == size - 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(ebc.optimizer)
        scaler.step(dense)
        scaler.update()
    assert ebc.tables.steps == 19
    return [scaler.get_scale()]


def uneven(rank: int, size: int, ebc, model, dense) -> None:
    """Evaluation and a broken loop in the middle; then a different number of batches per rank."""
    data = mine(rank, size)
    for number, batch in enumerate(lookahead(data, ebc)):
        if number % 5 == 2:
            model.eval()
            with torch.no_grad():
                [loss_of(model, part(draw(500 + at), rank, size)) for at in range(2)]
            model.train()
        train(model, ebc, [batch], dense)
        if number == 12:
            break
    train(model, ebc, lookahead(data[13 : 20 if rank else 17], ebc), dense)


def epochs(rank: int, size: int, ebc, model, dense) -> None:
    """One look-ahead read three times, the second time not to its end: ranks begin together."""
    stream = lookahead(mine(rank, size, 6), ebc)
    for epoch in range(3):
        for at, batch in enumerate(stream):
            train(model, ebc, [batch], dense)
            if epoch == 1 and at == 3:
                break
    assert ebc.tables.steps == 6 + 4 + 6


def emptied(rank: int, size: int, ebc, model, dense) -> None:
    """A rank without a single id in every second step."""

    def without_ids(batch: Clicks) -> Clicks:
        old = batch.sparse_features
        zeros = torch.zeros_like(old.lengths())
        none = KeyedJaggedTensor(old.keys(), old.values()[:0], lengths=zeros)
        return Clicks(batch.dense_features, none, batch.labels)

    data = mine(rank, size, 8)
    for at in range(1, 8, 2):
        if size == 1:
            data[at] = picked([part(data[at], 0, 2), without_ids(part(data[at], 1, 2))])
        elif rank == 1:
            data[at] = without_ids(data[at])
    train(model, ebc, lookahead(data, ebc), dense)


def one_loss(rank: int, size: int, ebc, model, dense) -> None:
    """Only the loss of rank 0 needs the embeddings."""
    other = torch.ones(1, requires_grad=True)
    for batch in mine(rank, 2, 6):
        total = values_of(ebc(batch.sparse_features)).sum()
        (total if rank == 0 else total.detach() * other).backward()
        if rank == 1:
            ebc.reduce()
        ebc.step()


LOOPS = {
    accumulated: ("sgd", {}),
    scaled: ("sgd", {}),
    uneven: ("adagrad", {}),
    epochs: ("adagrad", {"rows": 260}),
    emptied: ("adagrad", {}),
    one_loss: ("sgd", {"gradient_reduction": "sum"}),
}
"""What a loop may do, on ranks and in one process; optimizer and settings."""


@job
def loops(rank: int, size: int) -> dict:
    """What comes of every loop, under DDP."""
    found = {}
    for loop, (name, settings) in LOOPS.items():
        ebc, ddp, dense = wrapped(name, **{"rows": 400, **settings})
        told = loop(rank, size, ebc, ddp, dense)
        found[loop.__name__] = told, as_arrays(unwrapped(ddp))
        ebc.close()
    return found


@pytest.mark.usefixtures("kind")
def test_loops_on_two_ranks_are_those_of_one_process() -> None:
    first, second = ranks(loops)
    for loop, (name, settings) in LOOPS.items():
        (told, one), (also, other) = first[loop.__name__], second[loop.__name__]
        one = as_arrays(one, back=True)
        assert_same(one, as_arrays(other, back=True))
        ebc = cached(name, **{"rows": 400, **settings})
        model = dlrm(ebc)
        expected = loop(0, 1, ebc, model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert told == also and (told is None or told == pytest.approx(expected, rel=1e-5))
        assert_close(one, weights_of(model), atol=5e-6)


@job
def left(rank: int, size: int) -> dict:
    """Evaluation leaves its look-ahead early, on one rank with moves that come late."""
    next_unmoved, found = StepStream._next_unmoved, {}
    for late in (False, True):

        def slow(self, late=late):
            time.sleep(0.3 * (late and rank == 1))
            return next_unmoved(self)

        StepStream._next_unmoved = slow
        try:
            found[f"late {late}"] = evaluated_and_trained(rank, size)
        finally:
            StepStream._next_unmoved = next_unmoved
    return found


def evaluated_and_trained(rank: int, size: int) -> dict:
    ebc = cached("sgd", ratio=1.0, rows=None, prefetch=5, timeout_s=20)
    model = dlrm(ebc)
    with torch.no_grad():
        for at, batch in enumerate(lookahead(mine(rank, size, 12), ebc)):
            loss_of(model, batch)
            if at == 3:
                break
    train(model, ebc, lookahead(mine(rank, size, 16)[12:], ebc))
    found = weights_of(ebc)
    ebc.close()
    return as_arrays(found)


def test_an_evaluation_left_early_leaves_the_ranks_with_the_same_rows() -> None:
    first, second = ranks(left)
    for found in (first, second):
        assert_same(found["late True"], first["late False"])


@job
def one_fails(rank: int, size: int) -> dict:
    """An error of the loop of one rank, whose planner waits for the other's last word."""
    ahead.LEAVING_S = 0.2
    ebc = cached("sgd", ratio=1.0, rows=None, timeout_s=60)
    model, found = dlrm(ebc), {}
    try:
        for at, batch in enumerate(lookahead(mine(rank, size, 12), ebc)):
            if rank == 1 and at == 3:
                raise ValueError("on purpose")
            loss_of(model, batch).backward()
            ebc.step()
    except (ValueError, PeerError) as error:
        running = [t for t in threading.enumerate() if t.name.startswith("distcache-")]
        closing = any(thread.name == "distcache-closing" for thread in running)
        found = {"closing": closing, "error": str(error), "steps": ebc.tables.steps}
        if rank == 1:
            ebc.tables.reports.add(error)  # as at the interpreter's end
        ebc.close()
        for thread in running:
            thread.join(60)
    return found


def test_an_error_of_one_rank_shows_before_the_planners_have_ended() -> None:
    first, second = ranks(one_fails)
    assert second == {"closing": True, "error": "on purpose", "steps": 3}
    assert "rank 1" in first["error"] and "on purpose" in first["error"]
    assert first["steps"] == 3


@job
def one_asks(rank: int, size: int) -> dict:
    """Rank 0 alone asks for the tables, is told so, and goes on as if it had not."""
    asking.ALONE_S, found = 0.3, {}
    for asks in (True, False):
        ebc = cached("sgd", rows=400)
        model = dlrm(ebc)
        for at, batch in enumerate(lookahead(mine(rank, size, 6), ebc)):
            loss_of(model, batch).backward()
            ebc.step()
            if asks and at == 2 and rank == 0:
                with pytest.raises(PeerError, match=r"ranks 1, 2 did not within 0.3 s.* all ranks"):
                    model.state_dict()
        asking.ALONE_S = 60.0
        found[asks] = weights_of(ebc)
    return found


def test_rank_0_that_asks_for_the_tables_alone_is_told_who_is_missing() -> None:
    for found in ranks(one_asks, size=3):
        assert_same(found[True], found[False])


@job
def some_ranks(rank: int, size: int) -> dict:
    """Ranks 1 and 2 of three train without rank 0."""
    group = dist.new_group([1, 2])
    found = {}
    if rank:
        ebc = cached("sgd", rows=400, process_group=group, timeout_s=60)
        assert (ebc.tables.world.rank, ebc.tables.world.size) == (rank - 1, 2)
        for batch in lookahead(mine(rank - 1, 2, 6), ebc):
            values_of(ebc(batch.sparse_features)).sum().backward()
            ebc.step()
        found = weights_of(ebc)
    return found


@pytest.mark.slow
def test_a_group_of_some_ranks() -> None:
    found = ranks(some_ranks, size=3)
    assert_same(found[1], found[2])
    alone = cached("sgd", rows=400)
    for batch in batches(6):
        (values_of(alone(batch.sparse_features)).sum() / 2).backward()
        alone.step()
    assert_close(found[1], weights_of(alone))


STEPS = 8


def placements() -> dict[str, dict]:
    """Settings by name; the first is what the others are compared with."""
    known = {"statistics": counted(), "batch_size": 24}
    return {
        "all": {"ratio": 1.0, "rows": None},
        "home": {"state": "home"},
        "sharded": {"placement": "sharded", "rows": 200},
        "mixed": {"placement": "mixed", "replicated_share": 0.05, "state": "home", **known},
        "auto": {"placement": "auto", **known},
        "serial": {"placement": "sharded", "schedule": "serial", "rows": 200},
        "inline": {"placement": "sharded", "rows": 200},
    }


class Checkpointed(nn.Module):
    """A model whose forward runs once more in backward."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.model = Pooled(ebc)

    def forward(self, dense: Tensor, ids: object) -> Tensor:
        return checkpoint(self.model, dense, ids, use_reentrant=False)


def one_run(rank: int, size: int, name: str, kind: str, settings: dict, model=Pooled) -> dict:
    """Epochs, then steps of k = 2 weighted micro-batches (sequences read no weights) with clipping
    and a schedule of rates, and an evaluation; weights, norms, bytes that were exchanged."""
    tables = two_widths()
    data = mine(rank, size, STEPS, tables=tables, weighted=True)
    weighted = {"is_weighted": True} if hasattr(tables[0], "pooling") else {}
    settings = {"rows": 500, "lookahead": 4, **weighted, **settings}
    ebc, ddp, dense = wrapped(name, model, tables=tables, **settings)
    rates = torch.optim.lr_scheduler.StepLR(ebc.optimizer, 2, 0.5)
    found = {}
    train(ddp, ebc, data, dense)
    train(ddp, ebc, data if kind == "inline" else lookahead(data, ebc), dense)
    for number, batch in enumerate(lookahead(data, ebc, accumulate=2)):
        loss_of(ddp, batch).backward()
        if number % 2:
            norm = distcache.clip_grad_norm_(ddp.parameters(), ebc, 0.1)
            found[f"norm {number}"] = norm.reshape(1)
            ebc.step()
            dense.step()
            dense.zero_grad()
            rates.step()
    with torch.no_grad():
        loss_of(ddp, data[0])
    found |= {key.replace("model.", ""): value for key, value in unwrapped(ddp).items()}
    summary = ebc.summary()
    assert summary["steps"] == 2 * STEPS + STEPS // 2 and summary["stage_ms"]["sync"] > 0
    found["bytes"] = torch.tensor([summary["collective_bytes"]])
    ebc.close()
    return found


@job
def in_placements(rank: int, size: int, name: str) -> dict:
    runs = {
        kind: one_run(rank, size, name, kind, settings) for kind, settings in placements().items()
    }
    for kind in ("sharded", "mixed"):  # what runs twice exchanges nothing twice
        again = one_run(rank, size, name, kind, placements()[kind], Checkpointed)
        assert_same(again, runs[kind])
    for kind, found in runs.items():
        del found["bytes"]
        same = {name: torch.equal(value, runs["all"][name]) for name, value in found.items()}
        assert found.keys() == runs["all"].keys() and all(same.values()), (kind, same)
    return runs["all"]


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_all_placements_have_the_same_bits(name: str) -> None:
    assert_same(*ranks(in_placements, name))


@job
def non_finite(rank: int, size: int) -> dict:
    """An infinite gradient of a row at one home: every rank leaves the step out, or stops."""
    found = {}
    for placement in ("replicated", "sharded"):
        for on in ("skip", "stop"):
            ebc = cached("adam", placement=placement, on_nonfinite=on, timeout_s=60)
            data = mine(rank, size, 3)
            for number, batch in enumerate(data):
                factor = float("inf") if rank and number == 1 else 1.0
                (values_of(ebc(batch.sparse_features)) * factor).sum().backward()
                if number and on == "stop":  # from there on for good
                    with pytest.raises(NonFiniteLossError, match=r"step 1.*nothing was") as error:
                        ebc.step()
                    assert "from the batch of rank 1)" in str(error.value)
                    assert placement == "sharded" or "(tables t0, t1" in str(error.value)
                    ebc.optimizer.zero_grad()
                else:
                    ebc.step()
            counts = (ebc.tables.steps, ebc.tables.skipped)
            assert counts == ((2, 1) if on == "skip" else (1, 0))
            weights = {f"{placement} {key}": v.clone() for key, v in ebc.state_dict().items()}
            ebc.close()
            if on == "skip":
                found |= weights
                continue
            once = cached("adam", placement=placement, timeout_s=60)
            values_of(once(data[0].sparse_features)).sum().backward()
            once.step()
            assert_same(weights, {f"{placement} {k}": v for k, v in once.state_dict().items()})
            once.close()
    for key in [key for key in found if key.startswith("replicated")]:
        assert torch.equal(found[key], found[key.replace("replicated", "sharded")])
    return found


@pytest.mark.usefixtures("kind")
def test_a_sum_that_is_not_finite_at_one_home_is_left_out_by_all() -> None:
    assert_same(*ranks(non_finite))


def named(tables: list, number: int) -> dict[str, set[int]]:
    """The ids that a global batch names in each table."""
    ids = draw(number, tables=tables).sparse_features
    return {t.name: {int(i) for f in t.feature_names for i in ids[f].values()} for t in tables}


def marked(rank: int, size: int, placement: str) -> None:
    """Marks in a loop with rows on their way: ids since then are those of a set of ids. A table is
    frozen in step 4, step 5 is left out, step 6 evaluates, step 7 has no gradient but zero."""
    tables, settings = two_widths(), {"rows": 500, **placements()[placement]}
    ebc = cached("adam", tables=tables, on_nonfinite="skip", timeout_s=60, **settings)
    slow = {first: {table.name: set[int]() for table in tables} for first in (0, 3, 8)}
    marks = {0: ebc.mark()}
    for number, batch in enumerate(lookahead(mine(rank, size, 9, tables=tables), ebc)):
        if number in slow and number:
            marks[number] = ebc.mark()
        ebc.freeze("t0") if number == 4 else ebc.unfreeze("t0")
        with torch.set_grad_enabled(number != 6):
            loss = values_of(ebc(batch.sparse_features)).sum()
        if number == 6:
            continue
        (loss * {5: float("inf"), 7: 0.0}.get(number, 1.0)).backward()
        ebc.step()
        for first in (first for first in slow if first <= number != 5):
            for name, ids in named(tables, number).items():
                slow[first][name] |= ids if (number, name) != (4, "t0") else set()
    assert ebc.tables.skipped == 1
    for first, mark in marks.items():
        found = ebc.changed_since(mark)
        assert {name: ids.tolist() for name, ids in found.items()} == {
            name: sorted(ids) for name, ids in slow[first].items()
        }, (placement, first)
    last = ebc.mark()
    key = next(key for key in ebc.state_dict() if key.endswith("t2.weight"))
    ebc.load_state_dict({key: torch.ones(400, 4)}, strict=False)
    counts = {name: len(ids) for name, ids in ebc.changed_since(last).items()}
    assert counts == {table.name: 400 * (table.name == "t2") for table in tables}
    kept = ebc.changed_since(marks[3])
    again = ebc.changed_since(ebc.mark(kept))  # as a resumed loop does
    assert all(np.array_equal(ids, kept[name]) for name, ids in again.items())
    with pytest.raises(ConfigError, match=r"changed: table 't2' has ids 0 to 399, not 1 to 400"):
        ebc.mark({"t2": np.array([1, 400])})
    with pytest.raises(
        PlanError, match=r"mark 0 is not kept, of the last 4 there are \[1, 2, 3, 4\]"
    ):
        ebc.changed_since(marks[0])
    ebc.close()


@job
def marked_rows(rank: int, size: int) -> dict:
    for placement in ("all", "sharded", "mixed"):
        marked(rank, size, placement)
    return {}


@pytest.mark.usefixtures("kind")
def test_what_changed_is_what_applied_steps_named() -> None:
    marked(0, 1, "all")
    ranks(marked_rows)


@job
def scaled_at_one_home(rank: int, size: int) -> dict:
    """An infinite gradient of rows of one home alone: the scalers of all ranks decide alike."""
    data = mine(rank, size, 3)
    ebc, ddp, dense = wrapped("adam", placement="sharded")
    loss_of(ddp, data[0]).backward()
    with pytest.raises(PlanError, match=r"distcache.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(ebc.optimizer.param_groups[0]["params"], 1.0)
    ebc.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = {}
    for batch, bad in ((data[1], True), (data[2], False)):
        dense.zero_grad()
        loss = loss_of(ddp, batch)
        if bad:  # DDP's gradients stay finite: only this row's, at its one home, does not
            row = torch.zeros_like(ebc.tables.current.leaves[0])
            row[:1] = float("inf") if rank else 0.0
            ebc.tables.current.leaves[0].register_hook(lambda g, row=row: g + row)
        scaler.scale(loss).backward()
        if bad:
            homes = [part.rows.grad for part in ebc.tables.current.view.parts]
            found["finite"] = torch.stack([one.isfinite().all() for one in homes]).all()
        scaler.unscale_(ebc.optimizer)
        scaler.step(ebc.optimizer)
        scaler.update()
        ebc.optimizer.zero_grad()
    assert ebc.tables.steps == 2
    found["scale"] = torch.tensor([scaler.get_scale()])
    ebc.close()
    return found


@pytest.mark.usefixtures("kind")
def test_grad_scalers_agree_and_torchs_clipping_is_refused() -> None:
    found = ranks(scaled_at_one_home)
    assert [float(own["scale"]) for own in found] == [512.0, 512.0]
    assert sorted(bool(own["finite"]) for own in found) == [False, True], "one home alone has it"


def made_before(rank: int, size: int, kind: str) -> dict:
    """A model that is made before its ranks know each other trains as one made after that."""
    using(kind)
    torch.set_num_threads(1)
    found = {}
    early = cached("adagrad", timeout_s=60)
    early_model, early_lr = dlrm(early), early.optimizer.param_groups[0]["lr"]
    unused, closed = cached("sgd"), cached("sgd")
    closed.close()
    del unused
    with pytest.raises(ConfigError, match=rf"WORLD_SIZE={size}, but torch.distributed is not"):
        early_model.load_state_dict({}, strict=False)
    waiting = [  # used by each rank in another order at first
        cached("sgd", timeout_s=60),
        cached("adagrad", configs()[:2], timeout_s=60, rows=250),
    ]
    dist.init_process_group("gloo")
    try:
        for ebc in waiting if rank == 0 else waiting[::-1]:
            assert ebc.tables.world.size == size
        for name, ebc, model in (("early", early, early_model), ("late", None, None)):
            ebc = ebc or cached("adagrad", timeout_s=60)
            ddp = DistributedDataParallel(model or dlrm(ebc))
            dense = torch.optim.SGD(ddp.parameters(), lr=0.1)
            train(ddp, ebc, lookahead(mine(rank, size, 6), ebc), dense)
            assert ebc.tables.world.size == size
            found[name] = as_arrays(weights_of(ddp))
            ebc.close()
        assert early_lr == 0.005
        for batch in mine(rank, size, 4):
            for ebc in waiting:
                values_of(ebc(batch.sparse_features)).square().sum().backward()
                ebc.step()
        for at, ebc in enumerate(waiting):
            found[f"waiting {at}"] = as_arrays(weights_of(ebc))
            ebc.close()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return found


def test_a_collection_made_before_the_group_joins_it() -> None:
    first, second = ranks(made_before)
    for found in (first, second):
        assert_same(found["early"], found["late"])
    for name in first:
        assert_same(first[name], second[name])


def used_alone(rank: int, size: int, kind: str) -> dict:
    """Used by each process alone, then with a group of several ranks."""
    using(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE")
        ebc = cached("sgd")
        model = dlrm(ebc)
        loss_of(model, part(batches(1)[0], rank, size)).backward()
        ebc.step()
    dist.init_process_group("gloo")
    try:
        with pytest.raises(ConfigError, match=r"used before init_process_group and trains alone"):
            loss_of(model, part(batches(1)[0], rank, size))
        ebc.close()
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return {}


def test_a_collection_used_alone_does_not_train_with_others() -> None:
    ranks(used_alone)


def test_there_is_no_store_before_the_first_use() -> None:
    huge = cached("sgd", configs()[:1])
    assert huge._lazy_tables.made is None and huge.optimizer.param_groups[0]["lr"] == 0.1
    assert [tuple(leaf.shape) for leaf in huge.optimizer.param_groups[0]["params"]] == [(0, 8)]
    assert "400 x 8" in repr(huge) and huge.to("cpu") is huge
    huge.optimizer.zero_grad()
    huge.close()
    with pytest.raises(PlanError, match="is closed"):
        huge.state_dict()
