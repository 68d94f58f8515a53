"""Variants of `benchmarks.cache`: the ids that they train on, and one training step of each."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import distcache
from benchmarks.options import option
from benchmarks.report import Record
from benchmarks.stream import Pace
from distcache.embedding import step as embedding_step
from distcache.engine import start
from distcache.engine.planning import planner_threads
from distcache.engine.step import StepContext
from distcache.store.rows import ZERO_COPY, DirectRows, RowStore

MODES = ("staged", "zero_copy", "bag")
READ_AHEAD = 80
"""Batches that the largest look-ahead and its threads hold at most."""


@dataclass(frozen=True)
class CacheOptions:
    """Keys of the command line."""

    rows: int = option(25_600_000, "of each table", least=2)
    tables: int = option(10, "tables, all of one width", least=1)
    width: int = option(128, "of every table", least=1)
    batch: int = option(104_857, "samples of a step: ids of each table", least=1)
    zipf: float = option(1.05, "exponent of the power law, not 1", least=0)
    optimizer: str = option("sgd", "of the rows", among=("sgd", "adam"))
    modes: tuple[str, ...] = option(
        MODES[:2],
        "staged and zero_copy are the cache with that access to host memory; bag is "
        "torch.nn.EmbeddingBag with sparse gradients over all rows on the device",
        among=MODES,
    )
    slots: tuple[str, ...] = option(
        ("4000000",), "sizes of the cache in rows of all tables; 1.1x: times a step's distinct rows"
    )
    lookahead: str = option("auto", "steps that the planner sees ahead")
    planner_threads: tuple[int, ...] = option(
        (0,), "threads that plan; 0: the package's choice; several: one after the other", least=0
    )
    steps: int = option(20, "steps of a timed block", least=1)
    blocks: int = option(3, "timed blocks of each variant, without a pause", least=1)
    warmup: int = option(100, "steps before the first block", least=1)
    traced: int = option(10, "steps of which every stage is timed, after the blocks", least=0)
    profiled: int = option(5, "steps under the profiler, at the end (CUDA)", least=0)
    device: str = option("auto", "cpu, cuda or auto")
    out: str = option("", "the report, a .md file; JSON lines and traces go beside it")

    @property
    def needed(self) -> int:
        """Batches that a variant takes from the stream."""
        run = self.warmup + self.blocks * self.steps + self.traced + self.profiled
        return run + READ_AHEAD


# -----------------------------------------------------------------------------
# Batches.


def draw_ids(options: CacheOptions, step: int) -> np.ndarray:
    """Ids of one step, int64 `[tables, batch]`.

    The density x^-a on [1, rows + 1) is inverted in closed form; row k has the mass of [k, k + 1).
    At 25.6 M rows that gives the published number of distinct ids to 0.3 %; the discrete law gives
    5 % fewer. An affine bijection scatters popular ids, differently in each table.
    """
    rows, power = options.rows, 1.0 - options.zipf
    values = np.random.Generator(np.random.SFC64([7, step])).random((options.tables, options.batch))
    values *= math.expm1(power * math.log(rows + 1))
    np.log1p(values, out=values)
    values *= 1.0 / power
    np.exp(values, out=values)
    ids = values.astype(np.int64)
    ids -= 1
    np.clip(ids, 0, rows - 1, out=ids)  # rounding may leave the range by one
    multiplier = int(0.6180339887 * rows) | 1
    while math.gcd(multiplier, rows) != 1:
        multiplier += 2
    ids *= multiplier
    ids += (np.arange(options.tables) * (rows // options.tables + 1))[:, None]
    ids %= rows
    return ids


def draw_bank(options: CacheOptions) -> tuple[list[np.ndarray], dict[str, float]]:
    """All batches, and facts about them."""
    began = time.perf_counter()
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        bank = list(pool.map(partial(draw_ids, options), range(options.needed)))
        sample = [row for ids in bank[:: max(1, len(bank) // 8)] for row in ids]
        distinct = list(pool.map(lambda row: len(np.unique(row)), sample))
    by_step = np.asarray(distinct).reshape(-1, options.tables).sum(1)
    facts = {
        "ids": options.tables * options.batch,
        "distinct": float(by_step.mean()),
        "distinct_most": int(by_step.max()),
        "batches": len(bank),
        "seconds": time.perf_counter() - began,
    }
    return bank, facts


# -----------------------------------------------------------------------------
# Variants.


class KeptStores:
    """Tables in host memory that pass from one variant to the next: filling them takes longer than
    measuring a variant."""

    def __init__(self) -> None:
        self.stores: list[RowStore] = []
        self._direct: list[DirectRows] = []
        self._make = start.make_stores

    def make(self, world: Any, groups: Any, update: Any, *how: Any) -> list[RowStore]:
        """Stand in for `make_stores`: make the stores once, and open them as `access` says."""
        *rest, access = how
        if not self.stores:
            self.stores = self._make(world, groups, update, *rest, "staged")
            for store in self.stores:
                store.close = lambda: None  # type: ignore[method-assign]
        if access == ZERO_COPY and not self._direct:
            self._direct = [store.open_to(world.device) for store in self.stores]
        for at, store in enumerate(self.stores):
            store.direct = self._direct[at] if access == ZERO_COPY else None
        return self.stores

    @property
    def nbytes(self) -> int:
        """Bytes of all rows and their state."""
        return sum(store.nbytes for store in self.stores)

    def close(self) -> None:
        """Release the memory, which may be locked."""
        for direct in self._direct:
            direct.close()
        for store in self.stores:
            RowStore.close(store)


class Cached:
    """The drop-in collection under its look-ahead."""

    def __init__(
        self,
        options: CacheOptions,
        bank: Sequence[np.ndarray],
        device: torch.device,
        variant: tuple[str, int, int],
        kept: KeptStores,
    ) -> None:
        access, slots, threads = variant
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
        ahead = options.lookahead
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(start, "make_stores", kept.make))
            if threads:  # which the collection has no setting for
                chosen = mock.patch.object(
                    embedding_step,
                    "planner_threads",
                    lambda given, world: planner_threads(threads, world),
                )
                patches.enter_context(chosen)
            self.ebc = distcache.CachedEmbeddingBagCollection(
                configs,
                device=device,
                optimizer=update(lr=1e-3),
                rows=slots,
                lookahead=ahead if ahead == "auto" else int(ahead),
                store_access=access,
                init="seed",
            )
            self.tables = self.ebc.tables  # made now, while the patches hold
        self.rows: list[tuple[int, int, int]] = []
        engine = self.tables.engine
        count = engine.count

        def counted(context: StepContext) -> None:
            plans = context.plans
            evicted = sum(len(plan.evict_slots) for plan in plans)
            misses = sum(plan.misses for plan in plans)
            self.rows.append((sum(plan.distinct for plan in plans), misses, evicted))
            count(context)

        engine.count = counted  # type: ignore[method-assign]
        self._grad = torch.randn(options.batch, options.tables * options.width, device=device)
        self._grad *= 1e-3
        lengths = torch.ones(options.tables * options.batch, dtype=torch.int32)
        # A batch stays on the host: the look-ahead reads ids there and moves its plans itself.
        batches = (
            KeyedJaggedTensor(keys=names, values=torch.from_numpy(ids).view(-1), lengths=lengths)
            for ids in bank
        )
        self._stream = iter(distcache.lookahead(batches, self.ebc))

    def step(self) -> None:
        """Train one batch."""
        batch = next(self._stream)
        self.ebc(batch).values().backward(self._grad)
        self.ebc.step()

    def stage_sums(self) -> tuple[int, dict[str, float]]:
        """Timed steps so far and the seconds of their stages."""
        clock = self.tables.record_all()
        return clock.steps, dict(clock.seconds)

    def facts(self, first: int, last: int) -> Record:
        """Counts of steps `first` to `last`."""
        counts = np.asarray(self.rows[first:last])
        distinct, misses, evictions = counts.mean(0).tolist()
        cache_bytes = sum(of.cache.slots * of.row_bytes for of in self.tables.engine.rows)
        return {
            "distinct": distinct,
            "misses": misses,
            "evictions": evictions,
            "hit_rate": 1 - misses / distinct,
            "steady": bool((counts[:, 1] == counts[:, 2]).all() and misses > 0),
            "cache_bytes": cache_bytes,
            "lookahead": self.tables.engine.settings.lookahead,
            "planner_threads": self.tables.engine.settings.planner_threads,
        }

    def close(self) -> None:
        """Release the cache; the tables in host memory stay."""
        self._stream.close()
        self.ebc.close()


class Bag:
    """`torch.nn.EmbeddingBag` over all rows on the device, with sparse gradients."""

    def __init__(
        self, options: CacheOptions, bank: Sequence[np.ndarray], device: torch.device
    ) -> None:
        shape, width = (options.tables * options.rows, options.width), options.width
        self._bag = nn.EmbeddingBag(*shape, mode="sum", sparse=True, device="meta")
        self._bag.weight = nn.Parameter(torch.empty(shape, device=device).uniform_(-1e-3, 1e-3))
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.SparseAdam}[options.optimizer]
        self._optimizer = kind([self._bag.weight], lr=1e-3)
        self._device, self._pace = device, Pace(device)
        first = (np.arange(options.tables) * options.rows)[:, None]
        used = bank[: options.needed - READ_AHEAD]
        # Sample after sample, as the pooled output has them.
        formed = [torch.from_numpy(np.ascontiguousarray((ids + first).T)).view(-1) for ids in used]
        # A copy from pageable memory would wait for the device.
        self._batches = iter([ids.pin_memory() for ids in formed] if self._cuda else formed)
        self._offsets = torch.arange(options.tables * options.batch, device=device)
        self._grad = torch.randn(len(self._offsets), width, device=device) * 1e-3

    @property
    def _cuda(self) -> bool:
        return self._device.type == "cuda"

    def step(self) -> None:
        """Train one batch."""
        ids = next(self._batches).to(self._device, non_blocking=True)
        self._bag(ids, self._offsets).backward(self._grad)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._pace.keep()

    def close(self) -> None:
        """Release the tables."""
        del self._bag, self._optimizer, self._batches
