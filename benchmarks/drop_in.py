"""Milliseconds per step of a plain training loop around TorchRec's DLRM, with our collection of
embedding bags and with TorchRec's: `python -m benchmarks.drop_in`, or under torchrun for several
ranks.

All contenders live in one process per rank and take turns over the same batches, which are made in
advance. Everything around the collection is the same: the model, the loss, the dense optimizer.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
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
from benchmarks.options import option
from benchmarks.ranks import opened_world
from benchmarks.report import Bench, Column, Record, Section, run_bench
from benchmarks.setting import SIZES, compose_setting
from benchmarks.stream import BatchBank, Contender, Feed, Turns
from benchmarks.turns import RATIOS, shown
from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.data.batch import Batch
from distcache.layout import TableSpec
from distcache.parallel.hybrid import jagged
from distcache.trainer import build

log = logging.getLogger("distcache.benchmarks.drop_in")

WHO = ("cached", "sharded", "copies")
_READ_AHEAD = 80
"""Steps that a look-ahead of the largest size and its threads hold."""


@dataclass(frozen=True)
class DropInOptions:
    """The keys of the command line; zero leaves threads to torch."""

    size: str = option("kaggle", "tables", among=tuple(SIZES))
    who: tuple[str, ...] = option(
        WHO[:2],
        "who takes turns, each with its own tables: cached is distcache's collection under DDP, "
        "with every setting as it is by default, over a look-ahead; sharded is TorchRec's under "
        "DistributedModelParallel, table by table, with its optimizer inside backward; copies is "
        "TorchRec's under DDP, a copy of all tables on every rank",
        among=WHO,
    )
    zipf: tuple[float, ...] = option((1.05, 0.0), "skews of the ids; 0: uniform", least=0)
    batch: int = option(4096, "samples of a step over all ranks", least=1)
    width: int = option(16, "of every table", least=1)
    lr: float = option(0.1, "of SGD, for rows and the dense part")
    steps: int = option(20, "timed steps of a turn", least=1)
    lead: int = option(4, "steps before them, not timed", least=0)
    repetitions: int = option(9, "turns of each", least=1)
    warmup: int = option(60, "steps before the first turn", least=1)
    threads: int = option(0, "torch threads of a rank; 0: torch's own choice", least=0)
    out: str = option("", "the report, a .md file; JSON lines go beside it")


class Clicks(NamedTuple):
    """A rank's batch, as TorchRec's DLRM reads it."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor


class Loop(Contender):
    """A training loop around a DLRM."""

    def __init__(self, name: str, options: DropInOptions, model: nn.Module, feed: Feed) -> None:
        self.name, self._feed, self._model = name, feed, model
        others = dict(in_backward_optimizer_filter(model.named_parameters()))
        self._dense = torch.optim.SGD(others.values(), lr=options.lr)
        self._ready: deque[Clicks] = deque()
        self._stream = self._given()

    def prepare(self, steps: int) -> None:
        """See `Contender.prepare`."""
        while len(self._ready) < steps + self.ahead:
            self._ready.append(_form(next(self._feed)))

    def _given(self) -> Iterator[Clicks]:
        while True:
            yield self._ready.popleft() if self._ready else _form(next(self._feed))

    def step(self) -> Callable[[], float]:
        """See `Contender.step`."""
        batch = next(self._stream)
        self._dense.zero_grad()
        logits = self._model(batch.dense_features, batch.sparse_features).squeeze(1)
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()
        self.update()
        self._dense.step()
        loss = loss.detach()
        return lambda: loss.item()

    def update(self) -> None:
        """Apply the rows' gradients, where backward has not done it."""

    def close(self) -> None:
        """See `Contender.close`."""
        self._ready.clear()
        del self._model, self._dense


class Cached(Loop):
    """The same over our collection and its look-ahead."""

    ahead = _READ_AHEAD

    def __init__(self, options: DropInOptions, ebc: Any, model: nn.Module, feed: Feed) -> None:
        super().__init__("cached", options, model, feed)
        self._ebc, self._stream = ebc, iter(distcache.lookahead(self._given(), ebc))

    def update(self) -> None:
        """See `Loop.update`."""
        self._ebc.step()

    def close(self) -> None:
        """See `Contender.close`."""
        self._stream.close()
        super().close()
        self._ebc.close()


def _form(batch: Batch) -> Clicks:
    ids = jagged(batch.ids, len(batch.labels), torch.device("cpu"))
    return Clicks(batch.dense, ids, batch.labels)


def contender(
    who: str, options: DropInOptions, tables: Sequence[TableSpec], world: World, feed: Feed
) -> Loop:
    """One that takes turns; called by all ranks."""
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
    if who == "cached":
        update = distcache.optim.SGD(lr=options.lr)
        ebc: Any = distcache.CachedEmbeddingBagCollection(
            configs, device=world.device, optimizer=update
        )
    else:
        where = "meta" if who == "sharded" else world.device
        ebc = EmbeddingBagCollection(configs, device=torch.device(where))
    model: Any = DLRM(ebc, 13, [512, 256, 64, options.width], [512, 256, 1], world.device)
    if who == "sharded":
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": options.lr})
        return Loop(who, options, sharded(model, tables, world), feed)
    if world.size > 1:  # the dense part as DistributedModelParallel wraps it, in one bucket
        how = {"gradient_as_bucket_view": True, "broadcast_buffers": False, "static_graph": True}
        model = DistributedDataParallel(model, bucket_cap_mb=25, **how)
    return Cached(options, ebc, model, feed) if who == "cached" else Loop(who, options, model, feed)


def sharded(
    model: nn.Module, tables: Sequence[TableSpec], world: World
) -> DistributedModelParallel:
    """The model with whole tables on the ranks that TorchRec's planner gives them to: tables that
    all ranks copy, which it takes small ones for, would silently lose their optimizer."""
    constraint = ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world.size, compute_device=world.device.type),
        constraints={table.name: constraint for table in tables},
    )
    sharders: list[Any] = [EmbeddingBagCollectionSharder()]
    plan = planner.plan(model, sharders)
    return DistributedModelParallel(model, device=world.device, plan=plan, sharders=sharders)


def compose(options: DropInOptions, zipf: float) -> Config:
    """The configuration of the stream and of its tables."""
    return compose_setting(
        options.size,
        (
            f"model.embedding_dim={options.width}",
            f"model.dense_arch=[512,256,64,{options.width}]",
            f"data.global_batch_size={options.batch}",
            f"data.zipf={zipf}",
            "trainer.device=cpu",
        ),
    )


def measure(options: DropInOptions, overrides: tuple[str, ...]) -> list[Record]:
    """Build, warm up and take turns, for each skew; called by every rank."""
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
                contender(who, options, tables, world, bank.feed()) for who in options.who
            ]
            with closing(Turns(contenders, world, bank)) as turns:
                turns.warm_up(options.warmup, options.warmup)
                found = turns.take(options.repetitions, options.lead, options.steps)
            ids = f"zipf {zipf}" if zipf else "uniform"
            for record in found:
                for key in {"mode", "numerator", "denominator"} & record.keys():
                    record[key] = f"{record[key]}, {ids}"
            records += found
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
            Column("step ms", "step_ms", shown()),
            Column("least", lambda record: record["step_ms"]["min"], ".2f"),
        ),
    ),
    RATIOS,
)

BENCH = Bench("The drop-in collection in TorchRec's DLRM", DropInOptions, measure, SECTIONS)
main = partial(run_bench, BENCH)

if __name__ == "__main__":
    sys.exit(main())
