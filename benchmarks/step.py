"""Milliseconds per training step of the modes and of other libraries' tables, side by side:
`python -m benchmarks.step`, or under torchrun for several ranks.

All contenders live in one process per rank and take turns over the same batches, which are made in
advance; each turn begins with steps that are not timed. Ratios are taken within a repetition.
`against=<another checkout>` compares the training of two checkouts instead.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import against
from benchmarks.modes import CACHED, MODES, mode_contender
from benchmarks.options import option
from benchmarks.ranks import opened_world
from benchmarks.report import Bench, Column, Record, Section, of_kind, pivoted, run_bench
from benchmarks.setting import SIZES, compose_setting
from benchmarks.stream import BatchBank, Contender, Turns
from benchmarks.turns import RATIOS, shown
from benchmarks.yardsticks import UVM, YARDSTICKS, FbgemmTables, TorchTables, who_stands_in
from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.errors import ConfigError
from distcache.optim import row_update
from distcache.store.memory import require_memory
from distcache.trainer import build

log = logging.getLogger("distcache.benchmarks.step")

ALL = (*MODES, *YARDSTICKS)
MODELS = ("dlrm", "embeddings")


@dataclass(frozen=True)
class StepOptions:
    """The keys of the command line; zero leaves threads to torch."""

    size: str = option("kaggle", "tables", among=tuple(SIZES))
    modes: tuple[str, ...] = option(
        ("data", "resident", "host", "fused"),
        "who takes turns, each with its own tables: data moves rows beside the steps, serial is "
        "data without; replicated, home, sharded, mixed and auto are data with that placement, "
        "home with cache.state=home; table_wise, row_wise and column_wise are hybrid with that "
        "sharding, torchrec is hybrid in TorchRec's own pipeline; uvm is FBGEMM's own cache of "
        "that many slots on a GPU, uvm_prefetch with the next batch brought in ahead",
        among=ALL,
    )
    model: str = option("dlrm", "embeddings: next to no dense part", among=MODELS)
    batch: int = option(4096, "samples of a step over all ranks", least=1)
    widths: tuple[int, ...] = option(
        (16,), "width of every table; several: one after the other", least=1
    )
    ratio: float = option(0.015, "slots as a share of the rows, mode data")
    optimizer: str = option("sgd", "sgd, adagrad, rowwise_adagrad or adam")
    steps: int = option(20, "timed steps of a turn", least=1)
    lead: int = option(4, "steps before them, not timed", least=0)
    repetitions: int = option(9, "turns of each mode", least=1)
    warmup: int = option(20, "steps before the first turn, at least", least=1)
    warmup_most: int = option(600, "and at most; between them, until every miss evicts")
    device: str = option("cpu", "cpu, cuda or auto")
    threads: int = option(0, "torch threads of a rank; 0: torch's own choice", least=0)
    link: str = option("", "what joins the ranks, for the report")
    against: str = option("", "another checkout, whose steps take turns with this one's")
    ranks: int = option(1, "ranks of each checkout, with against=; else torchrun says", least=1)
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    @property
    def width(self) -> int:
        """The one width, or the first."""
        return self.widths[0]


def compose(options: StepOptions, overrides: Sequence[str]) -> Config:
    """The configuration of the options; `overrides` (keys with a dot) win."""
    return compose_setting(
        options.size,
        (
            f"optim={options.optimizer}",
            f"model.embedding_dim={options.width}",
            f"model.dense_arch=[512,256,64,{options.width}]",
            f"data.global_batch_size={options.batch}",
            f"cache.ratio={options.ratio}",
            f"trainer.device={options.device}",
            *overrides,
        ),
    )


def measure(options: StepOptions, overrides: tuple[str, ...]) -> list[Record]:
    """Build, warm up and take turns; called by every rank."""
    if options.warmup_most < options.warmup:
        raise ConfigError(f"warmup_most={options.warmup_most} is less than warmup={options.warmup}")
    if options.against:
        return against.measure(options, compose(options, overrides), overrides)
    records = []
    for width in options.widths:
        found = turns_of(replace(options, widths=(width,)), overrides)
        if len(options.widths) > 1:
            for record in found:
                for key in {"mode", "numerator", "denominator"} & record.keys():
                    record[key] = f"{record[key]}, {width}"
        records += found
        gc.collect()
        if options.device != "cpu" and torch.cuda.is_available():
            torch.cuda.empty_cache()  # the next one's tables are larger
    return records


def turns_of(options: StepOptions, overrides: tuple[str, ...]) -> list[Record]:
    """The records of one width."""
    config = compose(options, overrides)
    trainer, only_tables = config.trainer, options.model == "embeddings"
    with opened_world(trainer.device, trainer.backend, trainer.timeout_s) as world:
        contenders, bank = build_contenders(options.modes, config, world, only_tables)
        with closing(Turns(contenders, world, bank)) as turns:
            turns.warm_up(options.warmup, options.warmup_most)
            records = turns.take(options.repetitions, options.lead, options.steps)
            if world.device.type == "cuda":
                for record in of_kind(records, "mode"):
                    record["device"] = turns.at_work(record["mode"], options.steps)
            return records


class PooledMean(nn.Module):
    """Next to no dense part: `(dense [b, F], pooled [b, P]) -> scale * mean of pooled [b]`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return self.scale * pooled.mean(dim=1)


