"""Host threads in a predicted step: their times, the part that binds, and files of a cluster."""

from __future__ import annotations

import json

import pytest
from sizing_cases import BAGS, BATCH, cluster, demand, settings

from distcache.cli.compose import read_line
from distcache.cli.plan_run import Options, parse_request
from distcache.errors import ConfigError
from distcache.sizing.cluster import HOST, HostTimes, device_compute, read_cluster, write_cluster
from distcache.sizing.cost import (
    BINDS,
    DENSE_LAUNCHES,
    FUSED_LAUNCHES,
    GROUP_LAUNCHES,
    GROUP_MOVES,
    INDEX_BYTES,
    LAUNCHES,
    MOVES,
    RANK_LAUNCHES,
    Prediction,
    choose_placement,
    compare,
    predict,
)
from distcache.sizing.traffic import REPLICATED, RESIDENT, SHARDED, TABLE_WISE


def predicted(kind: str, times: HostTimes, world: int = 4, slots: int = 2000, **more) -> Prediction:
    """Predict a step on the tests' cluster with these host times."""
    there = cluster(world, host_times=times, **more)
    return predict(kind, demand(world), there, settings(slots))


SLOW = {
    "planner": HostTimes(id_s=1e-3),
    "mover": HostTimes(row_s=1e-1),
    "launch": HostTimes(step_s=1.0),
}


@pytest.mark.parametrize("thread", SLOW)
def test_a_step_is_as_long_as_the_thread_that_binds(thread: str) -> None:
    free = predicted(SHARDED, HostTimes(), slots=400).time
    time = predicted(SHARDED, SLOW[thread], slots=400).time
    assert free.binds in ("compute", "link") and not any(free.threads)
    assert time.binds == thread and thread in BINDS
    assert time.total == getattr(time.threads, thread) > free.total
    assert time.dense + time.sparse + time.exposed + time.waiting == pytest.approx(time.total)
    assert time.dense + time.sparse + time.exposed + free.waiting == pytest.approx(free.total)


@pytest.mark.parametrize("kind", [REPLICATED, SHARDED])
def test_each_thread_has_its_own_times(kind: str) -> None:
    """Ids of the batch, rows that the rank moves, launches, and a fixed time."""
    hits = predicted(kind, HostTimes()).hits
    rows = (hits.fetched + hits.written_back) / 4
    launches = LAUNCHES + GROUP_LAUNCHES + RANK_LAUNCHES
    threads = predicted(kind, HostTimes(1e-6, 1e-7, 1e-5, 1e-3)).time.threads
    assert threads.planner == pytest.approx(1e-7 * sum(BAGS) * BATCH)
    assert threads.mover == pytest.approx(1e-5 * rows + 1e-6 * (MOVES + GROUP_MOVES))
    assert threads.launch == pytest.approx(1e-3 + 1e-6 * launches)


@pytest.mark.parametrize("kind", [REPLICATED, SHARDED])
def test_index_bytes_follow_ids_and_rows(kind: str) -> None:
    """A plan has the rows of all ranks where they are replicated."""
    step = demand(4)
    planned = step.world_rows if kind == REPLICATED else step.rank_rows
    sent = INDEX_BYTES[0] * sum(BAGS) * BATCH + INDEX_BYTES[1] * planned
    sent += (INDEX_BYTES[2] + INDEX_BYTES[3]) * step.rank_rows
    assert predicted(kind, HostTimes()).traffic.index_bytes == pytest.approx(sent)


def test_indices_of_a_large_step_keep_their_budget() -> None:
    """Of Criteo Kaggle's tables, 16,384 samples of a rank: in all that a link or a GPU is given."""
    keys = ("preset=criteo_kaggle", "batch=16384", "width=64", "optim=sgd", "cache_ratio=0.015")
    for world, most in ((1, 4.5e6), (2, 5.5e6)):
        line = read_line("plan", Options, (*keys, f"world_size={world}"))
        found = predict(REPLICATED, *parse_request(line).on(world, 1))
        assert 0.5 * most < found.traffic.index_bytes <= most


@pytest.mark.parametrize("world", [1, 4])
def test_launches_follow_ranks_and_hybrid_layouts_have_no_planner(world: int) -> None:
    several = RANK_LAUNCHES * (world > 1)
    times = HostTimes(launch_s=1e-6, step_s=1e-3)
    cached = predicted(REPLICATED, times, world).time.threads
    assert cached.launch == pytest.approx(1e-3 + 1e-6 * (LAUNCHES + GROUP_LAUNCHES + several))
    hybrid = predicted(TABLE_WISE, times, world).time.threads
    launches = DENSE_LAUNCHES + LAUNCHES + FUSED_LAUNCHES + several
    assert hybrid.launch == pytest.approx(1e-3 + 1e-6 * launches)
    assert hybrid.planner == hybrid.mover == 0


