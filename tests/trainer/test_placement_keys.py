"""The keys of `cache` that say how rows lie over the ranks: whole runs, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from scenarios import count_steps
from source_runs import configured, digests, summaries
from torch import nn
from toy_parallel import toy_config

from distcache.comm.world import close_world, open_world
from distcache.engine.groups import Placement
from distcache.errors import ConfigError, DataError
from distcache.fitting import OwnSource
from distcache.sizing.cluster import Cluster, Compute, Link, read_cluster, write_cluster
from distcache.sizing.placement import choose
from distcache.sizing.resolve import read_window, request_of, resolve_placement
from distcache.trainer.build import build_source, build_tables

BASE = (
    *("data=synthetic", "data.table_rows=[700,90,30]", "data.bag_size=[2.0,1,3]"),
    *("data.global_batch_size=32", "data.zipf=1.2", "model=dcn_v2", "model.table_dims=[8,4,8]"),
    *("model.dense_arch=[8]", "model.over_arch=[8,1]", "model.cross_layers=1"),
    *("model.cross_rank=4", "optim=adagrad", "cache.rows=400", "cache.lookahead=8"),
    *("cache.prefetch=1", "trainer.device=cpu", "trainer.log_level=WARNING", "trainer.steps=12"),
    "run.digest=true",
)
CLUSTER = Cluster(2, Link(1e9, 1e-6), Link(1e8, 1e-5), compute=Compute(1e-8, 1e-8, 1e-8, 1e-6))


def parts(*overrides: str):
    config = configured(*BASE, *overrides)
    source = build_source(config)
    return config, source, build_tables(config, source)


def test_every_placement_trains_to_the_same_bits(tmp_path) -> None:
    write_cluster(CLUSTER, tmp_path)
    rows = "cache.replicated_rows={t_cat_0:40,t_cat_2:3}"
    ways = (
        "parallel=resident",
        "cache.placement=replicated cache.state=home store.access=zero_copy",
        "cache.placement=sharded",
        f"cache.placement=mixed {rows} cache.state=replicated",
        "cache.placement=mixed cache.replicated_share=0.05 cache.state=home",
        "cache.placement=auto",
        "cache.placement=auto cache.objective=bytes",
        f"cache.placement=auto cache.cluster={tmp_path}",
    )
    found = summaries([(*BASE, *way.split()) for way in ways], tmp_path, 2, timeout=240)
    assert len({digests(summary) for summary in found}) == 1
    placed = [summary["placement"] for summary in found]
    assert placed[1:6] == ["replicated", "sharded", "mixed", "mixed", placed[5]]
    assert placed[6] == "sharded"  # no placement sends fewer bytes
    assert [summary["cache_state"] for summary in found[1:4]] == ["home", "home", "replicated"]
    by_bytes = found[6]["collective_bytes"]
    assert by_bytes <= 1.02 * min(summary["collective_bytes"] for summary in found[1:5])
    for summary in found[1:]:
        assert summary["home_rows_max"] >= summary["home_rows_mean"] > 0
        assert summary["exchange_ms"] > 0 and 0 <= summary["exchange_hidden"] < 1
    assert found[1]["early_rows"] is None and 0 < found[2]["early_rows"] < 1


@pytest.mark.parametrize(
    ("optimizer", "given", "reduction", "state"),
    [
        ("sgd", "auto", "ordered", "replicated"),
        ("rowwise_adagrad", "auto", "ordered", "replicated"),
        ("adagrad", "auto", "ordered", "home"),
        ("adam", "auto", "ordered", "home"),
        ("adam", "auto", "native", "replicated"),
        ("adam", "replicated", "ordered", "replicated"),
        ("sgd", "home", "ordered", "home"),
    ],
)
def test_where_the_state_lies_follows_the_optimizer(optimizer, given, reduction, state) -> None:
    keys = {"optim__name": optimizer, "cache__state": given, "cache__reduction": reduction}
    assert request_of(toy_config(**keys), ()).state == state


class Shifted:
    """Ids outside their tables, which mean what a source's ids mean modulo the tables' rows."""

    def __init__(self, source) -> None:
        self.source, self.steps_per_epoch = source, source.steps_per_epoch
        self.features, self.table_rows = source.features, source.table_rows

    def train_batch(self, *where: int):
        batch = self.source.train_batch(*where)
        each = batch.ids.offsets[:: batch.ids.batch_size].diff()
        rows = torch.tensor(self.table_rows).repeat_interleave(each)
        values = batch.ids.values + (torch.arange(len(rows)) % 5 - 3) * rows
        return replace(batch, ids=replace(batch.ids, values=values))


def test_the_window_counts_the_ids_that_training_takes() -> None:
    _, source, tables = parts()
    found, want = read_window(source, tables, 5), count_steps(source, range(5))
    for mine, other in zip(found.tables, want.tables, strict=True):
        assert np.array_equal(mine.dense(), other.dense())
        assert (np.diff(other.dense()[mine.order]) <= 0).all() and mine.lookups == other.lookups
    assert found.samples == 5 * 32
    shifted = read_window(Shifted(source), tables, 5, "hash")
    for mine, other in zip(shifted.tables, found.tables, strict=True):
        assert np.array_equal(mine.dense(), other.dense())
    with pytest.raises(DataError, match=r"train batch 0: .* -"):
        read_window(Shifted(source), tables, 3)


def resolved(rank: int, size: int, cases: list[str], own: bool = False) -> list[object]:
    """What each case comes to: a placement's kind and hot rows, or its error."""
    world, found = open_world("cpu", "gloo", 60), []
    for overrides in cases:
        config, source, tables = parts(*overrides.split())
        if own:  # batches of a loader, which `fit` reads once
            source = OwnSource(tuple(source.features), tuple(source.table_rows))
        known = tables, (174, 86), None
        try:
            placement = resolve_placement(config, world, known, source, torch.nn.Linear(1, 1))
            found.append((placement.kind, [ids.tolist() for ids in placement.hot]))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    close_world(world)
    return found


