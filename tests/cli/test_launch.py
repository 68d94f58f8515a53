"""Ranks of the main command, with a stand-in for the trainer: one configuration, one folder.

One test has torchrun itself start them.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from launching import STUB, Forked, environment, train
from omegaconf import OmegaConf

TRAIN = ("-m", "distcache.train")


def messages(text: str) -> list[str]:
    """The lines that distcache wrote, without torchrun's own."""
    return [line for line in text.splitlines() if line.startswith("rank ")]


def test_one_folder_and_one_configuration(tmp_path):
    done = train(["optim=adam", "optim.eps=1e-7", "run.digest=true"], tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]
    seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert seen[0] == seen[1]
    assert (seen[0]["optim"]["eps"], seen[0]["run"]["digest"]) == (1e-7, "true")
    assert OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")) == seen[0]
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["world_size"] == 2
    assert "optim.eps=1e-7" in environment["command"]
    assert done.stdout.count("run folder") == 1


@pytest.mark.parametrize(
    "flags", [pytest.param(["--help"], marks=pytest.mark.slow), ["--cfg", "job", "cache.rows=77"]]
)
def test_questions_are_answered_once_and_end(tmp_path, flags):
    done = train(flags, tmp_path, ranks=2, program=TRAIN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("global_batch_size") == 1
    assert ("rows: 77" in done.stdout) is ("--cfg" in flags)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["cache.row=5"], "cache.row"),
        pytest.param(["cache.ratio=7"], "cache.ratio=7", marks=pytest.mark.slow),
        pytest.param(["--multirun", "optim=sgd,adam"], "run.sweep_ranks=2", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_command_line_ends_all_ranks_quickly(tmp_path, arguments, named):
    done = train(arguments, tmp_path, ranks=2, program=TRAIN)
    assert done.returncode == 1
    assert named in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_cause_is_told_before_its_consequences(tmp_path):
    done = train(["trainer.seed=2", "run.dir=run"], tmp_path, ranks=2, fresh=True)
    assert done.returncode == 1
    assert messages(done.stderr) == [
        "rank 1: error: the cause",
        "rank 0: error: stopped because rank 1 failed: the cause",
    ]
    assert done.stderr.index("the cause") < done.stderr.index("Traceback")  # torchrun's own


def by_hand(folder, arguments, sizes, port):
    """Ranks that nobody but their environment has brought together: exit codes and stderr."""
    ranks = []
    for rank, (own, size) in enumerate(zip(arguments, sizes, strict=True)):
        here = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(
            Forked(
                [sys.executable, STUB, *own],
                cwd=folder,
                env=environment(**{name: str(value) for name, value in here.items()}),
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    texts = [rank.communicate(timeout=100)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], texts


@pytest.mark.parametrize(
    ("seeds", "sizes", "named"),
    [
        ((5, 6), (2, 2), "command lines differ: trainer.seed is '5' on rank 0 and '6' on rank 1"),
        ((5, 5), (2, 3), "the ranks differ: WORLD_SIZE is '2' on rank 0 and '3' on rank 1"),
    ],
)
def test_every_rank_hears_why_they_do_not_go_together(tmp_path, seeds, sizes, named, free_port):
    arguments = [["run.dir=run", f"trainer.seed={seed}"] for seed in seeds]
    codes, texts = by_hand(tmp_path, arguments, sizes, free_port)
    assert codes == [1, 1]
    assert all(named in text for text in texts), texts
    assert not any("Traceback" in text for text in texts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments", [pytest.param(["run.dir=run"], marks=pytest.mark.slow), ["cache.ratio=7"]]
)
def test_ranks_without_torchruns_agent(tmp_path, arguments, free_port):
    """Rank 0 serves the store itself, and stays until the others have read from it."""
    codes, texts = by_hand(tmp_path, [arguments] * 2, [2, 2], free_port)
    wrong = "cache.ratio=7" in arguments
    assert codes == [int(wrong)] * 2, texts
    assert ("cache.ratio=7" in texts[0]) is wrong
    assert texts[1] == ""
    assert (tmp_path / "run" / "rank1.json").exists() is not wrong
