"""The comparison: what it runs, in what order, and how it ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import CHECKOUT, STUB

from distcache import compare as entry
from distcache.cli.compose import read_line
from distcache.compare import CompareConfig, Request, prepare
from distcache.errors import ConfigError


def parse(words: list[str]) -> Request:
    """The request of a command line."""
    return entry.parse(read_line("compare", CompareConfig, words))


def test_the_command_line():
    request = parse(["optim=adam", "modes=data,host", "world_size=3", "repeats=2", "output=here"])
    assert request == Request(("data", "host"), 3, 2, Path("here"), ("optim=adam",))
    assert parse(["modes=[data,hybrid]"]).modes == ("data", "hybrid")
    assert parse([]).modes == ("data", "hybrid")
    assert parse([]).output.parent == Path("compare")


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
        ("out=x", r"did you mean output\?"),
        ("mode=sharded", "did you mean modes"),
        ("nproc=2", "did you mean world_size"),
        ("modes=data,sharded cache.placement=mixed", "cache.placement=mixed: modes=sharded sets"),
        ("parallel.sharding=row_wise modes=table_wise", r"name the mode \(hybrid\)"),
    ],
)
def test_values_that_make_no_sense(word, named):
    with pytest.raises(ConfigError, match=named):
        parse(word.split())


def test_what_each_mode_is_told(monkeypatch):
    request = parse(["modes=data,host", "trainer.steps=500", "optim=adam"])
    assert [job.arguments for job in prepare(request)] == [
        (f"parallel={mode}", "trainer.steps=500", "optim=adam", "run.save=false",
         "trainer.log_every=10")
        for mode in ("data", "host")
    ]  # fmt: skip
    request = parse(["modes=data", "run.save=true", "trainer.log_every=3"])
    assert prepare(request)[0].arguments == (
        "parallel=data",
        "run.save=true",
        "trainer.log_every=3",
    )


def test_layouts_of_a_mode_stand_beside_modes():
    request = parse(["modes=sharded,auto,row_wise,host", "run.save=true", "trainer.log_every=3"])
    assert [job.arguments[:-2] for job in prepare(request)] == [
        ("parallel=data", "cache.placement=sharded"),
        ("parallel=data", "cache.placement=auto"),
        ("parallel=hybrid", "parallel.sharding=row_wise"),
        ("parallel=host",),
    ]


def test_two_names_of_one_configuration_are_refused():
    with pytest.raises(ConfigError, match="modes=data,replicated are one and the same"):
        prepare(parse(["modes=data,host,replicated"]))
    with pytest.raises(ConfigError, match="modes=hybrid,table_wise are one and the same"):
        prepare(parse(["modes=hybrid,table_wise,auto", "experiment=quickstart"]))


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
    given = [job.arguments for job in jobs]
    assert [at for at, own in enumerate(given) if "cache.replicated_share=0.1" in own] == shares
    assert [at for at, own in enumerate(given) if link in own] == clusters
    assert [job.refusal for job in jobs[1:]] == [None] * (len(jobs) - 1)


def test_a_mode_that_is_refused_does_not_stop_the_others():
    request = parse(["modes=data,hybrid", "optim=adam", "trainer.device=cpu"])
    data, hybrid = prepare(request)
    assert data.refusal is None
    assert "fbgemm has no Adam" in hybrid.refusal
    with pytest.raises(ConfigError, match=r"cache\.ratio=3"):
        prepare(parse(["modes=data,host", "cache.ratio=3"]))


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
    assert made == {
        *("table.md", "table.csv", "results.jsonl", "plots.png"),
        *names,
        *(f"{name}.log" for name in names),
    }


def test_nothing_runs_when_every_mode_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare", "modes=data,host", "cache.row=3"])
    assert entry.main() == 1
    assert "cache.row" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
