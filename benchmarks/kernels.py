"""Milliseconds of lookup, row gradients and update, our kernels beside FBGEMM's:
`python -m benchmarks.kernels`.

One device, everything cached. All contenders start from the same weights and take turns over the
same batches; on a GPU times are those between CUDA events, else of the clock. Ratios are taken
within a repetition.
"""

from __future__ import annotations

import logging
import sys
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.options import option
from benchmarks.ranks import opened_world
from benchmarks.report import Bench, Column, Record, Section, of_kind, run_bench
from benchmarks.stream import Contender, Turns
from benchmarks.turns import RATIOS, shown
from benchmarks.yardsticks import fbgemm_tables, why_no_fbgemm
from distcache import ops
from distcache.data.synthetic import ZipfTables
from distcache.errors import ConfigError
from distcache.layout import RowLayout, TableSpec
from distcache.ops import reference
from distcache.ops.long_segments import SegmentChunks, segment_chunks
from distcache.optim import row_update
from distcache.planner.rank import RankPlanner

log = logging.getLogger("distcache.benchmarks.kernels")

CONTENDERS = ("triton", "reference", "fbgemm")
"""Our two bodies, of which `reference` is plain PyTorch, and FBGEMM's tables."""

OPTIMIZERS = ("sgd", "adam")
SIZES = {"cuda": (10_500, 250_000), "cpu": (400, 20_000)}
"""Bags per table and rows per table by device, where the options say 0: 1.05 M ids on a GPU."""

BARS = {
    **{(f"triton, {name}", f"fbgemm, {name}"): 1.3 for name in OPTIMIZERS},
    ("triton, adam", "triton, sgd"): 1.5,
}
"""What the time of our kernels must not exceed on a GPU, of that of others."""

LR, EPS, BETAS = 0.05, 1e-8, (0.9, 0.999)


@dataclass(frozen=True)
class KernelOptions:
    """The keys of the command line; zero leaves sizes to the device and threads to torch."""

    contenders: tuple[str, ...] = option(CONTENDERS, "who runs, where it can", among=CONTENDERS)
    optimizers: tuple[str, ...] = option(OPTIMIZERS, "with which updates", among=OPTIMIZERS)
    tables: int = option(10, "tables, one feature each", least=1)
    rows: int = option(0, "rows of a table; 0: 250,000 on a GPU, 20,000 on a CPU", least=0)
    width: int = option(128, "width of every table", least=1)
    batch: int = option(0, "bags per table and step; 0: 10,500 on a GPU, 400 on a CPU", least=0)
    pooling: int = option(10, "ids of a bag", least=1)
    zipf: float = option(1.05, "exponent of the ids' popularity; 0: uniform")
    batches: int = option(4, "different batches, taken in turn", least=1)
    steps: int = option(8, "timed steps of a turn", least=1)
    lead: int = option(2, "steps before them, not timed", least=0)
    repetitions: int = option(9, "turns of each contender", least=1)
    device: str = option("auto", "cpu, cuda or auto", among=("auto", "cpu", "cuda"))
    threads: int = option(0, "torch threads; 0: torch's own choice", least=0)
    seed: int = option(1, "of ids, weights and gradients")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    @property
    def capacity(self) -> int:
        """C: rows of all tables, each with its slot."""
        return self.tables * self.rows

    @property
    def bags(self) -> int:
        """K: bags of a step, of which each has `pooling` ids."""
        return self.tables * self.batch


@dataclass(frozen=True)
class Work:
    """One step on the device; index tensors are int64. U rows, n ids, K bags, as in `StepPlan`.

    `ids` `[n]`: within their tables; `upstream` `[K, D]`: the bags' gradients, table-major as the
    bags are; `by_sample` `[batch, T D]`: the same as a model lays them out.
    """

    ids: Tensor
    offsets: Tensor
    slots: Tensor
    positions: Tensor
    order: Tensor
    segments: Tensor
    bag_of: Tensor
    chunks: SegmentChunks
    upstream: Tensor
    by_sample: Tensor


def make_work(options: KernelOptions, step: int, device: torch.device) -> Work:
    """Draw and plan a step: ids by Zipf's law in each table."""
    rng, seed, bags = np.random.default_rng([options.seed, step]), options.seed, options.bags
    per_table = np.full(options.tables, options.batch * options.pooling)
    source = ZipfTables([options.rows] * options.tables, options.zipf, seed)
    ids = source.draw_ids(rng.random(bags * options.pooling), per_table)
    rows = ids + np.repeat(np.arange(options.tables) * options.rows, per_table)
    table = TableSpec("all", options.tables * options.rows, options.width, ("all",))
    asked = RankPlanner(RowLayout([table], 1)).request(rows)
    positions = torch.from_numpy(asked.places[asked.labels]).long()
    segments = torch.from_numpy(asked.segments).long()
    generator = torch.Generator().manual_seed(seed + 1 + step)
    upstream = torch.randn(bags, options.width, generator=generator).mul_(0.01)
    by_sample = upstream.view(options.tables, options.batch, -1).transpose(0, 1).flatten(1)
    chunks = segment_chunks(segments)
    return Work(
        ids=torch.from_numpy(ids).to(device),
        offsets=(torch.arange(bags + 1) * options.pooling).to(device),
        slots=slots_of(options)[torch.from_numpy(asked.replicated.rows[0]).long()].to(device),
        positions=positions.to(device),
        order=positions.argsort(stable=True).to(device),
        segments=segments.to(device),
        bag_of=torch.arange(bags).repeat_interleave(options.pooling).to(device),
        chunks=replace(chunks, table=chunks.table.to(device)),
        upstream=upstream.to(device),
        by_sample=by_sample.contiguous().to(device),
    )


