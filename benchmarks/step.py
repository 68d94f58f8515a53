"""Milliseconds per training step of the modes and of other libraries' tables, side by side:
`python -m benchmarks.step`, or under torchrun for several ranks.

All contenders live in one process per rank and take turns over the same batches, which are drawn in
advance; each turn begins with untimed steps. Ratios are taken within a repetition.
`against=<another checkout>` compares the training of two checkouts instead.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks import against
from benchmarks.baselines import BASELINES, UVM_MODES, FbgemmTables, TorchTables, check_baseline
from benchmarks.modes import CACHED_MODES, MODES, mode_contender
from benchmarks.report import (
    RATIOS,
    Bench,
    Column,
    Record,
    Section,
    of_kind,
    option,
    pivot,
    show_spread,
)
from benchmarks.turns import SIZES, BatchBank, Contender, Turns, compose_setting, opened_world
from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.errors import ConfigError
from distcache.optim import row_update
from distcache.store.memory import require_memory
from distcache.trainer import build

log = logging.getLogger("distcache.benchmarks.step")


@dataclass(frozen=True)
class StepOptions:
    """Keys of the command line."""

    size: str = option("kaggle", "tables", choices=tuple(SIZES))
    modes: tuple[str, ...] = option(
        ("data", "resident", "host", "fused"),
        "contenders, each with its own tables: data moves rows beside the steps, serial is data "
        "without overlap; replicated, home, sharded, mixed and auto are data with that placement, "
        "home with cache.state=home; table_wise, row_wise and column_wise are hybrid with that "
        "sharding; fused is FBGEMM's tables, bag torch's; uvm is FBGEMM's own cache of as many "
        "slots on a GPU, uvm_prefetch the same with the next batch fetched ahead",
        choices=(*MODES, *BASELINES),
    )
    model: str = option("dlrm", "embeddings: almost no dense part", choices=("dlrm", "embeddings"))
    batch: int = option(4096, "samples of a step over all ranks", minimum=1)
    widths: tuple[int, ...] = option(
        (16,), "width of every table; several: one after the other", minimum=1
    )
    ratio: float = option(0.015, "slots as a share of the rows, mode data")
    optimizer: str = option("sgd", "sgd, adagrad, rowwise_adagrad or adam")
    steps: int = option(20, "timed steps of a turn", minimum=1)
    lead: int = option(4, "untimed steps before them", minimum=0)
    repetitions: int = option(9, "turns of each mode", minimum=1)
    warmup: int = option(20, "steps before the first turn, at least", minimum=1)
    warmup_most: int = option(600, "and at most; between them, until every miss evicts")
    device: str = option("cpu", "cpu, cuda or auto")
    threads: int = option(0, "torch threads of a rank; 0: torch's own choice", minimum=0)
    against: str = option("", "another checkout, whose steps take turns with those of this one")
    ranks: int = option(1, "ranks of each checkout with against=; else use torchrun", minimum=1)
    out: str = option("", "the report, a .md file; JSON lines go beside it")


def compose(options: StepOptions, overrides: Sequence[str]) -> Config:
    """Return the configuration of the options; `overrides` (keys with a dot) win."""
    width = options.widths[0]
    settings = (
        f"optim={options.optimizer}",
        f"model.embedding_dim={width}",
        f"model.dense_arch=[512,256,64,{width}]",
        f"data.global_batch_size={options.batch}",
        f"cache.ratio={options.ratio}",
        f"trainer.device={options.device}",
    )
    return compose_setting(options.size, (*settings, *overrides))


def measure(options: StepOptions, overrides: tuple[str, ...]) -> list[Record]:
    """Build the contenders, warm up and take turns; called by every rank."""
    if options.warmup_most < options.warmup:
        raise ConfigError(f"warmup_most={options.warmup_most} is less than warmup={options.warmup}")
    if options.against:
        return against.measure_steps(options, compose(options, overrides), overrides)
    records: list[Record] = []
    for width in options.widths:
        part = measure_width(replace(options, widths=(width,)), overrides)
        if len(options.widths) > 1:
            label_records(part, str(width))
        records += part
        gc.collect()
        if options.device != "cpu" and torch.cuda.is_available():
            torch.cuda.empty_cache()  # the next width's tables are larger
    return records


def label_records(records: Sequence[Record], label: str) -> None:
    """Append `label` to the contenders' names in records."""
    for record in records:
        for key in {"mode", "numerator", "denominator"} & record.keys():
            record[key] = f"{record[key]}, {label}"


def measure_width(options: StepOptions, overrides: tuple[str, ...]) -> list[Record]:
    """Return the records of one width."""
    config = compose(options, overrides)
    trainer = config.trainer
    with opened_world(trainer.device, trainer.backend, trainer.timeout_s) as world:
        contenders, bank = build_contenders(options, config, world)
        with closing(Turns(contenders, world, bank)) as turns:
            turns.warm_up(options.warmup, options.warmup_most)
            records = turns.run(options.repetitions, options.lead, options.steps)
            if world.device.type == "cuda":
                for record in of_kind(records, "mode"):
                    record["device"] = turns.profile(record["mode"], options.steps)
            return records


