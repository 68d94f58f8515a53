"""What `distcache.analyze` predicts beside what training measures, on four kinds of data:
`python -m distcache.bench.prediction`.

Each analysis and each run is a process of its own, as a user starts it. Generated files go into a
folder of their own, which is removed at the end.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distcache.bench.command import Bench, run_bench
from distcache.bench.criteo_lines import write_lines
from distcache.bench.options import at_least, option
from distcache.bench.report import Record, Table
from distcache.cli.compose import override
from distcache.errors import ConfigError

log = logging.getLogger("distcache.bench.prediction")

MODULE = "distcache.bench.prediction"
PURPOSE = "Predicted and measured distinct rows and hit rates, on four kinds of data."
SAMPLE, CLICKS = "criteo_kaggle_sample.txt", "amazon_book_interactions.txt"


@dataclass(frozen=True)
class PredictionOptions:
    """The keys of the command line."""

    folder: str = option("", f"a folder with {SAMPLE} and {CLICKS}, for cases with real data")
    sample: float = option(0.2, "the second prediction counts and replays this share of a run")
    steps: int = option(300, "training steps of the synthetic run")
    criteo_bytes: int = option(60_000_000, "bytes of generated Criteo lines")
    parquet_rows: int = option(300_000, "rows of generated Parquet")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, criteo_bytes=self.criteo_bytes)
        at_least(1000, parquet_rows=self.parquet_rows)
        if not 0 < self.sample < 1:
            raise ConfigError(f"sample={self.sample}: give a share above 0 and below 1")


@dataclass(frozen=True)
class RunCase:
    """A run: its overrides, how many ranks, and what makes its file first (None: nothing)."""

    name: str
    overrides: tuple[str, ...]
    ranks: int = 1
    make: Callable[[Path], object] | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code."""
    title = "Predictions beside training runs"
    return run_bench(Bench(title, MODULE, PURPOSE, PredictionOptions, measure, tables), arguments)


def cases(options: PredictionOptions, made: Path) -> list[RunCase]:
    """The runs; generated files go to `made`."""
    steps = f"trainer.steps={options.steps}"
    synthetic = ("experiment=quickstart", steps, "trainer.eval_steps=0", "cache.ratio=0.005")
    lines, parts = made / "lines.txt", made / "rows.parquet"
    found = [
        RunCase("synthetic, Zipf 1.05", synthetic),
        RunCase("synthetic, Zipf 1.05", synthetic, 2),
        RunCase("synthetic, Zipf 0.8, lru", (*synthetic, "data.zipf=0.8", "cache.policy=lru")),
        RunCase(
            "Criteo lines, generated",
            ("data=criteo", override("data.path", lines), "cache.ratio=0.002"),
            make=lambda _: write_lines(lines, options.criteo_bytes),
        ),
        RunCase(
            "Parquet, generated",
            (
                *("data=parquet", override("data.path", parts), "data.id_columns=[user,items]"),
                *("data.table_rows=[200000,50000]", "cache.ratio=0.05"),
            ),
            make=lambda _: write_parquet(parts, options.parquet_rows),
        ),
    ]
    if options.folder:
        given = Path(options.folder)
        rest = ("data.global_batch_size=64", "cache.rows=4000")
        criteo = ("data=criteo", override("data.path", given / SAMPLE), *rest)
        clicks = ("experiment=interactions", override("data.path", given / CLICKS))
        found += [RunCase("Criteo Kaggle's first lines", criteo), RunCase("Amazon-Book", clicks)]
    return found


def write_parquet(path: Path, rows: int) -> None:
    """Clicks of skewed users on bags of up to five skewed items."""
    import pyarrow as arrow
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    ends = np.cumsum(rng.integers(1, 6, rows))
    items = (50_000 * rng.random(int(ends[-1])) ** 4).astype(np.int64)
    offsets = np.concatenate(([0], ends)).astype(np.int32)
    columns = {
        "label": rng.integers(0, 2, rows),
        "user": (200_000 * rng.random(rows) ** 3).astype(np.int64),
        "items": arrow.ListArray.from_arrays(arrow.array(offsets), arrow.array(items)),
    }
    parquet.write_table(arrow.table(columns), path, row_group_size=20_000)


