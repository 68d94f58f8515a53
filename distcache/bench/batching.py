"""Hot and cold samples: how many are hot, and what batches of them cost and learn:
`python -m distcache.bench.batching`.

Every run trains as many samples of one epoch, on one rank, from the same weights.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from distcache.bench.batching_tables import tables
from distcache.bench.command import Bench, run_bench
from distcache.bench.options import at_least, option
from distcache.bench.report import Record
from distcache.bench.spread import rotated
from distcache.cli.compose import checked_config, compose_overrides
from distcache.comm.rendezvous import Place
from distcache.comm.world import World, close_world, open_world
from distcache.data.raw.settings import KAGGLE_ROWS
from distcache.data.samplers import SlicedSource, Subset
from distcache.errors import ConfigError
from distcache.popularity.curve import Curve
from distcache.popularity.hot_cold import HotSet, classify, hottest
from distcache.popularity.statistics import (
    Statistics,
    TableCounts,
    vocabulary_of,
    write_statistics,
)
from distcache.trainer.build import build_source
from distcache.trainer.trainer import train

log = logging.getLogger("distcache.bench.batching")

MODULE = "distcache.bench.batching"
PURPOSE = "Share of hot samples by size of the hot set; cost and result of each data.batching."
SOURCES = ("synthetic", "interactions", "criteo")
BATCHINGS = ("as_is", "hot_cold")
_CHUNK = 1 << 16
"""Samples that are counted at once."""


@dataclass(frozen=True)
class BatchingOptions:
    """The keys of the command line."""

    data: tuple[str, ...] = option(("synthetic",), f"among {', '.join(SOURCES)}")
    interactions: str = option("", "file of lines `user item item ...`, for data=interactions")
    criteo: str = option("", "file of Criteo lines, for data=criteo")
    scale: int = option(10, "tables of Criteo's shape have Kaggle's rows divided by this")
    samples: int = option(400_000, "synthetic: samples of an epoch")
    zipf: float = option(1.05, "synthetic: exponent of the ids")
    hot: tuple[float, ...] = option((0.001, 0.005, 0.015, 0.05, 0.1), "hot rows, share of all")
    batchings: tuple[str, ...] = option(BATCHINGS, f"among {', '.join(BATCHINGS)}")
    ratio: float = option(0.05, "cache.ratio of the runs")
    batch: int = option(2048, "samples of a global batch")
    eval_steps: int = option(5, "held-out batches of an evaluation")
    repetitions: int = option(1, "runs of each batching, which take turns")
    folder: str = option("", "where runs leave their files meanwhile; empty: the system's")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    def __post_init__(self) -> None:
        at_least(1, scale=self.scale, samples=self.samples, batch=self.batch)
        at_least(1, repetitions=self.repetitions, eval_steps=self.eval_steps)
        for key, values, known in (
            ("data", self.data, SOURCES),
            ("batchings", self.batchings, BATCHINGS),
        ):
            for value in values:
                if value not in known:
                    raise ConfigError(f"{key}={value} is unknown: choose among {', '.join(known)}")
        for share in (*self.hot, self.ratio):
            if not 0 < share <= 1:
                raise ConfigError(f"hot or ratio {share}: give shares above 0 and at most 1")
        for name in ("interactions", "criteo"):
            if name in self.data and not Path(getattr(self, name)).is_file():
                raise ConfigError(f"data={name} reads a file: give {name}=<file>")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code."""
    bench = Bench(
        "Hot and cold samples", MODULE, PURPOSE, BatchingOptions, measure, tables, overrides=True
    )
    return run_bench(bench, arguments)


def measure(options: BatchingOptions, overrides: Sequence[str] = ()) -> list[Record]:
    """The records of all sources, from files in a folder that is removed at the end; `overrides`
    of the runs win over the options."""
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="batching-", dir=options.folder or None) as folder:
        for name in options.data:
            home = Path(folder) / name
            source = build_source(configured(options, overrides, name, home, "as_is"))
            if not isinstance(source, SlicedSource):
                raise ConfigError(f"data={name} has no samples of its own")
            statistics = counted(source)
            write_statistics(home, statistics)
            records += [shares(name, source, statistics, share) for share in options.hot]
            with one_rank() as world:
                for turn in range(options.repetitions):
                    for batching in rotated(list(options.batchings), turn):
                        records.append(
                            trained(options, overrides, (name, batching, turn), home, world)
                        )
    return records


