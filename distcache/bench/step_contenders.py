"""Who takes part in the step's bench: every mode and yardstick over the same batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from distcache.bench.contenders import Contender, ModeContender
from distcache.bench.step_batches import BatchBank, Feed
from distcache.bench.uvm_tables import UvmTables
from distcache.bench.yardsticks import (
    UVM,
    YARDSTICKS,
    FusedTables,
    TorchTables,
    YardstickSpec,
    check_yardstick,
)
from distcache.comm.world import World
from distcache.config.tree import Config
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.optim import row_update
from distcache.parallel.hybrid import load_torchrec
from distcache.store.memory import require_memory
from distcache.trainer import build
from distcache.versions import fbgemm_here

log = logging.getLogger("distcache.bench.step")

CACHED = ("data", "serial", "replicated", "home", "sharded", "mixed", "auto")
"""Mode `data` in its variants."""

SHARDED_BY = ("table_wise", "row_wise", "column_wise")
"""Mode `hybrid` with that `parallel.sharding`."""

_PLANNED = (*CACHED, "resident", "host")

_AHEAD = 8
"""Steps that the threads of a cached mode hold beside those of L and P, at most."""


def build_contenders(
    modes: Sequence[str], config: Config, world: World, embeddings_only: bool = False
) -> tuple[list[Contender], BatchBank]:
    """One contender per mode, all over the batches of one bank; called by all ranks.

    `embeddings_only`: the dense part is one number, so that a step is the tables' alone.

    Raises ConfigError or MemoryTooSmallError before anything is built where they do not fit.
    """
    source = build.build_source(config)
    tables = build.build_tables(config, source)
    modes = [_here(mode, config, world) for mode in modes]
    update = row_update(config.optim.name, 0.0)
    floats = sum(table.rows * (table.dim + update.state_width(table.dim)) for table in tables)
    _check_memory(modes, floats * build.dtype_of(config).itemsize, world)
    bank = BatchBank(source, world.rank, world.size)
    contenders: list[Contender] = []
    for mode in modes:
        began = time.perf_counter()
        model = _dense(embeddings_only, config, tables, source.dense_features)
        feed = bank.feed()
        if mode in YARDSTICKS:
            contenders.append(_yardstick(mode, config, world, (tables, model, feed)))
        else:
            own = _config_of(mode, config)
            parallel = build.build_parallel(own, _own_group(world), tables, model, source)
            parallel.set_lr(*build.build_rates(config)(0))
            ahead = config.cache.lookahead + config.cache.prefetch + _AHEAD
            ahead = ahead if mode in _PLANNED else 0
            contenders.append(ModeContender(mode, parallel, feed, ahead, mode in CACHED))
        log.info("%s is there, after %.1f s", mode, time.perf_counter() - began)
    return contenders, bank


def _config_of(mode: str, config: Config) -> Config:
    """`serial` is mode `data`, one stage after the other; the placements are of mode `data`, the
    shardings of mode `hybrid`."""
    if mode == "serial":
        trainer = replace(config.trainer, schedule="serial")
        config, mode = replace(config, trainer=trainer), "data"
    elif mode == "home":
        cache = replace(config.cache, placement="replicated", state="home")
        config, mode = replace(config, cache=cache), "data"
    elif mode in CACHED and mode != "data":
        cache = replace(config.cache, placement=mode, state="replicated")
        config, mode = replace(config, cache=cache), "data"
    elif mode in SHARDED_BY:
        parallel = replace(config.parallel, sharding=mode)
        config, mode = replace(config, parallel=parallel), "hybrid"
    return replace(config, parallel=replace(config.parallel, mode=mode))


class PooledMean(nn.Module):
    """Next to no dense part: `(dense [b, F], pooled [b, P]) -> scale * mean of pooled [b]`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return self.scale * pooled.mean(dim=1)


def _dense(
    embeddings_only: bool, config: Config, tables: Sequence[TableSpec], features: int
) -> nn.Module:
    return PooledMean() if embeddings_only else build.build_dense(config, tables, features)


def _own_group(world: World) -> World:
    """`world` with a planning group for one contender: its planning thread must not meet those of
    the others on one group. Collective."""
    timeout = timedelta(seconds=world.timeout_s)
    return replace(world, planning_group=dist.new_group(backend="gloo", timeout=timeout))


def _here(mode: str, config: Config, world: World) -> str:
    """`mode`, or `bag` for `fused` on a GPU for which FBGEMM has no kernels here.

    Raises ConfigError for a yardstick that cannot run here.
    """
    if mode not in YARDSTICKS:
        return mode
    if world.size > 1:
        raise ConfigError(f"modes={mode} runs on one rank: leave it out, or take modes=hybrid")
    reason = ""
    if mode != "bag" and world.device.type == "cuda":
        reason = _no_cuda_kernels()
    if reason and mode in UVM:
        raise ConfigError(f"modes={mode} is FBGEMM's cache on a GPU: {reason}")
    mode = "bag" if reason else mode
    check_yardstick(mode, config.optim, build.dtype_of(config), world.device)
    if reason:
        log.warning("`bag` (torch.nn.EmbeddingBag) stands in for `fused`: %s", reason)
    return mode


def _no_cuda_kernels() -> str:
    """Why FBGEMM's fused tables cannot run on a GPU here; empty where they can."""
    try:
        load_torchrec()
    except ConfigError as error:
        return str(error)
    if "fbgemm-gpu" not in fbgemm_here():
        return "the fbgemm here is the CPU build"
    return ""


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


def _yardstick(
    mode: str, config: Config, world: World, parts: tuple[Sequence[TableSpec], nn.Module, Feed]
) -> Contender:
    tables, model, feed = parts
    dense_lr, embedding_lr = build.build_rates(config)(0)
    spec = YardstickSpec(
        tables=tables,
        optimizer=build.optimizer_spec(config),
        dense_lr=dense_lr,
        embedding_lr=embedding_lr,
        seed=config.trainer.seed,
        device=world.device,
        ratio=config.cache.ratio or 1.0,
    )
    if mode in UVM:
        return UvmTables(spec, model, feed, prefetch=mode == "uvm_prefetch")
    if mode == "bag":
        return TorchTables(spec, model, feed)
    return FusedTables(spec, model, feed, load_torchrec())
