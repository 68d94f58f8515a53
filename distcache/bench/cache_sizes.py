"""Throughput, device memory and AUC by cache size: `python -m distcache.bench.cache_sizes`.

Every size trains in fresh processes, as a user's run does, and sizes take turns. Keys with a dot
are overrides of the runs, which otherwise have the settings of `experiment=quickstart`.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distcache.bench.command import Bench, run_bench
from distcache.bench.options import at_least, option
from distcache.bench.report import Record, Table
from distcache.bench.spread import ratios, rotated, shown, spread
from distcache.cli.compare_report import read_run
from distcache.cli.compose import override
from distcache.cli.run import run_job, train_command
from distcache.errors import ConfigError

log = logging.getLogger("distcache.bench.cache_sizes")

MODULE = "distcache.bench.cache_sizes"
PURPOSE = "Throughput, device memory and AUC by the share of rows that is cached."

RESIDENT = "resident"
_KEPT = ("samples_per_second", "embedding_device_bytes", "peak_device_bytes", "hit_rate")
_KEPT += ("rows_fetched", "cache_rows", "steps", "eval_auc", "loss_digest", "state_digest")


@dataclass(frozen=True)
class CacheSizesOptions:
    """The keys of the command line."""

    ratios: tuple[float, ...] = option((0.005, 0.01, 0.015, 0.05, 1.0), "shares of rows cached")
    width: int = option(16, "width of every table")
    batch: int = option(16384, "samples of a step over all ranks")
    steps: int = option(150, "training steps of a run")
    optimizer: str = option("sgd", "sgd, adagrad, rowwise_adagrad or adam")
    ranks: int = option(1, "ranks of a run, on this machine")
    repetitions: int = option(3, "runs of each size")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    def __post_init__(self) -> None:
        at_least(1, width=self.width, batch=self.batch, steps=self.steps, ranks=self.ranks)
        at_least(1, repetitions=self.repetitions)
        wrong = [ratio for ratio in self.ratios if not 0 < ratio <= 1]
        if wrong:
            raise ConfigError(f"ratios={wrong[0]}: give shares above 0 and at most 1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code."""
    bench = Bench(
        "Cache sizes", MODULE, PURPOSE, CacheSizesOptions, measure, tables, overrides=True
    )
    return run_bench(bench, arguments)


def measure(options: CacheSizesOptions, overrides: Sequence[str] = ()) -> list[Record]:
    """Train with every size, and with all rows on the device (`resident`), in turns."""
    names = [str(ratio) for ratio in options.ratios] + [RESIDENT]
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="cache-sizes-") as home:
        for repetition in range(options.repetitions):
            for name in rotated(names, repetition):
                folder = Path(home, f"{name}-{repetition}")
                records.append(train(options, overrides, name, folder) | {"turn": repetition})
                log.info("%s: %s samples/s", name, f"{records[-1]['samples_per_second']:,.0f}")
    return records


def train(options: CacheSizesOptions, overrides: Sequence[str], name: str, folder: Path) -> Record:
    """One run, and what its summary says. Raises ConfigError with its log where it failed."""
    arguments = [
        "experiment=quickstart",
        f"optim={options.optimizer}",
        f"model.embedding_dim={options.width}",
        f"model.dense_arch=[512,256,64,{options.width}]",
        f"data.global_batch_size={options.batch}",
        f"trainer.steps={options.steps}",
        "run.digest=true",
        "parallel=resident" if name == RESIDENT else "parallel=data",
        *([] if name == RESIDENT else [f"cache.ratio={name}"]),
        *overrides,
        override("run.dir", folder),
    ]
    log_file = folder.with_suffix(".log")
    code = run_job(train_command(options.ranks, arguments), options.ranks, log_file)
    run = read_run("data", name, folder, code, 0.0, log_file)
    if run.error is not None:
        raise ConfigError(f"cached {name}: the run failed: {run.error}")
    values = {key: run.summary[key] for key in _KEPT}
    step_ms = run.number("step_ms.median")
    return {"kind": "run", "cached": name, "step_ms": step_ms} | values


def tables(records: Sequence[Record]) -> list[Table]:
    """The table of the report."""
    by_name: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda record: record["turn"]):
        by_name.setdefault(record["cached"], []).append(record)
    yard, rows = by_name[RESIDENT], []
    digests = {(r["loss_digest"], r["state_digest"]) for r in records}
    for name, runs in sorted(by_name.items(), key=lambda item: _share(item[0])):
        first = runs[0]
        took = ratios([r["step_ms"] for r in runs], [r["step_ms"] for r in yard])
        rate = first["hit_rate"]
        rows.append(
            (
                name if name == RESIDENT else f"{100 * float(name):g} %",
                f"{first['cache_rows'] or 0:,}" if name != RESIDENT else "all",
                shown(spread([r["samples_per_second"] for r in runs]), 0),
                shown(spread(took), 3),
                f"{first['embedding_device_bytes'] / 2**20:,.1f}",
                f"{first['peak_device_bytes'] / 2**20:,.1f}",
                "-" if rate is None else f"{rate:.4f}",
                "-" if first["rows_fetched"] is None else f"{first['rows_fetched']:,}",
                "-" if first["eval_auc"] is None else f"{first['eval_auc']:.6f}",
            )
        )
    same = "the same bits" if len(digests) == 1 else "NOT the same bits"
    note = (
        "Each run is a fresh process; the ratio is of median step times within a turn, to "
        "`resident` (all rows on the device, no host copy). Median [quartiles] over the turns. "
        f"Losses and final states of all runs have {same}."
    )
    columns = ("cached", "slots", "samples/s", "step time / resident", "embeddings on device, MiB")
    columns += ("peak, MiB", "hit rate of distinct rows", "rows fetched", "held-out AUC")
    return [Table("By cache size", note, columns, rows)]


def _share(name: str) -> float:
    return 2.0 if name == RESIDENT else float(name)


if __name__ == "__main__":
    sys.exit(main())
