"""The command of preprocessing: its keys, unknown ones, what went wrong, verifying."""

from __future__ import annotations

import subprocess

import pytest
from criteo_lines import ROWS
from preprocess_runs import command

from distcache import preprocess as entry
from distcache.cli.compose import read_line
from distcache.data.raw.settings import MLPERF_BAGS
from distcache.errors import ConfigError


def test_the_command_line():
    def settings(*words: str):
        return entry.make_settings(read_line("preprocess", entry.PreprocessConfig, words).values)

    one = settings(
        "input=a", "output=b", "mode=hash", "rows=kaggle", "multi_hot=true", "min_count=1"
    )
    assert list(one.input) == ["a"] and one.multi_hot == MLPERF_BAGS and one.rows[0] == 1460
    assert list(settings("input=a b.txt,day_*.gz", "output=b").input) == ["a b.txt", "day_*.gz"]
    third = settings(
        "input=[a, c]",
        "output=b",
        "mode=hash",
        f"rows={list(ROWS)}",
        "memory=1g",
        "workers=3",
        "part=1k",
        "on_bad_line=skip",
    )
    assert list(third.input) == ["a", "c"] and tuple(third.rows) == ROWS
    assert (third.memory, third.workers, third.part) == (1 << 30, 3, 1024)
    for words in (
        ["output=b"],
        ["input=a", "output=b", "memory=lots"],
    ):
        with pytest.raises(ConfigError):
            settings(*words)
    for rows in ("big", "[3,big]"):
        with pytest.raises(ConfigError, match=r"give 26 whole numbers .* kaggle or terabyte"):
            settings("input=a", "output=b", "mode=hash", f"rows={rows}")


def test_an_unknown_key_is_named_with_a_near_one(capsys):
    for typed, hint in (
        ("min_cuont=1", "min_cuont: no such key: did you mean min_count?"),
        ("--min-count=1", "--min-count=1: write min_count=..."),
        ("colour=red", "colour: no such key: `--cfg job` shows all keys"),
        ("outptu=c", "outptu: no such key: did you mean output?"),
        ("output=", "output is not set: give output=<folder>"),
        ("min_count=few", "min_count=few: give a whole number"),
    ):
        given = ["input=a", *["output=b"] * ("out" not in typed), typed]
        assert entry.main(given) == 1
        assert f"error: {hint}" in capsys.readouterr().err


def test_command_says_what_went_wrong_and_verifies(text, tmp_path):
    wrong = subprocess.run(
        command("input=nowhere", f"output={tmp_path / 'out'}"), capture_output=True, text=True
    )
    assert wrong.returncode == 1 and "nowhere" in wrong.stderr and "Traceback" not in wrong.stderr
    right = subprocess.run(
        command(f"input={text}", f"output={tmp_path / 'out'}", "min_count=2"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        " kB of text in" in right.stdout
        and "kB/s per core" in right.stdout
        and "700 samples" in right.stdout
    )
    assert "parse" in right.stderr
    check = command("verify=true", f"output={tmp_path / 'out'}")
    assert subprocess.run(check).returncode == 0
    with (tmp_path / "out/dense.npy").open("r+b") as file:
        file.seek(500)
        file.write(b"\x01")
    bad = subprocess.run(check, capture_output=True, text=True)
    assert bad.returncode == 1 and "dense.npy has checksum" in bad.stderr
    assert bad.stderr.startswith(f"error: output: {tmp_path / 'out'}")