class PooledMean(nn.Module):
    """A dense part of one number: `(dense [b, F], pooled [b, P]) -> scale * mean of pooled [b]`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return self.scale * pooled.mean(dim=1)


def build_contenders(
    options: StepOptions, config: Config, world: World
) -> tuple[list[Contender], BatchBank]:
    """Build one contender per mode, all over the batches of one bank; called by all ranks.

    Raises ConfigError or MemoryTooSmallError before anything is built that does not fit.
    """
    source = build.build_source(config)
    tables = build.build_tables(config, source)
    modes = [
        check_baseline(mode, config, world) if mode in BASELINES else mode for mode in options.modes
    ]
    state = row_update(config.optim.name, 0.0).state_width
    elements = sum(table.rows * (table.dim + state(table.dim)) for table in tables)
    check_memory(modes, elements * build.dtype_of(config).itemsize, world)
    bank = BatchBank(source, world.rank, world.size)
    contenders: list[Contender] = []
    for mode in modes:
        model: nn.Module = PooledMean()
        if options.model == "dlrm":
            model = build.build_dense(config, tables, source.dense_features)
        make: Any = mode_contender
        if mode in BASELINES:
            make = TorchTables if mode == "bag" else FbgemmTables
        contenders.append(make(mode, config, world, (source, tables, model), bank.feed()))
        log.info("built %s", mode)
    return contenders, bank


def check_memory(modes: Sequence[str], table_bytes: int, world: World) -> None:
    """Raise MemoryTooSmallError unless the host holds the tables of every mode at once.

    `data` and `host` have one store per node, `resident` a copy per rank, `hybrid` shards; FBGEMM's
    cache has its tables in unified memory.
    """
    host_modes = (*CACHED_MODES, "host", *UVM_MODES)
    on_host = [mode for mode in modes if mode in host_modes or world.device.type == "cpu"]
    copies = sum(world.local_size if mode == "resident" else 1 for mode in on_host)
    if world.local_rank == 0:
        require_memory(
            copies * table_bytes,
            f"the tables of {', '.join(on_host)} at once",
            "name fewer modes (modes=data,resident), or a smaller width",
        )


def stage_times(record: Record) -> dict[str, tuple[float, float | None]]:
    """Return milliseconds and hidden milliseconds by stage."""
    hidden = record.get("stage_hidden_ms", {})
    return {name: (ms, hidden.get(name)) for name, ms in record.get("stage_ms", {}).items()}


def show_stage(times: tuple[float, float | None]) -> str:
    """Format milliseconds of a stage, with the hidden share if there is one."""
    ms, hidden = times
    share = "" if hidden is None or not ms else f" [{100 * hidden / ms:.0f} %]"
    return f"{ms:.2f}{share}"


def row_count(title: str, name: str) -> Column:
    """Return the column of a count of rows."""
    return Column(title, lambda record: record.get("rows_per_step", {}).get(name), ",.0f")


SECTIONS = (
    Section(
        "Milliseconds per step",
        "Median [quartiles] over all timed steps, from the end of one step to the end of the next. "
        "Rows are medians over the turns, per step. Equal last losses mean bit-equal training.",
        "mode",
        (
            Column("mode", "mode"),
            Column("step ms", "step_ms", show_spread()),
            Column("least", lambda record: record["step_ms"]["min"], ".2f"),
            row_count("distinct rows", "distinct"),
            row_count("fetched", "misses"),
            row_count("evicted", "evictions"),
            Column("early rows", "early_rows", ".0%"),
            Column("device bytes of tables", "embedding_device_bytes", ","),
            Column("last loss", "loss", repr),
        ),
    ),
    RATIOS,
    Section(
        "The device at work",
        "On a GPU, by torch's profiler, in further steps: milliseconds per step with a kernel at "
        "work, and with a kernel or a copy; the share of a step (above) without a kernel; and the "
        "longest gap, which the profiler makes longer.",
        lambda records: [r for r in of_kind(records, "mode") if "device" in r],
        (
            Column("mode", "mode"),
            Column("kernels ms", lambda r: r["device"]["kernels_ms"], ".2f"),
            Column("with copies ms", lambda r: r["device"]["busy_ms"], ".2f"),
            Column("idle", lambda r: 1 - r["device"]["kernels_ms"] / r["step_ms"]["median"], ".1%"),
            Column("longest gap ms", lambda r: r["device"]["gap_ms"], ".2f"),
        ),
    ),
    pivot(
        "Milliseconds per stage",
        "Median over the turns. `ingest`, `load`, `plan` and `plan_exchange` run on a thread "
        "beside training, and so do `gather`, `write_back`, `fill` and `scatter` when overlapped; "
        "in brackets the share that training did not wait for. `wait` is training's own waiting.",
        stage_times,
        "stage",
        show_stage,
    ),
    pivot(
        "Bytes sent",
        "KB per rank and step: of rows, their gradients and sums, of dense gradients, and of "
        "planning.",
        lambda record: record.get("sent_per_step", {}) if record["world_size"] > 1 else {},
        "category",
        lambda count: f"{count / 1e3:,.1f}",
    ),
    *against.SECTIONS,
)

BENCH = Bench("Training step", StepOptions, measure, SECTIONS, takes_overrides=True)
main = BENCH.main

if __name__ == "__main__":
    sys.exit(main())
