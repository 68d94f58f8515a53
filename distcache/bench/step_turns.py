"""The turns of the step's bench: who takes part, warm-up, timed steps, and the records."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from types import TracebackType

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from distcache.bench.contenders import Contender, ModeContender
from distcache.bench.report import Record
from distcache.bench.spread import ratios, rotated, spread
from distcache.bench.step_batches import BatchBank, Feed
from distcache.bench.yardsticks import (
    YARDSTICKS,
    FusedTables,
    TorchTables,
    YardstickSpec,
    check_yardstick,
)
from distcache.comm.world import World
from distcache.config import Config
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.optim.rows import row_update
from distcache.parallel.hybrid_spec import load_torchrec
from distcache.run import build
from distcache.store.available import require_memory
from distcache.versions import fbgemm_here

log = logging.getLogger("distcache.bench.step")

_CACHED = ("data", "resident", "host")
_SETTLE_S = 0.25
"""Pause before a turn, in which the planning thread of the one before comes to rest."""


def build_contenders(
    modes: Sequence[str], config: Config, world: World
) -> tuple[list[Contender], BatchBank]:
    """One contender per mode, all over the batches of one bank; called by all ranks.

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
        model = build.build_dense(config, tables, source.dense_features)
        feed = bank.feed()
        if mode in YARDSTICKS:
            contenders.append(_yardstick(mode, config, world, (tables, model, feed)))
        else:
            own = replace(config, parallel=replace(config.parallel, mode=mode))
            parallel = build.build_parallel(own, _own_group(world), tables, model, source)
            parallel.set_lr(*build.build_rates(config)(0))
            ahead = config.cache.lookahead + config.cache.prefetch + 3 if mode in _CACHED else 0
            contenders.append(ModeContender(mode, parallel, feed, ahead))
        log.info("%s is there, after %.1f s", mode, time.perf_counter() - began)
    return contenders, bank


def _own_group(world: World) -> World:
    """`world` with a planning group for one contender: its planning thread must not meet those of
    the others on one group. Collective."""
    timeout = timedelta(seconds=world.timeout_s)
    return replace(world, planning_group=dist.new_group(backend="gloo", timeout=timeout))


def _here(mode: str, config: Config, world: World) -> str:
    """`mode`, or `bag` for `fused` on a GPU for which FBGEMM has no kernels here."""
    if mode not in YARDSTICKS:
        return mode
    if world.size > 1:
        raise ConfigError(f"modes={mode} runs on one rank: leave it out, or take modes=hybrid")
    reason = ""
    if mode == "fused" and world.device.type == "cuda":
        reason = _no_cuda_kernels()
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

    `data` and `host` have one store per node, `resident` a copy per rank, `hybrid` shards.
    """
    on_host = [mode for mode in modes if mode in ("data", "host") or world.device.type == "cpu"]
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
    )
    if mode == "bag":
        return TorchTables(spec, model, feed)
    return FusedTables(spec, model, feed, load_torchrec())


class Turns:
    """Contenders that train in turns, in rotating order, each all steps of the stream."""

    def __init__(self, contenders: Sequence[Contender], bank: BatchBank, world: World) -> None:
        self.contenders = {contender.name: contender for contender in contenders}
        self.bank, self.world = bank, world
        self.records: list[Record] = []
        self._trained, self._warmed = 0, 0
        self._steady = False
        self._ahead = max(contender.ahead for contender in contenders)

    def __enter__(self) -> Turns:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bank.finish()
        for contender in self.contenders.values():
            contender.close()

    def warm_up(self, least: int, most: int) -> None:
        """Train until every contender is in its steady state, from `least` to `most` steps."""
        while self._trained < most and not (self._trained >= least and self._steady):
            steps = min(least, most - self._trained)
            self._prepare(steps)
            for contender in self.contenders.values():
                for _ in range(steps):
                    contender.step()
            self._trained += steps
            unsteady = [not contender.steady() for contender in self.contenders.values()]
            flag = torch.tensor([int(any(unsteady))])
            dist.all_reduce(flag, group=self.world.host_group)
            self._steady = not flag.item()
        self._warmed = self._trained
        log.info("warm after %d steps", self._trained)
        if not self._steady:
            log.warning("no steady eviction after warmup_most=%d steps: give more", most)

    def take(self, repetition: int, lead: int, steps: int) -> None:
        """A turn of every contender over the same batches; a record for each."""
        self._prepare(lead + steps)
        for name in rotated(list(self.contenders), repetition):
            record = {"kind": "turn", "mode": name, "repetition": repetition}
            self.records.append(record | self._turn(self.contenders[name], lead, steps))
        self._trained += lead + steps

    def _prepare(self, steps: int) -> None:
        self.bank.fill(self._trained + steps + self._ahead)
        for contender in self.contenders.values():
            contender.prepare(steps)
        gc.collect()

    def _turn(self, contender: Contender, lead: int, steps: int) -> Record:
        """Milliseconds from the end of one step to the end of the next, and of each stage."""
        time.sleep(_SETTLE_S)
        for _ in range(lead):
            contender.step()
        self._synchronise()
        before, rows = contender.stage_seconds(), contender.rows()
        marks, losses = [time.perf_counter()], []
        for step in range(steps):
            losses.append(contender.step())
            if step == steps - 1:
                self._synchronise()
            marks.append(time.perf_counter())
        after = contender.stage_seconds()
        stages = {key: 1e3 * (after[key] - before.get(key, 0.0)) / steps for key in after}
        step_ms = (1e3 * np.diff(marks)).tolist()
        moved = {key: (count - rows[key]) / steps for key, count in contender.rows().items()}
        return {
            "step_ms": step_ms,
            "stage_ms": stages,
            "rows_per_step": moved,
            "loss": losses[-1],
        }

    def _synchronise(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        if self.world.size > 1:
            dist.barrier(group=self.world.host_group)

    def summarise(self) -> list[Record]:
        """All records: turns, one per mode, one per pair of modes. Called by all ranks."""
        modes = [self._mode_record(contender) for contender in self.contenders.values()]
        medians = {record["mode"]: record["turn_medians_ms"] for record in modes}
        pairs = [_pair_record(first, second, medians) for first, second in combinations(medians, 2)]
        return [*self.records, *modes, *pairs]

    def _mode_record(self, contender: Contender) -> Record:
        turns = [record for record in self.records if record["mode"] == contender.name]
        stages: dict[str, list[float]] = {}
        for turn in turns:
            for name, value in turn["stage_ms"].items():
                stages.setdefault(name, []).append(value)
        return {
            "kind": "mode",
            "mode": contender.name,
            "world_size": self.world.size,
            "step_ms": spread([value for turn in turns for value in turn["step_ms"]]),
            "turn_medians_ms": [float(np.median(turn["step_ms"])) for turn in turns],
            "stage_ms": {name: float(np.median(values)) for name, values in stages.items()},
            "loss": turns[-1]["loss"],
            "warmup_steps": self._warmed,
            "rows_per_step": _mean([turn["rows_per_step"] for turn in turns]),
            "steady_eviction": contender.steady(),
            **contender.summary(),
        }


def _mean(values: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each key."""
    return {key: sum(value[key] for value in values) / len(values) for key in values[0]}


def _pair_record(first: str, second: str, medians: dict[str, list[float]]) -> Record:
    """Ratio of two modes' median step, one value per repetition."""
    values = ratios(medians[first], medians[second])
    return {
        "kind": "ratio",
        "numerator": first,
        "denominator": second,
        "repetitions": values,
        "ratio": spread(values),
    }