def measure(options: PredictionOptions) -> list[Record]:
    """A record for each run, with both predictions."""
    with tempfile.TemporaryDirectory(prefix="prediction-") as folder:
        return [_measure(case, options, Path(folder)) for case in cases(options, Path(folder))]


def _measure(case: RunCase, options: PredictionOptions, folder: Path) -> Record:
    log.info("%s, %d rank(s)", case.name, case.ranks)
    if case.make is not None:
        case.make(folder)
    small = ("model.dense_arch=[16]", "model.over_arch=[16,1]", "run.save=false")
    train = [*case.overrides, *small, "trainer.device=cpu", "run.digest=false"]
    launch = ["-m", "distcache.train"]
    if case.ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.ranks}"]
        launch = [*torchrun, *launch]
    _run([*launch, *train, override("run.dir", folder / "run")])
    summary = json.loads((folder / "run/summary.json").read_text())
    whole = _predict(case, folder)
    lookups = round(options.sample * whole["read"]["lookups"])
    sampled = _predict(
        case, folder, f"analyze.sample={options.sample}", f"analyze.replay={lookups}"
    )
    return {
        "kind": "prediction",
        "case": case.name,
        "ranks": case.ranks,
        "steps": summary["steps"],
        "measured": _measured(summary),
        "predicted": _predicted(whole),
        "sampled": _predicted(sampled),
    }


def _predict(case: RunCase, folder: Path, *more: str) -> dict[str, Any]:
    words = [*case.overrides, f"analyze.world_sizes={case.ranks}", *more]
    words += ["analyze.memory=2g", f"analyze.output={folder / 'analysis'}"]
    _run(["-m", "distcache.analyze", *words])
    return json.loads((folder / "analysis/report.json").read_text())


def _measured(summary: dict[str, Any]) -> Record:
    fetched, steps = summary["rows_fetched"], summary["steps"]
    return {
        "distinct": fetched / (1 - summary["hit_rate"]) / steps,
        "hit_rate": summary["hit_rate"],
        "hit_rate_lookups": summary["hit_rate_lookups"],
        "fetched": fetched / steps,
    }


def _predicted(report: dict[str, Any]) -> Record:
    prediction = report["prediction"]
    case = prediction["cases"][0]
    return {
        "distinct": prediction["distinct_per_step_expected"],
        "hit_rate": case["hit_rate"],
        "hit_rate_lookups": case["hit_rate_lookups"],
        "fetched": case["fetched"] / case["steps"],
        "counted_steps": report["read"]["steps"],
        "replayed_steps": prediction["replayed_steps"],
    }


def _run(words: Sequence[str]) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{words[1]} failed: {done.stderr.strip().splitlines()[-1]}")


def tables(records: Sequence[Record]) -> list[Table]:
    """One table for each prediction."""
    return [
        _table(records, "predicted", "From the whole data", "All steps were counted and replayed."),
        _table(
            records,
            "sampled",
            "From a sample",
            "Evenly spread steps were counted, and the run's first steps replayed; the rest is "
            "taken to go on as the last quarter of them.",
        ),
    ]


def _table(records: Sequence[Record], which: str, title: str, how: str) -> Table:
    rows = []
    for record in records:
        found, true = record[which], record["measured"]
        start = (record["case"], str(record["ranks"]), f"{record['steps']:,}")
        steps = f"{found['counted_steps']:,} / {found['replayed_steps']:,}"
        cells = []
        for key, shape in (
            *(("distinct", ",.1f"), ("hit_rate", ".4f"), ("hit_rate_lookups", ".4f")),
            ("fetched", ",.1f"),
        ):
            off = 100 * (found[key] / true[key] - 1)
            cells.append(f"{found[key]:{shape}} / {true[key]:{shape}} ({off:+.2f} %)")
        rows.append((*start, steps, *cells))
    note = (
        f"{how} Predicted / measured (difference): distinct rows per step, expected from the "
        "counts alone; `hit_rate` (of distinct rows), `hit_rate_lookups` and rows fetched per "
        "step, by replay. Measured: `summary.json` of a training run from its first step."
    )
    columns = ("data", "ranks", "steps", "counted / replayed", "distinct rows", "hit_rate")
    return Table(title, note, (*columns, "hit_rate_lookups", "rows fetched"), rows)


if __name__ == "__main__":
    sys.exit(main())