def build_contenders(
    modes: Sequence[str], config: Config, world: World, embeddings_only: bool = False
) -> tuple[list[Contender], BatchBank]:
    """One contender per mode, all over the batches of one bank; called by all ranks.

    `embeddings_only`: the dense part is one number, so that a step is the tables' alone.

    Raises ConfigError or MemoryTooSmallError before anything is built where they do not fit.
    """
    source = build.build_source(config)
    tables = build.build_tables(config, source)
    modes = [who_stands_in(mode, config, world) if mode in YARDSTICKS else mode for mode in modes]
    state = row_update(config.optim.name, 0.0).state_width
    floats = sum(table.rows * (table.dim + state(table.dim)) for table in tables)
    _check_memory(modes, floats * build.dtype_of(config).itemsize, world)
    bank = BatchBank(source, world.rank, world.size)
    contenders: list[Contender] = []
    for mode in modes:
        began, feed = time.perf_counter(), bank.feed()
        if embeddings_only:
            model: nn.Module = PooledMean()
        else:
            model = build.build_dense(config, tables, source.dense_features)
        make: Any = mode_contender
        if mode in YARDSTICKS:
            make = TorchTables if mode == "bag" else FbgemmTables
        contenders.append(make(mode, config, world, (source, tables, model), feed))
        log.info("%s is there, after %.1f s", mode, time.perf_counter() - began)
    return contenders, bank


def _check_memory(modes: Sequence[str], table_bytes: int, world: World) -> None:
    """MemoryTooSmallError unless the host holds the tables of every mode at once.

    `data` and `host` have one store per node, `resident` a copy per rank, `hybrid` shards; FBGEMM's
    cache has its tables in unified memory.
    """
    there = (*CACHED, "host", *UVM)
    on_host = [mode for mode in modes if mode in there or world.device.type == "cpu"]
    copies = sum(world.local_size if mode == "resident" else 1 for mode in on_host)
    if world.local_rank == 0:
        require_memory(
            copies * table_bytes,
            f"the tables of {', '.join(on_host)} at once",
            "name fewer modes (modes=data,resident), or a smaller width",
        )


def _stages(record: Record) -> dict[str, tuple[float, float | None]]:
    """By stage: milliseconds, and those of them that training did not wait for."""
    hidden = record["stage_hidden_ms"]
    return {name: (ms, hidden.get(name)) for name, ms in record["stage_ms"].items()}


def shown_stage(value: tuple[float, float | None]) -> str:
    """Milliseconds of a stage, with its hidden share where it has one."""
    taken, hidden = value
    share = "" if hidden is None or not taken else f" [{100 * hidden / taken:.0f} %]"
    return f"{taken:.2f}{share}"


