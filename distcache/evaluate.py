"""Evaluate: `[torchrun ...] python -m distcache.evaluate resume=<path> [key=value ...]`.

1. Rank 0 takes the configuration of the run that left the checkpoint, and changes the keys that the
   command line sets; the other ranks receive it.
2. The model and its tables are made and loaded as for training, and see the held-out batches once.
3. Rank 0 says the metrics, and writes them, and the predictions, where it is asked to; nothing is
   trained, and nothing in the run folder changes.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist
from omegaconf import OmegaConf

from distcache.checkpoint.files import file_world
from distcache.checkpoint.state import load_checkpoint, most_bytes
from distcache.cli.compose import Composed, Line, read_line, to_config
from distcache.cli.run import leave, open_folder
from distcache.comm.link import run_on_rank0
from distcache.comm.rendezvous import Place
from distcache.comm.world import World
from distcache.config import option
from distcache.config.checks import refuse_if
from distcache.config.keys import own_keys
from distcache.config.tree import Config
from distcache.data.files import read_json, write_json
from distcache.errors import DataError
from distcache.parallel.base import tf32
from distcache.train import in_world, launch
from distcache.trainer import build
from distcache.trainer.record import Evaluation
from distcache.trainer.schedule import make_schedule
from distcache.trainer.trainer import find_starts, identity_of

log = logging.getLogger("distcache.evaluate")


@dataclass
class EvaluateConfig(Config):
    """The keys of a run, and those of its evaluation."""

    resume: str = option("", "the run folder, or a checkpoint of it", positional=True)
    predictions: str = option("", "Parquet file, a row for each held-out sample in their order")
    metrics: str = option("", "JSON file of the metrics")


def main() -> int:
    """Run this rank of an evaluation; its exit code."""
    own: list[EvaluateConfig] = []  # of rank 0, which reads the command line

    def compose(place: Place) -> Composed:
        line = read_line("evaluate", EvaluateConfig, sys.argv[1:])
        own.extend([] if line is None else [line.values])
        return Composed(None if line is None else config_of(line))

    def go(text: str, place: Place, store: dist.Store | None) -> int:
        config = to_config(text)

        def work(world: World) -> None:
            files = run_on_rank0(world, lambda: (own[0].predictions, own[0].metrics))
            evaluate(config, world, *(Path(name) if name else None for name in files))

        return in_world(config, place, store, work)

    return launch(go, compose)


def config_of(line: Line[EvaluateConfig]) -> str:
    """The configuration of the run that left the checkpoint, as YAML, with the keys that the line
    sets. Raises ConfigError where there is none, or where a key makes no sense."""
    given, own = line.given - set(own_keys(EvaluateConfig)), line.values
    refuse_if(not own.resume, "resume is not set: give resume=<a run folder, or a checkpoint>")
    for key in given & {"experiment", "trainer.resume", "run.dir"}:
        refuse_if(True, f"{key}: the configuration is that of the run in resume: leave this out")
    path = Path(own.resume).absolute()
    folder = next((at for at in (path, *path.parents[:2]) if (at / "config.yaml").is_file()), path)
    none = f"resume={own.resume}: no config.yaml is there or above: give a run folder, or a "
    refuse_if(not (folder / "config.yaml").is_file(), f"{none}checkpoint of one")
    config = to_config((folder / "config.yaml").read_text())
    fitted = f"resume={own.resume} is a run of distcache.fit, whose model and data are not here"
    refuse_if(config.data.name == "own", f"{fitted}: give fit eval_loader=")
    for key in sorted(given):
        section, _, rest = key.partition(".")
        name = rest.partition(".")[0]  # of keys below one that is a mapping: the whole mapping
        if name and section != "hydra":
            setattr(getattr(config, section), name, getattr(getattr(own, section), name))
        elif hasattr(config, section):  # a group
            setattr(config, section, getattr(own, section))
    config.run.dir = str(folder)
    config.trainer.resume, config.trainer.resume_data = str(path), "any"
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def evaluate(config: Config, world: World, predictions: Path | None, metrics: Path | None) -> None:
    """Evaluate the checkpoint `config.trainer.resume` on `trainer.eval_steps` held-out batches, or
    `all` of them; called by all ranks.

    `predictions`: a file of `write_predictions`; `metrics`: a JSON file; rank 0 writes both. Raises
    ConfigError where it cannot, or where checkpoint, data and settings do not go together.
    """
    with ExitStack() as folders:
        run_on_rank0(world, lambda: check_outputs(predictions, metrics, folders))
        _evaluate(config, world, predictions, metrics)


def _evaluate(config: Config, world: World, predictions: Path | None, metrics: Path | None) -> None:
    """Do what `evaluate` does, with the folders of the files there."""
    run_dir, source = Path(config.run.dir), build.build_source(config)
    if config.data.verify:
        build.verify_files(source.files.files, world, run_dir)
    tables = build.build_tables(config, source)
    model = build.build_dense(config, tables, source.dense_features)
    refuse_if(
        config.trainer.eval_steps == 0,
        "trainer.eval_steps=0 evaluates nothing: give trainer.eval_steps=all, or a number",
    )
    schedule = make_schedule(source, 0, 0, None, config.trainer.eval_steps)
    refuse_if(
        not schedule.eval_batches,
        "no batches are held out: give data.held_out or data.held_out_path",
    )
    # Nothing goes on here that depends on the number of ranks: that of the run is as good as any.
    was = run_on_rank0(world, lambda: read_json(run_dir / "environment.json") or {"world_size": 1})
    own = identity_of(config, world, source, tables)
    identity = {**own, "world_size": was["world_size"]}
    starts = find_starts(config, world, run_dir, identity)
    start = next(starts)
    mode = build.build_parallel(config, world, tables, model, source)
    mode.scratch = run_dir
    found = Evaluation(None if predictions is None else partial(write_predictions, predictions))
    try:
        with file_world(world, most_bytes(identity)) as files:
            try:
                load_checkpoint(start, mode, files)
            except DataError as error:
                starts.throw(error)  # raises it, with the name of an intact checkpoint
        with tf32(config.trainer.tf32):
            for step in mode.stream(schedule.batches(source, world.rank, world.size)):
                found.add(mode.eval_step(step), step.batch.labels)
        result = found.finish(world)
    finally:
        mode.close()
    if world.is_first:
        step = start.state.step
        log.info("%s, step %s: %s", config.trainer.resume, f"{step:,}", result)
        if metrics is not None:
            write_json(metrics, {"step": step} | asdict(result))


def check_outputs(predictions: Path | None, metrics: Path | None, folders: ExitStack) -> None:
    """Make the folders of the files to write; `folders` removes them after an error. Raises
    ConfigError where that is not possible."""
    for key, path in (("predictions", predictions), ("metrics", metrics)):
        if path is not None:
            refuse_if(path.is_dir(), f"{key}={path} is a folder: give the name of a file")
            folders.enter_context(open_folder(path.parent, key))
    missing = predictions is not None and importlib.util.find_spec("pyarrow") is None
    refuse_if(missing, f"predictions={predictions} needs pyarrow: pip install pyarrow")


def write_predictions(path: Path, logits: np.ndarray, labels: np.ndarray) -> None:
    """Write a Parquet file with columns `sample` int64 (its place among those held out), `label`
    float32, `logit` and `probability` float64; `path` holds all of it or what it held before."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    probability = 0.5 * (1.0 + np.tanh(0.5 * logits))  # the sigmoid, which overflows nowhere
    columns = {"sample": np.arange(len(logits)), "label": labels.astype(np.float32)}
    columns |= {"logit": logits, "probability": probability}
    part = path.with_name(f"{path.name}.partial")
    pq.write_table(pa.table(columns), part, write_page_checksum=True)
    part.replace(path)


if __name__ == "__main__":
    leave(main())
