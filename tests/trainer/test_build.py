"""From the config to parts: sources, tables, model, rates, threads; how far ahead `auto` goes, and
what a number that memory cannot hold gets to hear."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch
from toy_parallel import TABLES, toy_config

from distcache.data import files
from distcache.engine import planning
from distcache.errors import ConfigError, DataError, MemoryTooSmallError
from distcache.layout import TableSpec
from distcache.optim import row_update
from distcache.planner.victims import WINDOW_BYTES, auto_lookahead
from distcache.sizing import resolve
from distcache.sizing.resolve import resolve_ahead, resolve_prefetch
from distcache.trainer import build

SHAPE = {"data__table_rows": [50, 20], "data__samples": 100, "data__dense_features": 3}


def test_synthetic_data_tables_and_dense_model_fit_together():
    config = toy_config(**SHAPE, model__over_arch=[4, 1])
    source = build.build_source(config)
    tables = build.build_tables(config, source)
    assert tables == [
        TableSpec("t_cat_0", 50, 4, ("cat_0",)),
        TableSpec("t_cat_1", 20, 4, ("cat_1",)),
    ]
    model = build.build_dense(config, tables, source.dense_features)
    batch = source.train_batch(0, 0, 1)
    assert batch.dense.dtype == torch.float64
    logits = model(batch.dense, torch.zeros(16, 8, dtype=torch.float64))
    assert logits.shape == (16,)
    again = build.build_dense(config, tables, source.dense_features)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_criteo_lines_have_26_tables_and_tables_widths(tmp_path):
    config = toy_config(data__name="criteo", data__table_rows=[10] * 26)
    line = "\t".join(["1", *["3"] * 13, *["0a"] * 26])
    (tmp_path / "day").write_text(f"{line}\n" * 14)
    config.data.path = str(tmp_path / "day")
    source = build.build_source(config)
    assert (source.steps_per_epoch, source.eval_batches) == (1, 1)
    config.model.table_dims = [4, 8] * 13
    assert [table.dim for table in build.build_tables(config, source)] == [4, 8] * 13
    config.model.table_dims = [4]
    with pytest.raises(ConfigError, match="1 widths for 26 tables"):
        build.build_tables(config, source)


def test_changed_files_are_told_from_those_that_a_run_has_seen(world, tmp_path, monkeypatch):
    data, run, resumed = (tmp_path / name for name in ("data", "run", "resumed"))
    for folder in (data, run, resumed):
        folder.mkdir()
    paths = [data / f"{number}.parquet" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes(range(100)) * 10 * (number + 1))
    seen = files.find_files("data.path", str(data / "*"), "a file")
    build.verify_files(seen[:2], world, run)
    build.verify_files(seen, world, run)  # one is new
    assert sorted(json.loads((run / "data_files.json").read_text())) == sorted(map(str, paths))
    for at in (0, 1500, 2999):
        content = bytearray(paths[2].read_bytes())
        content[at] ^= 1
        paths[2].write_bytes(content)
        os.utime(paths[2], ns=(1, seen[2].mtime_ns))
        for place, earlier in ((run, None), (resumed, run), (resumed, run / "model" / "8")):
            with pytest.raises(DataError, match=rf"{paths[2]} .*{run}/data_files.json.* remove"):
                build.verify_files(seen, world, place, earlier)
        content[at] ^= 1
        paths[2].write_bytes(content)
        os.utime(paths[2], ns=(1, seen[2].mtime_ns))
    build.verify_files(seen, world, resumed, run / "model")
    assert (resumed / "data_files.json").read_text() == (run / "data_files.json").read_text()


def test_optimizer_and_rates():
    rates = {"dense_lr": 0.4, "embedding_lr": 0.2, "warmup_steps": 4}
    given = {"name": "adam", "betas": [0.8, 0.9], "decay_start": 10, "decay_steps": 10, **rates}
    config = toy_config(**{f"optim__{key}": value for key, value in given.items()})
    assert build.optimizer_spec(config) == row_update("adam", betas=(0.8, 0.9))
    rates = build.build_rates(config)
    assert rates(1) == pytest.approx((0.2, 0.1))
    assert rates(7) == pytest.approx((0.4, 0.2))
    assert rates(15) == pytest.approx((0.1, 0.05))


@pytest.mark.parametrize(
    ("setting", "variable", "local_size", "device", "expected"),
    [
        ("auto", None, 1, "cpu", 8),
        ("auto", None, 2, "cpu", 4),
        ("auto", None, 16, "cpu", 1),
        ("auto", "1", 2, "cpu", 4),  # set by torchrun
        ("auto", "1", 1, "cpu", 1),  # set by the user
        ("auto", "3", 2, "cpu", 3),
        ("auto", "3,1", 1, "cpu", 3),
        ("auto", "many", 4, "cpu", 2),
        ("auto", None, 1, "cuda", 1),
        ("auto", "3", 1, "cuda", 3),
        (5, "3", 2, "cuda", 5),
        (1, None, 1, "cpu", 1),
        (9, None, 1, "cpu", None),
    ],
)
def test_threads(monkeypatch, setting, variable, local_size, device, expected) -> None:
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    config = toy_config(trainer__threads=setting)
    world = SimpleNamespace(local_size=local_size, device=torch.device(device))
    if expected is None:
        with pytest.raises(ConfigError, match=r"trainer\.threads=9 .* 8 core\(s\)"):
            build.compute_threads(config, world)
    else:
        assert build.compute_threads(config, world) == expected


@pytest.mark.parametrize(
    ("given", "device", "local_size", "expected"),
    [
        ("auto", "cuda", 1, 8),
        ("auto", "cuda", 4, 5),
        ("auto", "cuda", 99, 1),
        ("auto", "cpu", 1, 1),
        (7, "cpu", 4, 7),
        (21, "cuda", 1, None),
    ],
)
def test_planner_threads(monkeypatch, given, device, local_size, expected) -> None:
    monkeypatch.setattr(planning.os, "sched_getaffinity", lambda _: set(range(20)))
    world = SimpleNamespace(local_size=local_size, device=torch.device(device))
    if expected is None:
        with pytest.raises(ConfigError, match=r"trainer\.planner_threads=21 .* 20 core\(s\)"):
            planning.planner_threads(given, world)
    else:
        assert planning.planner_threads(given, world) == expected


class Known:
    """A source whose steps have 10 ids per sample and table, and 12 distinct rows per table."""

    dense_features = 3

    def lookups_per_sample(self, table: int) -> float:
        return 10.0

    def expected_distinct(self, table: int, lookups: int) -> float:
        return 12.0


def ahead_of(world, slots=(1000,), source=None, **changes) -> tuple[int, int]:
    source = source or Known()
    given = {key.replace("_", "__", 1): value for key, value in changes.items()}
    found = resolve_ahead(toy_config(**given), world, source, TABLES)
    return found.cache.lookahead, resolve_prefetch(found, source, TABLES, slots)


FIRST = SimpleNamespace(ids_per_step=400_000)
"""What is known of a user's loader."""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (64, 1)),
        ({"cache_lookahead": 3, "cache_prefetch": 5}, (3, 5)),
        ({"cache_lookahead": 0}, (0, 1)),
        ({"source": object()}, (64, 1)),
        ({"source": FIRST}, (16, 1)),
        ({"source": FIRST, "cache_prefetch": 5}, (8, 5)),
        ({"parallel_mode": "resident"}, (8, 1)),  # no window decides which rows leave
        ({"cache_policy": "lru"}, (8, 1)),
        ({"slots": (24,)}, (64, 0)),  # rows move ahead where slots hold those of two steps
        ({"slots": (47,)}, (64, 0)),
        ({"slots": (48,)}, (64, 1)),
    ],
)
def test_auto_and_numbers_where_memory_holds_all(world, changes, expected) -> None:
    assert ahead_of(world, **changes) == expected


