"""`hybrid` on two ranks of the CPU: buckets, bad losses, failures, what is watched and counted."""

from __future__ import annotations

from itertools import pairwise

import hybrid_cases as cases
import numpy as np
import pytest
import torch
from ranks import run_ranks

from distcache.comm.world import World, close_world, open_world
from distcache.errors import ConfigError
from distcache.parallel.base import Step
from distcache.parallel.hybrid import load_torchrec

OPTIMIZERS = cases.OPTIMIZERS


def test_gradient_buckets_keep_their_order_from_the_first_step_on(two_ranks: list) -> None:
    orders = two_ranks[0]["buckets"]
    assert len(orders[0]) == 4
    assert orders == [orders[0]] * 4


def _bad_loss_and_rates(world: World, rank: int, size: int) -> list:
    hybrid = cases.hybrid_of(world, OPTIMIZERS[1], "row_wise")
    good = Step(cases.rank_slice(cases.whole_batch(0, 8), rank, size))
    poisoned = Step(cases.rank_slice(cases.whole_batch(1, 8), rank, size))
    if rank == 1:
        poisoned.batch.dense[0, 0] = float("inf")
        poisoned.batch.dense[1, 0] = float("-inf")
    out = []
    for _ in range(2):  # before and after the first applied step
        before = cases.copy_state(hybrid)
        result = hybrid.train_step(poisoned)
        after = cases.copy_state(hybrid)
        same = all(
            torch.equal(value, after[key]) if isinstance(value, torch.Tensor) else True
            for key, value in before.items()
        )
        out.append(
            (result.bad_ranks, np.isfinite(result.loss), same and before.keys() == after.keys())
        )
        out.append(hybrid.train_step(good, stop=rank == 1).stop)
    hybrid.set_lr(0.0, 0.0)
    before = cases.copy_state(hybrid)
    hybrid.train_step(good)
    after = cases.copy_state(hybrid)
    frozen = all(
        torch.equal(before[key], after[key])
        for key in before
        if key.startswith("dense.") or ".weight/" in key
    )
    moved = any(not torch.equal(before[k], after[k]) for k in before if "momentum1" in k)
    out.append((frozen, moved))
    hybrid.close()
    hybrid.close()
    return out


def test_a_loss_that_is_not_finite_changes_nothing_and_rates_act_at_once(two_ranks: list) -> None:
    for seen in (results["bad"] for results in two_ranks):
        assert seen == [((1,), False, True), True, ((1,), False, True), True, (True, True)]


def _bucket_orders(world: World, rank: int, size: int) -> list:
    hybrid = cases.hybrid_of(world, OPTIMIZERS[0], "table_wise")
    orders, wrapped = [], hybrid._dmp._dmp_wrapped_module
    step = Step(cases.rank_slice(cases.whole_batch(0, 8), rank, size))
    names = {id(p): name for name, p in hybrid._model.named_parameters()}
    for _ in range(4):
        hybrid.train_step(step)
        buckets = wrapped.reducer._get_zeros_like_grad_buckets()
        orders.append([names[id(p)] for bucket in buckets for p in bucket.parameters()])
    hybrid.close()
    return orders


def _planner_fails(world: World, rank: int, size: int) -> str:
    from distcache.parallel import hybrid_torchrec as hybrid_sharding

    def fails(*_: object) -> None:
        raise MemoryError("not enough HBM")

    planned = hybrid_sharding._planned
    hybrid_sharding._planned = fails if rank == 0 else planned
    try:
        cases.hybrid_of(world, OPTIMIZERS[0], "auto")
    except ConfigError as error:
        return str(error)
    finally:
        hybrid_sharding._planned = planned
    return "no error"


def test_a_planner_that_fails_on_rank_0_is_heard_on_all(two_ranks: list) -> None:
    for results in two_ranks:
        assert (
            "parallel.sharding=row_wise. It says: MemoryError: not enough HBM" in results["fails"]
        )


def _bytes(world: World, rank: int, size: int) -> list:
    out = []
    for sharding in ("table_wise", "row_wise"):
        hybrid = cases.hybrid_of(world, OPTIMIZERS[1], sharding)
        assert load_torchrec().comm_ops.get_gradient_division() is False
        for index in range(2):
            batch = cases.whole_batch(index, 8)
            hybrid.train_step(Step(cases.rank_slice(batch, rank, size)))
        hybrid.eval_step(Step(cases.rank_slice(batch, rank, size)))
        owners = {
            name: value.metadata().shards_metadata[0].placement.rank()
            for name, value in hybrid._weights.items()
        }
        out.append((hybrid.counters.values(), owners, hybrid.summary()))
        hybrid.close()
        assert load_torchrec().comm_ops.get_gradient_division() is True
    return out


