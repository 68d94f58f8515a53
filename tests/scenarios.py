"""Small training runs with awkward shapes, the same in every mode and at every world size; what
they are held against, and the statistics of their batches.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import reference_trainer
import torch
from torch import Tensor, nn

from distcache.comm.world import World
from distcache.data.batch import Batch, BatchSource, JaggedIds, slice_bounds
from distcache.layout import TableSpec
from distcache.models import initialise
from distcache.optim import RowUpdate, row_update
from distcache.parallel.cached import CachedParallel, CachedSettings
from distcache.popularity.slots import statistics_of
from distcache.popularity.statistics import (
    Popularity,
    Statistics,
    TableCounts,
    vocabulary_of,
)
from distcache.sizing.slots import CacheRequest


class SmallNet(nn.Module):
    """An MLP over dense features and pooled rows: `(dense [b, F], pooled [b, P]) -> [b]`."""

    def __init__(self, dense_features: int, pooled: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(dense_features + pooled, 16), nn.ReLU(), nn.Linear(16, 1)
        )

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.layers(torch.cat([dense, pooled], dim=1)).squeeze(1)


@dataclass(frozen=True)
class Scenario:
    """Tables, bags and optimizer of a run. `bag`: largest number of ids in a bag (0 to bag)."""

    tables: tuple[TableSpec, ...]
    optimizer: RowUpdate = field(default_factory=lambda: row_update("sgd"))
    lr: float = 0.1
    global_batch: int = 24
    last_batch: int | None = None
    steps: int = 30
    bag: int = 3
    weighted: bool = False
    skew: float = 3.0
    dtype: torch.dtype = torch.float32
    seed: int = 0
    empty_ranks: bool = False

    @property
    def readers(self) -> dict[str, TableSpec]:
        """The table of each feature, later tables first, to be unlike the order of tables."""
        return {f: table for table in reversed(self.tables) for f in table.features}

    @property
    def features(self) -> tuple[str, ...]:
        """The features that batches have: all."""
        return tuple(self.readers)

    @property
    def pooled_width(self) -> int:
        """Sum of the features' widths."""
        return sum(table.dim * len(table.features) for table in self.tables)

    def model(self) -> nn.Module:
        """The dense part with its initial weights."""
        return initialise(SmallNet(5, self.pooled_width), self.seed, self.dtype)

    def batch(self, step: int, rank: int = 0, world: int = 1, kind: str = "train") -> Batch:
        """This rank's slice of a step."""
        size = self.global_batch
        if self.last_batch is not None and step == self.steps - 1 and kind == "train":
            size = self.last_batch
        rng = np.random.default_rng([self.seed, step, kind == "eval"])
        lengths, values, weights = [], [], []
        low, high = slice_bounds(size, rank, world)
        if self.empty_ranks and world > 1:
            low, high = slice_bounds(size, max(rank - 1, 0), world - 1)
            high = low if rank == 0 else high
        dense = rng.standard_normal((size, 5))
        labels = (rng.random(size) < 0.3).astype(np.float64)
        for table in map(self.readers.get, self.features):
            counts = rng.integers(0, self.bag + 1, size) if self.bag > 1 else np.ones(size, int)
            ids = (rng.random(counts.sum()) ** self.skew * table.rows).astype(np.int64)
            weight = rng.uniform(0.5, 1.5, counts.sum())
            edges = np.concatenate(([0], np.cumsum(counts)))
            mine = slice(edges[low], edges[high])
            lengths.append(counts[low:high])
            values.append(ids[mine])
            weights.append(weight[mine])
        offsets = np.concatenate(([0], np.cumsum(np.concatenate(lengths)))).astype(np.int64)
        jagged = JaggedIds(
            self.features,
            torch.from_numpy(np.concatenate(values)),
            torch.from_numpy(offsets),
            torch.from_numpy(np.concatenate(weights)).to(self.dtype) if self.weighted else None,
        )
        return Batch(
            dense=torch.from_numpy(dense[low:high]).to(self.dtype),
            ids=jagged,
            labels=torch.from_numpy(labels[low:high]).to(self.dtype),
            global_size=size,
            index=step,
            epoch=0,
            first_sample=low,
            kind=kind,
        )


