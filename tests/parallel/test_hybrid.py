"""`hybrid` on the CPU: the numbers of an unsharded trainer at every sharding and world size;
buckets, bad losses, failures, what is watched and counted on two ranks; what is refused, and why.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from scenarios import OPTIMIZERS, Outcome, Scenario, check_against_trainer, table

from distcache.comm.world import World, close_world, open_world
from distcache.data.batch import Batch
from distcache.errors import ConfigError, MemoryTooSmallError
from distcache.layout import TableSpec
from distcache.parallel.base import OptimizerSpec, Step
from distcache.parallel.hybrid import (
    HybridParallel,
    HybridSpec,
    check_memory,
    check_spec,
    load_torchrec,
)
from distcache.store import memory as available

SIZES = (8, 7, 1, 5, 2, 3, 8, 8, 8, 8, 8, 8)
SUMS = (table("t0", 37, 16, features=2), table("t1", 3, 16), table("t2", 64, 32))
TABLES = (replace(SUMS[0], pooling="mean"), *SUMS[1:])
"""Two widths, two features on one table, one table smaller than four ranks."""


class Sizes(Scenario):
    """Global batches of `SIZES` samples, and of 5 in evaluation."""

    def batch(self, step: int, rank: int = 0, world: int = 1, kind: str = "train") -> Batch:
        size = SIZES[step] if kind == "train" else 5
        return Scenario.batch(replace(self, global_batch=size), step, rank, world, kind)


def scenario(name: str = "adagrad", weighted: bool = False) -> Scenario:
    spec, lr = OPTIMIZERS[name]
    tables = SUMS if weighted else TABLES
    return Sizes(tables, spec, lr, steps=len(SIZES), weighted=weighted, bag=4)


def hybrid_of(world: World, case: Scenario, sharding: str, **changes: object) -> HybridParallel:
    named = {"sharding": sharding, "weighted": case.weighted, **changes}
    spec = HybridSpec(case.tables, case.features, case.optimizer, case.seed, **named)
    hybrid = HybridParallel(world, spec, case.model())
    hybrid.set_lr(case.lr, case.lr)
    return hybrid


def train(hybrid: HybridParallel, world: World, case: Scenario) -> list[float]:
    """The losses of this rank's steps."""
    slices = (case.batch(step, world.rank, world.size) for step in range(case.steps))
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
    return Outcome(losses, "", "", tables, dense, {})


def copy_state(hybrid: HybridParallel) -> dict[str, torch.Tensor]:
    """Copies of all local tensors of the state."""
    copies = {}
    for key, value in hybrid.state_dict().items():
        if hasattr(value, "local_shards"):
            shards = enumerate(value.local_shards())
            copies |= {f"{key}/{i}": shard.tensor.clone() for i, shard in shards}
        elif isinstance(value, torch.Tensor):
            copies[key] = value.clone()
    return copies


# -----------------------------------------------------------------------------
# Training.

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


def grid(rank: int, size: int, settings: list, world: World | None = None) -> list:
    """For each setting: what there was, what came out, logits of another batch, shards by table."""
    own, out = world or open_world("cpu", "gloo", 60), []
    for name, sharding, weighted in settings:
        case = scenario(name, weighted)
        hybrid = hybrid_of(own, case, sharding)
        start = ended(hybrid, case, [])
        found = ended(hybrid, case, train(hybrid, own, case))
        logits = hybrid.eval_step(Step(case.batch(99, rank, size, "eval"))).numpy()
        weights = hybrid._weights.items()
        split = {table: len(value.metadata().shards_metadata) for table, value in weights}
        out.append((start, found, logits, split))
        hybrid.close()
    if world is None:
        close_world(own)
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
        if sharding == "row_wise":  # t1 has three rows
            assert list(split.values()) == [size, 1 if size == 4 else size, size]


def test_one_rank_equals_an_unsharded_trainer() -> None:
    check([grid(0, 1, SAMPLE)], SAMPLE)