def test_resident_rows_do_not_move() -> None:
    resident = predicted(RESIDENT, HOST)
    assert resident.hits.fetched == resident.hits.written_back == 0
    assert resident.traffic.host_in == resident.traffic.host_out == 0
    assert resident.traffic.index_bytes > 0
    data = predicted(REPLICATED, HOST)
    assert resident.time.threads.planner == data.time.threads.planner
    assert resident.time.threads.mover < data.time.threads.mover
    assert resident.device_bytes > data.device_bytes
    small = predict(RESIDENT, demand(1), cluster(1, device_memory=1000), settings())
    assert "device_memory=1,000" in str(small.refused)


def test_without_a_device_host_threads_take_the_core_that_computes() -> None:
    free = predicted(SHARDED, HostTimes(), slots=400, overlap=0.0).time
    times = HostTimes(1e-5, 1e-6, 1e-3, 1e-3)
    slow = predicted(SHARDED, times, slots=400, overlap=0.0).time
    assert slow.total == pytest.approx(free.total + sum(slow.threads))
    assert slow.binds == "mover"


def test_the_choice_knows_the_time_per_row() -> None:
    """A replicated cache holds fewer distinct rows than a sharded one, so it moves more rows."""
    seconds = {}
    for row_s in (0.0, 1e-3):
        there = cluster(4, host_times=HostTimes(row_s=row_s), collective_s=1e-4)
        point = compare(demand(4), there, settings(5000), "time", hybrid=False)
        seconds[row_s] = {p.placement: p.time.total for p in point.predictions}
        chosen, why = choose_placement(demand(4), there, settings(5000))
        assert chosen.placement == SHARDED
        assert why.startswith("predicted ms per step: sharded ")
    assert seconds[0.0][SHARDED] == seconds[1e-3][SHARDED]
    assert seconds[0.0][REPLICATED] < seconds[1e-3][REPLICATED]


def test_a_file_keeps_the_host_times(tmp_path) -> None:
    there = cluster(2, host_times=HostTimes(1e-6, 2e-8, 3e-8, 4e-4, "measured"))
    file = write_cluster(there, tmp_path)
    assert read_cluster(tmp_path) == read_cluster(file) == there
    two_nodes = cluster(4, 2)
    assert read_cluster(write_cluster(two_nodes, tmp_path)) == two_nodes
    for key in ("launch_s", "id_s", "row_s", "step_s"):
        with pytest.raises(ConfigError, match=f"host_times.{key}=-1.0: it must be at least 0"):
            cluster(2, host_times=HostTimes(**{key: -1.0}))


@pytest.mark.parametrize("change", ["old", "unknown", "part", "list"])
def test_a_file_of_another_version_is_refused(tmp_path, change: str) -> None:
    values = json.loads(write_cluster(cluster(2), tmp_path).read_text())
    if change == "old":
        values["threads"] = values.pop("host_times") | {"serial": 0.03, "training_s": 4e-4}
    elif change == "unknown":
        values["compute"]["python_s"] = 1e-3
    elif change == "part":
        values["host_times"] = 1e-3
    else:
        values = [values]
    file = tmp_path / "old.json"
    file.write_text(json.dumps(values))
    names = {
        "old": r"has no threads: measure again with .* measure=true",
        "unknown": r"has no compute\.python_s: measure again",
    }
    with pytest.raises(ConfigError, match=names.get(change, "describes no cluster")):
        read_cluster(file)


def test_the_defaults_have_every_time() -> None:
    assert min(HOST.launch_s, HOST.id_s, HOST.row_s, HOST.step_s) > 0


def test_a_device_computes_at_what_kernels_reach() -> None:
    """Of 16,384 samples of DLRM's 502,000 parameters and 26 features of width 64, an H100 moves
    2.2 GB at 2.7 TB/s and does 49 billion operations at 45 TFLOP/s, next to nothing beside."""
    outputs = 27 * 64 + 351 + 1665
    sample = device_compute("h100", 64, 0, 502_000, outputs).sample_s
    assert 16_384 * sample == pytest.approx(2.23e9 / 2.7e12 + 49.3e9 / 45e12, rel=0.03)
    plain = device_compute("h200", 64, 0, 502_000).sample_s
    assert plain == pytest.approx(6 * 502_000 / 45e12, rel=0.01)