class Source:
    """The batches of a scenario, without end."""

    steps_per_epoch: int | None = None
    eval_batches: int | None = 0
    dense_features = 5
    identity: ClassVar[dict[str, str]] = {}

    def __init__(self, case: Scenario) -> None:
        self.train_batch, self.features = case.batch, case.features
        self.table_rows = tuple(table.rows for table in case.readers.values())


def table(name: str, rows: int, dim: int = 8, features: int = 1, pooling: str = "sum") -> TableSpec:
    """A table read by `features` features."""
    return TableSpec(name, rows, dim, tuple(f"{name}_{i}" for i in range(features)), pooling)


@dataclass
class Outcome:
    """Losses, final weights by table and dense state, the mode's summary, the digest of all weights
    and the cache. On several nodes the tables, and the digest, are those of rank 0 alone."""

    losses: list[float]
    tables: dict[str, np.ndarray]
    dense: dict[str, np.ndarray]
    summary: dict
    state_digest: str = ""
    cached: np.ndarray | None = None


class Shaker:
    """Shakes out races: sleeps up to 1.5 ms at a hand-over between threads, or not.

    Two calls in three return at once, so that threads run in bursts as well as one by one. The
    delays of a thread depend on `seed` and the thread's name; results must depend on none.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._local = seed, threading.local()

    def __call__(self) -> None:
        if not hasattr(self._local, "draw"):
            self._local.draw = random.Random(f"{self._seed} {threading.current_thread().name}")
        if self._local.draw.random() < 1 / 3:
            time.sleep(self._local.draw.random() * 1.5e-3)


def make_mode(
    world: World, case: Scenario, settings: CachedSettings, popularity: Popularity | None = None
) -> CachedParallel:
    """A cached mode that trains `case`."""
    parts = (case.tables, case.features, case.model(), case.optimizer)
    mode = CachedParallel(world, *parts, settings, popularity)
    mode.set_lr(case.lr, case.lr)
    if settings.schedule == "overlapped":
        mode.tables.delay_hook = Shaker(world.rank)
    return mode


def run_mode(
    world: World,
    scenario: Scenario,
    settings: CachedSettings,
    evals: int = 0,
    popularity: Popularity | None = None,
) -> Outcome:
    """Train `scenario` in a cached mode; an evaluation batch every `evals` steps (0: none)."""
    mode = make_mode(world, scenario, settings, popularity)

    def batches():
        for step in range(scenario.steps):
            yield scenario.batch(step, world.rank, world.size)
            if evals and step % evals == evals - 1:
                yield scenario.batch(1000 + step, world.rank, world.size, "eval")

    losses = []
    for step in mode.stream(batches()):
        if step.batch.kind == "eval":
            mode.eval_step(step)
        else:
            losses.append(mode.train_step(step).loss)
    return finish(mode, scenario, losses)


def finish(mode, scenario: Scenario, losses: list[float]) -> Outcome:
    """Flush, digest and close."""
    mode.flush()
    blocks = [mode.table_block(index, 0, t.rows) for index, t in enumerate(scenario.tables)]
    pairs = zip(scenario.tables, blocks, strict=True)  # on several nodes rank 0 alone has them
    wide = {spec.name: block.to(scenario.dtype) for spec, block in pairs if block is not None}
    tables = {name: block.clone().numpy() for name, block in wide.items()}
    dense = {name: value.cpu().clone().numpy() for name, value in mode.dense_state().items()}
    state = hashlib.sha256()
    for value in (*tables.values(), *dense.values()):
        state.update(np.ascontiguousarray(value))
    cached = mode.rows[0].cache.weight.to("cpu", scenario.dtype, copy=True).numpy()
    summary = mode.summary()
    mode.close()
    return Outcome(losses, tables, dense, summary, state.hexdigest(), cached)


OPTIMIZERS = {
    "sgd": (row_update("sgd"), 0.1),
    "adagrad": (row_update("adagrad", initial_accumulator=0.1), 0.005),
    "rowwise_adagrad": (row_update("rowwise_adagrad", initial_accumulator=0.1), 0.005),
    "adam": (row_update("adam"), 0.005),
    "momentum_sgd": (row_update("momentum_sgd", weight_decay=0.01), 0.02),
    "adamw": (row_update("adamw"), 0.005),
    "partial_rowwise_adam": (row_update("partial_rowwise_adam"), 0.005),
    "counted_adam": (row_update("counted_adam", weight_decay=0.01), 0.005),
    "ftrl": (row_update("ftrl", l1=1e-4, l2=1e-3), 0.05),
    "l2": (row_update("rowwise_adagrad", initial_accumulator=0.1, weight_decay=0.1), 0.005),
    "decoupled": (
        row_update(
            "rowwise_adagrad",
            initial_accumulator=0.1,
            weight_decay=0.1,
            decoupled_weight_decay=True,
        ),
        0.005,
    ),
}
"""A well-conditioned setting of each optimizer, and its learning rate."""


def check_against_trainer(
    case: Scenario,
    start: Outcome,
    found: Outcome,
    weights: float | None = None,
    by_table: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Losses within 1e-9 (float64) or 1e-5, weights within 1e-10 (or `weights`), or ten times the
    drift of the trainer itself when it takes its samples in reverse; `by_table`: as of its
    settings."""
    own = {key: value for key, value in vars(case.optimizer).items() if key != "lr"}
    settings = reference_trainer.Settings(
        optimizer=case.optimizer.name,
        feature_tables=tuple(case.readers[feature].name for feature in case.features),
        dense_lr=case.lr,
        embedding_lr=case.lr,
        **own,
        by_table=by_table or {},
        pooling={spec.name: spec.pooling for spec in case.tables},
    )
    first, ours = (
        reference_trainer.Trained(
            outcome.losses,
            {name: torch.from_numpy(value) for name, value in outcome.tables.items()},
            {name: torch.from_numpy(value) for name, value in outcome.dense.items()},
        )
        for outcome in (start, found)
    )
    given = (first.tables, first.dense, case.model())
    batches = [case.batch(step) for step in range(case.steps)]
    expected, reverse = (
        reference_trainer.train(*given, replace(settings, reverse=reverse), batches)
        for reverse in (False, True)
    )
    loss, weight = reference_trainer.difference(ours, expected)
    loss_drift, weight_drift = reference_trainer.difference(reverse, expected)
    double = case.dtype is torch.float64
    assert loss <= max(1e-9 if double else 1e-5, 10 * loss_drift)
    if double or weights:
        assert weight <= max(weights or 1e-10, 10 * weight_drift)


