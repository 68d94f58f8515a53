"""A training run counts what a replay of its data predicts, to the row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from protocol_cases import CASE, SLOTS, make, train
from ranks import run_ranks
from source_runs import SMALL, summaries

from distcache.cli.compose import compose_overrides, to_config
from distcache.comm.world import close_world, open_world
from distcache.config.tree import Config
from distcache.planner.victims import Policy
from distcache.replay import Case, Outcome, replay
from distcache.trace import record_source
from distcache.trainer import build
from distcache.trainer.schedule import make_schedule

RUN = (
    "data.table_rows=[3000,400,60]",
    "data.global_batch_size=64",
    "data.zipf=1.05",
    "model.embedding_dim=4",
    "model.dense_arch=[8,4]",
    "model.over_arch=[8,1]",
    "optim=adagrad",
    "trainer.steps=30",
    "cache.rows=240",
)
RUNS = {
    "lookahead": ("cache.lookahead=5", "cache.prefetch=2", "trainer.eval_steps=0"),
    "lru": ("cache.policy=lru", "cache.lookahead=4", "cache.prefetch=3", "trainer.eval_steps=0"),
    "lfu": (
        "cache.policy=lfu",
        "cache.lookahead=2",
        "cache.prefetch=1",
        "trainer.eval_steps=0",
    ),
    "a tail": (
        "cache.tail=lfu",
        "cache.half_life=6",
        "cache.lookahead=2",
        "cache.prefetch=0",
        "trainer.eval_every=11",
        "trainer.eval_steps=1",
    ),
    "evaluated": (
        "cache.lookahead=2",
        "cache.prefetch=1",
        "trainer.eval_every=7",
        "trainer.eval_steps=2",
    ),
}


def predicted(config: Config, world: int) -> Outcome:
    """The replay of a configuration's data."""
    source = build.build_source(config)
    want, cache = config.trainer, config.cache
    schedule = make_schedule(source, 0, want.steps, want.eval_every, want.eval_steps)
    traces = record_source(source, build.build_tables(config, source), (world,), schedule.order())
    policy = Policy.of(cache.policy, cache.tail, cache.half_life)
    case = Case(policy, (cache.rows,), config.cache.lookahead, config.cache.prefetch, world)
    return replay(traces, [case])[0]


def check(found: dict[str, Any], expected: Outcome, row_bytes: list[int]) -> None:
    assert expected.refused is None
    assert 0 < expected.fetched < expected.distinct, "nothing is fetched, or nothing found"
    assert expected.written_back > 0
    assert {key: found[key] for key in KEYS} == {
        "rows_fetched": expected.fetched,
        "rows_written_back": expected.written_back,
        "hit_rate": expected.hit_rate,
        "hit_rate_lookups": expected.hit_rate_lookups,
        "host_to_device_bytes": expected.host_to_device_bytes(row_bytes),
        "device_to_host_bytes": expected.device_to_host_bytes(row_bytes),
    }


KEYS = (
    "rows_fetched",
    "rows_written_back",
    "hit_rate",
    "hit_rate_lookups",
    "host_to_device_bytes",
    "device_to_host_bytes",
)


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_counts_what_is_predicted(world: int, tmp_path: Path) -> None:
    runs = [(*RUN, *changes) for changes in RUNS.values()]
    for overrides, found in zip(runs, summaries(runs, tmp_path, world), strict=True):
        config = to_config(compose_overrides([*SMALL, *overrides]))
        assert found["steps"] == 30
        check(found, predicted(config, world), [(4 + 4) * 4])  # a row, and Adagrad's sums


STEPS = 24


class _Source:
    """`CASE` as a batch source."""

    features = CASE.features
    train_batch = staticmethod(CASE.batch)

    @staticmethod
    def eval_batch(index: int, rank: int, world: int) -> Any:
        return CASE.batch(index, rank, world, "eval")


def _train(rank: int, world_size: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    world = open_world("cpu", timeout_s=60)
    found = []
    for evals in (False, True):
        mode = make(world, lookahead=2, prefetch=1)
        order = _order(evals)
        draw = {"train": CASE.batch, "eval": _Source.eval_batch}
        train(mode, (draw[kind](step, rank, world_size) for kind, step in order))
        before = mode.summary()
        mode.flush()
        after = mode.summary()
        left = after["rows_written_back"] - before["rows_written_back"]
        found.append(before | {"left_dirty": left})
        mode.close()
    close_world(world)
    return found


def _order(evals: bool) -> list[tuple[str, int]]:
    kinds = ("train", "eval") if evals else ("train",)
    return [(kind, step) for step in range(STEPS) for kind in kinds]


@pytest.mark.parametrize("world", [1, 2])
def test_two_groups_bags_and_the_rows_that_are_left(world: int) -> None:
    for evals, found in zip((False, True), run_ranks(_train, world)[0], strict=True):
        traces = record_source(_Source(), CASE.tables, (world,), _order(evals))
        case = Case(Policy(), SLOTS, lookahead=2, prefetch=1, world_size=world)
        (expected,) = replay(traces, [case])
        check(found, expected, [(8 + 8) * 4, (4 + 4) * 4])
        assert found["left_dirty"] == expected.left_dirty > 0
        (other,) = replay(traces, [replace(case, lookahead=0)])
        assert other.fetched != expected.fetched, "the window decides nothing here"