def configured(
    options: BatchingOptions, more: Sequence[str], name: str, home: Path, batching: str
) -> Any:
    """The configuration of a run over source `name`, whose statistics are in `home`."""
    own = {
        "synthetic": ["experiment=quickstart", f"data.samples={options.samples}"],
        "interactions": ["experiment=interactions", f"data.path={options.interactions}"],
        "criteo": ["experiment=criteo_kaggle", f"data.path={options.criteo}"],
    }[name]
    if name == "synthetic":
        own.append(f"data.zipf={options.zipf}")
    if name != "interactions":
        own.append(f"data.table_rows={[max(3, rows // options.scale) for rows in KAGGLE_ROWS]}")
    given = [
        *own,
        f"cache.ratio={options.ratio}",
        f"data.global_batch_size={options.batch}",
        f"data.batching={batching}",
        f"trainer.eval_steps={options.eval_steps}",
        "trainer.steps=null",
        "trainer.device=cpu",
        "trainer.log_level=WARNING",
        "run.save=false",
        "run.digest=false",
    ]
    if (home / "statistics.json").is_file():
        given.append(f"cache.statistics={home}")
    else:  # the source is wanted, to be counted
        more = [override for override in more if not override.startswith("cache.")]
    return checked_config(compose_overrides([*given, *more]), Place(0, 1, 0, 1))


def counted(source: SlicedSource) -> Statistics:
    """Exact counts of the training samples, as they are in the first epoch."""
    counts = [np.zeros(rows, dtype=np.int64) for rows in source.table_rows]
    samples = source.samples_per_epoch or 0
    for start in range(0, samples, _CHUNK):
        ids = source.ids_of(np.arange(start, min(start + _CHUNK, samples)), 0)
        edges = ids.offsets[:: ids.batch_size].tolist()
        for own, low, high in zip(counts, edges, edges[1:], strict=False):
            own += np.bincount(ids.values[low:high].numpy(), minlength=len(own))
    tables = tuple(
        TableCounts(feature, len(own), int(own.sum()), int(np.count_nonzero(own)), own)
        for feature, own in zip(source.features, counts, strict=True)
    )
    return Statistics(tables, vocabulary_of(source), samples)


def shares(name: str, source: SlicedSource, statistics: Statistics, share: float) -> Record:
    """How many samples and lookups are hot where the `share` most frequent of all rows are."""
    curves = [Curve.of(table, statistics.samples) for table in statistics.tables]
    hot = HotSet(statistics, hottest(curves, round(share * sum(statistics.table_rows))))
    began = time.perf_counter()
    chosen = Subset(classify(source, hot, 0))
    seconds = time.perf_counter() - began
    lookups = sum(table.lookups for table in statistics.tables)
    cold = sum(
        int((c.counts * c.below(k)).sum()) for c, k in zip(curves, hot.hot_rows, strict=True)
    )
    log.info(
        "%s: %g of the rows hot: %.4f of the samples",
        name,
        share,
        chosen.count / statistics.samples,
    )
    return {
        "kind": "hot_samples",
        "source": name,
        "rows": sum(statistics.table_rows),
        "distinct": sum(table.distinct for table in statistics.tables),
        "samples": statistics.samples,
        "share": share,
        "hot_rows": hot.rows,
        "hot_lookups": 1 - cold / lookups,
        "hot_samples": chosen.count / statistics.samples,
        "ids_per_second": lookups / seconds,
        "bytes": 2 * chosen.nbytes + hot.nbytes,
    }


@contextmanager
def one_rank() -> Iterator[World]:
    """This process as the only rank."""
    world = open_world("cpu", timeout_s=300)
    try:
        yield world
    finally:
        close_world(world)


def trained(
    options: BatchingOptions,
    overrides: Sequence[str],
    what: tuple[str, str, int],
    home: Path,
    world: World,
) -> Record:
    """One epoch over a source, with a batching."""
    name, batching, turn = what
    config = configured(options, overrides, name, home, batching)
    folder = home / f"{batching}-{turn}"
    folder.mkdir()
    config = replace(config, run=replace(config.run, dir=str(folder)))
    began = time.perf_counter()
    found = train(config, world, folder).summary
    seconds = time.perf_counter() - began
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    samples = samples_of(config)
    keys = ("steps", "hot_samples", "hot_steps", "cold_steps", "phase_rate", "cache_rows")
    keys += ("rows_fetched", "hot_rows_fetched", "cold_rows_fetched", "warm_start_rows")
    keys += ("hot_host_bytes", "cold_host_bytes", "final_loss", "eval_auc", "eval_logloss")
    record = {"kind": "run", "source": name, "batching": batching, "repetition": turn}
    record |= {key: found[key] for key in keys}
    record["host_bytes"] = found["host_to_device_bytes"] + found["device_to_host_bytes"]
    record["samples"] = samples
    rate = found["samples_per_second"]  # None for a step or two
    record["train_s"] = samples / rate if rate else None
    record["wall_s"] = seconds
    record["evaluations"] = sum("eval_logloss" in line for line in lines)
    log.info(
        "%s %s: %.1f s, %s rows fetched", name, batching, seconds, f"{found['rows_fetched']:,}"
    )
    return record


def samples_of(config: Any) -> int:
    """Training samples of an epoch."""
    source = build_source(config)
    return getattr(source, "samples_per_epoch", None) or 0


if __name__ == "__main__":
    sys.exit(main())
