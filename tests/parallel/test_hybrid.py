"""`hybrid` on the CPU: the numbers of an unsharded trainer, at every sharding and world size."""

from __future__ import annotations

from itertools import pairwise

import hybrid_cases as cases
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks

from distcache.comm.world import World, close_world, open_world
from distcache.errors import ConfigError
from distcache.parallel.base import Step
from distcache.parallel.hybrid import HybridParallel
from distcache.parallel.hybrid_spec import load_torchrec

SIZES = [8, 7, 1, 5, 2, 3] + [8] * 14
OPTIMIZERS = cases.OPTIMIZERS
SHARDINGS = ["auto", "table_wise", "row_wise", "column_wise"]


def _train(hybrid: HybridParallel, rank: int, size: int, weighted: bool = False) -> list[float]:
    whole = [cases.whole_batch(i, b, weighted) for i, b in enumerate(SIZES)]
    steps = hybrid.stream(cases.rank_slice(batch, rank, size) for batch in whole)
    results = [hybrid.train_step(step) for step in steps]
    assert not any(result.bad_ranks or result.stop for result in results)
    return [result.loss for result in results]


def _grid(rank: int, size: int, settings: list) -> list:
    world = open_world("cpu", "gloo", 60)
    out = _train_all(world, rank, size, settings)
    close_world(world)
    return out


def _train_all(world: World, rank: int, size: int, settings: list) -> list:
    out = []
    for optimizer, sharding, weighted in settings:
        hybrid = cases.hybrid_of(world, optimizer, sharding, weighted)
        before = cases.whole_tables(hybrid)
        losses = _train(hybrid, rank, size, weighted)
        last = cases.rank_slice(cases.whole_batch(99, 5, weighted), rank, size)
        logits = hybrid.eval_step(Step(last)).numpy()
        dense = {name: value.numpy().copy() for name, value in hybrid.dense_state().items()}
        split = {
            name: [shard.shard_sizes for shard in value.metadata().shards_metadata]
            for name, value in hybrid._weights.items()
        }
        out.append((losses, before, cases.whole_tables(hybrid), dense, logits, split))
        hybrid.close()
    return out


def _check(by_rank: list, settings: list) -> None:
    size = len(by_rank)
    for case, (optimizer, sharding, weighted) in enumerate(settings):
        oracle = cases.Unsharded(optimizer, "sum" if weighted else "mean")
        losses, before, after, dense, _, split = by_rank[0][case]
        name = f"{optimizer.name} {sharding} weighted={weighted} W={size}"
        for table, weight in zip(before, oracle.rows, strict=True):
            np.testing.assert_array_equal(table, weight.detach().float().numpy(), err_msg=name)
        expected = [oracle.train(cases.whole_batch(i, b, weighted)) for i, b in enumerate(SIZES)]
        np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=name)
        for other in by_rank:
            assert other[case][0] == losses, f"{name}: ranks report different losses"
        for start, table, weight in zip(before, after, oracle.rows, strict=True):
            assert np.abs(table - start).max() > 1e-5, f"{name}: nothing was learnt"
            np.testing.assert_allclose(table, weight.detach(), atol=2e-6, err_msg=name)
        for key, value in oracle.model.named_parameters():
            np.testing.assert_allclose(dense[key], value.detach(), atol=2e-6, err_msg=name)
        assert list(dense) == [key for key, _ in cases.Toy().named_parameters()]
        with torch.no_grad():
            logits = oracle.logits(cases.whole_batch(99, 5, weighted))
        here = np.concatenate([other[case][4] for other in by_rank])
        np.testing.assert_allclose(here, logits, atol=1e-5, err_msg=name)
        if sharding == "column_wise" and size > 1:
            assert all(len(shards) == size for shards in split.values()), split
        if sharding == "row_wise":
            shards = [len(split[table]) for table in ("t0", "t1", "t2")]
            assert shards == [size, 1 if size == 4 else size, size]  # t1 has three rows


# Column shards keep row states of their own: no row-wise Adagrad of the whole row.
FULL = [
    (optimizer, sharding, weighted)
    for optimizer in OPTIMIZERS
    for sharding in SHARDINGS
    for weighted in (False, True)
    if (optimizer.name, sharding) != ("rowwise_adagrad", "column_wise")
]
SAMPLE = [(OPTIMIZERS[1], sharding, False) for sharding in SHARDINGS]
SAMPLE += [(OPTIMIZERS[0], "row_wise", True), (OPTIMIZERS[0], "column_wise", True)]
SAMPLE += [(OPTIMIZERS[2], "table_wise", True), (OPTIMIZERS[2], "row_wise", False)]


def test_one_rank_equals_an_unsharded_trainer() -> None:
    _check([_grid(0, 1, SAMPLE)], SAMPLE)


