"""Files as users have them, read by the command: interactions in columns, ids that are floats."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from launching import environment, run
from pyarrow import parquet

SMALL = (
    "model.embedding_dim=4",
    "model.dense_arch=[4]",
    "model.over_arch=[4,1]",
    "trainer.steps=2",
)
COUNT = "300 interactions of 20 users and 30 items"
DICE = random.Random(0)
PAIRS = [(user, item) for user in range(1, 21) for item in DICE.sample(range(1, 31), 15)]
ITEMS = {item for _, item in PAIRS}
ROWS = [(*pair, DICE.randint(1, 5), DICE.randint(870_000_000, 890_000_000)) for pair in PAIRS]


def train(*overrides: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of the command."""
    command = [sys.executable, "-m", "distcache.train", *SMALL, "data.global_batch_size=64"]
    command += ["trainer.device=cpu", "run.save=false", f"run.dir={folder / 'run'}", *overrides]
    options = {"capture_output": True, "text": True, "timeout": 100}
    done = run(command, cwd=folder, env=environment(), **options)
    return done.returncode, done.stdout + done.stderr


def train_on(path: Path, lines: list[str], *overrides: str) -> tuple[int, str]:
    """Exit code and output of the command on a file of interactions of these lines."""
    path.write_text("\n".join(lines) + "\n")
    return train("data=interactions", f"data.path={path}", *overrides, folder=path.parent)


def joined(delimiter: str, fields: tuple[int, ...]) -> list[str]:
    """The rows with these of their fields."""
    return [delimiter.join(str(row[field]) for field in fields) for row in ROWS]


TYPED = "user_id:token\titem_id:token\ttimestamp:float"
CASES = {
    "u.data": ("u.data", joined("\t", (0, 1, 2, 3)), (), "user, item, rating, time"),
    "three columns": ("u.tsv", joined("\t", (0, 1, 2)), (), "user, item, rating"),
    "commas in .data": ("u.data", joined(",", (0, 1, 2)), (), "user, item, rating"),
    "typed": ("a.inter", [TYPED, *joined("\t", (0, 1, 3))], (), "user, item, time"),
    "another order": (
        "a.csv",
        ["rating,note,movieId,userId", *(f"{r},x,{i},{u}" for u, i, r, _ in ROWS)],
        (),
        "rating, not read, item, user",
    ),
    "tab by name": (
        "a.txt",
        joined("\t", (0, 1, 2)),
        ("data.delimiter=tab",),
        "user, item, rating",
    ),
    "tab escaped": (
        "a.txt",
        joined("\t", (0, 1, 2)),
        ("data.format=csv", r"data.delimiter='\t'"),
        "user, item, rating",
    ),
    "double colon": ("a.dat", joined("::", (0, 1, 2)), ("data.format=csv",), "user, item, rating"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_columns_are_read_as_columns(tmp_path, case):
    name, lines, overrides, columns = case
    code, output = train_on(tmp_path / name, lines, *overrides)
    assert code == 0, output
    assert f"columns {columns}, separated by" in output
    assert COUNT in output and "tables of 21 and 31 rows" in output


@pytest.mark.parametrize("fields", [(0, 1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("delimiter", ["\t", " "])
def test_ambiguous_lines_are_refused_until_the_format_is_named(tmp_path, delimiter, fields):
    lines = joined(delimiter, fields)
    code, output = train_on(tmp_path / "clicks.txt", lines)
    assert code == 1 and f"every line of {tmp_path}/clicks.txt has {len(fields)} fields" in output
    assert "data.format=csv" in output and "data.format=lines" in output
    code, output = train_on(tmp_path / "clicks.txt", lines, "data.format=csv")
    assert code == 0 and COUNT in output, output


def test_lines_of_equal_length_are_read_once_named(tmp_path):
    lines = [f"{user} {user + 1} {user + 2}" for user in range(40)]
    code, output = train_on(tmp_path / "pairs.txt", lines, "data.format=lines")
    assert code == 0 and "80 interactions of 40 users and 41 items" in output, output


@pytest.mark.parametrize(
    ("lines", "overrides", "words"),
    [
        (["customer,product,timestamp", "1,2,870000000"], (), "'timestamp' stands in the place of"),
        (["user,user_id,item", "1,2,3"], (), "two columns of the user"),
        (["1,2,3,4,5"], (), "5 fields separated by ','"),
        (["1,2"], ("data.format=lines", "data.delimiter=tab"), "data.format=lines has none"),
    ],
)
def test_columns_that_cannot_be_told_are_refused(tmp_path, lines, overrides, words):
    code, output = train_on(tmp_path / "a.csv", lines, *overrides)
    assert code == 1 and words in output


@pytest.mark.parametrize("nulls", ["error", "zero", "empty"])
def test_parquet_ids_that_missing_values_made_floats(tmp_path, nulls):
    """One file has integers, and the other, with a missing value, floats."""
    labels = [number % 2 for number in range(100)]
    ids = [number % 50 for number in range(100)]
    kinds = {"a": pa.int64(), "b": pa.float64()}
    for name, type_ in kinds.items():
        column = pa.array([None, *ids[1:]] if name == "b" else ids, type_)
        parquet.write_table(pa.table({"y": labels, "i": column}), tmp_path / f"{name}.parquet")
    code, output = train(
        *("data=parquet", f"data.path={tmp_path}/*.parquet", f"data.nulls={nulls}"),
        *("data.label_column=y", "data.id_columns=[i]", "data.table_rows=[50]"),
        folder=tmp_path,
    )
    if nulls == "error":
        assert code == 1 and "b.parquet, row 1, column 'i': there is no value" in output
    else:
        assert code == 0 and "2 Parquet files" in output, output
