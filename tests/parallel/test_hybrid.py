"""`hybrid` on the CPU: the numbers of an unsharded trainer at every sharding and world size;
buckets, bad losses, failures, what is watched and counted on two ranks; what is refused, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from scenarios import OPTIMIZERS, Outcome, Scenario, check_against_trainer, table
from torchrec.distributed import comm_ops

from distcache.comm.world import World, close_world, open_world
from distcache.data.batch import Batch
from distcache.errors import ConfigError, MemoryTooSmallError
from distcache.layout import TableSpec
from distcache.optim import row_update
from distcache.parallel import hybrid as module
from distcache.parallel.base import Step, StepResult
from distcache.parallel.hybrid import HybridParallel, HybridSpec, check_memory, check_spec
from distcache.store import memory as available

SIZES = (8, 7, 1, 5, 2, 3, 8, 8, 8, 8, 8, 8)
SUMS = (table("t0", 37, 16, features=2), table("t1", 1, 16), table("t2", 64, 32))
TABLES = (replace(SUMS[0], pooling="mean"), *SUMS[1:])
"""Two widths, two features on one table, one table that cannot be cut by rows."""

SHARDINGS = ("auto", "table_wise", "row_wise", "column_wise")
# Column shards keep row states of their own: no row-wise Adagrad of the whole row.
FULL = [
    (name, sharding, weighted)
    for name in ("sgd", "adagrad", "rowwise_adagrad")
    for sharding in SHARDINGS
    for weighted in (False, True)
    if (name, sharding) != ("rowwise_adagrad", "column_wise")
]
SAMPLE = [("adagrad", sharding, False) for sharding in SHARDINGS]
SAMPLE += [("sgd", "row_wise", True), ("sgd", "column_wise", True)]
SAMPLE += [("rowwise_adagrad", "table_wise", True), ("rowwise_adagrad", "row_wise", False)]


class Sizes(Scenario):
    """Global batches of `SIZES` samples, and of 5 in evaluation."""

    def batch(self, step: int, rank: int = 0, world: int = 1, kind: str = "train") -> Batch:
        size = SIZES[step] if kind == "train" else 5
        return Scenario.batch(replace(self, global_batch=size), step, rank, world, kind)


def scenario(name: str = "adagrad", weighted: bool = False) -> Scenario:
    spec, lr = OPTIMIZERS[name]
    tables = SUMS if weighted else TABLES
    return Sizes(tables, spec, lr, steps=len(SIZES), weighted=weighted, bag=4)


def steps_of(case: Scenario, world: World) -> list[Step]:
    return [Step(case.batch(at, world.rank, world.size)) for at in range(case.steps)]


def eval_of(case: Scenario, world: World) -> Step:
    return Step(case.batch(99, world.rank, world.size, "eval"))


def hybrid_of(world: World, case: Scenario, sharding: str, **changes: object) -> HybridParallel:
    named = {"sharding": sharding, "weighted": case.weighted, **changes}
    spec = HybridSpec(case.tables, case.features, case.optimizer, case.seed, **named)
    hybrid = HybridParallel(world, spec, case.model())
    hybrid.set_lr(case.lr, case.lr)
    return hybrid


def train(hybrid: HybridParallel, world: World, case: Scenario) -> list[float]:
    """The losses of this rank's steps."""
    slices = (step.batch for step in steps_of(case, world))
    results = [hybrid.train_step(step) for step in hybrid.stream(slices)]
    assert not any(result.bad_ranks or result.stop for result in results)
    return [result.loss for result in results]


def ended(hybrid: HybridParallel, case: Scenario, losses: list[float]) -> Outcome:
    """All tables on rank 0, read ten rows at a time, and the dense part."""
    tables: dict[str, np.ndarray] = {}
    for index, spec in enumerate(case.tables):
        starts = range(0, spec.rows, 10)
        parts = [hybrid.table_block(index, low, min(low + 10, spec.rows)) for low in starts]
        if parts[0] is not None:
            tables[spec.name] = torch.cat(parts).numpy()
    dense = {name: value.numpy().copy() for name, value in hybrid.dense_state().items()}
    return Outcome(losses, tables, dense, {})


