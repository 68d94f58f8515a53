"""Milliseconds per step of a plain training loop around TorchRec's DLRM, with our collection of
embedding bags and with TorchRec's: `python -m benchmarks.drop_in`, or under torchrun for several
ranks.

All contenders live in one process per rank and take turns over the same batches, which are made in
advance. Everything around the collection is the same: the model, the loss, the dense optimizer.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

import distcache
from benchmarks.report import RATIOS, Bench, Column, Record, Section, option, show_spread
from benchmarks.step import StepOptions, label_records
from benchmarks.step import compose as compose_step
from benchmarks.turns import SIZES, BatchBank, Contender, Feed, Turns, opened_world
from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.data.batch import Batch
from distcache.layout import TableSpec
from distcache.parallel.hybrid import jagged
from distcache.trainer import build

COLLECTIONS = ("cached", "sharded", "copies")

STEPS_AHEAD = 80
"""Steps that a look-ahead of the largest size and its threads hold."""


@dataclass(frozen=True)
class DropInOptions:
    """Keys of the command line."""

    size: str = option("kaggle", "tables", choices=tuple(SIZES))
    collections: tuple[str, ...] = option(
        COLLECTIONS[:2],
        "contenders, each with its own tables: cached is distcache's collection under DDP over a "
        "look-ahead, with default settings; sharded is TorchRec's under "
        "DistributedModelParallel, table-wise, with its optimizer inside backward; copies is "
        "TorchRec's under DDP, with a copy of all tables on every rank",
        choices=COLLECTIONS,
    )
    zipf: tuple[float, ...] = option((1.05, 0.0), "skews of the ids; 0: uniform", minimum=0)
    batch: int = option(4096, "samples of a step over all ranks", minimum=1)
    width: int = option(16, "of every table", minimum=1)
    lr: float = option(0.1, "of SGD, for rows and the dense part")
    steps: int = option(20, "timed steps of a turn", minimum=1)
    lead: int = option(4, "untimed steps before them", minimum=0)
    repetitions: int = option(9, "turns of each collection", minimum=1)
    warmup: int = option(60, "steps before the first turn", minimum=1)
    threads: int = option(0, "torch threads of a rank; 0: torch's own choice", minimum=0)
    out: str = option("", "the report, a .md file; JSON lines go beside it")


class Clicks(NamedTuple):
    """A batch of one rank in the form of TorchRec's DLRM."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor


class Loop(Contender):
    """A training loop around a DLRM."""

    def __init__(self, name: str, options: DropInOptions, model: nn.Module, feed: Feed) -> None:
        self.name = name
        self._feed = feed
        self._model = model
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        self._dense_optimizer = torch.optim.SGD(dense.values(), lr=options.lr)
        self._prepared: deque[Clicks] = deque()
        self._stream = self._batches()

    def prepare(self, steps: int) -> None:
        """See `Contender.prepare`."""
        while len(self._prepared) < steps + self.steps_ahead:
            self._prepared.append(to_clicks(next(self._feed)))

    def _batches(self) -> Iterator[Clicks]:
        while True:
            yield self._prepared.popleft() if self._prepared else to_clicks(next(self._feed))

    def step(self) -> Callable[[], float]:
        """See `Contender.step`."""
        batch = next(self._stream)
        self._dense_optimizer.zero_grad()
        logits = self._model(batch.dense_features, batch.sparse_features).squeeze(1)
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()
        self.update()
        self._dense_optimizer.step()
        return loss.detach().item

    def update(self) -> None:
        """Apply the rows' gradients, unless backward has done it."""

    def close(self) -> None:
        """See `Contender.close`."""
        self._prepared.clear()
        del self._model, self._dense_optimizer


class Cached(Loop):
    """The same loop over our collection and its look-ahead."""

    steps_ahead = STEPS_AHEAD

    def __init__(self, options: DropInOptions, ebc: Any, model: nn.Module, feed: Feed) -> None:
        super().__init__("cached", options, model, feed)
        self._ebc = ebc
        self._stream = iter(distcache.lookahead(self._batches(), ebc))

    def update(self) -> None:
        """See `Loop.update`."""
        self._ebc.step()

    def close(self) -> None:
        """See `Contender.close`."""
        self._stream.close()
        super().close()
        self._ebc.close()