def count_ids(
    rows: Mapping[str, int], batches: Iterable[JaggedIds], vocabulary: str = "ids"
) -> Statistics:
    """How often each row of the features' tables is looked up; `rows`: by feature."""
    counts, samples = {feature: np.zeros(count, np.int64) for feature, count in rows.items()}, 0
    for ids in batches:
        samples += ids.batch_size
        spans = np.split(ids.values.numpy(), ids.offsets.numpy()[:: ids.batch_size][1:-1])
        for feature, values in zip(ids.features, spans, strict=True):
            counts[feature] += np.bincount(values, minlength=rows[feature])
    tables = tuple(TableCounts.of(feature, own) for feature, own in counts.items())
    return Statistics(tables, vocabulary, samples)


def count_steps(source: BatchSource, steps: Iterable[int]) -> Statistics:
    """Of some training steps of a source."""
    rows = dict(zip(source.features, source.table_rows, strict=True))
    batches = (source.train_batch(step, 0, 1).ids for step in steps)
    return count_ids(rows, batches, vocabulary_of(source))


def count(case: Scenario, steps: Iterable[int]) -> Statistics:
    """Of every feature over some steps of a scenario."""
    rows = {feature: case.readers[feature].rows for feature in case.features}
    return count_ids(rows, (case.batch(step).ids for step in steps))


def popularity_of(case: Scenario, slots: tuple[int, ...], **how: object) -> Popularity:
    """The popularity of the first half of a run for caches of `slots`."""
    counted = statistics_of(count(case, range(max(case.steps // 2, 1))), case.tables, "here")
    request = CacheRequest(case.tables, None, case.optimizer, 1, 4, 0, 1, "bytes")
    return Popularity(counted, request.first_rows(slots, counted), **how)