def test_two_ranks_equal_an_unsharded_trainer(two_ranks: list) -> None:
    _check([results["grid"] for results in two_ranks], SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_setting_equals_an_unsharded_trainer(size: int) -> None:
    _check(run_ranks(_grid, size, FULL, timeout=300), FULL)


def _save_and_go_on(world: World, rank: int, size: int, folder: str) -> list:
    out = []
    for optimizer, sharding in [
        (OPTIMIZERS[0], "auto"),
        (OPTIMIZERS[1], "table_wise"),
        (OPTIMIZERS[1], "column_wise"),
        (OPTIMIZERS[2], "row_wise"),
        (OPTIMIZERS[2], "column_wise"),
    ]:
        path = f"{folder}/{optimizer.name}-{sharding}"
        whole = [cases.whole_batch(i, b) for i, b in enumerate(SIZES[:10])]
        steps = [Step(cases.rank_slice(batch, rank, size)) for batch in whole]
        straight = cases.hybrid_of(world, optimizer, sharding)
        losses = [straight.train_step(step).loss for step in steps[:5]]
        dcp.save(straight.state_dict(), checkpoint_id=path)
        straight.eval_step(steps[0])
        losses += [straight.train_step(step).loss for step in steps[5:]]
        expected = cases.whole_tables(straight)
        straight.close()
        resumed = cases.hybrid_of(world, optimizer, sharding)
        state = resumed.state_dict()
        dcp.load(state, checkpoint_id=path)
        resumed.load_state_dict(state)
        assert resumed.state_dict()["counters.steps"] == 5
        again = [resumed.train_step(step).loss for step in steps[5:]]
        out.append((losses[5:], again, expected, cases.whole_tables(resumed)))
        resumed.close()
    return out


def test_stop_and_resume_is_bitwise(two_ranks: list) -> None:
    for losses, again, expected, tables in two_ranks[0]["resume"]:
        assert losses == again
        for one, two in zip(expected, tables, strict=True):
            np.testing.assert_array_equal(one, two)


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
    from distcache.parallel import hybrid_sharding

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
    _train(hybrid, rank, size)
    hybrid.eval_step(Step(cases.rank_slice(cases.whole_batch(99, 5), rank, size)))
    summary, progress = hybrid.summary(), hybrid.progress()
    hybrid.close()
    return seen, summary, progress


def test_a_watcher_sees_each_step_and_its_wait(two_ranks: list) -> None:
    for seen, summary, progress in (results["watched"] for results in two_ranks):
        assert [step for step, _, _ in seen] == list(range(len(SIZES) + 1))
        assert [kind for _, kind, _ in seen] == ["train"] * len(SIZES) + ["eval"]
        names = [[span.name for span in spans] for _, _, spans in seen]
        assert names == [["wait", "step"]] * len(SIZES) + [["forward"]]
        spans = [span for _, _, spans in seen for span in spans]
        assert all(a.end <= b.start for a, b in pairwise(spans))
        waited = sum(span.seconds for span in spans if span.name == "wait")
        assert summary["stage_ms"]["wait"] == pytest.approx(1e3 * waited / len(SIZES))
        assert 0 <= summary["stage_hidden_ms"]["load"] <= summary["stage_ms"]["load"]
        assert progress == {}, "no stages: the log line shows none"


def _bf16(world: World, rank: int, size: int) -> tuple:
    hybrid = cases.hybrid_of(world, OPTIMIZERS[1], "table_wise", amp="bf16")
    losses = _train(hybrid, rank, size)
    dtypes = {value.dtype for value in cases.copy_state(hybrid).values() if hasattr(value, "dtype")}
    logits = hybrid.eval_step(Step(cases.rank_slice(cases.whole_batch(99, 5), rank, size)))
    hybrid.close()
    return losses, dtypes, logits.dtype


def test_bfloat16_products_and_float32_rows(two_ranks: list) -> None:
    oracle = cases.Unsharded(OPTIMIZERS[1])
    expected = [oracle.train(cases.whole_batch(i, b)) for i, b in enumerate(SIZES)]
    for losses, dtypes, logits in (results["bf16"] for results in two_ranks):
        assert dtypes == {torch.float32} and logits == torch.float32
        apart = np.abs(np.array(losses) / expected - 1)
        assert 1e-5 < apart.max() < 2**-6, "bfloat16 rounds each product to 8 bits"


def _two_ranks(rank: int, size: int, folder: str) -> dict:
    world = open_world("cpu", "gloo", 60)
    results = {
        "fails": _planner_fails(world, rank, size),
        "grid": _train_all(world, rank, size, SAMPLE),
        "resume": _save_and_go_on(world, rank, size, folder),
        "bad": _bad_loss_and_rates(world, rank, size),
        "watched": _watched(world, rank, size),
        "bf16": _bf16(world, rank, size),
        "bytes": _bytes(world, rank, size),
        "buckets": _bucket_orders(world, rank, size),
    }
    close_world(world)
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What several checks saw on two ranks, by rank."""
    return run_ranks(_two_ranks, 2, str(tmp_path_factory.mktemp("hybrid")))


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
