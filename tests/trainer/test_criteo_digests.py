"""Training on text and on the arrays made from it: the same bits, in both modes."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import torch
from criteo_lines import ROWS, make_lines, write_lines
from ranks import run_ranks

from distcache.cli.compose import compose_overrides, to_config
from distcache.comm.world import close_world, open_world
from distcache.data.raw.job import preprocess
from distcache.data.raw.settings import PreprocessSettings
from distcache.trainer import train


class NoBar:
    def update(self, n=1):
        pass


def train_all(rank: int, world_size: int, text: str, folder: str, runs: str) -> dict:
    """Summaries of both modes on both forms of the data, shuffled; on one set of ranks."""
    torch.set_num_threads(1)
    world = open_world("cpu", "gloo", 60.0)
    found = {}
    for mode in ("data", "resident"):
        for kind, path in (("text", text), ("arrays", folder)):
            name = f"{mode}-{kind}"
            overrides = [
                "data=criteo",
                f"data.path={path}",
                f"data.table_rows={list(ROWS) if kind == 'text' else []}".replace(" ", ""),
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
                f"run.dir={runs}/{name}",
            ]
            os.makedirs(f"{runs}/{name}", exist_ok=True)
            result = train(to_config(compose_overrides(overrides)), world, Path(runs, name))
            found[name] = result.summary
    close_world(world)
    return found


def test_text_and_arrays_give_the_same_digests(tmp_path):
    text = write_lines(tmp_path / "a.txt", make_lines(400))
    settings = PreprocessSettings([str(text)], str(tmp_path / "out"), "hash", ROWS, workers=1)
    preprocess(settings, lambda *_: nullcontext(NoBar()))
    found = run_ranks(train_all, 2, str(text), str(tmp_path / "out"), str(tmp_path / "runs"))[0]
    for key in ("loss_digest", "state_digest", "eval_auc", "final_loss"):
        values = {name: summary[key] for name, summary in found.items()}
        assert len(set(values.values())) == 1 and None not in values.values(), values
    for name, summary in found.items():
        assert {"load", "wait", "plan"} <= set(summary["stage_ms"]), name
        assert summary["steps"] == 25
