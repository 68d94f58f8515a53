"""Every source trains in every mode, on one rank and on two, in the same order; the data are part
of a run, the same on all ranks and when it is resumed; dense features and labels of coming batches
are loaded beside the steps."""

from __future__ import annotations

import json
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import source_runs
from batch_sources import write
from criteo_lines import ROWS, make_lines, preprocessed, write_lines
from ranks import run_ranks
from source_runs import NET, configured, digests, summaries

from distcache.comm.world import close_world, open_world
from distcache.trainer import build
from distcache.trainer.trainer import Run

SMALL = (*NET, "cache.ratio=0.5", "optim=adagrad", "run.digest=true", "trainer.eval_steps=2")
CRITEO = (f"data.table_rows={list(ROWS)}", "data.global_batch_size=64")
SKIP, SKIPPED = "data.on_bad_line=skip", {"text": (12, 10), "interactions": (1, 1)}
INTERACTIONS = ("data.global_batch_size=16", "trainer.eval_steps=1", SKIP)


def table_of(lines: list[bytes]) -> pa.Table:
    """Criteo lines as columns: nullable integers, and ids as nullable hexadecimal strings."""
    columns = list(zip(*(line.decode().split("\t") for line in lines), strict=True))
    names = ["label", *(f"I{i}" for i in range(13)), *(f"C{i}" for i in range(26))]
    return pa.table(
        {
            name: [(value if at > 13 else int(value)) if value else None for value in column]
            for at, (name, column) in enumerate(zip(names, columns, strict=True))
        }
    )


