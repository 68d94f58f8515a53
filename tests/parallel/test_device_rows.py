"""What lies on devices: state once over the ranks, and the bound of a step's rows; the rows that a
warm start brings before the first step, on ranks and nodes that count alike.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from placement_cases import KINDS, TABLES, fitting_slots, placement_of
from protocol_cases import CASE
from ranks import run_ranks
from scenarios import OPTIMIZERS, Scenario, make_mode, popularity_of, table
from torch import Tensor

from distcache.comm.world import World, close_world, open_world
from distcache.engine.groups import Placement, make_groups
from distcache.engine.start import warm_blocks
from distcache.engine.step import StepContext
from distcache.engine.tables import all_of
from distcache.errors import ConfigError, PlanError
from distcache.parallel.cached import CachedSettings

STATE = {"sgd": lambda dim: 0, "rowwise_adagrad": lambda dim: 1, "adam": lambda dim: 2 * dim}
"""Floats of optimizer state of a row of width D."""
RUNS = [(kind, name) for kind in ("replicated", *KINDS) for name in STATE]


def held(context: StepContext) -> dict[int, int]:
    """Bytes of a step's rows on the device, by where they lie: copies, gradients and sums."""
    tensors: list[Tensor | None] = [*context.sharded, *context.leaves]
    tensors += [leaf.grad for leaf in context.leaves]
    if context.result is not None and context.result.sums is not None:
        tensors += all_of(context.result.sums)
    parts = [t.untyped_storage() for t in tensors if t is not None]
    return {part.data_ptr(): part.nbytes() for part in parts if part.nbytes()}


def measure(rank: int, size: int) -> list[tuple]:
    """For each run and group of tables the slots of its regions and those with state; the most
    bytes of rows that were found on the device, and what the summary says of all beyond slots."""
    world, found = open_world("cpu", "gloo", 60), []
    for kind, name in RUNS:
        placement = Placement() if kind == "replicated" else placement_of(kind, CASE, 0.2)
        spec, lr = OPTIMIZERS[name]
        # Room for movement to be ahead as far as P allows.
        slots = tuple(3 * c for c in fitting_slots(CASE, size, placement))
        settings = CachedSettings("data", slots, 4, 2, placement=placement)
        mode, most = make_mode(world, replace(CASE, optimizer=spec, lr=lr), settings), []
        count = mode.tables.count

        def counted(context: StepContext, mode=mode, most=most, count=count) -> None:
            seen = held(context)
            for ahead in list(mode.tables.stream._planned):
                seen |= held(ahead) if ahead.moved else {}
            most.append(sum(seen.values()))
            count(context)

        mode.tables.count = counted
        for step in mode.stream(CASE.batch(s, rank, size) for s in range(CASE.steps)):
            mode.train_step(step)
            assert held(step.context) == {}  # the next step has that memory
        assert int(mode.applied) == CASE.steps
        regions, stateful, said = [], [], mode.summary()["embedding_device_bytes"]
        for rows in mode.rows:
            cache, regions = rows.cache, [*regions, (rows.slots.replicated, rows.slots.sharded)]
            stateful.append(0 if cache.state is None else len(cache.state))
            tensors = [cache.weight, *([] if cache.state is None else [cache.state])]
            floats = cache.slots * cache.dim + stateful[-1] * STATE[name](cache.dim)
            assert sum(tensor.nbytes for tensor in tensors) == 4 * floats
            assert cache.slots == sum(regions[-1])
            said -= 4 * floats
        found.append((regions, stateful, max(most), said))
        mode.close()
    close_world(world)
    return found


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_state_lies_once_and_the_summary_bounds_what_a_rank_holds(world: int) -> None:
    by_run = zip(*run_ranks(measure, world), strict=True)
    for (kind, name), ranks in zip(RUNS, by_run, strict=True):
        regions, states, most, said = zip(*ranks, strict=True)
        assert all(own == regions[0] for own in regions)
        for (replicated, sharded), stateful in zip(
            regions[0], zip(*states, strict=True), strict=True
        ):
            assert (replicated > 0) == (kind != "sharded")
            assert (sharded > 0) == (kind in ("sharded", "mixed", "mixed home"))
            copies = 1 if "home" in kind else world
            expected = copies * replicated + world * sharded
            assert sum(stateful) == (0 if name == "sgd" else expected), (kind, name)
        for seen, told in zip(most, said, strict=True):
            # The largest of the ranks is told: at least the rows that were seen.
            assert 0 < seen <= told <= 5 * max(most), (kind, name, told)


SLOTS = (240, 12)
WARM = Scenario(TABLES, *OPTIMIZERS["sgd"], steps=20, weighted=True)


def test_a_checkpoint_is_loaded_before_rows_are_cached(world: World) -> None:
    mode = make_mode(
        world, WARM, CachedSettings("data", SLOTS), popularity_of(WARM, SLOTS, warm_start=1.0)
    )
    state = mode.state_dict()
    mode.load_state_dict(state)
    stream = mode.stream([WARM.batch(0)])
    next(stream)
    stream.close()
    with pytest.raises(PlanError, match="a step was run or rows are cached"):
        mode.load_state_dict(state)
    mode.close()


def test_each_home_fills_its_own_slots_with_its_likeliest_rows() -> None:
    group = make_groups([table("a", 1000)], ["a_0"], 3)[0]
    hot = np.random.default_rng(0).permutation(1000)[:90].astype(np.int64)
    found: dict[int, int] = {}
    for rank in range(3):
        ((slots, parts),) = warm_blocks(group, hot, 60, 0.5)
        start = sum(len(part) for part in parts[:rank])
        rows = parts[rank].tolist()
        own = slots[start : start + len(rows)].tolist()
        mine = [row for row in hot.tolist() if group.layout.home(np.array([row]))[0] == rank]
        assert rows == mine[:10], "half of 20 slots, the likeliest first"
        assert own == list(range(rank * 20 + 19, rank * 20 + 9, -1)), "and those leave last"
        found |= dict(zip(own, rows, strict=True))
    assert len(found) == 30


def differ(rank: int, size: int) -> list[str]:
    """Other hot rows on rank 1; then, where each rank is a node, counts in which two rows have
    changed places."""
    found = []
    for how in ("rows", {"warm_start": 1.0}, {"classes": True}):
        if how != "rows":
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        world = open_world("cpu", "gloo", 60)
        popularity = popularity_of(WARM, SLOTS, **({"warm_start": 1.0} if how == "rows" else how))
        tables = list(popularity.statistics.tables)
        counts = tables[0].dense().copy()
        low, high = int(counts.argmin()), int(counts.argmax())
        if rank and how == "rows":
            popularity = replace(popularity, hot_rows=(1, 1, 1, 1))
        elif rank:
            counts[[low, high]] = counts[[high, low]]
        tables[0] = replace(tables[0], counts=counts, ids=None)
        statistics = replace(popularity.statistics, tables=tuple(tables))
        with pytest.raises(ConfigError) as caught:
            settings = CachedSettings("data", SLOTS, 4, 1)
            make_mode(world, WARM, settings, replace(popularity, statistics=statistics))
        found.append(str(caught.value))
        close_world(world)
    return found


def test_ranks_with_other_hot_rows_and_nodes_with_other_counts_are_refused() -> None:
    for rows, *counts in run_ranks(differ, 2):
        assert "hot rows" in rows
        for message in counts:
            assert "cache.statistics (digests of its counts on each node) is [" in message
