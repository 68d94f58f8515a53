"""What the host's threads take of a predicted step: which of them binds, and what moves that."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from cost_cases import BAGS, BATCH, cluster, demand, settings

from distcache.cli import plan_run as host_times
from distcache.cli.compose import read_line
from distcache.cli.plan_run import Options, parse_request
from distcache.comm.world import close_world, open_world
from distcache.cost.cluster import (
    HOST,
    Cluster,
    HostTimes,
    device_compute,
    read_cluster,
    write_cluster,
)
from distcache.cost.predict import (
    BINDS,
    EXCHANGE_GROWTH,
    FAR_EXCHANGE,
    FAR_EXCHANGE_GROWTH,
    GROUP_LAUNCHES,
    INDEX_BYTES,
    LAUNCHES,
    RANK_LAUNCHES,
    Prediction,
    choose_placement,
    compare,
    crossovers,
    predict,
)
from distcache.cost.traffic import REPLICATED, RESIDENT, SHARDED, TABLE_WISE
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.errors import ConfigError


def predicted(kind: str, times: HostTimes, world: int = 4, slots: int = 2000, **more) -> Prediction:
    """A step on the tests' cluster with these times of its host."""
    return predict(kind, demand(world), cluster(world, threads=times, **more), settings(slots))


SLOW = {
    "planner": HostTimes(id_s=1e-3),
    "talker": HostTimes(exchange_s=1.0),
    "mover": HostTimes(moving_s=1.0),
    "launch": HostTimes(launch_s=1e-2),
    "interpreter": HostTimes(python_s=0.6, python_more_s=0.4),
}


@pytest.mark.parametrize("thread", SLOW)
def test_a_step_is_as_long_as_the_thread_that_binds(thread: str) -> None:
    free, time = (predicted(SHARDED, t).time for t in (HostTimes(), SLOW[thread]))
    assert free.binds in ("compute", "link") and not any(free.threads)
    assert time.binds == thread and thread in BINDS
    assert time.total == getattr(time.threads, thread) > free.total
    assert time.dense + time.sparse + time.exposed + time.waiting == pytest.approx(time.total)
    assert time.dense + time.sparse + time.exposed + free.waiting == pytest.approx(free.total)


def test_more_threads_plan_faster_until_something_else_binds(monkeypatch) -> None:
    """By Amdahl's law: what one thread does alone stays; where no thread has too little to do."""
    ids = sum(BAGS) * BATCH
    few = HostTimes(id_s=6e-4 / ids, serial=0.0)
    for k, at_work in ((1, 1), (2, 1.2), (16, 1.2)):
        time = predicted(SHARDED, replace(few, planner_threads=k)).time
        assert time.threads.planner == pytest.approx(6e-4 / at_work)
    monkeypatch.setattr("distcache.cost.predict.LEAST_S", 1e-9)
    for serial in (0.0, 0.25):
        slow = HostTimes(id_s=1e-6, planning_s=1e-5, serial=serial)
        found = [predicted(SHARDED, replace(slow, planner_threads=k)).time for k in (1, 2, 16)]
        for k, time in zip((1, 2, 16), found, strict=True):
            share = serial + (1 - serial) / k
            assert time.threads.planner == pytest.approx(1e-5 + share * ids * 1e-6)
        assert found[0].binds == "planner" and found[0].total > found[1].total
        assert (found[2].binds == "planner") == (serial > 0)