def sources(folder: Path) -> dict[str, list[str]]:
    """The overrides of each source; the first three are of the same samples. Text and interactions
    have malformed lines at their end, which are skipped."""
    lines = make_lines(700, seed=3)
    text = write_lines(folder / "a.txt", lines)
    preprocessed(text, folder / "out")
    preprocessed(text, folder / "words", mode="vocabulary", min_count=2, multi_hot=(1, 3) * 13)
    write(folder / "a.parquet", table_of(lines), 60)
    with text.open("ab") as file:
        file.write(b"bad\n" * 12)
    rng = np.random.default_rng(0)
    with (folder / "users.txt").open("w") as users:
        for user in range(40):
            users.write(" ".join(map(str, [user, *rng.choice(60, 8, replace=False)])) + "\n")
        users.write("7 x\n")
    parquet = {
        "path": folder / "a.parquet",
        "dense_columns": [f"I{i}" for i in range(13)],
        "id_columns": [f"C{i}" for i in range(26)],
    }
    parquet |= {"label_column": "label", "string_ids": "hex", "nulls": "zero"}
    words = {"path": folder / "words", "table_rows": [], "shuffle": "false"}
    given = {
        "text": ("criteo", {"path": text}, (*CRITEO, SKIP)),
        "arrays": ("criteo", {"path": folder / "out"}, CRITEO),
        "parquet": ("parquet", parquet | {"dense_transform": "log1p"}, CRITEO),
        "vocabulary and bags": ("criteo", words | {"global_batch_size": 24}, ("cache.ratio=0.8",)),
        "interactions": ("interactions", {"path": folder / "users.txt"}, INTERACTIONS),
    }
    return {
        name: [f"data={kind}", *(f"data.{key}={value}" for key, value in keys.items()), *more]
        for name, (kind, keys, more) in given.items()
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The summary of each source in each mode with what it says of malformed lines (None: it has
    no such file), by the number of ranks."""
    folder = tmp_path_factory.mktemp("sources")
    given = sources(folder)
    results = {}
    for world in (1, 2):
        names = [(source, mode) for source in given for mode in modes_of(source, world)]
        runs = [[*SMALL, *given[source], f"parallel={mode}"] for source, mode in names]
        done = summaries(runs, folder / f"w{world}", world)
        for number, summary in enumerate(done):
            path = folder / f"w{world}/w{world}-{number}/bad_lines.json"
            summary["bad_lines"] = json.loads(path.read_text()) if path.exists() else None
        results[world] = dict(zip(names, done, strict=True))
    return results


def modes_of(source: str, world: int) -> list[str]:
    """A mode sees batches and no source: each is tried with single ids and with bags, on two ranks
    those that divide batches in ways of their own."""
    tried = world == 1 and source in ("text", "vocabulary and bags")
    return [
        "data",
        *["resident", "host"] * tried,
        *["hybrid"] * (source in ("text", "interactions")),
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_every_mode_trains_on_every_source(found, world):
    """Of text, arrays and Parquet the bits are the same, too: hexadecimal ids modulo the tables'
    rows, missing ones in row 0, whatever holds them. On two ranks the global batches are those of
    one: sums differ by rounding, samples of another order by far more."""
    runs = found[world]
    assert len({digests(runs[name, "data"]) for name in ("text", "arrays", "parquet")}) == 1
    for (source, mode), summary in runs.items():
        data = runs[source, "data"]
        assert None not in digests(data) and 0 < data["eval_auc"] < 1
        assert mode == "hybrid" or digests(summary) == digests(data), (source, mode)
        for other in (data, found[1][source, mode]):
            assert summary["final_loss"] == pytest.approx(other["final_loss"], rel=1e-5), source
            assert summary["eval_logloss"] == pytest.approx(other["eval_logloss"], rel=1e-5), source
            assert summary["steps"] == other["steps"] > 8
        assert summary["stage_ms"]["load"] >= 0 and summary["stage_ms"]["wait"] >= 0, (source, mode)
        report = summary["bad_lines"] or {"count": None, "first": [""]}
        assert (report["count"], len(report["first"])) == SKIPPED.get(source, (None, 1)), source
        assert re.search("^$|a.txt:701: 1 tab-sep|users.txt:41: item 'x' is", report["first"][0])


def run(world, folder: Path, path: str, *more: str) -> dict[str, Any] | str:
    """The summary of a run over the Criteo folder at `path`, or what it raises."""
    given = ("data=criteo", f"data.path={path}", "data.table_rows=[]", "data.global_batch_size=32")
    quiet = (*source_runs.SMALL, "trainer.eval_steps=0", "run.save=true", "trainer.resume=never")
    try:
        return source_runs.run(world, folder, *quiet, *SMALL, *given, *more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def resume(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Runs that go on with the same data, with other ones, and ones whose ranks differ."""
    home, world, seen = Path(folder), open_world("cpu", timeout_s=60), {}
    one, copy, other = (str(home / name) for name in ("one", "copy", "other"))
    for mode in ("data", "hybrid"):  # which has its own checkpoints
        mine, half = f"parallel={mode}", home / f"half-{mode}"
        run(world, half, one, "trainer.steps=5", mine)
        rest = (mine, "trainer.steps=12", f"trainer.resume={half}")
        seen[mode] = {
            "whole": run(world, home / "whole", one, "trainer.steps=12", mine),
            "copy": run(world, home / "rest", copy, *rest),  # elsewhere, but the same
            "other": run(world, home / "other", other, *rest),
            "meant": run(world, home / "meant", other, *rest, "trainer.resume_data=any"),
            "mixed": run(world, home / "mixed", other if rank else one, mine),
        }
    close_world(world)
    return seen


def test_a_run_keeps_to_its_data(tmp_path):
    preprocessed(write_lines(tmp_path / "a.txt", make_lines(400)), tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    preprocessed(write_lines(tmp_path / "b.txt", make_lines(400, seed=8)), tmp_path / "other")
    for seen in run_ranks(resume, 2, str(tmp_path), timeout=200):
        for found in seen.values():
            assert found["copy"]["state_digest"] == found["whole"]["state_digest"]
            assert found["copy"]["final_loss"] == found["whole"]["final_loss"]
            assert re.search("other data: data.path was .{64}, is .{64}", found["other"])
            assert (found["meant"]["first_step"], found["meant"]["steps"]) == (5, 7)
            differ = "the ranks differ: data.path is '.*' on rank 0 and '.*' on"
            assert re.search(differ, found["mixed"])


STEPS, PATIENCE_S = 12, 30.0
MODES = ("data", "resident", "host", "hybrid")


class Meeting:
    """A source whose load of batch s + 1 and the training step s wait for each other: neither can
    end before the other one began. `met`: (kind, number) of those that found the other."""

    def __init__(self, source) -> None:
        self._source, self.met, self.threads = source, [], set()
        kinds = ("load", "step")
        self.began = {kind: [threading.Event() for _ in range(STEPS)] for kind in kinds}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def barrier(self, kind: str, number: int, other: str, at: int) -> None:
        self.began[kind][number].set()
        if 0 <= at < STEPS and self.began[other][at].wait(PATIENCE_S):
            self.met.append((kind, number))

    def train_batch(self, step: int, rank: int, world_size: int):
        batch = self._source.train_batch(step, rank, world_size).loaded()

        def load():
            self.threads.add(threading.current_thread().name)
            self.barrier("load", step, "step", step - 1)
            return batch.dense, batch.labels

        dense, labels = batch.dense.to("meta"), batch.labels.to("meta")
        return replace(batch, dense=dense, labels=labels, load=load)


def load_late(rank: int, size: int, folder: str) -> dict[str, Any]:
    world, seen = open_world("cpu", timeout_s=100), {}
    for mode_name in MODES:
        overrides = [
            *("trainer.device=cpu", f"trainer.steps={STEPS}", "trainer.log_level=ERROR"),
            *("trainer.eval_steps=0", "run.save=false", f"parallel={mode_name}"),
            *("data.table_rows=[500,60]", "data.bag_size=1", "data.global_batch_size=16"),
            *("cache.ratio=null", "cache.rows=200"),
        ]
        config = configured(*NET, *overrides)
        meeting = Meeting(build.build_source(config))
        tables = build.build_tables(config, meeting)
        model = build.build_dense(config, tables, meeting.dense_features)
        mode = build.build_parallel(config, world, tables, model, meeting)
        train = mode.train_step

        def train_step(step, asks=0, train=train, meeting=meeting):
            index = step.batch.index
            meeting.barrier("step", index, "load", index + 1)
            return train(step, asks)

        mode.train_step = train_step
        home = Path(folder, mode_name)
        home.mkdir(exist_ok=True)
        result = Run(config, world, home, meeting, tables, mode).go(build.build_rates(config))
        seen[mode_name] = sorted(meeting.met), meeting.threads, result.summary["stage_ms"]
    close_world(world)
    return seen


def test_a_load_and_the_step_before_it_run_at_one_time(tmp_path):
    expected = [("load", number) for number in range(1, STEPS)]
    expected += [("step", number) for number in range(STEPS - 1)]
    for found in run_ranks(load_late, 2, str(tmp_path), timeout=250):
        for mode in MODES:
            met, threads, stages = found[mode]
            assert met == expected, mode
            assert "MainThread" not in threads
            assert stages["load"] > 0 and stages["wait"] >= 0
