"""A sweep starts each job in fresh processes, in a folder of its own."""

from __future__ import annotations

import sys

import pytest
from launching import CHECKOUT, STUB

from distcache import train as entry
from distcache.cli import compose
from distcache.cli.compose import asks_for_sweep, compose_command_line
from distcache.comm.rendezvous import Place
from distcache.errors import ConfigError


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Run `--multirun` with jobs that use the stand-in trainer; (exit code, commands)."""
    commands = []

    def command(ranks, arguments):
        commands.append((ranks, list(arguments)))
        return [sys.executable, STUB, *arguments]

    monkeypatch.setattr(compose, "train_command", command)
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, list]:
        monkeypatch.setattr(sys, "argv", ["train", "--multirun", *arguments])
        return entry.main(), commands

    return run


def test_each_job_has_its_folder_and_processes(sweep, tmp_path):
    code, commands = sweep("trainer.seed=0,1", "optim=adam", "hydra.sweep.dir=all")
    assert code == 1  # one of them fails
    folder = tmp_path / "all"
    assert commands == [
        (1, ["trainer.seed=0", "optim=adam", f"run.dir='{folder / '0'}'"]),
        (1, ["trainer.seed=1", "optim=adam", f"run.dir='{folder / '1'}'"]),
    ]
    assert (tmp_path / "all" / "0" / "summary.json").exists()
    assert "name: adam" in (tmp_path / "all" / "0" / "config.yaml").read_text()
    assert not (tmp_path / "all" / "1" / "summary.json").exists()


def test_jobs_of_several_ranks(sweep, monkeypatch):
    monkeypatch.setattr(compose, "run_job", lambda command, ranks: 0)
    code, commands = sweep("optim=sgd,adam", "run.sweep_ranks=3", "hydra.sweep.dir=all")
    assert code == 0
    assert [ranks for ranks, _ in commands] == [3, 3]


def test_one_folder_for_all_jobs_is_refused(sweep, capsys, tmp_path):
    code, commands = sweep("optim=sgd,adam", "run.dir=same")
    assert (code, commands) == (1, [])
    assert "hydra.sweep.dir=<folder>" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("--multirun a=1,2", True),
        ("-m a=1,2", True),
        ("--multi a=1,2", True),
        ("a=1 hydra.mode=MULTIRUN", True),
        ("a=-m b=1", False),
        ("--cfg job", False),
        ("", False),
    ],
)
def test_sweeps_are_recognised(line, answer):
    assert asks_for_sweep(line.split()) is answer


@pytest.mark.parametrize("line", ["--multirun optim=sgd,adam", "-m a=1"])
def test_sweeps_under_torchrun_are_refused(monkeypatch, tmp_path, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", *line.split()])
    with pytest.raises(ConfigError, match=r"run\.sweep_ranks=4"):
        compose_command_line(Place(0, 4, 0, 4))
    assert list(tmp_path.iterdir()) == []
