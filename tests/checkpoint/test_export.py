"""Tables out of checkpoints, and runs that start from them: the values that DCP itself reads, block
by block, in every mode."""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import torch
from node_cases import open_nodes
from pyarrow import parquet
from ranks import run_ranks
from scenarios import Scenario, make_mode, table
from toy_parallel import TABLES, ToyParallel, toy_run

from distcache.checkpoint import writer
from distcache.checkpoint.state import TrainerState
from distcache.checkpoint.weights import checkpoint_values, init_from
from distcache.comm.world import close_world
from distcache.errors import ConfigError
from distcache.export import main
from distcache.optim import row_update
from distcache.parallel.cached import CachedSettings
from distcache.parallel.hybrid import HybridParallel, HybridSpec
from distcache.store import table_files
from distcache.store.table_files import Stored, read_safetensors

NAMES = [spec.name for spec in TABLES]


@pytest.fixture(scope="module")
def run(world, tmp_path_factory) -> Path:
    """A run with checkpoints at steps 8 and 9, of blocks of five rows."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BLOCK_BYTES", 5 * 4 * 8)
        often = {"trainer__steps": 9, "trainer__checkpoint_every": 8}
        toy_run(world, folder, ToyParallel(world), **often)
    return folder


def weights(run: Path, step: int) -> list[np.ndarray]:
    """The tables of a checkpoint, as DCP reads them."""
    values = checkpoints.tensors(run / "checkpoints" / f"step_{step:08d}")
    return [values[f"tables.{name}.weight"].numpy() for name in NAMES]


@pytest.fixture(autouse=True)
def seven_rows(monkeypatch) -> None:
    """Seven rows are exported at a time."""
    monkeypatch.setattr(table_files, "BLOCK_BYTES", 7 * 4 * 8)


def test_the_newest_checkpoints_tables(run, tmp_path) -> None:
    assert main([f"resume={run}", f"output={tmp_path}"]) == 0
    found = read_safetensors(tmp_path)
    for name, want in zip(NAMES, weights(run, 9), strict=True):
        assert torch.equal(found[f"{name}.weight"].block(0, len(want)), torch.from_numpy(want))
    assert len(found) == len(NAMES)


def exported(folder: Path, name: str) -> tuple[list[int], np.ndarray]:
    """Ids and vectors of a Parquet file."""
    found = parquet.read_table(folder / f"{name}.parquet")
    return found["id"].to_pylist(), np.array(found["vector"].to_pylist(), np.float32)


def test_chosen_rows_of_one_checkpoint(run, tmp_path) -> None:
    (tmp_path / "ids").write_text("30\n2\n")
    how = ["format=parquet", f"tables={NAMES[0]}", f"rows={tmp_path / 'ids'}"]
    one = run / "checkpoints" / "step_00000008"
    assert main([f"resume={one}", f"output={tmp_path}", *how]) == 0
    ids, vectors = exported(tmp_path, NAMES[0])
    assert ids == [2, 30]
    assert np.array_equal(vectors, weights(run, 8)[0][ids].astype(np.float32))


def test_rows_that_differ_from_an_older_checkpoint(run, tmp_path) -> None:
    since = f"since={run / 'checkpoints' / 'step_00000008'}"
    assert main([f"resume={run}", f"output={tmp_path}", "format=parquet", since]) == 0
    for name, new, old in zip(NAMES, weights(run, 9), weights(run, 8), strict=True):
        ids, vectors = exported(tmp_path, name)
        assert ids == np.flatnonzero((new != old).any(axis=1)).tolist()
        assert np.array_equal(vectors, new[ids].astype(np.float32))
    assert 0 < len(exported(tmp_path, NAMES[0])[0]) < 31  # a batch has 16 ids


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["output=o"], "resume is not set"),
        (["resume=RUN"], "output is not set"),
        (["resume=RUN/x", "output=o"], "resume=.*: there is no such folder"),
        (["resume=RUN", "output=o", "tables=t_x"], r"tables=\['t_x'\]: the checkpoint has t_cat_0"),
        (["resume=RUN", "output=o", "rows=ids"], "give the one table with these ids by tables="),
        (["resume=RUN", "output=o", "format=csv"], "one of safetensors, parquet"),
        (["resume=RUN", "output=o", "since=RUN"], "parquet for chosen rows"),
    ],
)
def test_what_cannot_be_exported_is_told(run, capsys, words, says) -> None:
    assert main([word.replace("RUN", str(run)) for word in words]) == 1
    assert re.search(says, capsys.readouterr().err)


def test_a_damaged_block_is_named(run, tmp_path, capsys) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run / "checkpoints" / "step_00000009", copy)
    (path,) = copy.glob("*.distcp")
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 99):  # some lie in tables, and other blocks are not read
        data[at] ^= 1
    path.write_bytes(data)
    assert main([f"resume={copy}", f"output={tmp_path / 'out'}"]) == 1
    assert f"{path.name} (of 2 files) not as written" in capsys.readouterr().err


# --- runs that start from what is stored ---------------------------------------------------------


def still(world, folder: Path, **changes) -> dict:
    """The summary of a run whose rates are 0."""
    return toy_run(world, folder, ToyParallel(world), None, lambda _: (0.0, 0.0), **changes).summary


def test_a_run_starts_from_another_and_goes_on_from_itself(world, run, tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "distcache")
    of_run = still(world, tmp_path / "same", trainer__resume=str(run), trainer__steps=10)
    how = {"trainer__init_from": str(run), "trainer__resume": "auto"}
    first = still(world, tmp_path / "own", **how, trainer__steps=2)
    assert first["first_step"] == 0 and first["state_digest"] == of_run["state_digest"]
    assert "2 of 2 tables; 4 of 4 dense parameters" in caplog.text
    caplog.clear()
    again = still(world, tmp_path / "own", **how, trainer__steps=4)
    assert again["first_step"] == 2 and "dense parameters" not in caplog.text


CASE = Scenario((table("a", 30), table("b", 40), table("c", 7, dim=4)), row_update("adagrad"))
OF = {"a": torch.randn(25, 8), "x.y.weight": torch.randn(40, 8)}
MODES = {
    "data": CachedSettings("data", (24, 8), 2, 1),
    "resident": CachedSettings("resident"),
    "host": CachedSettings("host"),
    "column_wise": None,
    "row_wise": None,
}


def start_in_modes(
    rank: int, size: int, folder: str, modes: tuple[str, ...], nodes: tuple[int, ...]
) -> dict[str, list]:
    """The tables of modes, on nodes of so many ranks, at the start and from the files in `folder`;
    of hybrid, from a checkpoint of itself also."""
    world, found = open_nodes(rank, nodes), {}

    def blocks(mode) -> list:
        read = [mode.table_block(at, 0, spec.rows) for at, spec in enumerate(CASE.tables)]
        return [None if block is None else block.clone().numpy() for block in read]

    for name in modes:
        if (settings := MODES[name]) is not None:
            mode = make_mode(world, CASE, settings)
        else:
            spec = HybridSpec(CASE.tables, CASE.features, CASE.optimizer, CASE.seed, name)
            mode = HybridParallel(world, spec, CASE.model())
        found[name] = [blocks(mode)]
        init_from(Path(folder, "files"), {"b": "y"}, mode, CASE.tables, world)
        found[name].append(blocks(mode))
        if settings is None:
            tables = tuple((spec.name, spec.rows, spec.dim) for spec in CASE.tables)
            identity = checkpoints.identity_of(
                "hybrid", size, "float32", "adagrad", 0, 24, tables, steps_per_epoch=9
            )
            where = Path(folder, name)
            checkpoints.save(where, mode, identity, TrainerState(), world)
            stored = checkpoint_values(where)
            values = [stored[f"tables.{spec.name}.weight"] for spec in CASE.tables]
            found[name].append([one.block(0, one.shape[0]).numpy() for one in values])
        mode.close()
    close_world(world)
    return found


@pytest.mark.parametrize(
    ("modes", "nodes"), [(tuple(MODES), (2,)), (("data", "host"), (1, 1))], ids=["one", "two"]
)
def test_tables_start_from_files_in_every_mode(tmp_path, modes, nodes) -> None:
    stored = {name.removesuffix(".weight"): Stored.of(values) for name, values in OF.items()}
    table_files.write_tables(tmp_path / "files", "safetensors", stored)
    found = run_ranks(start_in_modes, 2, str(tmp_path), modes, nodes)[0]
    for name in modes:
        drawn, *filled = found[name]
        drawn[0][:25], drawn[1][:] = OF["a"], OF["x.y.weight"]
        for tables in filled:
            for got, want in zip(tables, drawn, strict=True):
                assert np.array_equal(got, want), name
    assert [len(found[name]) for name in modes] == [3 if "wise" in name else 2 for name in modes]


def test_dense_parameters_of_another_shape_are_refused(world, run) -> None:
    case = replace(CASE, tables=TABLES)
    mode = make_mode(world, case, CachedSettings("data", (28,), 2, 1))
    with pytest.raises(ConfigError, match=r"'layers\.0\.weight' has shape \[16, 13"):
        init_from(run, {}, mode, TABLES, world)
    mode.close()
