"""Training on text and on the arrays made from it: the same bits, in both modes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from criteo_lines import ROWS, make_lines, preprocessed, write_lines
from ranks import run_ranks

from distcache.cli.compose import compose_overrides, to_config
from distcache.comm.world import close_world, open_world
from distcache.config.tree import Config
from distcache.data.criteo import CriteoArrays
from distcache.errors import DataError
from distcache.trainer.trainer import train


def configured(path: str, rows: tuple[int, ...], mode: str, run_dir: str) -> Config:
    """A small run: 25 steps, three evaluation batches at the end."""
    overrides = [
        "data=criteo",
        f"data.path={path}",
        f"data.table_rows={list(rows)}".replace(" ", ""),
        "data.global_batch_size=32",
        f"parallel={mode}",
        "cache.ratio=0.5",
        "optim=adagrad",
        "model.embedding_dim=4",
        "model.dense_arch=[8,4]",
        "model.over_arch=[8,1]",
        "trainer.steps=25",
        "trainer.eval_steps=3",
        "trainer.device=cpu",
        "trainer.backend=gloo",
        "run.save=false",
        "run.digest=true",
        f"run.dir={run_dir}",
    ]
    os.makedirs(run_dir, exist_ok=True)
    return to_config(compose_overrides(overrides))


def train_all(
    rank: int, world_size: int, modes: list[str], text: str, folder: str, runs: str
) -> dict:
    """Summaries of the modes on both forms of the data, shuffled; on one set of ranks."""
    torch.set_num_threads(1)
    world = open_world("cpu", "gloo", 60.0)
    found = {}
    for mode in modes:
        for kind, path, rows in (("text", text, ROWS), ("arrays", folder, ())):
            name = f"{mode}-{kind}"
            config = configured(path, rows, mode, f"{runs}/{name}")
            found[name] = train(config, world, Path(runs, name)).summary
    close_world(world)
    return found


def fail_to_load(rank: int, world_size: int, folder: str, runs: str) -> str:
    """What this rank raises when rank 1 cannot read the dense features of its fourth batch."""
    torch.set_num_threads(1)
    world = open_world("cpu", "gloo", 60.0)
    reads = []
    real = CriteoArrays.read_rest

    def read_rest(self, lines):
        reads.append(len(lines))
        if rank == 1 and len(reads) == 4:
            raise DataError("dense.npy is gone")
        return real(self, lines)

    CriteoArrays.read_rest = read_rest
    try:
        train(configured(folder, (), "data", f"{runs}/{rank}"), world, Path(runs, str(rank)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        close_world(world, orderly=False)
    return "nothing"


def prepare(folder: Path) -> tuple[str, str]:
    """A text file, and the folder made of it."""
    text = write_lines(folder / "a.txt", make_lines(400))
    preprocessed(text, folder / "out")
    return str(text), str(folder / "out")


def check_digests(found: dict[str, dict]) -> None:
    """All runs are the same bits, and say how long loading took."""
    for key in ("loss_digest", "state_digest", "eval_auc", "final_loss"):
        values = {name: summary[key] for name, summary in found.items()}
        assert len(set(values.values())) == 1 and None not in values.values(), values
    for name, summary in found.items():
        assert {"load", "wait", "plan"} <= set(summary["stage_ms"]), name
        assert summary["stage_ms"]["wait"] is not None and summary["steps"] == 25


def test_text_and_arrays_give_the_same_digests(tmp_path):
    modes = ["data", "resident"]
    check_digests(run_ranks(train_all, 2, modes, *prepare(tmp_path), str(tmp_path / "runs"))[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["host", "hybrid"])
def test_the_other_modes_too(tmp_path, mode):
    check_digests(run_ranks(train_all, 2, [mode], *prepare(tmp_path), str(tmp_path / "runs"))[0])


def test_a_rank_that_cannot_load_is_named(tmp_path):
    _, folder = prepare(tmp_path)
    first, second = run_ranks(fail_to_load, 2, folder, str(tmp_path / "runs"))
    assert second == "DataError: dense.npy is gone"
    assert first.startswith("PeerError") and "rank 1" in first and "dense.npy is gone" in first