def _watched(world: World, rank: int, size: int) -> tuple:
    hybrid, seen = cases.hybrid_of(world, OPTIMIZERS[0], "table_wise"), []
    hybrid.watch(lambda step, kind, spans: seen.append((step, kind, spans)))
    cases.train(hybrid, rank, size)
    hybrid.eval_step(Step(cases.rank_slice(cases.whole_batch(99, 5), rank, size)))
    summary, progress = hybrid.summary(), hybrid.progress()
    hybrid.close()
    return seen, summary, progress


def test_a_watcher_sees_each_step_and_its_wait(two_ranks: list) -> None:
    for seen, summary, progress in (results["watched"] for results in two_ranks):
        assert [step for step, _, _ in seen] == list(range(len(cases.SIZES) + 1))
        assert [kind for _, kind, _ in seen] == ["train"] * len(cases.SIZES) + ["eval"]
        names = [[span.name for span in spans] for _, _, spans in seen]
        assert names == [["wait", "step"]] * len(cases.SIZES) + [["forward"]]
        spans = [span for _, _, spans in seen for span in spans]
        assert all(a.end <= b.start for a, b in pairwise(spans))
        waited = sum(span.seconds for span in spans if span.name == "wait")
        assert summary["stage_ms"]["wait"] == pytest.approx(1e3 * waited / len(cases.SIZES))
        assert 0 <= summary["stage_hidden_ms"]["load"] <= summary["stage_ms"]["load"]
        assert progress == {}, "no stages: the log line shows none"


def _two_ranks(rank: int, size: int) -> dict:
    world = open_world("cpu", "gloo", 60)
    results = {
        "fails": _planner_fails(world, rank, size),
        "bad": _bad_loss_and_rates(world, rank, size),
        "watched": _watched(world, rank, size),
        "bytes": _bytes(world, rank, size),
        "buckets": _bucket_orders(world, rank, size),
    }
    close_world(world)
    return results


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    """What several checks saw on two ranks, by rank."""
    return run_ranks(_two_ranks, 2)


def test_bytes_of_known_steps(two_ranks: list) -> None:
    size, steps, local = 2, 2, 4
    by_rank = [results["bytes"] for results in two_ranks]
    dense = sum(parameter.nbytes for parameter in cases.Toy().parameters())
    widths = {table.name: table.dim * len(table.features) for table in cases.tables()}
    sent = []
    for rank, ((counted, owners, summary), _) in enumerate(by_rank):
        mine = sum(width for name, width in widths.items() if owners[name] == rank)
        others = sum(widths.values()) - mine
        # Forward: my tables' vectors of the other's samples; backward: gradients of my samples.
        assert counted["collective_bytes"] == steps * 4 * local * (mine + others)
        assert counted["dense_collective_bytes"] == steps * dense
        assert counted["planning_bytes"] > 0
        assert mine > 0, "each rank owns a table"
        assert summary["stage_ms"]["forward_backward"] > 0
        assert summary["stage_ms"]["sync"] is None
        assert summary["stage_hidden_ms"] == {"load": 0.0}, "no batch came from a stream"
        assert summary["hit_rate"] is None
        sent.append(counted["planning_bytes"])
        tables = sum(t.rows * t.dim * 4 for t in cases.tables() if owners[t.name] == rank)
        assert summary["embedding_device_bytes"] >= 2 * tables
        assert summary["table_rows"] == 104
    assert summary["planning_bytes"] == round(sum(sent) / size)
    state = 4 * sum(1 for _ in cases.Toy().parameters())
    assert summary["peak_device_bytes"] == summary["embedding_device_bytes"] + 3 * dense + state
    for _, (counted, _, summary) in by_rank:
        # Row-wise: a reduce-scatter of every sample's vectors forward, an all-gather backward.
        whole = size * local * 4 * sum(widths.values())
        assert counted["collective_bytes"] == steps * 2 * whole // 2
        assert counted["dense_collective_bytes"] == steps * dense
        assert summary["collective_bytes"] == counted["collective_bytes"]
