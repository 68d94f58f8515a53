"""Runs of the command that start from other weights: what fits, what grows, what is warned of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import environment, run
from pyarrow import parquet

from distcache import export

SETTINGS = (
    *("data.global_batch_size=16", "trainer.device=cpu", "trainer.eval_steps=1"),
    *("model.embedding_dim=4", "model.dense_arch=[4]", "model.over_arch=[4,1]"),
)
FROZEN = ("optim.dense_lr=0", "optim.embedding_lr=0", "trainer.steps=1")


def train(folder: Path, *overrides: str) -> tuple[int, str]:
    """Exit code and output of the command, whose run folder is `folder`."""
    line = [sys.executable, "-m", "distcache.train", *SETTINGS, f"run.dir={folder}", *overrides]
    options = {"capture_output": True, "text": True, "timeout": 60}
    done = run(line, cwd=folder.parent, env=environment(), **options)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A run over two tables, with its tables as files beside it."""
    folder = tmp_path_factory.mktemp("source") / "run"
    code, output = train(folder, "data.table_rows=[50,20]", "trainer.steps=3", "trainer.seed=7")
    assert code == 0, output
    assert export.main([f"resume={folder}", f"output={folder.parent}/tables"]) == 0
    return folder


def rows(run_folder: Path, folder: Path, table: str) -> list[list[float]]:
    """The rows of a table of a run's newest checkpoint."""
    words = [f"resume={run_folder}", f"output={folder}", "format=parquet", f"tables=[{table}]"]
    assert export.main(words) == 0
    return parquet.read_table(folder / f"{table}.parquet")["vector"].to_pylist()


def warnings(output: str) -> list[str]:
    return [line for line in output.splitlines() if "dense parameters are not stored" in line]


def test_all_of_a_run_is_taken_without_a_warning(source, tmp_path):
    words = ("data.table_rows=[50,20]", f"trainer.init_from={source}", *FROZEN)
    code, output = train(tmp_path / "new", *words)
    assert code == 0 and "2 of 2 tables; 6 of 6 dense parameters" in output, output
    assert not warnings(output)
    old = rows(source, tmp_path / "old", "t_cat_0")
    assert rows(tmp_path / "new", tmp_path / "after", "t_cat_0") == old


def test_dense_parameters_that_are_not_stored_are_warned_of(source, tmp_path):
    words = ("data.table_rows=[50,20]", f"trainer.init_from={source.parent}/tables", *FROZEN)
    code, output = train(tmp_path / "new", *words)
    assert code == 0, output
    (warning,) = warnings(output)
    assert "warning" in warning and "6 of 6 dense parameters" in warning
    assert "dense_arch.0.weight" in warning and "and 1 more" in warning
    assert "stored and not used: none" in warning


def test_layers_that_are_new_are_warned_of(source, tmp_path):
    words = ("data.table_rows=[50,20]", f"trainer.init_from={source}", *FROZEN)
    code, output = train(tmp_path / "new", *words, "model.dense_arch=[4,4]")
    assert code == 0 and "6 of 8 dense parameters" in output, output
    (warning,) = warnings(output)
    assert "2 of 8 dense parameters" in warning
    assert "initial values: dense_arch.2.weight, dense_arch.2.bias;" in warning


def test_what_is_stored_and_not_used_is_named(source, tmp_path):
    words = ("data.table_rows=[50]", f"trainer.init_from={source.parent}/tables", *FROZEN)
    code, output = train(tmp_path / "new", *words)
    assert code == 0, output
    (warning,) = warnings(output)
    assert "stored and not used: t_cat_1.weight" in warning


def test_tables_grow_and_take_other_names(source, tmp_path):
    words = ("data.table_rows=[30,60]", f"trainer.init_from={source}", *FROZEN)
    names = ("trainer.init_names={t_cat_0: t_cat_1, t_cat_1: t_cat_0}",)
    code, output = train(tmp_path / "new", *words, *names)
    assert code == 0, output
    assert "t_cat_0 (the first 20 of 30 rows)" in output
    assert "t_cat_1 (the first 50 of 60 rows)" in output
    old = rows(source, tmp_path / "old", "t_cat_0")
    new = rows(tmp_path / "new", tmp_path / "after", "t_cat_1")
    assert new[:50] == old and len(new) == 60


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("data.table_rows=[49,20]",), "'t_cat_0' has 49 rows x 4 and cannot start from"),
        (
            ("data.table_rows=[50,20]", "model.embedding_dim=8", "model.dense_arch=[8]"),
            "width must",
        ),
        (("data.table_rows=[50,20]", "model.over_arch=[5,1]"), "'over_arch.0.weight' has shape"),
        (("data.table_rows=[50,20]", "trainer.init_names={t_cat_0: x}"), "x: not one table and"),
    ],
)
def test_what_does_not_fit_is_refused(source, tmp_path, overrides, words):
    code, output = train(tmp_path / "new", f"trainer.init_from={source}", *overrides, *FROZEN)
    assert code == 1 and words in output and "Traceback" not in output
