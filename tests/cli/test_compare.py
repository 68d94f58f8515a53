"""The comparison: what it runs, in what order, how it ends, and what it says of its runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from fabricated import summary, write_run
from launching import CHECKOUT, STUB

from distcache import compare as entry
from distcache.cli.compose import Line, read_line
from distcache.compare import CompareConfig, Spread, log_tail, markdown, prepare, read_run, spread
from distcache.errors import ConfigError


def parse(words: list[str]) -> Line[CompareConfig]:
    """What a command line says, checked."""
    line = read_line("compare", CompareConfig, words)
    entry.check_line(line)
    return line


def test_the_command_line():
    line = parse(["optim=adam", "modes=data,host", "world_size=3", "repeats=2", "output=here"])
    own = line.values
    assert (own.modes, own.world_size, own.repeats) == (["data", "host"], 3, 2)
    assert own.output == "here" and line.overrides == ("optim=adam",)
    for words in (["modes=[data,hybrid]"], []):
        assert parse(words).values.modes == ["data", "hybrid"]


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("modes=data,ddp", "modes=ddp"),
        ("modes=data,data", "twice"),
        ("modes=", "modes="),
        ("world_size=0", "world_size=0"),
        ("repeats=two", "repeats=two"),
        ("parallel=data", "use modes="),
        ("run.dir=x", "output="),
        ("out=x", "did you mean output "),
        ("mode=sharded", "did you mean modes"),
        ("nproc=2", "did you mean world_size"),
    ],
)
def test_values_that_make_no_sense(word, named):
    with pytest.raises(ConfigError, match=named):
        parse(word.split())


def test_what_each_mode_is_told():
    words = ["trainer.steps=500", "optim=adam"]
    assert prepare(parse(["modes=data,host", *words])) == {
        mode: [*words, f"parallel={mode}", "run.save=false", "trainer.log_every=10"]
        for mode in ("data", "host")
    }
    words = ["run.save=true", "trainer.log_every=3"]
    jobs = prepare(parse(["modes=sharded,auto,row_wise,host", *words]))
    assert jobs == {
        "sharded": [*words, "parallel=data", "cache.placement=sharded"],
        "auto": [*words, "parallel=data", "cache.placement=auto"],
        "row_wise": [*words, "parallel=hybrid", "parallel.sharding=row_wise"],
        "host": [*words, "parallel=host"],
    }
    # A mode that is refused does not stop the others.
    jobs = prepare(parse(["modes=data,hybrid", "optim=adam", "trainer.device=cpu"]))
    assert isinstance(jobs["data"], list) and "fbgemm has no Adam" in str(jobs["hybrid"])


def test_nothing_is_prepared_where_all_are_refused():
    with pytest.raises(ConfigError, match=r"cache\.ratio=3"):
        prepare(parse(["modes=data,host", "cache.ratio=3"]))


@pytest.mark.parametrize(
    ("words", "shares", "clusters"),
    [
        (["modes=mixed,auto,replicated,hybrid"], [0], [0, 1]),
        (["modes=data,hybrid", "cache.placement=mixed"], [0, 1], [0, 1]),  # as they are given
    ],
)
def test_keys_of_one_layout_are_not_for_those_beside_it(words, shares, clusters, tmp_path):
    link = f"cache.cluster={tmp_path}/x.json"
    (tmp_path / "x.json").touch()
    jobs = prepare(parse([*words, "cache.replicated_share=0.1", link]))
    given = list(jobs.values())
    assert not any(isinstance(own, ConfigError) for own in given)
    assert [at for at, own in enumerate(given) if "cache.replicated_share=0.1" in own] == shares
    assert [at for at, own in enumerate(given) if link in own] == clusters


@pytest.mark.parametrize("repeats", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_runs_go_round_and_a_failing_mode_is_told(
    repeats, tmp_path, monkeypatch, capsys, forked_jobs
):
    def command(ranks: int, arguments: list[str]) -> list[str]:
        assert ranks == 1
        return [sys.executable, STUB, *arguments]

    monkeypatch.setattr(entry, "train_command", command)
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.chdir(tmp_path)
    words = ["modes=data,host", "world_size=1", f"repeats={repeats}", "output=o", "trainer.seed=11"]
    monkeypatch.setattr(sys, "argv", ["compare", *words])
    assert entry.main() == 1
    said = capsys.readouterr()
    names = ["data", "host"] if repeats == 1 else ["data-1", "host-1", "data-2", "host-2"]
    ends = [f"{name}: {'failed' if 'host' in name else 'done'} in" for name in names]
    places = [said.out.index(end) for end in ends]
    assert places == sorted(places)
    assert "| step ms, median" in said.out
    assert f"{names[1]} failed (exit code 1)" in said.err and "id 99 is beyond" in said.err
    assert "Hardware: " in (tmp_path / "o" / "table.md").read_text()
    made = {path.name for path in (tmp_path / "o").iterdir()}
    logs = {f"{name}.log" for name in names}
    assert made == {"table.md", "results.jsonl", "plots.png", *names} | logs


def test_nothing_runs_when_every_mode_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare", "modes=data,host", "cache.row=3"])
    assert entry.main() == 1
    assert "cache.row" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def run_of(folder: Path, mode: str, name: str | None = None, **values):
    """A fabricated run, read back."""
    drift, where = values.pop("drift", 0.0), folder / (name or mode)
    write_run(where, summary(mode, **values), drift=drift)
    return read_run(mode, name or mode, where, 0, 60.0, folder / "log")


def cells(table: str, label: str) -> list[str]:
    """The cells of the table's line with this label."""
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {label} ")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize(("runs", "odds"), [(2, 3), (3, 10), (4, 35)])
def test_how_often_ranges_lie_apart_by_chance(runs, odds, tmp_path):
    """Of all ways to divide the runs into two halves, each the slower one once."""
    groups = [
        run_of(tmp_path, mode, f"{mode}-{i}", ms=base + i)
        for mode, base in (("data", 10), ("host", 20))
        for i in range(runs)
    ]
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
    speed = cells(table, "speed relative to data, by median step")
    assert speed == ["-", "0.98x (one run)", "2.00x (one run)"]
    assert cells(table, "largest relative loss difference to data") == ["-", "1e-06", "0"]
    bits = cells(table, "bits of losses / final state as data")
    assert bits == ["-", "differ / differ", "same / same"]
    # 1.9e6 bytes a step are 1,855.5 KiB
    assert cells(table, "rows and row gradients sent, KiB per rank and step")[0] == "1,855.5"
    assert "step time of hybrid and data: how much runs differ is not known from one: use" in table
    table = markdown(runs[:1])
    assert "relative" not in table and "*" not in table
    bare = run_of(tmp_path, "host", state_digest=None)
    assert cells(markdown([runs[0], bare]), "bits of losses")[1] == "same / -"


