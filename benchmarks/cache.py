"""Milliseconds per step of cached tables in the setting of DynamicEmb's published benchmark:
`python -m benchmarks.cache`.

Ten tables, one id per bag, power-law ids, no dense part: forward, backward from a fixed gradient,
and update. The cached variants are `CachedEmbeddingBagCollection` under `distcache.lookahead`, one
after the other over the same batches, which are drawn before the first step. Each result is also
printed at once, because a time limit may end the run.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import distcache
from benchmarks.modes import RowCounts
from benchmarks.report import (
    Bench,
    Column,
    Record,
    Section,
    option,
    pivot,
    show_spread,
    spread,
)
from benchmarks.turns import device_work
from distcache.engine.step import StepContext
from distcache.errors import ConfigError

log = logging.getLogger("distcache.benchmarks.cache")

ACCESSES = ("staged", "zero_copy")
BATCHES_AHEAD = 80
"""Batches that the largest look-ahead and its threads hold at most."""


@dataclass(frozen=True)
class CacheOptions:
    """Keys of the command line."""

    rows: int = option(25_600_000, "rows of each table", minimum=2)
    tables: int = option(10, "tables, all of one width", minimum=1)
    width: int = option(128, "width of every table", minimum=1)
    batch: int = option(104_857, "samples of a step: ids of each table", minimum=1)
    zipf: float = option(1.05, "exponent of the power law, not 1", minimum=0)
    optimizer: str = option("sgd", "update of the rows", choices=("sgd", "adam"))
    access: tuple[str, ...] = option(ACCESSES, "access to host memory", choices=ACCESSES)
    slots: tuple[str, ...] = option(
        ("4000000",), "sizes of the cache in rows of all tables; 1.1x: times a step's distinct rows"
    )
    lookahead: str = option("auto", "steps that the planner sees ahead")
    steps: int = option(20, "steps of a timed block", minimum=1)
    blocks: int = option(3, "timed blocks of each variant, without a pause", minimum=1)
    warmup: int = option(100, "steps before the first block", minimum=1)
    profiled: int = option(5, "steps under torch's profiler, at the end (CUDA)", minimum=1)
    device: str = option("auto", "cpu, cuda or auto", choices=("auto", "cpu", "cuda"))
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    @property
    def batches(self) -> int:
        """Batches that a variant takes from the stream."""
        return self.warmup + self.blocks * self.steps + self.profiled + BATCHES_AHEAD


def draw_ids(options: CacheOptions, step: int) -> np.ndarray:
    """Draw the ids of one step, int64 `[tables, batch]`.

    The density x^-a on [1, rows + 1) is inverted in closed form; row k has the mass of [k, k + 1).
    At 25.6 M rows that gives the published number of distinct ids to 0.3 %; the discrete law gives
    5 % fewer. An affine bijection scatters popular ids, differently in each table.
    """
    rows = options.rows
    power = 1.0 - options.zipf
    rng = np.random.Generator(np.random.SFC64([7, step]))
    uniform = rng.random((options.tables, options.batch))
    values = np.exp(np.log1p(uniform * math.expm1(power * math.log(rows + 1))) / power)
    ids = np.clip(values.astype(np.int64) - 1, 0, rows - 1)  # rounding may leave the range by one
    multiplier = int(0.6180339887 * rows) | 1
    while math.gcd(multiplier, rows) != 1:
        multiplier += 2
    shift = (np.arange(options.tables) * (rows // options.tables + 1))[:, None]
    return (ids * multiplier + shift) % rows


def draw_batches(options: CacheOptions) -> tuple[list[np.ndarray], Record]:
    """Draw all batches; return them with the record of their numbers of distinct ids."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        batches = list(pool.map(partial(draw_ids, options), range(options.batches)))
    sample = batches[:: max(1, len(batches) // 8)]
    distinct = [sum(len(np.unique(row)) for row in ids) for ids in sample]
    ids = options.tables * options.batch
    record = {"kind": "stream", "ids": ids, "distinct": float(np.mean(distinct))}
    return batches, record | {"distinct_most": max(distinct), "batches": len(batches)}


def slot_count(text: str, distinct_most: int) -> int:
    """Return a size of the cache in rows; raise ConfigError for text that is no size."""
    try:
        if text.endswith("x"):
            return int(float(text[:-1]) * distinct_most)
        return int(text)
    except ValueError as error:
        raise ConfigError(f"slots={text} is neither a number of rows nor like 1.1x") from error


class CachedVariant:
    """The drop-in collection under its look-ahead, with one access and one size of the cache."""

    def __init__(
        self, options: CacheOptions, batches: Sequence[np.ndarray], variant: tuple[str, int, str]
    ) -> None:
        """Build the collection; `variant` is access, slots and device."""
        access, slots, device = variant
        names = [f"t{table}" for table in range(options.tables)]
        configs = [
            EmbeddingBagConfig(
                name=name,
                num_embeddings=options.rows,
                embedding_dim=options.width,
                feature_names=[name],
            )
            for name in names
        ]
        update = {"sgd": distcache.optim.SGD, "adam": distcache.optim.Adam}[options.optimizer]
        lookahead = options.lookahead
        self.ebc = distcache.CachedEmbeddingBagCollection(
            configs,
            device=torch.device(device),
            optimizer=update(lr=1e-3),
            rows=slots,
            lookahead=lookahead if lookahead == "auto" else int(lookahead),
            store_access=access,
            init="seed",
        )
        self._tables = self.ebc.tables
        self._observe_plans()
        self._grad = torch.randn(options.batch, options.tables * options.width, device=device)
        self._grad *= 1e-3
        lengths = torch.ones(options.tables * options.batch, dtype=torch.int32)
        # Batches stay on the host: the look-ahead reads ids there and moves its plans itself.
        stream = (
            KeyedJaggedTensor(keys=names, values=torch.from_numpy(ids).view(-1), lengths=lengths)
            for ids in batches
        )
        self._stream = iter(distcache.lookahead(stream, self.ebc))

    def _observe_plans(self) -> None:
        """Count rows of every step when the engine counts its bytes."""
        self._rows = RowCounts()
        engine = self._tables.engine
        count = engine.count

        def count_rows(context: StepContext) -> None:
            self._rows.add(context.plans)
            count(context)

        engine.count = count_rows  # type: ignore[method-assign]

    def step(self) -> None:
        """Train one batch."""
        batch = next(self._stream)
        self.ebc(batch).values().backward(self._grad)
        self.ebc.step()

    def sums(self) -> dict[str, float]:
        """Return running sums: rows of all steps, and the timed steps' number and stage seconds."""
        clock = self._tables.record_all()
        stages = {f"stage {name}": 1e3 * seconds for name, seconds in clock.seconds.items()}
        return {**self._rows.sums, **stages, "timed": clock.steps}

    def cache_bytes(self) -> int:
        """Return the bytes of all slots with their state."""
        return sum(rows.cache.slots * rows.row_bytes for rows in self._tables.engine.rows)

    def is_steady(self) -> bool:
        """Return True if every row that the last step fetched evicted one."""
        return self._rows.is_steady

    def close(self) -> None:
        """Release cache and tables."""
        self._stream.close()
        self.ebc.close()


def run_variant(options: CacheOptions, variant: CachedVariant, device: str) -> Record:
    """Warm up one variant, time its blocks, then profile further steps."""

    def train(steps: int) -> float:
        """Train some steps; return the time at which the device has done them."""
        for _ in range(steps):
            variant.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = [train(options.warmup)]
    before = variant.sums()
    # No pause between blocks: the planner would get ahead of a training that stands still.
    times += [train(options.steps) for _ in range(options.blocks)]
    totals = {name: value - before.get(name, 0.0) for name, value in variant.sums().items()}
    steps = options.blocks * options.steps
    timed = max(1, totals.pop("timed"))
    rows = {name: totals[name] / steps for name in ("distinct", "misses", "evictions")}
    record: Record = {
        "step_ms": spread((1e3 * np.diff(times) / options.steps).tolist()),
        "stage_ms": {
            name.removeprefix("stage "): ms / timed
            for name, ms in totals.items()
            if name.startswith("stage ")
        },
        **rows,
        "hit_rate": 1 - rows["misses"] / rows["distinct"],
        "is_steady": variant.is_steady(),
        "cache_bytes": variant.cache_bytes(),
    }
    if device == "cuda":
        record["peak_bytes"] = torch.cuda.max_memory_allocated()
        with device_work(options.profiled) as work:
            train(options.profiled)
        record["device"] = work
    return record


def measure(options: CacheOptions, overrides: tuple[str, ...]) -> list[Record]:
    """Measure all variants one after the other."""
    if options.zipf == 1:
        raise ConfigError("zipf=1: give an exponent beside 1, such as 1.0001")
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    batches, stream = draw_batches(options)
    records: list[Record] = [stream]
    sizes = [slot_count(text, stream["distinct_most"]) for text in options.slots]
    for access, slots in product(options.access, sizes):
        record: Record = {"kind": "mode", "mode": f"{access} {slots}"}
        try:
            variant = CachedVariant(options, batches, (access, slots, device))
            try:
                record |= run_variant(options, variant, device)
            finally:
                variant.close()
        except Exception as error:  # the other variants are worth their time
            log.exception("%s failed", record["mode"])
            record |= {"kind": "failed", "error": f"{error}"[:500]}
        records.append(record | {"optimizer": options.optimizer})
        sys.stdout.write(json.dumps(records[-1]) + "\n")
        sys.stdout.flush()
    return records


def idle_share(record: Record) -> float | None:
    """Return the share of a step without a kernel or a copy on the device."""
    if "device" not in record:
        return None
    return 1 - record["device"]["busy_ms"] / record["step_ms"]["median"]


SECTIONS = (
    Section(
        "Ids",
        "Of a step: means over a sample of the batches.",
        "stream",
        (
            Column("ids", "ids", ","),
            Column("distinct", "distinct", ",.0f"),
            Column("most", "distinct_most", ","),
            Column("batches", "batches", ","),
        ),
    ),
    Section(
        "Milliseconds per step",
        "Median [quartiles] over the blocks; a variant's name ends with its slots. Steady: every "
        "row that the last step fetched evicted one. Idle: share of a step without a kernel or "
        "copy. docs/results/gpu.md has the published figures.",
        "mode",
        (
            Column("variant", "mode"),
            Column("optimizer", "optimizer"),
            Column("step ms", "step_ms", show_spread(3)),
            Column("cache MB", lambda r: r.get("cache_bytes", 0) / 1e6 or None, ",.1f"),
            Column("hit rate", "hit_rate", ".4f"),
            Column("distinct", "distinct", ",.0f"),
            Column("fetched", "misses", ",.0f"),
            Column("steady", "is_steady", str),
            Column("busy ms", lambda r: r["device"]["busy_ms"] if "device" in r else None, ".2f"),
            Column("idle", idle_share, ".1%"),
            Column("peak MB", lambda r: r.get("peak_bytes", 0) / 1e6 or None, ",.1f"),
        ),
    ),
    pivot(
        "Milliseconds per stage",
        "Of the timed blocks; on a device one step in ten has its stages timed.",
        lambda record: record["stage_ms"],
        "stage",
    ),
    Section(
        "Failed",
        "Variants that did not run.",
        "failed",
        (Column("variant", "mode"), Column("error", "error")),
    ),
)

BENCH = Bench("Published cache benchmark", CacheOptions, measure, SECTIONS)
main = BENCH.main

if __name__ == "__main__":
    sys.exit(main())