def test_auto_is_the_largest_window_whose_ids_stay_small() -> None:
    least = {8: 10, 16: 18, 32: 34, 64: 66}  # L + P + 1
    for window, steps in least.items():
        ids = WINDOW_BYTES // 8 // steps
        assert auto_lookahead(ids, 1) == window
        assert auto_lookahead(ids + 1, 1) == max(8, window // 2)
    assert auto_lookahead(WINDOW_BYTES, 0) == 8


BETWEEN = 9
"""Steps beside L and P: two are over and two, beside a GPU, were not looked at yet, one trains, two
have plans and have not moved, one waits for its place in their queue, and one beyond the window has
been read."""


@pytest.mark.parametrize(
    ("steps", "lookahead", "prefetch", "expected"),
    [
        (20, "auto", "auto", (16, 1)),
        (8, "auto", "auto", (7, 1)),
        (1, "auto", "auto", (0, 1)),
        (0, "auto", "auto", (0, 0)),
        (6, 5, 1, (5, 1)),
        (6, "auto", 4, (2, 4)),
        (6, 30, "auto", r"cache\.lookahead=30: 31 steps ahead.* 6 do: lower cache\.lookahead"),
        (6, 6, 3, r"cache\.lookahead=6, cache\.prefetch=3: 9 steps"),
    ],
)
def test_memory_bounds_auto_and_refuses_a_number(
    world, monkeypatch, steps, lookahead, prefetch, expected
) -> None:
    each = 16 * (2 * 10 * 64 + 4 * 4)
    monkeypatch.setattr(resolve, "available_memory", lambda: 2 * (steps + BETWEEN) * each)
    given = {"cache_lookahead": lookahead, "cache_prefetch": prefetch}
    if isinstance(expected, tuple):
        assert ahead_of(world, **given) == expected
    else:
        with pytest.raises(MemoryTooSmallError, match=expected):
            ahead_of(world, **given)


@pytest.mark.parametrize(
    ("backend", "gpus", "steps"),
    [("gloo", 1, 16), ("gloo", 2, 41), ("gloo", 4, 91), ("nccl", 1, 91)],
)
def test_ranks_that_share_a_gpu_share_its_memory(monkeypatch, backend, gpus, steps) -> None:
    monkeypatch.setattr(resolve, "available_memory", lambda: 1 << 50)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (200_000, 1 << 40))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    world = SimpleNamespace(device=torch.device("cuda", 0), local_size=4, backend=backend)
    assert resolve._room(1000, world) == steps