def test_the_spread_of_repeats_is_the_range_of_their_medians(tmp_path):
    runs = [run_of(tmp_path, "data", f"data-{i}", ms=ms) for i, ms in enumerate((12, 14, 13))]
    assert spread(runs) == Spread(13, 12, 14, 3)
    others = [run_of(tmp_path, "host", f"host-{i}", ms=ms) for i, ms in enumerate((13.9, 20, 19))]
    table = markdown([*runs, *others])
    assert cells(table, "step ms, median") == ["13.00", "19.00"]
    assert cells(table, "speed relative to data, by median step")[1] == "0.68x (noise)"
    assert "noise: the ranges overlap (ranges over 3 runs)" in table


def test_noise_is_an_overlap():
    one = Spread(1.5, 1.0, 2.0, 2)
    for low, noise in ((1.9, True), (2.0, True), (2.1, False)):
        other = Spread(2.5, low, 3.0, 2)
        for pair in ((one, other), (other, one)):
            assert (entry.verdict(*pair)[0] == " (noise)") is noise


def test_losses_are_compared_at_common_steps(tmp_path):
    one, other = run_of(tmp_path, "data"), run_of(tmp_path, "host", steps=40, drift=1e-3)
    assert entry.largest_loss_difference(one, other) == pytest.approx(1e-3, rel=1e-2)
    none = read_run("x", "x", tmp_path, 1, 0, tmp_path / "no")
    assert entry.largest_loss_difference(one, none) is None


