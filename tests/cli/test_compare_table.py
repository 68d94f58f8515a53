"""What a comparison says of its runs: the table, its notes, noise, files, and the tail of a log."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import pytest
from fabricated import summary, write_run

from distcache.cli.compare_report import (
    Spread,
    by_chance,
    is_noise,
    largest_loss_difference,
    log_tail,
    markdown,
    read_run,
    spread,
    write_files,
)


def run_of(folder: Path, mode: str, name: str | None = None, **values):
    """A fabricated run, read back."""
    extra = {key: values.pop(key) for key in ("scatter", "drift") if key in values}
    where = folder / (name or mode)
    write_run(where, summary(mode, **values), **extra)
    return read_run(mode, name or mode, where, 0, 1.0, folder / "log")


def cells(table: str, label: str) -> list[str]:
    """The cells of the table's line with this label."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {label} ")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize("runs", [2, 3, 4])
def test_how_often_ranges_lie_apart_by_chance(runs, tmp_path):
    """Of all ways to divide runs of one mode into two halves, each the slower one once."""
    values = range(2 * runs)
    halves = list(itertools.combinations(values, runs))
    apart = [half for half in halves if max(half) < runs or min(half) >= runs]
    odds = len(halves) // len(apart)
    groups = [
        run_of(tmp_path, mode, f"{mode}-{i}", ms=base + i)
        for mode, base in (("data", 10), ("host", 20))
        for i in range(runs)
    ]
    found = {run.mode: [r for r in groups if r.mode == run.mode] for run in groups}
    assert by_chance(*map(spread, found.values())) == odds
    table = markdown(groups)
    assert f"apart, as modes of one speed would be 1 time in {odds} (ranges over {runs} r" in table
    (cell,) = cells(table, "speed relative to data, by median step")[1:]
    assert (f"(chance 1 in {odds})" in cell) == (odds < 20) and "x" in cell


def test_the_table(tmp_path):
    runs = [
        run_of(tmp_path, "data"),
        run_of(tmp_path, "hybrid", ms=12.2, digest="b", drift=1e-6),
        run_of(tmp_path, "resident", ms=6.0),
    ]
    table = markdown(runs)
    assert cells(table, "step ms, median") == ["12.00", "12.20", "6.00"]
    assert cells(table, "hit rate of distinct rows") == ["0.8300", "-", "-"]
    assert cells(table, "speed relative to data, by median step") == [
        "-",
        "0.98x (noise)",
        "2.00x (one run)",
    ]
    assert cells(table, "largest relative loss difference to data") == ["-", "1e-06", "0"]
    assert cells(table, "bits of losses / final state as data") == [
        "-",
        "differ / differ",
        "same / same",
    ]
    # 1.9e6 bytes a step are 1,855.5 KiB
    assert cells(table, "rows and row gradients sent, KiB per rank and step")[0] == "1,855.5"
    assert "hybrid 12.20 ms" in table and "noise: the ranges overlap" in table
    assert "apart within one run; whether runs differ as much is not known: use repeats=4" in table
    table = markdown(runs[:1])
    assert "relative" not in table and "*" not in table
    bare = run_of(tmp_path, "host", state_digest=None)
    assert cells(markdown([runs[0], bare]), "bits of losses")[1] == "same / -"


def test_what_auto_is_stands_below_the_table(tmp_path):
    runs = [run_of(tmp_path, "data"), run_of(tmp_path, "auto", placement="sharded")]
    assert "\n* auto is sharded\n" in markdown(runs)
    again = run_of(tmp_path, "auto", "auto-2", placement="replicated")
    assert "\n* auto is replicated and sharded\n" in markdown([*runs, again])
    alone = run_of(tmp_path, "auto", "auto-3", placement=None)
    assert "auto is" not in markdown([runs[0], alone])


def test_the_spread_of_windows_leaves_the_first_steps_out(tmp_path):
    found = spread([run_of(tmp_path, "data", scatter=0.05)])
    assert 11.4 <= found.low < found.median == 12.0 < found.high <= 12.6
    few = run_of(tmp_path, "data", name="few", steps=24)
    assert spread([few]) is None
    assert "too few measurements" in markdown([few, run_of(tmp_path, "host")])


def test_the_spread_of_repeats_is_the_range_of_their_medians(tmp_path):
    runs = [run_of(tmp_path, "data", f"data-{i}", ms=ms) for i, ms in enumerate((12, 14, 13))]
    assert spread(runs) == Spread(13, 12, 14, "3 runs", 3)
    others = [run_of(tmp_path, "host", f"host-{i}", ms=ms) for i, ms in enumerate((13.9, 20, 19))]
    table = markdown([*runs, *others])
    assert cells(table, "step ms, median") == ["13.00", "19.00"]
    assert cells(table, "speed relative to data, by median step")[1] == "0.68x (noise)"


@pytest.mark.parametrize(("low", "noise"), [(1.9, True), (2.0, True), (2.1, False)])
def test_noise_is_an_overlap(low, noise):
    one, other = Spread(1.5, 1.0, 2.0, ""), Spread(2.5, low, 3.0, "")
    assert is_noise(one, other) is is_noise(other, one) is noise


def test_losses_are_compared_at_common_steps(tmp_path):
    one, other = run_of(tmp_path, "data"), run_of(tmp_path, "host", steps=40, drift=1e-3)
    assert largest_loss_difference(one, other) == pytest.approx(1e-3, rel=1e-2)
    assert largest_loss_difference(one, read_run("x", "x", tmp_path, 1, 0, tmp_path / "no")) is None


def test_the_files(tmp_path):
    failed = read_run("host", "host", tmp_path / "host", 1, 1.0, tmp_path / "no.log")
    runs = [run_of(tmp_path, "data"), run_of(tmp_path, "hybrid"), failed]
    write_files(tmp_path, runs, "python -m distcache.compare modes=data,hybrid,host")
    assert (tmp_path / "plots.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "table.md").read_text()
    assert "modes=data,hybrid,host" in text and "plots.png" in text
    assert "host failed (exit code 1)" in text
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["data", "hybrid", "host"]
    assert (rows[0]["step_ms.median"], rows[1]["hit_rate"], rows[2]["exit_code"]) == (
        "12.0",
        "",
        "1",
    )
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert lines[0]["summary"]["step_ms"] == {"median": 12.0, "p90": pytest.approx(13.2)}
    assert (lines[2]["summary"], lines[2]["exit_code"]) == (None, 1)


def test_files_without_a_run_that_succeeded(tmp_path):
    failed = read_run("host", "host", tmp_path / "host", 1, 1.0, tmp_path / "no.log")
    write_files(tmp_path, [failed], "x")
    assert "no mode ran to its end" in (tmp_path / "table.md").read_text()
    assert not (tmp_path / "plots.png").exists()


def test_the_tail_of_a_log_starts_at_its_first_error(tmp_path):
    path = tmp_path / "x.log"
    path.write_text("\n".join(["start", "rank 1: error: the cause", *["torchrun says"] * 60]))
    assert log_tail(path).splitlines()[1] == "rank 1: error: the cause"
    path.write_text("\n".join(f"line {number}" for number in range(60)))
    assert log_tail(path).splitlines()[-1] == "line 59"