def copy_state(hybrid: HybridParallel) -> dict[str, torch.Tensor]:
    """Copies of all local tensors of the state, but for the count of steps."""
    copies = {}
    for key, value in hybrid.state_dict().items():
        if hasattr(value, "local_shards"):
            shards = enumerate(value.local_shards())
            copies |= {f"{key}/{i}": shard.tensor.clone() for i, shard in shards}
        elif key != "applied_steps":
            copies[key] = value.clone()
    return copies


def in_world(rank: int, size: int, work: Callable, *args: object) -> object:
    """`work(world, *args)` on ranks."""
    world = open_world("cpu", "gloo", 60)
    found = work(world, *args)
    close_world(world)
    return found


def grid(world: World, settings: list) -> list:
    """For each setting: what there was, what came out, logits of another batch, shards by table."""
    out = []
    for name, sharding, weighted in settings:
        case = scenario(name, weighted)
        hybrid = hybrid_of(world, case, sharding)
        start = ended(hybrid, case, [])
        found = ended(hybrid, case, train(hybrid, world, case))
        logits = hybrid.eval_step(eval_of(case, world)).numpy()
        weights = hybrid._weights.items()
        split = {table: len(value.metadata().shards_metadata) for table, value in weights}
        out.append((start, found, logits, split))
        hybrid.close()
    return out


def check(by_rank: list, settings: list) -> None:
    size = len(by_rank)
    for place, (name, sharding, weighted) in enumerate(settings):
        case, (start, found, _, split) = scenario(name, weighted), by_rank[0][place]
        check_against_trainer(case, start, found, weights=2e-6)
        for _, other, *_ in (rank[place] for rank in by_rank):
            assert other.losses == found.losses, "ranks report different losses"
        for table_name, rows in start.tables.items():
            assert np.abs(rows - found.tables[table_name]).max() > 1e-5, "nothing was learnt"
        assert list(found.dense) == [key for key, _ in case.model().named_parameters()]
        assert sum(len(rank[place][2]) for rank in by_rank) == 5
        if sharding == "column_wise" and size > 1:
            assert set(split.values()) == {size}
        if sharding == "row_wise":
            assert list(split.values()) == [size, 1, size]


@pytest.mark.parametrize(
    ("size", "settings"),
    [(1, SAMPLE), (2, SAMPLE)]
    + [pytest.param(size, FULL, marks=pytest.mark.slow) for size in (1, 2, 4)],
)
def test_it_equals_an_unsharded_trainer(size: int, settings: list) -> None:
    check(run_ranks(in_world, size, grid, settings, timeout=300), settings)


def stop_and_resume_is_bitwise(world: World, folder: str) -> None:
    for name, sharding, weighted in (*SAMPLE[:2], SAMPLE[-1], ("adagrad", "column_wise", False)):
        path, case = f"{folder}/{name}-{sharding}", scenario(name, weighted)
        steps, found = steps_of(case, world), []
        for resumed in (False, True):
            hybrid = hybrid_of(world, case, sharding)
            if resumed:
                state = hybrid.state_dict()
                dcp.load(state, checkpoint_id=path)
                hybrid.load_state_dict(state)
                assert hybrid.state_dict()["applied_steps"] == 5
            else:
                [hybrid.train_step(step) for step in steps[:5]]
                dcp.save(hybrid.state_dict(), checkpoint_id=path)
                hybrid.eval_step(steps[0])
            found.append(ended(hybrid, case, [hybrid.train_step(step).loss for step in steps[5:]]))
            hybrid.close()
        assert found[0].losses == found[1].losses
        for table_name, rows in found[0].tables.items():
            np.testing.assert_array_equal(found[1].tables[table_name], rows)


def bfloat16_products_and_float32_rows(world: World, folder: str) -> None:
    case, losses = scenario(), []
    for amp in ("off", "bf16"):
        hybrid = hybrid_of(world, case, "table_wise", amp=amp)
        losses.append(np.array(train(hybrid, world, case)))
        assert {value.dtype for value in copy_state(hybrid).values()} == {torch.float32}
        hybrid.close()
    apart = np.abs(losses[1] / losses[0] - 1)
    assert 1e-5 < apart.max() < 2**-6, "bfloat16 rounds each product to 8 bits"


