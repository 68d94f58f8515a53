"""The main command with a stand-in for the trainer: one rank, several, and the jobs of a sweep."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import CHECKOUT, STUB, Forked, environment, train
from omegaconf import OmegaConf
from ranks import free_port

from distcache import train as entry
from distcache.cli import compose
from distcache.cli.compose import asks_for_sweep, compose_overrides, to_config
from distcache.cli.run_lock import hold_run_folder
from distcache.comm.rendezvous import Place
from distcache.errors import ConfigError, DataError

TRAIN = ("-m", "distcache.train")
WRONG = "error: feature f3, table t_3: id 99 is beyond its 10 rows\n"


@pytest.mark.parametrize(
    ("seed", "code", "said"),
    [(1, 1, WRONG), (3, 1, "error: ZeroDivisionError: a bug\nTraceback"), (4, 0, "")],
)
def test_how_a_run_ends(tmp_path, seed, code, said):
    """A user's error shows no traceback, a bug does; a stop is a good end."""
    done = train([f"trainer.seed={seed}", "run.dir=run"], tmp_path)
    assert done.returncode == code and done.stderr.startswith(said)
    assert done.stderr == said or seed == 3


def test_ctrl_c_in_the_middle(tmp_path):
    command = [sys.executable, STUB, "trainer.seed=5", "run.dir=run"]
    how = {"env": environment(), "stderr": subprocess.PIPE, "text": True}
    rank = Forked(command, cwd=tmp_path, **how)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "asleep").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    rank.send_signal(signal.SIGINT)
    assert (rank.communicate(timeout=60)[1], rank.returncode) == ("", 130)


def opened(folder: Path, *overrides: str, restarted: bool = False) -> Callable[[], None] | None:
    config = to_config(compose_overrides([f"run.dir={folder}", *overrides]))
    world = SimpleNamespace(size=1, device=SimpleNamespace(type="cpu"), backend="gloo")
    with hold_run_folder(folder):
        return entry.open_run_folder(folder, config, world, restarted)


def test_another_run_is_overwritten_only_where_that_is_meant(tmp_path):
    opened(tmp_path / "run")
    opened(tmp_path / "run")  # a run that failed before its first step
    run, steps = tmp_path / "run", [tmp_path / "run/checkpoints" / f"step_{n}" for n in (5, 7)]
    assert run.stat().st_mode & 0o777 == 0o700
    (run / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"\(summary.json\).*resume=auto.*run.overwrite=true"):
        opened(run)
    assert (run / "summary.json").exists()
    opened(run, restarted=True)  # a generation that was killed before its first checkpoint
    for step in steps:
        step.mkdir(parents=True)
        (step / "manifest.json").write_text("{}")
    for resume in ("auto", run, run / "checkpoints", steps[1]):
        (run / "summary.json").write_text("{}")
        was = (run / "config.yaml").read_text()
        begun = opened(run, f"trainer.resume={resume}", "trainer.steps=77")
        assert (run / "summary.json").exists() and (run / "config.yaml").read_text() == was
        begun()
        assert not (run / "summary.json").exists(), "until the new run has one of its own"
        assert to_config((run / "config.yaml").read_text()).trainer.steps == 77
        (run / "config.yaml").write_text(was)
    refused = {"never": r"\(checkpoints\)", tmp_path: r"\(checkpoints\)", steps[0]: r"\(step_7\)"}
    for resume, kept in refused.items():
        with pytest.raises(ConfigError, match=rf"{kept}.*resume={resume} does not go on with it"):
            opened(run, f"trainer.resume={resume}")
    assert all(step.exists() for step in steps)
    opened(run, f"trainer.resume={steps[0]}", "run.overwrite=true")
    assert [step.exists() for step in steps] == [True, False]
    (run / "metrics.jsonl").write_text("{}")
    opened(run, "run.overwrite=true", restarted=True)
    assert steps[0].exists()
    opened(run, "run.overwrite=true")
    assert not (run / "checkpoints").exists() and not (run / "metrics.jsonl").exists()
    assert json.loads((run / "environment.json").read_text())["world_size"] == 1
    with pytest.raises(ConfigError, match=r"run\.dir=/proc/none .*name another"):
        opened(Path("/proc/none"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((SystemExit(code), number) for code, number in ((None, 0), (0, 0), (4, 4), ("words", 1))),
        *((KeyboardInterrupt(), 130), (DataError("x"), 1), (ValueError("bug"), 1)),
    ],
)
def test_whatever_happens_to_rank_0_is_published(monkeypatch, error, code):
    published = []

    def fail(place: Place) -> None:
        raise error

    monkeypatch.setattr(entry, "compose_command_line", fail)
    monkeypatch.setattr(
        entry.rendezvous, "publish", lambda store, size, value: published.append(value)
    )
    with contextlib.suppress(ValueError):
        entry.agree(Place(), None)
    assert published == [{"text": None, "exit_code": code}]


