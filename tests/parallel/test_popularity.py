"""Warm start: what lies in the slots before the first step; ranks and nodes that count alike."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import run_ranks
from scenarios import OPTIMIZERS, Scenario, make_mode, popularity_of, table

from distcache.comm.world import World, close_world, open_world
from distcache.engine.groups import make_groups
from distcache.engine.whole import warm_blocks
from distcache.errors import ConfigError, PlanError
from distcache.parallel.cached import CachedSettings

TABLES = (table("a", 300), table("b", 40, features=2), table("c", 7, dim=4), table("d", 1))
SLOTS = (240, 12)


def scenario(optimizer: str, **changes: object) -> Scenario:
    spec, lr = OPTIMIZERS[optimizer]
    return replace(Scenario(TABLES, spec, lr, steps=20, weighted=True), **changes)


def test_slots_hold_the_most_frequent_rows(world: World) -> None:
    case = scenario("sgd")
    popularity = popularity_of(case, SLOTS, warm_start=1.0)
    mode = make_mode(world, case, CachedSettings("data", SLOTS), popularity)
    next(mode.stream([case.batch(0)]))
    rows, start = mode.rows[0], 0
    held = rows.cache.slot_row
    used = np.flatnonzero(held >= 0)
    assert torch.equal(rows.cache.weight[used], rows.store.weight[torch.from_numpy(held[used])])
    for index, place in ((0, 0), (1, 1)):  # tables a and b, and d after them, have width 8
        own = held[(held >= start) & (held < start + TABLES[index].rows)] - start
        counts = popularity.statistics.tables[index].dense()
        cold = np.setdiff1d(np.arange(TABLES[index].rows), own)
        assert len(own) and (place or counts[cold].max(initial=0) <= counts[own].min() + 1)
        start += TABLES[index].rows
    mode.close()


def test_a_checkpoint_is_loaded_before_rows_are_cached(world: World) -> None:
    case = scenario("sgd")
    mode = make_mode(
        world, case, CachedSettings("data", SLOTS), popularity_of(case, SLOTS, warm_start=1.0)
    )
    state = mode.state_dict()
    mode.load_state_dict(state)
    stream = mode.stream([case.batch(0)])
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
    found, case = [], scenario("sgd")
    for how in ("rows", {"warm_start": 1.0}, {"classes": True}):
        if how != "rows":
            os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        world = open_world("cpu", "gloo", 60)
        popularity = popularity_of(case, SLOTS, **({"warm_start": 1.0} if how == "rows" else how))
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
            make_mode(world, case, settings, replace(popularity, statistics=statistics))
        found.append(str(caught.value))
        close_world(world)
    return found


def test_ranks_with_other_hot_rows_and_nodes_with_other_counts_are_refused() -> None:
    for rows, *counts in run_ranks(differ, 2):
        assert "hot rows" in rows
        for message in counts:
            assert "other counts on the node of rank 1 than on that of rank 0" in message