def test_mixed_takes_the_hottest_rows_of_the_first_batches_on_every_rank() -> None:
    keys = [
        *("replicated_rows={t_cat_0:6}", "replicated_share=0.01", "replicated_rows={t_cat_2:30}"),
        *("replicated_rows={t_cat_9:6}", "replicated_rows={t_cat_1:91}"),
    ]
    first, second = run_ranks(resolved, 2, [f"cache.placement=mixed cache.{key}" for key in keys])
    _, source, tables = parts()
    hottest = read_window(source, tables, 10).tables[0].order[:6].tolist()
    assert first[0] == second[0] == ("mixed", [sorted(hottest), [], []])
    assert first[1] == second[1] and sum(map(len, first[1][1])) == 8
    assert first[2][1] == [[], [], list(range(30))]  # all rows, whether they were seen or not
    assert "t_cat_9=6 names no table: choose from t_cat_0, t_cat_1, t_cat_2" in first[3]
    assert "t_cat_1=91, but the table has 90 rows: give at most 90" in first[4]
    assert all("t_cat_" in found for found in second[3:])


@pytest.mark.parametrize(("slots", "warned"), [((174, 86), False), ((12, 6), True)])
def test_mixed_that_will_not_hold_a_step_is_said_before_training(slots, warned, caplog) -> None:
    config, source, tables = parts("cache.placement=mixed", "cache.state=home")
    counted = read_window(source, tables, 4)
    there = Cluster(2, Link(1e9), Link(1e9))
    best, _ = choose(request_of(config, tables), slots, counted, there)
    assert best.placement == "mixed"
    assert bool(best.refused) == warned
    assert ("cache.placement=sharded has all slots" in caplog.text) == warned


def test_a_cluster_that_is_not_the_running_world_is_refused(tmp_path) -> None:
    two = asdict(Cluster(2, Link(1e9), Link(1e9), Link(1e9), nodes=2))
    for name, values, said in (
        ("broken", two | {"inside": {"bandwidth": 0.0, "name": "measured"}},
         r"cache\.cluster.*inside.bandwidth=0.0: it must be above 0"),
        ("words", two | {"host": {"bandwidth": "fast"}}, "json: host.bandwidth=fast: it must be a"),
        ("less", {key: value for key, value in two.items() if key != "inside"},
         "less.json describes no cluster .*'inside'.*: give the cluster.json"),
    ):  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
        with pytest.raises(ConfigError, match=said):
            read_cluster(tmp_path / f"{name}.json")
    other = write_cluster(Cluster(8, Link(1e9), Link(1e9)), tmp_path)
    assert read_cluster(tmp_path) == Cluster(8, Link(1e9), Link(1e9))
    cases = [f"cache.placement=auto cache.cluster={p}" for p in (other, tmp_path / "none.json")]
    for differs, unread in run_ranks(resolved, 2, cases):
        assert "has world_size=8 on nodes=1, but 2 ranks run" in differs
        assert "none.json: cannot be read" in unread


def test_rows_beyond_a_table_are_refused_at_one_rank_too() -> None:
    one: Any = SimpleNamespace(size=1)
    config, source, tables = parts("cache.placement=mixed", "cache.replicated_rows={t_cat_1:91}")
    with pytest.raises(ConfigError, match="t_cat_1=91, but the table has 90 rows"):
        resolve_placement(config, one, (tables, [10, 10], None), source, nn.Module())
    config.cache.replicated_rows = {"t_cat_1": 90}
    known = tables, [10, 10], None
    assert resolve_placement(config, one, known, source, nn.Module()) == Placement()


def test_what_is_not_known_of_a_loader_of_ones_own_is_said() -> None:
    kinds = ("auto", "mixed", "auto cache.objective=bytes")
    cases = [f"cache.placement={kind}" for kind in kinds]
    for timed, mixed, by_bytes in run_ranks(resolved, 2, cases, True):
        assert "cache.placement=auto with cache.objective=time" in timed
        assert "ConfigError" in mixed and "cache.placement=mixed" in mixed
        assert "give cache.statistics=<folder" in by_bytes