def test_the_plots_show_loss_differences_and_evaluations(tmp_path):
    figure_module = pytest.importorskip("matplotlib.figure", reason="plots need matplotlib")
    figure = figure_module.Figure()
    runs = {"data": [run_of(tmp_path, "data")], "host": [run_of(tmp_path, "host", drift=1e-3)]}
    entry.plot(figure, runs)
    panels = {panel.get_title(): panel for panel in figure.axes}
    (line,) = panels["relative difference of the loss to data"].get_lines()
    assert list(line.get_xdata()) == list(runs["data"][0].losses())
    assert line.get_ydata() == pytest.approx(1e-3, rel=1e-2)
    points = [line.get_xydata().tolist() for line in panels["AUC on held-out samples"].get_lines()]
    assert points == [[[200, 0.7]]] * 2
    labels = [text.get_text() for text in panels["throughput, samples/s"].texts]
    assert labels == ["170,667"] * 2


def test_a_summary_that_was_there_before_is_no_result(tmp_path):
    assert run_of(tmp_path, "data").error is None
    os.utime(tmp_path / "data" / "summary.json", (1, 1))
    found = read_run("data", "data", tmp_path / "data", 0, 60.0, tmp_path / "log")
    assert not found.summary and "give another output=" in found.error


def test_the_ticks_of_an_axis_differ(tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    panel = figure.subplots()
    numbers = {"embedding_device_bytes": 2.1 * 2**20, "peak_device_bytes": 2.3 * 2**20}
    run = entry.ModeRun("data", "data", tmp_path, 0, 1.0, summary=numbers)
    entry.draw_bars(panel, {"data": [run]}, entry.MEMORY, entry.ModeRun.number, entry.MIB)
    figure.canvas.draw()
    labels = [label.get_text() for label in panel.get_yticklabels()]
    assert len({*labels}) == len(labels) > 2


def test_the_files(tmp_path):
    failed = read_run("host", "host", tmp_path / "host", 1, 1.0, tmp_path / "no.log")
    runs = [run_of(tmp_path, "data"), run_of(tmp_path, "hybrid"), failed]
    entry.write_files(tmp_path, runs, "python -m distcache.compare modes=data,hybrid,host")
    assert (tmp_path / "plots.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "table.md").read_text()
    assert "modes=data,hybrid,host" in text and "plots.png" in text
    assert "host failed (exit code 1)" in text
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["data", "hybrid", "host"]
    assert lines[0]["summary"]["step_ms"] == {"median": 12.0, "p90": pytest.approx(13.2)}
    assert (lines[2]["summary"], lines[2]["exit_code"]) == (None, 1)
    (tmp_path / "plots.png").unlink()
    entry.write_files(tmp_path, [failed], "x")
    assert "no mode ran to its end" in (tmp_path / "table.md").read_text()
    assert not (tmp_path / "plots.png").exists()


def test_the_tail_of_a_log_starts_at_its_first_error(tmp_path):
    path = tmp_path / "x.log"
    path.write_text("\n".join(["start", "rank 1: error: the cause", *["torchrun says"] * 60]))
    assert log_tail(path).splitlines()[1] == "rank 1: error: the cause"
    path.write_text("\n".join(f"line {number}" for number in range(60)))
    assert log_tail(path).splitlines()[-1] == "line 59"
