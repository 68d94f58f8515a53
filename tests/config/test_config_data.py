"""Wrong keys of the sources that read columns or interactions, refused before any rank starts."""

from __future__ import annotations

import os
import socket

import pytest

from distcache.cli.compose import checked_config, compose_overrides
from distcache.comm.rendezvous import Place
from distcache.data.files import find_files
from distcache.errors import ConfigError, DataError

PARQUET = ["data=parquet", "data.id_columns=[a,b]", "data.table_rows=[5,6]"]
CLICKS = ["data=interactions"]

REFUSED = {
    "no path": (["data=parquet"], r"data\.path is not set, and data=parquet reads files"),
    "no match": ([*PARQUET, "data.path=none*"], r"data\.path=none\*: no such file"),
    "folder": ([*PARQUET, "data.path=."], r"data\.path=\. is a folder: .* '\./\*'"),
    "no ids": (["data=parquet", "FILE"], r"data\.id_columns is empty"),
    "tables": ([*PARQUET, "FILE", "data.table_rows=[5]"], "2 entries, data.table_rows 1"),
    "rows": ([*PARQUET, "FILE", "data.table_rows=[5,0]"], r"data\.table_rows=\[5, 0\]"),
    "label": ([*PARQUET, "FILE", "data.label_column=null"], r"data\.label_column is not set"),
    "weights": ([*PARQUET, "FILE", "data.weight_columns={c: w}"], "its keys from data.id_columns"),
    "lines": ([*PARQUET, "FILE", "data.on_bad_line=skip"], "Parquet has no lines"),
    "nulls": ([*PARQUET, "FILE", "data.nulls=skip"], "data.nulls=skip is unknown"),
    "share": ([*PARQUET, "FILE", "data.held_out=1"], r"data\.held_out=1\.0: give a share"),
    "two": ([*PARQUET, "FILE", "data.held_out=0.1", "data.held_out_path=F"], "contradict"),
    "mean": (
        [*PARQUET, "FILE", "data.weight_columns={a: w}", "model.pooling=mean"],
        r"data\.weight_columns with model\.pooling=mean",
    ),
    "foreign": ([*PARQUET, "FILE", "data.negatives=2"], "is a key of data=interactions"),
    "synthetic": ([*PARQUET, "FILE", "data.samples=2"], "is a key of data=synthetic"),
    "delimiter": ([*CLICKS, "FILE", "data.delimiter=''"], "data.delimiter is empty"),
    "three tables": ([*CLICKS, "FILE", "data.table_rows=[1,2,3]"], "rows of users and items"),
    "share of last": ([*CLICKS, "FILE", "data.held_out=0.1"], "data.held_out_by=last, which holds"),
    "columns": ([*CLICKS, "FILE", "data.id_columns=[a]"], "is a key of data=parquet"),
    "both": (["data.held_out=0.1"], "is a key of data=parquet and data=interactions and means"),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(tmp_path, overrides, message):
    file = tmp_path / "file"
    file.write_text("")
    own = [o.replace("FILE", f"data.path={file}").replace("=F", f"={file}") for o in overrides]
    with pytest.raises(ConfigError, match=message):
        checked_config(compose_overrides(own), Place(0, 1, 0, 1))


@pytest.mark.parametrize("data", [["data=criteo"], CLICKS, PARQUET], ids=lambda data: data[0])
def test_what_is_no_regular_file_is_not_opened(tmp_path, data):
    """Reading would never end, or wait for a writer."""
    os.mkfifo(tmp_path / "pipe")
    place = Place(0, 1, 0, 1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path in ("/dev/zero", tmp_path / "pipe", tmp_path / "socket"):
            with pytest.raises(ConfigError, match=rf"data\.path={path} is no regular file but"):
                checked_config(compose_overrides([*data, f"data.path={path}"]), place)
            with pytest.raises(DataError, match=rf"{path} is not a file but a pipe or device"):
                find_files("data.path", str(path), "a file")


def test_a_file_of_a_preprocessed_folder(tmp_path):
    for name in ("manifest.json", "ids.npy"):
        (tmp_path / name).touch()
        with pytest.raises(
            ConfigError, match=rf"{name} is a file of .*: give .* data\.path={tmp_path}"
        ):
            checked_config(
                compose_overrides(["data=criteo", f"data.path={tmp_path / name}"]),
                Place(0, 1, 0, 1),
            )


def test_accepted(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    place = Place(0, 1, 0, 1)
    more = [f"data.path={file}", "data.weight_columns={a: w}", "data.nulls=zero"]
    config = checked_config(compose_overrides([*PARQUET, *more]), place)
    assert config.data.weight_columns == {"a": "w"}
    config = checked_config(compose_overrides([*CLICKS, f"data.path={file}"]), place)
    assert config.data.table_rows == []
