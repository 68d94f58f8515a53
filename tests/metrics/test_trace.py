"""The trace: every stage of every rank once, on one clock, whatever ends the run."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from protocol_cases import Raises, batches, caught, make, train
from ranks import run_ranks

from distcache.comm.world import close_world, open_world
from distcache.engine import tracing as trace
from distcache.engine.step import WAIT, Span
from distcache.engine.tracing import (
    TracePart,
    collect,
    part_of,
    remove_trace,
    tracing,
)
from distcache.errors import ConfigError

MOVEMENT = ["gather", "write_back", "fill", "scatter"]
PLANNING = ["ingest", "ingest", "plan", "plan"]
"""Its rows are asked for and taken in; it is decided and, once it is told of, put together."""
TALKING = ["load", "plan_exchange"]
LOOP = ["forward_backward", "sync", "apply"]


def read_part(folder: Path, rank: int) -> list[dict]:
    """The events of a part, as viewers read it, without a line that was being written."""
    text = part_of(folder, rank).read_text()
    return json.loads(text[: text.rindex(",\n")] + "]")


def read(folder: Path) -> list[dict]:
    """The trace in `folder`, which must hold nothing else of it."""
    (path,) = folder.glob("trace*")
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        return json.load(file)


def spans_of(events: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Complete events by the names of their rank and lane, in the order of time."""
    about, rest = ([e for e in events if (e["ph"] == "M") == meta] for meta in (True, False))
    ranks = {e["pid"]: e["args"]["name"] for e in about if e["name"] == "process_name"}
    named = [e for e in about if e["name"] == "thread_name"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in named}
    assert len(named) == len(lanes), "a lane is named once"
    spans: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for event in sorted(rest, key=lambda e: e["ts"]):
        assert event["ph"] == "X" and event["dur"] >= 0
        lane = lanes[event["pid"], event["tid"]]
        spans[ranks[event["pid"]].split(" on ")[0], lane].append(event)
    return spans


def by_step(events: list[dict]) -> dict[int, list[str]]:
    """The stages of each step, waits left out; names carry the step's number."""
    steps: dict[int, list[str]] = defaultdict(list)
    for event in events:
        assert event["name"] == f"{event['cat']} {event['args']['step']}"
        if event["cat"] != WAIT:
            steps[event["args"]["step"]].append(event["cat"])
    return dict(steps)


def traced(
    rank: int, size: int, folder: str, fail: int | None, schedule: str, threads: int = 1
) -> str:
    """Train with evaluations in between, traced; what the run raised."""
    world = open_world("cpu", "gloo", 60)
    model = Raises(fail if rank == size - 1 else None)
    mode = make(world, schedule=schedule, model=model, planner_threads=threads)

    def run() -> None:
        with tracing(world, Path(folder), mode.watch):
            train(mode, batches(world, range(6), evals=fail is None))

    error = caught(run)
    mode.close()
    close_world(world, orderly=False)
    return error


@pytest.mark.parametrize("schedule", ["overlapped", "serial"])
def test_all_ranks_stages_are_on_one_clock(tmp_path, schedule) -> None:
    assert run_ranks(traced, 2, str(tmp_path), None, schedule) == ["", ""]
    found = read(tmp_path)
    spans, steps = spans_of(found), range(12)
    own = MOVEMENT if schedule == "serial" else []
    lanes = ["planner", "talking", "training"]
    lanes += ["movement"] if schedule == "overlapped" else []
    assert sorted(spans) == [(f"rank {r}", lane) for r in range(2) for lane in sorted(lanes)]
    for (_, lane), events in spans.items():
        for one, other in pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.01, "a lane does one thing at a time"
        kinds = {e["args"]["step"]: e["args"]["kind"] for e in events}
        assert kinds == {step: ("train", "eval")[step % 2] for step in steps}
        expected = {
            "planner": dict.fromkeys(steps, PLANNING),
            # Of the first steps, as nothing is told with them with L = 2, exchanges are their own.
            "talking": {s: TALKING[1:] * (s <= 3) + TALKING for s in steps},
            "movement": dict.fromkeys(steps, MOVEMENT),
            "training": {step: own + (["forward"] if step % 2 else LOOP) for step in steps},
        }
        assert by_step(events) == expected[lane]
    syncs = ([e for e in spans[f"rank {r}", "training"] if e["cat"] == "sync"] for r in range(2))
    for one, other in zip(*syncs, strict=True):  # sums are done once both have come
        assert one["ts"] + one["dur"] > other["ts"] and other["ts"] + other["dur"] > one["ts"]
    waits = [e for e in spans["rank 0", "training"] if e["cat"] == WAIT]
    assert {e["args"]["step"] for e in waits} == set(steps)


def test_what_a_thread_reads_ahead_has_a_lane_of_its_own(tmp_path) -> None:
    assert run_ranks(traced, 2, str(tmp_path), None, "overlapped", 2) == ["", ""]
    spans, steps = spans_of(read(tmp_path)), range(12)
    for rank in range(2):
        reading, planner = (by_step(spans[f"rank {rank}", lane]) for lane in ("reading", "planner"))
        assert reading == {s: PLANNING[:1] for s in steps}
        assert planner == {s: PLANNING[1:] for s in steps}