def a_loss_that_is_not_finite_changes_nothing_and_rates_act_at_once(
    world: World, folder: str
) -> None:
    case = scenario()
    hybrid, steps = hybrid_of(world, case, "row_wise"), steps_of(case, world)
    good, poisoned = steps[0], steps[7]
    if world.rank == 1:
        poisoned.batch.dense[0, 0], poisoned.batch.dense[1, 0] = float("inf"), float("-inf")

    def changed_by(step: Step, stop: bool = False) -> tuple[set[str], StepResult]:
        before = copy_state(hybrid)
        result = hybrid.train_step(step, stop)
        after = copy_state(hybrid).items()
        return {key for key, value in after if not torch.equal(value, before[key])}, result

    for _ in range(2):  # before and after the first applied step
        changed, result = changed_by(poisoned)
        assert (changed, result.bad_ranks, np.isfinite(result.loss)) == (set(), (1,), False)
        changed, result = changed_by(good, stop=world.rank == 1)
        assert changed and result.stop
    hybrid.set_lr(0.0, 0.0)
    changed, _ = changed_by(good)
    assert not any(key.startswith("dense.") or ".weight/" in key for key in changed)
    assert any(".sum/" in key for key in changed)
    hybrid.close()
    hybrid.close()


def gradient_buckets_keep_their_order_from_the_first_step_on(world: World, folder: str) -> None:
    case = scenario("sgd")
    hybrid = hybrid_of(world, case, "table_wise")
    orders, wrapped = [], hybrid._dmp._dmp_wrapped_module
    names = {id(p): name for name, p in hybrid.model.named_parameters()}
    for _ in range(4):
        hybrid.train_step(steps_of(case, world)[0])
        buckets = wrapped.reducer._get_zeros_like_grad_buckets()
        orders.append([names[id(p)] for bucket in buckets for p in bucket.parameters()])
    hybrid.close()
    assert len(orders[0]) == 4
    assert orders == [orders[0]] * 4


def a_planner_that_fails_on_rank_0_is_heard_on_all(world: World, folder: str) -> None:
    def fails(*_: object) -> None:
        raise MemoryError("not enough HBM")

    said = "parallel.sharding=row_wise. It says: MemoryError: not enough HBM"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError, match=said):
        if world.rank == 0:
            patch.setattr(module, "_planned", fails)
        hybrid_of(world, scenario(), "auto")


def a_watcher_sees_each_step_and_its_wait(world: World, folder: str) -> None:
    case, seen, steps = scenario("sgd"), [], len(SIZES)
    hybrid = hybrid_of(world, case, "table_wise")
    hybrid.watch(lambda step, kind, spans: seen.append((step, kind, spans)))
    train(hybrid, world, case)
    hybrid.eval_step(eval_of(case, world))
    summary, progress = hybrid.summary(), hybrid.progress()
    hybrid.close()
    assert [step for step, _, _ in seen] == list(range(steps + 1))
    assert [kind for _, kind, _ in seen] == ["train"] * steps + ["eval"]
    names = [{span.name for span in spans} for _, _, spans in seen]
    assert names == [{"load", "wait", "forward_backward"}] * steps + [{"forward"}]
    spans = [span for _, _, spans in seen for span in spans if span.lane == "training"]
    assert all(a.end <= b.start for a, b in pairwise(sorted(spans, key=lambda span: span.start)))
    waited = sum(span.end - span.start for span in spans if span.name == "wait")
    assert summary["stage_ms"]["wait"] == pytest.approx(1e3 * waited / steps)
    assert 0 <= summary["stage_hidden_ms"]["load"] <= summary["stage_ms"]["load"]
    assert progress == {}, "no stages: the log line shows none"


@pytest.mark.parametrize(
    "law",
    [
        stop_and_resume_is_bitwise,
        bfloat16_products_and_float32_rows,
        a_loss_that_is_not_finite_changes_nothing_and_rates_act_at_once,
        gradient_buckets_keep_their_order_from_the_first_step_on,
        a_planner_that_fails_on_rank_0_is_heard_on_all,
        a_watcher_sees_each_step_and_its_wait,
    ],
)
def test_on_two_ranks(law: Callable, tmp_path: Path) -> None:
    run_ranks(in_world, 2, law, str(tmp_path))


SPLIT = replace(scenario(), tables=(TABLES[0], table("t1", 3, 16), TABLES[2]))
"""Every table can be cut by the rows of two ranks."""