def test_ranks_have_one_folder_and_one_configuration(tmp_path):
    done = train(["optim=adam", "optim.eps=1e-7", "run.digest=true"], tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]
    seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert seen[0] == seen[1]
    assert (seen[0]["optim"]["eps"], seen[0]["run"]["digest"]) == (1e-7, "true")
    assert OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")) == seen[0]
    written = json.loads((folder / "environment.json").read_text())
    assert written["world_size"] == 2 and "optim.eps=1e-7" in written["command"]
    assert done.stdout.count("run folder") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param("--help", 0, "global_batch_size", marks=pytest.mark.slow),
        ("--cfg job cache.rows=77", 0, "rows: 77"),
        ("cache.row=5", 1, "cache.row"),
    ],
)
def test_ranks_without_a_run_end_at_once(tmp_path, arguments, code, said):
    """Questions are answered once; a wrong command line ends all ranks."""
    done = train(arguments.split(), tmp_path, ranks=2, program=TRAIN)
    assert done.returncode == code, done.stderr
    assert done.stdout.count(said) == 1 if code == 0 else said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_cause_is_told_before_its_consequences(tmp_path):
    done = train(["trainer.seed=2", "run.dir=run"], tmp_path, ranks=2, fresh=True)
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("rank ")] == [
        "rank 1: error: the cause",
        "rank 0: error: stopped because rank 1 failed: the cause",
    ]
    assert done.stderr.index("the cause") < done.stderr.index("Traceback")  # torchrun's own


SEEDS = "trainer.seed is 'trainer.seed=5' on rank 0 and 'trainer.seed=6' on rank 1; start all"
SIZES = "the ranks differ: WORLD_SIZE is '2' on rank 0 and '3' on rank 1"


@pytest.mark.parametrize(
    ("words", "sizes", "said"),
    [
        (("trainer.seed=5", "trainer.seed=6"), (2, 2), (SEEDS, SEEDS)),
        (("trainer.seed=5", "trainer.seed=5"), (2, 3), (SIZES, SIZES)),
        (("cache.ratio=7", "cache.ratio=7"), (2, 2), ("cache.ratio=7", "")),
        pytest.param(("optim=sgd", "optim=sgd"), (2, 2), (None, ""), marks=pytest.mark.slow),
    ],
)
def test_ranks_that_only_their_environment_brings_together(tmp_path, words, sizes, said):
    """Rank 0 serves the store itself, and stays until the others have read from it; every rank
    hears why they do not go together."""
    ranks, port = [], free_port()
    for rank, (word, size) in enumerate(zip(words, sizes, strict=True)):
        here = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = environment(**{name: str(value) for name, value in here.items()})
        command = [sys.executable, STUB, "run.dir=run", word]
        how = {"cwd": tmp_path, "env": own, "stderr": subprocess.PIPE, "text": True}
        ranks.append(Forked(command, **how))
    texts = [rank.communicate(timeout=100)[1] for rank in ranks]
    runs = said[0] is None
    assert [rank.returncode for rank in ranks] == [int(not runs)] * 2, texts
    for text, told in zip(texts, said, strict=True):
        assert "Traceback" not in text
        assert told is None or (told in text if told else text == "")
    assert (tmp_path / "run" / "rank1.json").exists() is runs


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


def test_each_job_has_its_folder_and_processes(sweep, forked_jobs, tmp_path):
    code, commands = sweep("trainer.seed=0,1", "optim=adam", "hydra.sweep.dir=all")
    assert code == 1  # one of them fails
    folder = tmp_path / "all"
    assert commands == [
        (1, [f"trainer.seed={seed}", "optim=adam", f"run.dir='{folder / str(seed)}'"])
        for seed in (0, 1)
    ]
    assert [(folder / str(seed) / "summary.json").exists() for seed in (0, 1)] == [True, False]
    assert "name: adam" in (folder / "0" / "config.yaml").read_text()


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


def test_sweeps_are_recognised():
    sweeps = ("--multirun a=1,2", "-m a=1,2", "--multi a=1,2", "a=1 hydra.mode=MULTIRUN")
    assert all(asks_for_sweep(line.split()) for line in sweeps)
    assert not any(asks_for_sweep(line.split()) for line in ("a=-m b=1", "--cfg job", ""))


@pytest.mark.parametrize("line", ["--multirun optim=sgd,adam", "-m a=1"])
def test_sweeps_under_torchrun_are_refused(monkeypatch, tmp_path, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", *line.split()])
    with pytest.raises(ConfigError, match=r"run\.sweep_ranks=4"):
        compose.compose_command_line(Place(0, 4, 0, 4))
    assert list(tmp_path.iterdir()) == []