def test_what_a_planner_does_follows_from_rows_and_ranks() -> None:
    """A home decides on a W-th of the rows that ranks touch; a plan has all of them where they are
    replicated, and those that its rank names where they are sharded."""
    step = demand(4)
    for kind, placed in ((REPLICATED, step.world_rows), (SHARDED, step.rank_rows)):
        whole = predicted(kind, HostTimes())
        fetched = whole.hits.fetched / 4
        wanted = {"id_s": sum(BAGS) * BATCH, "named_s": step.rank_rows, "placed_s": placed}
        wanted |= {"decided_s": step.world_rows / 4, "fetched_s": fetched}
        for key, count in wanted.items():
            time = predicted(kind, HostTimes(**{key: 1e-9})).time
            assert time.threads.planner == pytest.approx(count * 1e-9), key
            assert time.threads.talker == 0
        # To and from three others: what it asks and answers; slots are written once, and read.
        told = 2 * 3 / 4 * 2 * step.rank_rows
        told += step.world_rows if kind == REPLICATED else 0
        growth = 1 + 2 * EXCHANGE_GROWTH
        for times, took in ((HostTimes(exchange_s=1e-9), growth), (HostTimes(told_s=1e-9), told)):
            threads = predicted(kind, times).time.threads
            assert (threads.planner, threads.talker) == (0, pytest.approx(took * 1e-9))
        sent = INDEX_BYTES[0] * wanted["id_s"] + INDEX_BYTES[1] * placed
        sent += (INDEX_BYTES[2] + INDEX_BYTES[3]) * step.rank_rows
        assert whole.traffic.index_bytes == pytest.approx(sent)
        moved = fetched + whole.hits.written_back / 4
        times = HostTimes(listed_s=1e-9, row_s=1e-7, moved_s=9e-7)
        mover = predicted(kind, times).time.threads.mover
        assert mover == pytest.approx(1e-9 * step.rank_rows + 1e-6 * moved)


def test_planners_of_several_nodes_tell_each_other_rank_by_rank() -> None:
    """Over gloo, to which slots are given once for each rank, and which brings as many."""
    step = demand(4)
    told = 2 * 3 / 4 * (2 * step.rank_rows + step.world_rows) * 1e-9
    size = FAR_EXCHANGE * (1 + FAR_EXCHANGE_GROWTH) * 1e-9
    for times, took in ((HostTimes(exchange_s=1e-9), size), (HostTimes(told_s=1e-9), told)):
        there = cluster(4, 2, threads=times)
        found = predict(REPLICATED, step, there, settings())
        assert found.time.threads.talker == pytest.approx(took)


def test_indices_of_a_large_step_keep_their_budget() -> None:
    """Of Criteo Kaggle's tables, 16,384 samples of a rank: in all that a link or a GPU is given."""
    keys = ("preset=criteo_kaggle", "batch=16384", "width=64", "optim=sgd", "cache_ratio=0.015")
    for world, most in ((1, 4.5e6), (2, 5.5e6)):
        line = read_line("plan", Options, (*keys, f"world_size={world}"))
        found = predict(REPLICATED, *parse_request(line).on(world, 1))
        assert 0.5 * most < found.traffic.index_bytes <= most


def test_launches_follow_groups_and_ranks_and_fused_tables_have_no_planner() -> None:
    for world in (1, 4):
        every = LAUNCHES + GROUP_LAUNCHES + RANK_LAUNCHES * (world > 1)
        times = HostTimes(launch_s=1e-6, training_s=1e-3, summing_s=2e-3)
        own = 1e-3 + 2e-3 * (world > 1) + every * 1e-6
        assert predicted(REPLICATED, times, world).time.threads.launch == pytest.approx(own)
    for world in (1, 4):
        none = replace(HOST, hybrid_s=0.0, hybrid_more_s=0.0)
        every = none, replace(none, hybrid_s=3e-3), replace(none, hybrid_more_s=5e-3)
        fused, *hybrid = (predicted(TABLE_WISE, of, world).time.threads for of in every)
        assert fused.launch > 0 == fused.planner == fused.mover
        own = [of.launch - fused.launch for of in hybrid]
        assert own == pytest.approx([3e-3, 5e-3 * (world > 1)])


def test_resident_rows_need_no_decision_and_do_not_move() -> None:
    found = predicted(RESIDENT, HOST)
    assert found.hits.fetched == found.hits.written_back == 0
    assert found.traffic.host_in == found.traffic.host_out == 0 < found.traffic.index_bytes
    data = predicted(REPLICATED, HOST)
    assert found.time.threads.planner < data.time.threads.planner
    assert found.time.threads.mover < data.time.threads.mover
    assert found.device_bytes > data.device_bytes
    small = predict(RESIDENT, demand(1), cluster(1, device_memory=1000), settings())
    assert "device_memory=1,000" in str(small.refused)