def test_two_ranks_equal_an_unsharded_trainer(two_ranks: list) -> None:
    check([results["grid"] for results in two_ranks], SAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_setting_equals_an_unsharded_trainer(size: int) -> None:
    check(run_ranks(grid, size, FULL, timeout=300), FULL)


def resumes(world: World, folder: str) -> list:
    out = []
    for name, sharding, weighted in (*SAMPLE[:2], SAMPLE[-1], ("adagrad", "column_wise", False)):
        path, case = f"{folder}/{name}-{sharding}", scenario(name, weighted)
        batches = [case.batch(at, world.rank, world.size) for at in range(case.steps)]
        steps = [Step(batch) for batch in batches]
        straight = hybrid_of(world, case, sharding)
        [straight.train_step(step) for step in steps[:5]]
        dcp.save(straight.state_dict(), checkpoint_id=path)
        straight.eval_step(steps[0])
        losses = [straight.train_step(step).loss for step in steps[5:]]
        expected = ended(straight, case, losses)
        straight.close()
        resumed = hybrid_of(world, case, sharding)
        state = resumed.state_dict()
        dcp.load(state, checkpoint_id=path)
        resumed.load_state_dict(state)
        assert resumed.state_dict()["counters.steps"] == 5
        again = [resumed.train_step(step).loss for step in steps[5:]]
        out.append((expected, ended(resumed, case, again)))
        resumed.close()
    return out


def test_stop_and_resume_is_bitwise(two_ranks: list) -> None:
    for expected, again in two_ranks[0]["resumes"]:
        assert again.losses == expected.losses
        for name, rows in expected.tables.items():
            np.testing.assert_array_equal(again.tables[name], rows)


def bf16(world: World) -> tuple:
    case, found = scenario(), []
    for amp in ("off", "bf16"):
        hybrid = hybrid_of(world, case, "table_wise", amp=amp)
        found.append(train(hybrid, world, case))
        dtypes = {value.dtype for value in copy_state(hybrid).values()}
        hybrid.close()
    return found, dtypes


def test_bfloat16_products_and_float32_rows(two_ranks: list) -> None:
    for (plain, rounded), dtypes in (results["bf16"] for results in two_ranks):
        assert dtypes == {torch.float32}
        apart = np.abs(np.array(rounded) / plain - 1)
        assert 1e-5 < apart.max() < 2**-6, "bfloat16 rounds each product to 8 bits"


def bad_loss_and_rates(world: World) -> list:
    case, out = scenario(), []
    hybrid = hybrid_of(world, case, "row_wise")
    good, poisoned = (Step(case.batch(at, world.rank, world.size)) for at in (0, 7))
    if world.rank == 1:
        poisoned.batch.dense[0, 0], poisoned.batch.dense[1, 0] = float("inf"), float("-inf")
    for _ in range(2):  # before and after the first applied step
        before = copy_state(hybrid)
        result = hybrid.train_step(poisoned)
        same = all(torch.equal(value, before[key]) for key, value in copy_state(hybrid).items())
        out.append((result.bad_ranks, np.isfinite(result.loss), same))
        out.append(hybrid.train_step(good, stop=world.rank == 1).stop)
    hybrid.set_lr(0.0, 0.0)
    before = copy_state(hybrid)
    hybrid.train_step(good)
    changed = {key for key, v in copy_state(hybrid).items() if not torch.equal(v, before[key])}
    frozen = not any(key.startswith("dense.") or ".weight/" in key for key in changed)
    out.append((frozen, any("momentum1" in key for key in changed)))
    hybrid.close()
    hybrid.close()
    return out


def test_a_loss_that_is_not_finite_changes_nothing_and_rates_act_at_once(two_ranks: list) -> None:
    for seen in (results["bad"] for results in two_ranks):
        assert seen == [((1,), False, True), True, ((1,), False, True), True, (True, True)]


def bucket_orders(world: World) -> list:
    case = scenario("sgd")
    hybrid = hybrid_of(world, case, "table_wise")
    orders, wrapped = [], hybrid._dmp._dmp_wrapped_module
    step = Step(case.batch(0, world.rank, world.size))
    names = {id(p): name for name, p in hybrid._model.named_parameters()}
    for _ in range(4):
        hybrid.train_step(step)
        buckets = wrapped.reducer._get_zeros_like_grad_buckets()
        orders.append([names[id(p)] for bucket in buckets for p in bucket.parameters()])
    hybrid.close()
    return orders


def test_gradient_buckets_keep_their_order_from_the_first_step_on(two_ranks: list) -> None:
    orders = two_ranks[0]["buckets"]
    assert len(orders[0]) == 4
    assert orders == [orders[0]] * 4


def planner_fails(world: World) -> str:
    from distcache.parallel import hybrid_torchrec

    def fails(*_: object) -> None:
        raise MemoryError("not enough HBM")

    planned = hybrid_torchrec._planned
    hybrid_torchrec._planned = fails if world.rank == 0 else planned
    try:
        hybrid_of(world, scenario(), "auto")
    except ConfigError as error:
        return str(error)
    finally:
        hybrid_torchrec._planned = planned
    return "no error"


def test_a_planner_that_fails_on_rank_0_is_heard_on_all(two_ranks: list) -> None:
    for told in (results["fails"] for results in two_ranks):
        assert "parallel.sharding=row_wise. It says: MemoryError: not enough HBM" in told


def watched(world: World) -> tuple:
    case, seen = scenario("sgd"), []
    hybrid = hybrid_of(world, case, "table_wise")
    hybrid.watch(lambda step, kind, spans: seen.append((step, kind, spans)))
    train(hybrid, world, case)
    hybrid.eval_step(Step(case.batch(99, world.rank, world.size, "eval")))
    summary, progress = hybrid.summary(), hybrid.progress()
    hybrid.close()
    return seen, summary, progress


def test_a_watcher_sees_each_step_and_its_wait(two_ranks: list) -> None:
    steps = len(SIZES)
    for seen, summary, progress in (results["watched"] for results in two_ranks):
        assert [step for step, _, _ in seen] == list(range(steps + 1))
        assert [kind for _, kind, _ in seen] == ["train"] * steps + ["eval"]
        names = [[span.name for span in spans] for _, _, spans in seen]
        assert names == [["wait", "step"]] * steps + [["forward"]]
        spans = [span for _, _, spans in seen for span in spans]
        assert all(a.end <= b.start for a, b in pairwise(spans))
        waited = sum(span.end - span.start for span in spans if span.name == "wait")
        assert summary["stage_ms"]["wait"] == pytest.approx(1e3 * waited / steps)
        assert 0 <= summary["stage_hidden_ms"]["load"] <= summary["stage_ms"]["load"]
        assert progress == {}, "no stages: the log line shows none"


def counted(world: World) -> list:
    case, out = scenario(), []
    for sharding in ("table_wise", "row_wise"):
        hybrid = hybrid_of(world, case, sharding)
        assert load_torchrec().comm_ops.get_gradient_division() is False
        for at in (0, 6):
            hybrid.train_step(Step(case.batch(at, world.rank, world.size)))
        hybrid.eval_step(Step(case.batch(0, world.rank, world.size)))
        owners = {
            name: value.metadata().shards_metadata[0].placement.rank()
            for name, value in hybrid._weights.items()
        }
        out.append((hybrid.counters.values(), owners, hybrid.summary()))
        hybrid.close()
        assert load_torchrec().comm_ops.get_gradient_division() is True
    return out


def test_bytes_of_known_steps(two_ranks: list) -> None:
    size, steps, local, case = 2, 2, 4, scenario()
    by_rank = [results["counted"] for results in two_ranks]
    parameters = list(case.model().parameters())
    dense = sum(parameter.nbytes for parameter in parameters)
    widths = {spec.name: spec.dim * len(spec.features) for spec in case.tables}
    whole = size * local * 4 * sum(widths.values())
    for rank, (table_wise, row_wise) in enumerate(by_rank):
        counted, owners, summary = table_wise
        # Forward: my tables' vectors of the other's samples; backward: gradients of my samples.
        assert counted["collective_bytes"] == steps * whole // size
        assert counted["dense_collective_bytes"] == steps * dense
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


def on_two(rank: int, size: int, folder: str) -> dict:
    world = open_world("cpu", "gloo", 60)
    results = {
        "grid": grid(rank, size, SAMPLE, world),
        "resumes": resumes(world, folder),
        "bf16": bf16(world),
        "fails": planner_fails(world),
        "bad": bad_loss_and_rates(world),
        "watched": watched(world),
        "counted": counted(world),
        "buckets": bucket_orders(world),
    }
    close_world(world)
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What several checks saw on two ranks, by rank."""
    return run_ranks(on_two, 2, str(tmp_path_factory.mktemp("hybrid")))


# -----------------------------------------------------------------------------
# What is refused before anything is made.


def test_row_wise_and_column_wise_fall_back_where_a_table_cannot_be_split() -> None:
    torchrec = load_torchrec()
    splits = [torchrec.splits_rows(rows, 4) for rows in (3, 4, 5, 6, 7, 8)]
    assert splits == [False, True, False, False, True, True]
    shards = [torchrec.column_shards(dim, 4) for dim in (4, 8, 12, 16, 20, 64)]
    assert shards == [1, 2, 3, 4, 1, 4]


def _world(device: str = "cpu", backend: str = "gloo", size: int = 2) -> World:
    fields = dict.fromkeys(("device_group", "host_group", "planning_group", "store"))
    place = torch.device(device)
    return World(0, size, 0, size, device=place, backend=backend, timeout_s=1.0, **fields)


@pytest.mark.parametrize(
    ("change", "world", "words"),
    [
        ({"dtype": torch.float64}, {}, "trainer.dtype=float32"),
        ({"optimizer": OptimizerSpec("adam")}, {}, "optim=adam"),
        ({"sharding": "grid"}, {}, "parallel.sharding='grid'"),
        ({"tables": (TableSpec("t", 9, 6, ("a",)),), "features": ("a",)}, {}, "embedding_dim=8"),
        ({"weighted": True}, {}, "weights need 'sum'"),
        ({"features": ("t0_0", "t1_0")}, {}, "the tables read features"),
        ({"tables": (*TABLES, TableSpec("t", 9, 8, ("t0_0",)))}, {}, "several tables"),
        ({}, {"device": "cuda"}, "trainer.backend=nccl"),
    ],
)
def test_refuses_with_the_way_out(change: dict, world: dict, words: str) -> None:
    spec = HybridSpec(TABLES, scenario().features, OptimizerSpec("sgd"), seed=0)
    check_spec(spec, _world())
    with pytest.raises(ConfigError, match=words):
        check_spec(replace(spec, **change), _world(**world))


def test_a_missing_or_broken_library_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="needs torchrec and fbgemm_gpu, not installed"):
            load_torchrec()

    def broken(name: str) -> None:
        raise OSError("undefined symbol: _ZN3c10")

    with monkeypatch.context() as patch:
        patch.setattr("importlib.import_module", broken)
        with pytest.raises(ConfigError, match=r"does not load under torch .* undefined symbol"):
            load_torchrec()


def test_too_little_memory_is_said_before_anything_is_made(monkeypatch) -> None:
    for optimizer, floats in (("sgd", 8), ("adagrad", 16), ("rowwise_adagrad", 9)):
        spec = HybridSpec((table("t", 1000),), ("t_0",), OptimizerSpec(optimizer), seed=0)
        needed = 1000 * floats * 4
        monkeypatch.setattr(available, "available_memory", lambda needed=needed: needed)
        check_memory(spec, _world(size=1))
        monkeypatch.setattr(available, "available_memory", lambda needed=needed: needed - 1)
        with pytest.raises(MemoryTooSmallError, match=f"{needed}.*parallel=data"):
            check_memory(spec, _world(size=1))
