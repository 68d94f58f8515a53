"""Milliseconds of lookup, row gradients and update, our kernels beside FBGEMM's:
`python -m benchmarks.kernels`.

One device, everything cached. All contenders start from the same weights and take turns over the
same batches; times are those between CUDA events on a GPU, else of the clock. Ratios are taken
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
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.baselines import fbgemm_tables, why_no_fbgemm
from benchmarks.report import (
    RATIO_COLUMNS,
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
from benchmarks.turns import Contender, Turns, opened_world
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
"""Our two implementations, of which `reference` is plain PyTorch, and FBGEMM's tables."""

OPTIMIZERS = ("sgd", "adam")
SIZES = {"cuda": (10_500, 250_000), "cpu": (400, 20_000)}
"""Bags per table and rows per table by device, if the options are 0: 1.05 M ids on a GPU."""

LR = 0.05
EPS = 1e-8
BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class KernelOptions:
    """Keys of the command line."""

    contenders: tuple[str, ...] = option(CONTENDERS, "implementations", choices=CONTENDERS)
    optimizers: tuple[str, ...] = option(OPTIMIZERS, "updates", choices=OPTIMIZERS)
    tables: int = option(10, "tables, one feature each", minimum=1)
    rows: int = option(0, "rows of a table; 0: 250,000 on a GPU, 20,000 on a CPU", minimum=0)
    width: int = option(128, "width of every table", minimum=1)
    batch: int = option(0, "bags per table and step; 0: 10,500 on a GPU, 400 on a CPU", minimum=0)
    pooling: int = option(10, "ids of a bag", minimum=1)
    zipf: float = option(1.05, "exponent of the ids' popularity; 0: uniform")
    batches: int = option(4, "different batches, taken in turn", minimum=1)
    steps: int = option(8, "timed steps of a turn", minimum=1)
    lead: int = option(2, "untimed steps before them", minimum=0)
    repetitions: int = option(9, "turns of each contender", minimum=1)
    device: str = option("auto", "cpu, cuda or auto", choices=("auto", "cpu", "cuda"))
    threads: int = option(0, "torch threads; 0: torch's own choice", minimum=0)
    seed: int = option(1, "of ids, weights and gradients")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    @property
    def capacity(self) -> int:
        """Rows of all tables, each with its slot."""
        return self.tables * self.rows

    @property
    def bags(self) -> int:
        """Bags of a step, of which each has `pooling` ids."""
        return self.tables * self.batch


@dataclass(frozen=True)
class Work:
    """One step on the device; index tensors are int64. U rows, n ids, K bags, as in `StepPlan`.

    `ids` `[n]` are numbered within their tables. `upstream` `[K, D]` has the bags' gradients,
    table-major like the bags, and `by_sample` `[batch, T D]` the same as a model lays them out.
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
    """Draw and plan a step; ids follow Zipf's law in each table."""
    rng = np.random.default_rng([options.seed, step])
    bags = options.bags
    ids_per_table = np.full(options.tables, options.batch * options.pooling)
    source = ZipfTables([options.rows] * options.tables, options.zipf, options.seed)
    ids = source.draw_ids(rng.random(bags * options.pooling), ids_per_table)
    rows = ids + np.repeat(np.arange(options.tables) * options.rows, ids_per_table)
    table = TableSpec("all", options.capacity, options.width, ("all",))
    request = RankPlanner(RowLayout([table], 1)).request(rows)
    positions = torch.from_numpy(request.places[request.labels]).long()
    segments = torch.from_numpy(request.segments).long()
    generator = torch.Generator().manual_seed(options.seed + 1 + step)
    upstream = torch.randn(bags, options.width, generator=generator).mul_(0.01)
    by_sample = upstream.view(options.tables, options.batch, -1).transpose(0, 1).flatten(1)
    chunks = segment_chunks(segments)
    distinct = torch.from_numpy(request.replicated.rows[0]).long()
    return Work(
        ids=torch.from_numpy(ids).to(device),
        offsets=(torch.arange(bags + 1) * options.pooling).to(device),
        slots=slots_of_rows(options)[distinct].to(device),
        positions=positions.to(device),
        order=positions.argsort(stable=True).to(device),
        segments=segments.to(device),
        bag_of=torch.arange(bags).repeat_interleave(options.pooling).to(device),
        chunks=replace(chunks, table=chunks.table.to(device)),
        upstream=upstream.to(device),
        by_sample=by_sample.contiguous().to(device),
    )


def slots_of_rows(options: KernelOptions) -> Tensor:
    """Return the slot of every row, int64 `[C]`, scattered as in a cache after many steps."""
    generator = torch.Generator().manual_seed(options.seed)
    return torch.randperm(options.capacity, generator=generator)