def test_without_a_device_planner_and_mover_take_the_core_that_computes() -> None:
    times = HostTimes(id_s=1e-6, moving_s=1e-3, launch_s=1.0)
    free, found = (predicted(SHARDED, t, overlap=0.0).time for t in (HostTimes(), times))
    own = found.threads
    assert own.launch == 0  # what computes has its calls
    assert found.total == pytest.approx(free.total + own.planner + own.mover)
    assert found.binds == "mover"


def test_the_choice_and_the_crossovers_know_the_host() -> None:
    """A plan has the rows of all ranks where they are replicated: what one that is put together
    takes speaks for sharded ones."""
    slow, warm = HostTimes(placed_s=1e-5), settings(5340)

    def there(world: int, times: HostTimes) -> Cluster:
        return cluster(world, collective_s=1e-4, threads=times)

    def changes(times: HostTimes) -> list[tuple]:
        points = [compare(demand(w), there(w, times), warm, "time") for w in (4, 8)]
        return [(found.before, found.old, found.new) for found in crossovers(points)]

    for times, best in ((HostTimes(), REPLICATED), (slow, SHARDED)):
        found, why = choose_placement(demand(4), there(4, times), warm)
        assert found.placement == best
        assert why.startswith(f"predicted ms per step: {best} ")
    assert changes(HostTimes()) != changes(slow)


def test_a_cluster_keeps_its_threads(tmp_path) -> None:
    there = cluster(2, threads=replace(HOST, planner_threads=3, name="measured"))
    write_cluster(there, tmp_path)
    assert read_cluster(tmp_path) == there
    file = tmp_path / "cluster.json"
    for wrong, said in (('"serial": 1.5', "serial=1.5"), ('"serial": "much"', "describes no")):
        text = file.read_text().replace(f'"serial": {HOST.serial}', wrong)
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_cluster(tmp_path / "wrong.json")
    for key, value in (("id_s", -1.0), ("serial", 2.0), ("planner_threads", 0)):
        with pytest.raises(ConfigError, match=f"threads.{key}={value}"):
            cluster(2, threads=HostTimes(**{key: value}))


def test_the_table_has_every_time() -> None:
    fitted = {name: getattr(HOST, name) for name in host_times.PLANNER}
    others = [own.name for own in fields(HostTimes) if own.name not in ("name", *fitted)]
    assert all(getattr(HOST, name) > 0 for name in others)
    assert min(fitted.values()) >= 0 and list(fitted.values()).count(0.0) < 2  # a fit may find one
    assert 0 < HOST.serial < 1


def test_a_device_computes_at_what_kernels_reach() -> None:
    """Of 16,384 samples of DLRM's 502,000 parameters and 26 features of width 64, an H100 moves
    2.2 GB at 2.7 TB/s and does 49 billion operations at 45 TFLOP/s, next to nothing beside."""
    outputs = 27 * 64 + 351 + 1665
    sample = device_compute("h100", 64, 0, 502_000, outputs).sample_s
    assert 16_384 * sample == pytest.approx(2.23e9 / 2.7e12 + 49.3e9 / 45e12, rel=0.03)
    plain = device_compute("h200", 64, 0, 502_000).sample_s
    assert plain == pytest.approx(6 * 502_000 / 45e12, rel=0.01)


def test_all_that_planner_threads_share_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, plain = set(), host_times.Counted.each

    def each(self: host_times.Counted, call: Any, arguments: Any) -> list:
        shared.add(call.__name__)
        return plain(self, call, arguments)

    monkeypatch.setattr(host_times.Counted, "each", each)
    world = open_world("cpu")
    source = SyntheticSource(SyntheticSpec([900, 40], global_batch_size=64))
    counts, seconds, serial = host_times.time_planner(world, source)
    close_world(world)
    assert shared >= {"name_span", "divide_span", "advance", "order_ids"}
    assert 0 < serial < 1 and seconds > 0 and counts["id_s"] == 128