def counted(world: World) -> list:
    case, out = SPLIT, []
    for sharding in ("table_wise", "row_wise"):
        hybrid, steps = hybrid_of(world, case, sharding), steps_of(case, world)
        assert comm_ops.get_gradient_division() is False
        for at in (0, 6):
            hybrid.train_step(steps[at])
        hybrid.eval_step(steps[0])
        owners = {
            name: value.metadata().shards_metadata[0].placement.rank()
            for name, value in hybrid._weights.items()
        }
        out.append((hybrid.counters.values(), owners, hybrid.summary()))
        hybrid.close()
        assert comm_ops.get_gradient_division() is True
    return out


def test_bytes_of_known_steps() -> None:
    size, steps, local, case = 2, 2, 4, SPLIT
    by_rank = run_ranks(in_world, size, counted)
    parameters = list(case.model().parameters())
    dense = sum(parameter.nbytes for parameter in parameters)
    widths = {spec.name: spec.dim * len(spec.features) for spec in case.tables}
    whole = size * local * 4 * sum(widths.values())
    for rank, (table_wise, row_wise) in enumerate(by_rank):
        said, owners, summary = table_wise
        # Forward: my tables' vectors of the other's samples; backward: gradients of my samples.
        assert said["collective_bytes"] == steps * whole // size
        assert said["dense_collective_bytes"] == steps * dense
        assert rank in owners.values(), "each rank owns a table"
        assert summary["stage_ms"]["forward_backward"] > 0
        assert summary["stage_ms"]["sync"] is None
        assert summary["stage_hidden_ms"] == {"load": 0.0}, "no batch came from a stream"
        assert summary["hit_rate"] is None and summary["table_rows"] == 104
        tables = sum(t.rows * t.dim * 4 for t in case.tables if owners[t.name] == rank)
        assert summary["embedding_device_bytes"] >= 2 * tables
        sent = [told[0][0]["planning_bytes"] for told in by_rank]
        assert summary["planning_bytes"] == round(sum(sent) / size) > 0
        held = 3 * dense + 4 * len(parameters)  # Adagrad's, and a step count of each
        assert summary["peak_device_bytes"] == summary["embedding_device_bytes"] + held
        # Row-wise: a reduce-scatter of every sample's vectors forward, an all-gather backward.
        assert row_wise[0]["collective_bytes"] == row_wise[2]["collective_bytes"] == steps * whole
        assert row_wise[0]["dense_collective_bytes"] == steps * dense


def _world(device: str = "cpu", backend: str = "gloo", size: int = 2) -> World:
    fields = dict.fromkeys(("device_group", "host_group", "planning_group", "store"))
    place = torch.device(device)
    return World(0, size, 0, size, device=place, backend=backend, timeout_s=1.0, **fields)


@pytest.mark.parametrize(
    ("change", "world", "words"),
    [
        ({"tables": (TableSpec("t", 9, 6, ("a",)),), "features": ("a",)}, {}, "embedding_dim=8"),
        ({"weighted": True}, {}, "weights need 'sum'"),
        ({}, {"device": "cuda"}, "trainer.backend=nccl"),
    ],
)
def test_refuses_with_the_way_out(change: dict, world: dict, words: str) -> None:
    spec = HybridSpec(TABLES, scenario().features, row_update("sgd"), seed=0)
    check_spec(spec, _world())
    with pytest.raises(ConfigError, match=words):
        check_spec(replace(spec, **change), _world(**world))


def test_too_little_memory_is_said_before_anything_is_made(monkeypatch) -> None:
    for optimizer, floats in (("sgd", 8), ("adagrad", 16), ("rowwise_adagrad", 9)):
        spec = HybridSpec((table("t", 1000),), ("t_0",), row_update(optimizer), seed=0)
        needed = 1000 * floats * 4
        monkeypatch.setattr(available, "available_memory", lambda needed=needed: needed)
        check_memory(spec, _world(size=1))
        monkeypatch.setattr(available, "available_memory", lambda needed=needed: needed - 1)
        with pytest.raises(MemoryTooSmallError, match=f"{needed}.*parallel=data"):
            check_memory(spec, _world(size=1))


def test_row_wise_and_column_wise_fall_back_where_a_table_cannot_be_split() -> None:
    splits = [module.splits_rows(rows, 4) for rows in (3, 4, 5, 6, 7, 8)]
    assert splits == [False, True, False, False, True, True]
    shards = [module.column_shards(dim, 4) for dim in (4, 8, 12, 16, 20, 64)]
    assert shards == [1, 2, 3, 4, 1, 4]