def _device_parts(records: Sequence[Record]) -> list[Record]:
    """A row for each part of what each mode keeps on the device."""
    return [
        {"mode": record["mode"], "part": name, **part}
        for record in of_kind(records, "mode")
        for name, part in record.get("device_parts", {}).items()
    ]


def _rows(name: str) -> Column:
    titles = {"distinct": "distinct rows", "misses": "fetched", "evictions": "evicted"}
    return Column(titles[name], lambda record: record["rows_per_step"].get(name), ",.0f")


SECTIONS = (
    Section(
        "Milliseconds per step",
        "Median [quartiles] over all timed steps, from the end of one step to the end of the next. "
        "Rows are means per step. The last loss is the same number wherever the training is the "
        "same to the bit.",
        "mode",
        (
            Column("mode", "mode"),
            Column("step ms", "step_ms", shown()),
            Column("least", lambda record: record["step_ms"]["min"], ".2f"),
            *map(_rows, ("distinct", "misses", "evictions")),
            Column("early rows", "early_rows", ".0%"),
            Column("last loss", "loss", repr),
        ),
    ),
    RATIOS,
    Section(
        "The device at work",
        "On a GPU, by torch's profiler, in steps of their own: milliseconds a step with a kernel "
        "at work, and with a kernel or a copy; what of a step (above) goes by without a kernel; "
        "and the longest gap, which the profiler makes longer.",
        lambda records: [r for r in of_kind(records, "mode") if "device" in r],
        (
            Column("mode", "mode"),
            Column("kernels ms", lambda r: r["device"]["kernels_ms"], ".2f"),
            Column("with copies ms", lambda r: r["device"]["busy_ms"], ".2f"),
            Column("idle", lambda r: 1 - r["device"]["kernels_ms"] / r["step_ms"]["median"], ".1%"),
            Column("longest gap ms", lambda r: r["device"]["gap_ms"], ".2f"),
        ),
    ),
    pivoted(
        (
            "Milliseconds per stage",
            "Median over the turns of the mean of a turn's steps. `ingest`, `load`, `plan` and "
            "`plan_exchange` run on a thread beside training, and so do `gather`, "
            "`write_back`, `fill` and `scatter` when overlapped; in brackets the share of them "
            "that training did not wait for. `wait` is what it did.",
        ),
        "mode",
        _stages,
        ("stage", lambda record: record["mode"]),
        shown_stage,
    ),
    pivoted(
        (
            "Bytes sent",
            "KB per rank and step: of rows, their gradients and sums, of dense gradients, and of "
            "planning.",
        ),
        "mode",
        lambda record: record["sent_per_step"] if record["world_size"] > 1 else {},
        ("category", lambda record: record["mode"]),
        lambda count: f"{count / 1e3:,.1f}",
    ),
    Section(
        "Device bytes of the embeddings",
        "The bound is slots (D + S) + 3 U D floats, and staging of U rows in and U rows out, for "
        "the U of the largest step.",
        lambda records: [r for r in of_kind(records, "mode") if r.get("embedding_device_bytes")],
        (
            Column("mode", "mode"),
            Column("slots", "cache_rows", ","),
            Column("bytes", "embedding_device_bytes", ","),
            Column("bound", "embedding_bytes_bound", ","),
        ),
    ),
    Section(
        "Device bytes by part",
        "Of the largest step. Slots: C (D + S); ids: index tensors, dense features and labels of "
        "the steps on the device at once; rows: 3 U D; moving: fetched and evicted rows; dense: "
        "parameters, gradients, optimizer state. On a GPU the allocator's peak is all of them, "
        "activations and the other contenders on the device.",
        _device_parts,
        (
            Column("mode", "mode"),
            Column("part", "part"),
            Column("counted", "expected", ","),
            Column("measured", "measured", ","),
            Column(
                "measured / counted",
                lambda row: row["measured"] / row["expected"] if row["expected"] else None,
                ".2f",
            ),
        ),
    ),
    *against.SECTIONS,
)

BENCH = Bench("Training step", StepOptions, measure, SECTIONS, overrides=True)
main = partial(run_bench, BENCH)

if __name__ == "__main__":
    sys.exit(main())
