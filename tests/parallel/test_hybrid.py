"""`hybrid` on the CPU: the numbers of an unsharded trainer, at every sharding and world size."""

from __future__ import annotations

import hybrid_cases as cases
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks

from distcache.comm.world import World, close_world, open_world
from distcache.parallel.base import Step

OPTIMIZERS = cases.OPTIMIZERS
SHARDINGS = ["auto", "table_wise", "row_wise", "column_wise"]


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
        losses = cases.train(hybrid, rank, size, weighted)
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
        expected = [
            oracle.train(cases.whole_batch(i, b, weighted)) for i, b in enumerate(cases.SIZES)
        ]
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
        whole = [cases.whole_batch(i, b) for i, b in enumerate(cases.SIZES[:10])]
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


def _bf16(world: World, rank: int, size: int) -> tuple:
    hybrid = cases.hybrid_of(world, OPTIMIZERS[1], "table_wise", amp="bf16")
    losses = cases.train(hybrid, rank, size)
    dtypes = {value.dtype for value in cases.copy_state(hybrid).values() if hasattr(value, "dtype")}
    logits = hybrid.eval_step(Step(cases.rank_slice(cases.whole_batch(99, 5), rank, size)))
    hybrid.close()
    return losses, dtypes, logits.dtype


def test_bfloat16_products_and_float32_rows(two_ranks: list) -> None:
    oracle = cases.Unsharded(OPTIMIZERS[1])
    expected = [oracle.train(cases.whole_batch(i, b)) for i, b in enumerate(cases.SIZES)]
    for losses, dtypes, logits in (results["bf16"] for results in two_ranks):
        assert dtypes == {torch.float32} and logits == torch.float32
        apart = np.abs(np.array(losses) / expected - 1)
        assert 1e-5 < apart.max() < 2**-6, "bfloat16 rounds each product to 8 bits"


def _two_ranks(rank: int, size: int, folder: str) -> dict:
    world = open_world("cpu", "gloo", 60)
    results = {
        "grid": _train_all(world, rank, size, SAMPLE),
        "resume": _save_and_go_on(world, rank, size, folder),
        "bf16": _bf16(world, rank, size),
    }
    close_world(world)
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What several checks saw on two ranks, by rank."""
    return run_ranks(_two_ranks, 2, str(tmp_path_factory.mktemp("hybrid")))