def slots_of(options: KernelOptions) -> Tensor:
    """int64 `[C]`, CPU: the slot of every row, scattered as in a cache that has run for a while."""
    generator = torch.Generator().manual_seed(options.seed)
    return torch.randperm(options.capacity, generator=generator)


class KernelContender(Contender):
    """Tables with an optimizer, for steps of lookup, row gradients and update; a step ends when the
    device has done it."""

    def __init__(
        self, name: str, options: KernelOptions, optimizer: str, weight: Tensor, works: list[Work]
    ) -> None:
        """`weight`: float32 `[C, D]`, CPU, by row number; `works`: steps, taken in turn."""
        self.name, self.optimizer, self.options = f"{name}, {optimizer}", optimizer, options
        self._works, self.device = works, works[0].ids.device
        self._done, self._cuda = 0, self.device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._ms: dict[str, float] = defaultdict(float)

    @abstractmethod
    def run(self, work: Work) -> None:
        """One step; each piece is told to `mark` when it is done."""

    def mark(self, piece: str) -> None:
        """The end of a piece, on the current stream or of the clock."""
        point = torch.cuda.Event(enable_timing=True) if self._cuda else time.perf_counter()
        self._marks.append((piece, point))
        if self._cuda:
            point.record()

    def step(self) -> None:
        """See `Contender.step`."""
        self.mark("")
        self.run(self._works[self._done % len(self._works)])
        self._done += 1
        if self._cuda:
            torch.cuda.synchronize(self.device)
        for (_, before), (piece, after) in pairwise(self._marks):
            ms = before.elapsed_time(after) if self._cuda else 1e3 * (after - before)
            self._ms[piece] += ms
        self._marks.clear()

    def meters(self) -> dict[str, Mapping[str, float]]:
        """See `Contender.meters`."""
        return {"stage_ms": dict(self._ms)}

    def summary(self) -> Record:
        """The ids and distinct rows of a step, and the bytes of each piece."""
        distinct = int(np.mean([len(work.slots) for work in self._works]))
        moved = moved_bytes(self.options, distinct, self.optimizer)
        return {"ids": len(self._works[0].ids), "distinct": distinct, "bytes": moved}


class Ours(KernelContender):
    """Rows in scattered slots, a leaf per step, and the bodies of one module of `ops`."""

    def __init__(self, name: str, options: KernelOptions, optimizer: str, *more: Any) -> None:
        super().__init__(name, options, optimizer, *more)
        weight, device = more[0], self.device
        self._body: Any = reference if name == "reference" else ops.triton_bodies()
        self._update = row_update(optimizer, LR, eps=EPS, betas=BETAS)
        self._slots = slots_of(options)
        self._weight = torch.empty_like(weight).index_copy_(0, self._slots, weight).to(device)
        width = self._update.state_width(options.width)
        self._state = torch.zeros(options.capacity, width, device=device) if width else None

    def run(self, work: Work) -> None:
        """See `KernelContender.run`."""
        leaf = self._weight.index_select(0, work.slots)
        self.mark("gather")
        self._body.pooled_lookup(leaf, work.positions, work.offsets)
        self.mark("lookup")
        gradient = self._body.row_gradients(
            work.upstream, work.bag_of, work.order, work.segments, None, work.chunks
        )
        self.mark("gradient")
        rule = self._update.rule(LR, self._done + 1)
        self._body.update_rows(rule, self._weight, self._state, work.slots, gradient)
        self.mark("update")


class FbgemmTables(KernelContender):
    """FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen`: backward updates the rows."""

    def __init__(self, name: str, options: KernelOptions, optimizer: str, *more: Any) -> None:
        super().__init__(name, options, optimizer, *more)
        sizes = [(options.rows, options.width)] * options.tables
        settings = {"learning_rate": LR, "eps": EPS, "beta1": BETAS[0], "beta2": BETAS[1]}
        self._tables = fbgemm_tables(sizes, optimizer, self.device, **settings)
        parts = more[0].split(options.rows)
        for table, part in zip(self._tables.split_embedding_weights(), parts, strict=True):
            table.data.copy_(part)

    def run(self, work: Work) -> None:
        """See `KernelContender.run`."""
        pooled = self._tables(work.ids, work.offsets)
        self.mark("lookup")
        pooled.backward(work.by_sample)
        self.mark("gradient + update")