class KernelContender(Contender):
    """Tables with an optimizer, for steps of lookup, row gradients and update.

    A step ends when the device has done it.
    """

    def __init__(
        self, name: str, options: KernelOptions, optimizer: str, weight: Tensor, works: list[Work]
    ) -> None:
        """Take float32 weights `[C, D]` by row number on the CPU, and steps to repeat."""
        self.name = f"{name}, {optimizer}"
        self.device = works[0].ids.device
        self.steps_done = 0
        self._works = works
        self._cuda = self.device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._ms: dict[str, float] = defaultdict(float)

    @abstractmethod
    def run(self, work: Work) -> None:
        """Run one step and call `mark` after each operation."""

    def mark(self, operation: str) -> None:
        """Record the end of an operation, on the current stream or of the clock."""
        point = torch.cuda.Event(enable_timing=True) if self._cuda else time.perf_counter()
        self._marks.append((operation, point))
        if self._cuda:
            point.record()

    def step(self) -> None:
        """See `Contender.step`."""
        self.mark("")
        self.run(self._works[self.steps_done % len(self._works)])
        self.steps_done += 1
        if self._cuda:
            torch.cuda.synchronize(self.device)
        for (_, before), (operation, after) in pairwise(self._marks):
            ms = before.elapsed_time(after) if self._cuda else 1e3 * (after - before)
            self._ms[operation] += ms
        self._marks.clear()

    def meters(self) -> dict[str, Mapping[str, float]]:
        """See `Contender.meters`."""
        return {"stage_ms": dict(self._ms)}

    def summary(self) -> Record:
        """Return ids and distinct rows of a step."""
        distinct = int(np.mean([len(work.slots) for work in self._works]))
        return {"ids": len(self._works[0].ids), "distinct": distinct}


class PackageKernels(KernelContender):
    """Rows in scattered slots, a leaf per step, and one implementation of `distcache.ops`."""

    def __init__(self, name: str, options: KernelOptions, optimizer: str, *more: Any) -> None:
        super().__init__(name, options, optimizer, *more)
        self._ops: Any = reference if name == "reference" else ops.triton_bodies()
        self._update = row_update(optimizer, LR, eps=EPS, betas=BETAS)
        weight = more[0]
        scattered = torch.empty_like(weight).index_copy_(0, slots_of_rows(options), weight)
        self._weight = scattered.to(self.device)
        width = self._update.state_width(options.width)
        state = torch.zeros(options.capacity, width, device=self.device)
        self._state = state if width else None

    def run(self, work: Work) -> None:
        """See `KernelContender.run`."""
        leaf = self._weight.index_select(0, work.slots)
        self.mark("gather")
        self._ops.pooled_lookup(leaf, work.positions, work.offsets)
        self.mark("lookup")
        gradient = self._ops.row_gradients(
            work.upstream, work.bag_of, work.order, work.segments, None, work.chunks
        )
        self.mark("gradient")
        rule = self._update.rule(LR, self.steps_done + 1)
        self._ops.update_rows(rule, self._weight, self._state, work.slots, gradient)
        self.mark("update")


class FbgemmKernels(KernelContender):
    """FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen`, which updates rows in backward."""

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
    """Return the reason why a contender cannot run here; empty if it can."""
    if name == "triton":
        kernels = ops.triton_bodies()
        if kernels is None:
            return "Triton is not installed"
        if not kernels.fits(torch.empty(0, device=device)):
            return "no GPU (TRITON_INTERPRET=1 runs the kernels slowly on a CPU)"
    if name == "fbgemm" and optimizer == "adam" and device.type == "cpu":
        return "FBGEMM has no Adam on the CPU"
    return why_no_fbgemm(device) if name == "fbgemm" else ""


def measure(options: KernelOptions, overrides: tuple[str, ...]) -> list[Record]:
    """Let every contender with every optimizer take turns."""
    with opened_world(options.device) as world:
        turns = Turns(make_contenders(options, world.device), world)
        return turns.run(options.repetitions, options.lead, options.steps)


def make_contenders(options: KernelOptions, device: torch.device) -> list[KernelContender]:
    """Build the contenders that run here; raise ConfigError if none does."""
    batch, rows = SIZES[device.type]
    options = replace(options, batch=options.batch or batch, rows=options.rows or rows)
    generator = torch.Generator().manual_seed(options.seed)
    weight = torch.rand(options.capacity, options.width, generator=generator).mul_(0.1)
    works = [make_work(options, step, device) for step in range(options.batches)]
    contenders: list[KernelContender] = []
    for optimizer in sorted(options.optimizers):  # Adam first: the ratio is of Adam over SGD
        for name in options.contenders:
            reason = why_not(name, optimizer, device)
            if reason:
                log.warning("%s with %s is left out: %s", name, optimizer, reason)
                continue
            make = FbgemmKernels if name == "fbgemm" else PackageKernels
            contenders.append(make(name, options, optimizer, weight, works))
    if not contenders:
        raise ConfigError(f"contenders={','.join(options.contenders)}: none can run here")
    return contenders


def related_pairs(records: Sequence[Record]) -> list[Record]:
    """Return the ratios of two contenders of one optimizer, or of one contender's optimizers."""
    pairs = of_kind(records, "ratio")
    return [r for r in pairs if set(r["numerator"].split(", ")) & set(r["denominator"].split(", "))]


SECTIONS = (
    Section(
        "Milliseconds of forward, backward and update",
        "Median [quartiles] over all timed steps. `triton` and `reference` are our "
        "implementations, with the copy of the step's rows that training makes.",
        "mode",
        (
            Column("tables", "mode"),
            Column("step ms", "step_ms", show_spread(3)),
            Column("least", lambda record: record["step_ms"]["min"], ".3f"),
            Column("ids", "ids", ","),
            Column("distinct rows", "distinct", ","),
        ),
    ),
    Section(
        RATIOS.title,
        f"{RATIOS.note} On a GPU `triton` should take at most 1.3 times FBGEMM's time, and Adam at "
        "most 1.5 times SGD's.",
        related_pairs,
        RATIO_COLUMNS,
    ),
    pivot(
        "Milliseconds per operation",
        "Median over the turns.",
        lambda record: record["stage_ms"],
        "operation",
        ".3f",
    ),
)

BENCH = Bench("Kernels", KernelOptions, measure, SECTIONS)
main = BENCH.main

if __name__ == "__main__":
    sys.exit(main())