def test_a_rank_that_fails_leaves_the_steps_before_it_of_all_ranks(tmp_path) -> None:
    errors = run_ranks(traced, 2, str(tmp_path), 3, "overlapped")
    assert "the model fails in step 3" in errors[0] and "ValueError" in errors[1]
    for rank in range(2):
        spans = spans_of(read_part(tmp_path, rank))
        assert list(by_step(spans[f"rank {rank}", "training"])) == [0, 1, 2]


def test_an_interrupted_run_has_its_trace(world, tmp_path) -> None:
    mode = make(world)
    with pytest.raises(KeyboardInterrupt), tracing(world, tmp_path, mode.watch):
        for step in mode.stream(batches(world, range(6))):
            mode.train_step(step)
            if step.batch.index == 3:
                raise KeyboardInterrupt
    assert list(by_step(spans_of(read(tmp_path))["rank 0", "training"])) == [0, 1, 2, 3]
    (tmp_path / "file").write_text("")
    refusal = pytest.raises(ConfigError, match=r"trainer\.trace=true cannot write into .*run\.dir")
    with refusal, tracing(world, tmp_path / "file", mode.watch):
        pass
    mode.close()


def part(folder: Path, rank: int = 0, steps: int = 3, later_s: float = 0.0) -> TracePart:
    """A part with steps of 1 s each, of which the first 0.25 s were waited; the first begins
    `later_s` after the trace does."""
    start_s = time.time() - time.perf_counter() + 100.0 - later_s
    made = TracePart(folder, rank, start_s)
    for step in range(steps):
        at = 100.0 + step
        wait = Span(WAIT, "training", step, at, at + 0.25)
        made(step, "train", [wait, Span("apply", "training", step, at + 0.25, at + 1)])
    return made


def test_times_are_microseconds_since_the_start(tmp_path) -> None:
    made = part(tmp_path)
    lanes = ("movement", "planner")
    made(3, "train", [Span("fill", lane, 3, 0.0, 1.0) for lane in lanes])
    made.close()
    part(tmp_path, 1, later_s=7.5).close()
    collect(tmp_path, 2)
    found = read(tmp_path)
    spans = spans_of(found)
    assert {lane for rank, lane in spans if rank == "rank 0"} == {*lanes, "training"}
    for rank, shift in ((0, 0.0), (1, 7.5e6)):
        events = spans[f"rank {rank}", "training"]
        applies = [(e["ts"] - shift, e["dur"]) for e in events if e["cat"] == "apply"]
        expected = [(s * 1e6 + 0.25e6, 0.75e6) for s in range(3)]
        assert sum(applies, ()) == pytest.approx(sum(expected, ()), abs=2_000)
    threads = [e["tid"] for e in found if e["name"] == "thread_name"]
    processes = [e["pid"] for e in found if e["name"] == "process_name"]
    assert len(set(threads)) == 10 and len(set(processes)) == 2 and 0 not in processes


def test_what_a_killed_rank_wrote_is_kept(tmp_path) -> None:
    killed = part(tmp_path, 1)
    killed._file.flush()
    with part_of(tmp_path, 1).open("a") as file:
        file.write('{"name":"torn')
    assert len(spans_of(read_part(tmp_path, 1))["rank 1", "training"]) == 6
    part(tmp_path).close()
    collect(tmp_path, 2)
    assert (tmp_path / "trace.json").exists()
    assert len(spans_of(read(tmp_path))["rank 1", "training"]) == 6


def test_large_traces_are_packed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(trace, "LARGE_BYTES", 1_000)
    part(tmp_path, steps=20).close()
    collect(tmp_path, 1)
    assert (tmp_path / "trace.json.gz").exists()
    assert len(spans_of(read(tmp_path))["rank 0", "training"]) == 40


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path, caplog, monkeypatch) -> None:
    made = part(tmp_path)
    made._file.flush()
    with Path("/dev/full").open("w") as full, made._file:
        made._file = full
        for step in range(3, 5_000):
            made(step, "train", [Span("apply", "training", step, 0.0, 1.0)])
        made.close()
    assert caplog.text.count("the trace of this rank ends here") >= 1
    (tmp_path / "trace.json.partial").mkdir()  # no file of this name can be written
    collect(tmp_path, 1)
    assert "its parts stay" in caplog.text and part_of(tmp_path, 0).exists()


def test_memory_does_not_grow_with_the_steps(tmp_path) -> None:
    made = part(tmp_path)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for step in range(2_000):
        made(step, "train", [Span("apply", "training", step, 0.0, 1.0)] * 10)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    made.close()
    written = part_of(tmp_path, 0).stat().st_size
    assert written > 2_000_000 and grown < written / 20


def test_an_older_trace_is_removed_and_nothing_else(tmp_path) -> None:
    for end in ("json", "json.gz", "rank0.json", "rank11.json", "txt"):
        (tmp_path / f"trace.{end}").write_text("")
    (tmp_path / "summary.json").write_text("")
    remove_trace(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["summary.json", "trace.txt"]