def why_not(name: str, optimizer: str, device: torch.device) -> str:
    """Why a contender cannot run here; empty where it can."""
    if name == "triton":
        kernels = ops.triton_bodies()
        if kernels is None:
            return "Triton is not installed"
        if not kernels.fits(torch.empty(0, device=device)):
            return "no GPU (TRITON_INTERPRET=1 runs the kernels slowly on a CPU)"
    if name == "fbgemm" and optimizer == "adam" and device.type == "cpu":
        return "FBGEMM has no Adam on the CPU"
    return why_no_fbgemm(device) if name == "fbgemm" else ""


def measure(options: KernelOptions, overrides: tuple[str, ...] = ()) -> list[Record]:
    """Turns of every contender with every optimizer."""
    with opened_world(options.device) as world:
        turns = Turns(make_contenders(options, world.device), world)
        return turns.take(options.repetitions, options.lead, options.steps)


def make_contenders(options: KernelOptions, device: torch.device) -> list[KernelContender]:
    """Those that run here; ConfigError where nobody does."""
    batch, rows = SIZES[device.type]
    options = replace(options, batch=options.batch or batch, rows=options.rows or rows)
    generator = torch.Generator().manual_seed(options.seed)
    weight = torch.rand(options.capacity, options.width, generator=generator).mul_(0.1)
    works = [make_work(options, step, device) for step in range(options.batches)]
    contenders: list[KernelContender] = []
    for optimizer in sorted(options.optimizers):  # the ratio is of Adam over SGD
        for name in options.contenders:
            reason = why_not(name, optimizer, device)
            if reason:
                log.warning("%s with %s is left out: %s", name, optimizer, reason)
                continue
            make = FbgemmTables if name == "fbgemm" else Ours
            contenders.append(make(name, options, optimizer, weight, works))
    if not contenders:
        raise ConfigError(f"contenders={','.join(options.contenders)}: none can run here")
    return contenders


def moved_bytes(options: KernelOptions, distinct: int, optimizer: str) -> dict[str, int]:
    """Bytes that each operation reads and writes, indices included.

    Every id's row counts, whether it comes from the device's memory or its cache; for combined
    pieces of other libraries the sum of the operations that they stand for.
    """
    bags, row = options.bags, 4 * options.width
    n, rows_touched = bags * options.pooling, {"sgd": 3, "adam": 7}[optimizer]
    moved = {
        "gather": distinct * (8 + 2 * row),
        "lookup": n * (8 + row) + bags * (8 + row),
        "gradient": n * (16 + row) + distinct * (8 + row),
        "update": distinct * (8 + rows_touched * row),
    }
    return moved | {"gradient + update": moved["gradient"] + moved["update"]}


def _pieces(records: Sequence[Record]) -> list[Record]:
    """A row for each piece of each contender."""
    return [
        {"of": f"{r['mode']}: {name}", "ms": ms, "bytes": r["bytes"][name]}
        for r in of_kind(records, "mode")
        for name, ms in r["stage_ms"].items()
    ]


def _bar(record: Record) -> float | None:
    pair = record["numerator"], record["denominator"]
    return BARS.get(pair) if torch.cuda.is_available() else None


def _pairs(records: Sequence[Record]) -> list[Record]:
    """The ratios of two contenders of one optimizer, or of one contender's optimizers."""
    pairs = of_kind(records, "ratio")
    return [r for r in pairs if set(r["numerator"].split(", ")) & set(r["denominator"].split(", "))]


SECTIONS = (
    Section(
        "Milliseconds of forward, backward and update",
        "Median [quartiles] over all timed steps. `triton` and `reference` are our bodies, with "
        "the copy of the step's rows that training makes.",
        "mode",
        (
            Column("tables", "mode"),
            Column("step ms", "step_ms", shown(3)),
            Column("least", lambda record: record["step_ms"]["min"], ".3f"),
            Column("ids", "ids", ","),
            Column("distinct rows", "distinct", ","),
        ),
    ),
    Section(
        RATIOS.title,
        f"{RATIOS.note} The bars are for the kernels on a GPU.",
        _pairs,
        (
            *RATIOS.columns,
            Column("bar", _bar, lambda bar: f"at most {bar:g}"),
            Column("holds", lambda r: _bar(r) and str(r["ratio"]["median"] <= _bar(r))),
        ),
    ),
    Section(
        "Pieces",
        "Medians over the turns of the mean of a turn's steps. Bytes are those that our operation "
        "reads and writes, each id's row counted, whether memory or a cache has it; others' pieces "
        "are given the same bytes for the same work.",
        _pieces,
        (
            Column("piece", "of"),
            Column("ms", "ms", ".3f"),
            Column("MB", lambda row: row["bytes"] / 1e6, ",.1f"),
            Column("GB/s", lambda row: row["bytes"] / 1e6 / row["ms"], ",.1f"),
        ),
    ),
)

BENCH = Bench("Kernels", KernelOptions, measure, SECTIONS)
main = partial(run_bench, BENCH)

if __name__ == "__main__":
    sys.exit(main())
