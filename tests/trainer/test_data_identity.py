"""The data are part of a run: all ranks read the same, and a resumed run the same as before."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import source_runs
import torch
from batch_sources import columns, write
from batch_sources import parquet_source as source
from criteo_lines import ROWS, make_lines, preprocessed, write_lines
from ranks import run_ranks

from distcache.comm.world import close_world, open_world
from distcache.data.criteo import CriteoArrays, CriteoSource, CriteoSpec
from distcache.data.interactions import InteractionsSource, InteractionsSpec
from distcache.errors import ConfigError

SMALL = (
    "data=criteo",
    "data.global_batch_size=32",
    *source_runs.NET,
    "cache.ratio=0.5",
    "trainer.device=cpu",
    "trainer.log_level=ERROR",
    "trainer.eval_steps=0",
    "run.digest=true",
)


def run(world, home: Path, name: str, path: str, *more: str) -> dict[str, Any]:
    """One run over the text or folder at `path`."""
    rows = f"data.table_rows={list(ROWS)}" if path.endswith(".txt") else "data.table_rows=[]"
    return source_runs.run(world, home / name, *SMALL, f"data.path={path}", rows, *more)


def play(rank: int, size: int, folder: str) -> dict[str, str]:
    """What is said of other data: on resuming, in each mode, and on the last rank alone."""
    torch.set_num_threads(1)
    home, seen = Path(folder), {}
    one, copy, other = (str(home / name) for name in ("one", "copy", "other"))
    world = open_world("cpu", timeout_s=60)
    tries = {
        "order": (one, "data.shuffle=false"),
        "block": (one, "data.shuffle_block=8"),
        "other": (other,),
        "text": (str(home / "a.txt"),),
    }
    for mode in modes_of(size):
        mine = (f"parallel={mode}",)
        whole = run(world, home, f"whole-{mode}", one, "trainer.steps=12", *mine)
        run(world, home, f"half-{mode}", one, "trainer.steps=5", *mine)
        rest = (*mine, "trainer.steps=12", f"trainer.resume={home / f'half-{mode}'}")
        again = run(world, home, f"rest-{mode}", copy, *rest)  # elsewhere, but the same
        seen[f"copy {mode}"] = str(whole["state_digest"] == again["state_digest"])
        for name, (path, *changed) in tries.items():
            try:
                run(world, home, f"{name}-{mode}", path, *rest, *changed)
            except ConfigError as error:
                seen[f"{name} {mode}"] = str(error)
        meant = run(world, home, f"meant-{mode}", other, *rest, "trainer.resume_data=any")
        seen[f"meant {mode}"] = str((meant["first_step"], meant["steps"]))
        if size > 1:
            try:
                run(world, home, f"mixed-{mode}", other if rank else one, *mine)
            except ConfigError as error:
                seen[f"mixed {mode}"] = str(error)
    close_world(world)
    return seen


def modes_of(size: int) -> tuple[str, ...]:
    """The other trainer has checkpoints of its own, the same at every number of ranks."""
    return ("data", "hybrid") if size == 1 else ("data",)


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_keeps_to_its_data(tmp_path, size):
    text = write_lines(tmp_path / "a.txt", make_lines(400))
    preprocessed(text, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    preprocessed(write_lines(tmp_path / "b.txt", make_lines(400, seed=8)), tmp_path / "other")
    for seen in run_ranks(play, size, str(tmp_path), timeout=200):
        for mode in modes_of(size):
            assert seen[f"copy {mode}"] == "True"
            for name in ("other", "text"):
                assert re.search(
                    "other data: data.path was .{64}, is .{64}", seen[f"{name} {mode}"]
                )
            assert "other data: data.shuffle was True, is False" in seen[f"order {mode}"]
            assert "data.shuffle_block was 4096, is 8" in seen[f"block {mode}"]
            assert all("trainer.resume_data=any" in seen[f"{n} {mode}"] for n in ("order", "text"))
            assert seen[f"meant {mode}"] == "(5, 7)"
            if size > 1:
                found = seen[f"mixed {mode}"]
                assert re.search("the ranks differ: data.path is '.*' on rank 0 and '.*' on", found)


def test_what_a_source_depends_on(tmp_path):
    """Content, what is made of it and its order; not names, nor what no batch can show."""
    text = write_lines(tmp_path / "a.txt", make_lines(70))
    preprocessed(text, tmp_path / "one")
    plain = CriteoArrays(CriteoSpec(tmp_path / "one", (), 16)).identity
    assert set(plain) == {"data.path", "data.shuffle", "data.shuffle_block"}
    in_order = CriteoArrays(CriteoSpec(tmp_path / "one", (), 16, shuffle=False)).identity
    assert in_order == {"data.path": plain["data.path"], "data.shuffle": "False"}
    lines = CriteoSource(CriteoSpec(text, ROWS)).identity
    shutil.copy(text, tmp_path / "c.txt")
    assert CriteoSource(CriteoSpec(tmp_path / "c.txt", ROWS)).identity == lines
    changed = make_lines(70)
    changed[33] = b"\t".join([*changed[33].split(b"\t")[:-1], b"1"])
    other = CriteoSource(CriteoSpec(write_lines(tmp_path / "d.txt", changed), ROWS)).identity
    assert other["data.path"] != lines["data.path"]


def test_what_parquet_depends_on(tmp_path):
    path, data = write(tmp_path / "a.parquet", columns(40)), columns(40)
    plain = source(path).identity
    shutil.copy(path, tmp_path / "b.parquet")
    assert source(tmp_path / "b.parquet").identity == plain
    data["x"] = data["x"] + np.eye(40)[11]  # one value, in no way the largest
    pq.write_table(pq.read_table(write(tmp_path / "c.parquet", data)), tmp_path / "c.parquet")
    assert source(tmp_path / "c.parquet").identity["data.path"] != plain["data.path"]
    for change, key in (
        ({"held_out": 0.5}, "data.path"),
        ({"dense_transform": "log1p"}, "data.dense_transform"),
        ({"string_ids": "hex"}, "data.string_ids"),
        ({"shuffle_rows": 7}, "data.shuffle_rows"),
        ({"dense_columns": ("z", "x")}, "data.dense_columns"),
    ):
        found = source(path, **change).identity
        assert {name for name in plain if found[name] != plain[name]} == {key}


def test_what_interactions_depend_on(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("0 1 2 3\n1 2 5\n2 0 1 4\n")

    def identity(**changes):
        return InteractionsSource(InteractionsSpec(path, **changes)).identity

    plain = identity()
    assert identity(negatives=3) == plain | {"data.negatives": "3"}
    assert identity(sampling="popularity") == plain | {"data.negative_sampling": "popularity"}
    path.write_text("0 1 2 3\n1 2 5\n2 0 3 4\n")
    assert identity() == plain | {"data.path": identity()["data.path"]} != plain