def to_clicks(batch: Batch) -> Clicks:
    """Convert a batch."""
    ids = jagged(batch.ids, len(batch.labels), torch.device("cpu"))
    return Clicks(batch.dense, ids, batch.labels)


def make_loop(
    collection: str, options: DropInOptions, tables: Sequence[TableSpec], world: World, feed: Feed
) -> Loop:
    """Build a contender; called by all ranks."""
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=list(table.features),
        )
        for table in tables
    ]
    torch.manual_seed(0)
    if collection == "cached":
        update = distcache.optim.SGD(lr=options.lr)
        ebc: Any = distcache.CachedEmbeddingBagCollection(
            configs, device=world.device, optimizer=update
        )
    else:
        device = "meta" if collection == "sharded" else world.device
        ebc = EmbeddingBagCollection(configs, device=torch.device(device))
    model: Any = DLRM(ebc, 13, [512, 256, 64, options.width], [512, 256, 1], world.device)
    if collection == "sharded":
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": options.lr})
        return Loop(collection, options, sharded(model, tables, world), feed)
    if world.size > 1:
        # Wrap the dense part like DistributedModelParallel, in one bucket.
        model = DistributedDataParallel(
            model,
            bucket_cap_mb=25,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            static_graph=True,
        )
    if collection == "cached":
        return Cached(options, ebc, model, feed)
    return Loop(collection, options, model, feed)


def sharded(
    model: nn.Module, tables: Sequence[TableSpec], world: World
) -> DistributedModelParallel:
    """Return the model with whole tables on the ranks of TorchRec's planner.

    The constraint forbids data-parallel tables, which would silently lose their optimizer.
    """
    constraint = ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world.size, compute_device=world.device.type),
        constraints={table.name: constraint for table in tables},
    )
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    plan = planner.plan(model, sharders)
    return DistributedModelParallel(model, device=world.device, plan=plan, sharders=sharders)


def compose(options: DropInOptions, zipf: float) -> Config:
    """Return the configuration of the stream and of its tables."""
    step_options = StepOptions(size=options.size, batch=options.batch, widths=(options.width,))
    return compose_step(step_options, (f"data.zipf={zipf}",))


def measure(options: DropInOptions, overrides: tuple[str, ...]) -> list[Record]:
    """Build the contenders, warm up and take turns, for each skew; called by every rank."""
    records: list[Record] = []
    trainer = compose(options, 0).trainer
    with opened_world(trainer.device, trainer.backend, trainer.timeout_s) as world:
        if not dist.is_initialized():  # TorchRec's classes want a group of one rank too
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for zipf in options.zipf:
            config = compose(options, zipf)
            source = build.build_source(config)
            bank = BatchBank(source, world.rank, world.size)
            tables = build.build_tables(config, source)
            contenders = [
                make_loop(collection, options, tables, world, bank.feed())
                for collection in options.collections
            ]
            with closing(Turns(contenders, world, bank)) as turns:
                turns.warm_up(options.warmup, options.warmup)
                part = turns.run(options.repetitions, options.lead, options.steps)
            label_records(part, f"zipf {zipf}" if zipf else "uniform")
            records += part
            del contenders, turns
            gc.collect()
    return records


SECTIONS = (
    Section(
        "Milliseconds per step",
        "Median [quartiles] over all timed steps, from the end of one step to the end of the next.",
        "mode",
        (
            Column("collection", "mode"),
            Column("ranks", "world_size"),
            Column("step ms", "step_ms", show_spread()),
            Column("least", lambda record: record["step_ms"]["min"], ".2f"),
        ),
    ),
    RATIOS,
)

BENCH = Bench("The drop-in collection in TorchRec's DLRM", DropInOptions, measure, SECTIONS)
main = BENCH.main

if __name__ == "__main__":
    sys.exit(main())
