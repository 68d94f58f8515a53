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
import pyarrow.parquet as pq
import pytest
import source_runs
import torch
from batch_sources import columns, write
from batch_sources import parquet_source as parquet
from criteo_lines import ROWS, make_lines, preprocessed, write_lines
from ranks import run_ranks
from source_runs import NET, configured, digests, summaries

from distcache.comm.world import close_world, open_world
from distcache.data.criteo import CriteoArrays, CriteoSource, CriteoSpec
from distcache.data.interactions import InteractionsSource, InteractionsSpec
from distcache.trainer import build
from distcache.trainer.trainer import Run

SMALL = (*NET, "cache.ratio=0.5", "optim=adagrad", "run.digest=true", "trainer.eval_steps=2")
CRITEO = (f"data.table_rows={list(ROWS)}", "data.global_batch_size=64")
INTERACTIONS = ("data.global_batch_size=16", "trainer.eval_steps=1")


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
    """The overrides of each source; the first three are of the same samples."""
    lines = make_lines(700, seed=3)
    text = write_lines(folder / "a.txt", lines)
    preprocessed(text, folder / "out")
    preprocessed(text, folder / "words", mode="vocabulary", min_count=2, multi_hot=(1, 3) * 13)
    write(folder / "a.parquet", table_of(lines), 60)
    rng = np.random.default_rng(0)
    with (folder / "users.txt").open("w") as users:
        for user in range(40):
            users.write(" ".join(map(str, [user, *rng.choice(60, 8, replace=False)])) + "\n")
    parquet = {
        "path": folder / "a.parquet",
        "dense_columns": [f"I{i}" for i in range(13)],
        "id_columns": [f"C{i}" for i in range(26)],
    }
    parquet |= {"label_column": "label", "string_ids": "hex", "nulls": "zero"}
    words = {"path": folder / "words", "table_rows": [], "shuffle": "false"}
    given = {
        "text": ("criteo", {"path": text}, CRITEO),
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
    """The summary of each source in each mode, by the number of ranks."""
    folder = tmp_path_factory.mktemp("sources")
    given = sources(folder)
    results = {}
    for world in (1, 2):
        names = [(source, mode) for source in given for mode in modes_of(source, world)]
        runs = [[*SMALL, *given[source], f"parallel={mode}"] for source, mode in names]
        results[world] = dict(zip(names, summaries(runs, folder / f"w{world}", world), strict=True))
    return results


def modes_of(source: str, world: int) -> list[str]:
    """A mode sees batches and no source: each is tried, on two ranks those that divide batches in
    ways of their own."""
    cached = ["data", "resident", "host"] if world == 1 else ["data"]
    return cached + ["hybrid"] * (source in ("text", "interactions"))


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
        assert summary.keys() == data.keys()
        assert mode == "hybrid" or digests(summary) == digests(data), (source, mode)
        for other in (data, found[1][source, mode]):
            assert summary["final_loss"] == pytest.approx(other["final_loss"], rel=1e-5), source
            assert summary["eval_logloss"] == pytest.approx(other["eval_logloss"], rel=1e-5), source
            assert summary["steps"] == other["steps"] > 8
        assert summary["stage_ms"]["load"] >= 0 and summary["stage_ms"]["wait"] >= 0, (source, mode)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_skipped_is_in_the_run_folder(tmp_path, world_size):
    text = write_lines(tmp_path / "a.txt", [*make_lines(200), *[b"bad"] * 12])
    clicks = tmp_path / "b.txt"
    clicks.write_text("".join(f"{u} {u + 1} {u + 2} {u + 3}\n" for u in range(30)) + "7 x\n")
    skip = ("data.on_bad_line=skip", "trainer.steps=2", "trainer.eval_steps=0")
    runs = [
        ["data=criteo", f"data.path={text}", *SMALL, *CRITEO, *skip],
        ["data=interactions", f"data.path={clicks}", *SMALL, *skip, "cache.ratio=1"],
        ["data=interactions", f"data.path={clicks}", *SMALL, *skip, "parallel=resident"],
        ["data=synthetic", *SMALL, "trainer.steps=2", "data.table_rows=[50,60]", "cache.ratio=1"],
    ]
    summaries(runs, tmp_path, world_size)
    *found, none = [tmp_path / f"w{world_size}-{number}" / "bad_lines.json" for number in range(4)]
    first, *others = [json.loads(path.read_text()) for path in found]
    assert first["count"] == 12 and len(first["first"]) == 10
    assert first["first"][0].startswith(f"{text}:201: 1 tab-separated")
    for report in others:
        (line,) = report["first"]
        assert report["count"] == 1 and line.startswith(f"{clicks}:31: item 'x' is not a whole")
    assert not none.exists()


def run(world, folder: Path, path: str, *more: str) -> dict[str, Any] | str:
    """The summary of a run over the Criteo folder at `path`, or what it raises."""
    given = ("data=criteo", f"data.path={path}", "data.table_rows=[]", "data.global_batch_size=32")
    quiet = (*source_runs.SMALL, "trainer.eval_steps=0", "run.save=true")
    try:
        return source_runs.run(world, folder, *quiet, *SMALL, *given, *more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def resume(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Runs that go on with the same data, with other ones, and ones whose ranks differ."""
    torch.set_num_threads(1)
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


def changed(plain: dict[str, str], other: dict[str, str]) -> set[str]:
    return {key for key in plain | other if plain.get(key) != other.get(key)}


def test_what_criteo_depends_on(tmp_path):
    """Content, what is made of it and its order; not names, nor what no batch can show."""
    text = write_lines(tmp_path / "a.txt", make_lines(70))
    preprocessed(text, tmp_path / "one")

    def arrays(**more):
        return CriteoArrays(CriteoSpec(tmp_path / "one", (), 16, **more)).identity

    plain = arrays()
    assert set(plain) == {"data.path", "data.shuffle", "data.shuffle_block"}
    assert arrays(shuffle=False) == {"data.path": plain["data.path"], "data.shuffle": "False"}
    assert changed(plain, arrays(shuffle_block=8)) == {"data.shuffle_block"}
    lines = CriteoSource(CriteoSpec(text, ROWS)).identity
    assert "data.path" in changed(plain, lines)
    shutil.copy(text, tmp_path / "c.txt")
    assert CriteoSource(CriteoSpec(tmp_path / "c.txt", ROWS)).identity == lines
    other = make_lines(70)
    other[33] = b"\t".join([*other[33].split(b"\t")[:-1], b"1"])
    other = CriteoSource(CriteoSpec(write_lines(tmp_path / "d.txt", other), ROWS)).identity
    assert "data.path" in changed(lines, other)


def test_what_parquet_depends_on(tmp_path):
    path, data = write(tmp_path / "a.parquet", columns(40)), columns(40)
    plain = parquet(path).identity
    shutil.copy(path, tmp_path / "b.parquet")
    assert parquet(tmp_path / "b.parquet").identity == plain
    data["x"] = data["x"] + np.eye(40)[11]  # one value, in no way the largest
    pq.write_table(pq.read_table(write(tmp_path / "c.parquet", data)), tmp_path / "c.parquet")
    assert "data.path" in changed(plain, parquet(tmp_path / "c.parquet").identity)
    changes = {"dense_transform": "log1p", "string_ids": "hex", "shuffle_rows": 7}
    changes |= {"dense_columns": ("z", "x")}
    for name, value in changes.items():
        assert changed(plain, parquet(path, **{name: value}).identity) == {f"data.{name}"}
    assert changed(plain, parquet(path, held_out=0.5).identity) == {"data.path"}


def test_what_interactions_depend_on(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("0 1 2 3\n1 2 5\n2 0 1 4\n")

    def identity(**changes):
        return InteractionsSource(InteractionsSpec(path, **changes)).identity

    plain = identity()
    assert identity(negatives=3) == plain | {"data.negatives": "3"}
    assert identity(sampling="popularity") == plain | {"data.negative_sampling": "popularity"}
    path.write_text("0 1 2 3\n1 2 5\n2 0 3 4\n")
    assert changed(plain, identity()) == {"data.path"}


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

    def meet(self, kind: str, number: int, other: str, at: int) -> None:
        self.began[kind][number].set()
        if 0 <= at < STEPS and self.began[other][at].wait(PATIENCE_S):
            self.met.append((kind, number))

    def train_batch(self, step: int, rank: int, world_size: int):
        batch = self._source.train_batch(step, rank, world_size).loaded()

        def load():
            self.threads.add(threading.current_thread().name)
            self.meet("load", step, "step", step - 1)
            return batch.dense, batch.labels

        dense, labels = batch.dense.to("meta"), batch.labels.to("meta")
        return replace(batch, dense=dense, labels=labels, load=load)


def load_late(rank: int, size: int, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
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

        def train_step(step, stop=False, train=train, meeting=meeting):
            index = step.batch.index
            meeting.meet("step", index, "load", index + 1)
            return train(step, stop=stop)

        mode.train_step = train_step
        home = Path(folder, mode_name)
        home.mkdir(exist_ok=True)
        result = Run(config, world, home, meeting, tables, mode).go(build.build_rates(config))
        seen[mode_name] = sorted(meeting.met), meeting.threads, result.summary["stage_ms"]
    close_world(world)
    return seen


@pytest.mark.parametrize("size", [1, 2])
def test_a_load_and_the_step_before_it_run_at_one_time(tmp_path, size):
    expected = [("load", number) for number in range(1, STEPS)]
    expected += [("step", number) for number in range(STEPS - 1)]
    for found in run_ranks(load_late, size, str(tmp_path), timeout=250):
        for mode in MODES:
            met, threads, stages = found[mode]
            assert met == expected, mode
            assert "MainThread" not in threads
            assert stages["load"] > 0 and stages["wait"] >= 0
