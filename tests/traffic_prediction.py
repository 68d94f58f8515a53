"""Predicted bytes per link beside counted ones: three sources, three placements.

Counted: by the replay of the same steps, whose bytes are those of the counters of a real run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from traffic_runs import Run, StepTraffic, replayed

from benchmarks.preprocess import write_lines
from distcache.cli.compose import compose_overrides, override, to_config
from distcache.cost.cluster import Cluster, Link
from distcache.cost.demand import Demand, counted_sources, demand_at, zipf_sources
from distcache.cost.predict import Prediction, Settings, predict
from distcache.data.batch import BatchSource
from distcache.data.raw.settings import KAGGLE_ROWS
from distcache.engine.groups import MIXED, REPLICATED, SHARDED, Placement
from distcache.layout import TableSpec
from distcache.optim import row_update
from distcache.popularity.statistics import Statistics, TableCounts
from distcache.trainer import build

OPTIMIZER = "adagrad"
CLOSE = 0.03
"""Most that predicted bytes of a link may be off."""

_WIDTH = "model.embedding_dim=8"


@dataclass(frozen=True)
class DataCase:
    """A source by its overrides. `slots`: C of a rank where rows are replicated; where they are
    sharded, a W-th of it, so that as many rows are cached; `zipf`: the law of its ids, if known."""

    name: str
    data: tuple[str, ...]
    slots: int
    steps: int
    zipf: float | None = None
    lookahead: int = 4
    prefetch: int = 1

    def source(self) -> tuple[BatchSource, list[TableSpec]]:
        """The data, and its tables."""
        config = to_config(compose_overrides(["trainer.device=cpu", *self.data]))
        source = build.build_source(config)
        return source, build.build_tables(config, source)

    def slots_of(self, kind: str, world: int) -> int:
        """C of a rank, a multiple of W."""
        share = self.slots if kind == REPLICATED else -(-self.slots // world)
        return -(-share // world) * world

    def run(self, placement: Placement, world: int) -> Run:
        """The run of the case's steps in a placement."""
        slots = (self.slots_of(placement.kind, world),)
        ahead = (self.lookahead, self.prefetch)
        return Run(self.data, slots, placement, OPTIMIZER, *ahead, self.steps)


def synthetic_case(steps: int = 100) -> DataCase:
    """Ids by a known law."""
    shape = ("data=synthetic", "data.table_rows=[30000,4000,600]", "data.zipf=1.05")
    data = (*shape, "data.global_batch_size=512", _WIDTH)
    return DataCase("synthetic, Zipf 1.05", data, 4000, steps, 1.05)


def data_cases(folder: Path) -> list[DataCase]:
    """Synthetic ids, drawn interactions and drawn Criteo lines, in files of `folder`."""
    clicks, lines = folder / "interactions.txt", folder / "criteo.txt"
    _write_clicks(clicks)
    write_lines(lines, 10_000_000)
    interactions = (
        *("data=interactions", override("data.path", clicks), "data.on_bad_line=skip"),
        *("data.negatives=1", "data.global_batch_size=1024", _WIDTH),
    )
    rows = ",".join(str(max(count // 200, 3)) for count in KAGGLE_ROWS)
    criteo = (
        *("data=criteo", override("data.path", lines), f"data.table_rows=[{rows}]"),
        *("data.global_batch_size=512", _WIDTH),
    )
    return [
        synthetic_case(),
        DataCase("interactions", interactions, 16_000, 100),
        DataCase("Criteo lines", criteo, 24_000, 80),
    ]


def _write_clicks(path: Path) -> None:
    """Users with a few skewed items each."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for user in range(9000):
            items = np.unique((30_000 * rng.random(rng.integers(4, 20)) ** 3).astype(np.int64))
            file.write(f"{user} {' '.join(map(str, items))}\n")


@dataclass(frozen=True)
class Known:
    """A case's tables and counts over its steps, and the placements with {table: K}."""

    case: DataCase
    tables: list[TableSpec]
    statistics: Statistics
    batch: int
    placements: tuple[tuple[Placement, dict[str, int]], ...]

    @classmethod
    def of(cls, case: DataCase, share: float = 0.01) -> Known:
        """`share` of each table's rows is replicated in `mixed`, the most frequent ones."""
        source, tables = case.source()
        case = replace(case, steps=min(case.steps, source.steps_per_epoch or case.steps))
        statistics = _count(source, case.steps)
        counts = [max(1, round(share * table.rows)) for table in tables]
        found = zip(statistics.tables, counts, strict=True)
        hot = tuple(np.sort(table.order[:count]) for table, count in found)
        named = {table.name: len(ids) for table, ids in zip(tables, hot, strict=True)}
        placements = (
            (Placement(REPLICATED), {}),
            (Placement(SHARDED), {}),
            (Placement(MIXED, hot=hot), named),
        )
        return cls(case, tables, statistics, statistics.samples // case.steps, placements)

    def counted(self, placement: Placement, world: int) -> list[StepTraffic]:
        """The replay."""
        return replayed(self.case.run(placement, world), world)

    def demand(self, world: int, law: bool) -> Demand:
        """From the law of the ids, or from the counts."""
        dims, case = [table.dim for table in self.tables], self.case
        if law and case.zipf is not None:
            rows = [table.rows for table in self.tables]
            names = [table.name for table in self.tables]
            one = [1.0] * len(rows)
            sources = zipf_sources(rows, dims, one, [case.zipf] * len(rows), names)
        else:
            sources = counted_sources(self.statistics, dims)
        update = row_update(OPTIMIZER, 0.0)
        states = [update.state_width(dim) for dim in dims]
        return demand_at(sources, states, self.batch / world, world)

    def predicted(
        self, of: tuple[Placement, dict[str, int]], world: int, law: bool, fetched: float | None
    ) -> Prediction:
        """Of the steps from the first on; `fetched`: rows per step, if a replay told them."""
        (placement, counts), case, link = of, self.case, Link(1e9)
        settings = Settings(
            (case.slots_of(placement.kind, world),),
            placement.state,
            case.lookahead,
            case.prefetch,
            case.steps,
            fetched={} if fetched is None else {placement.kind: fetched},
        )
        demand = self.demand(world, law)
        return predict(placement.kind, demand, Cluster(world, link, link), settings, counts)


def _count(source: BatchSource, steps: int) -> Statistics:
    """How often each row is looked up."""
    counts, samples = [np.zeros(rows, np.int64) for rows in source.table_rows], 0
    for step in range(steps):
        ids = source.train_batch(step, 0, 1).ids
        samples += ids.batch_size
        starts = ids.offsets[:: ids.batch_size].tolist()
        for table, count in enumerate(counts):
            values = ids.values[starts[table] : starts[table + 1]].numpy()
            count += np.bincount(values, minlength=len(count))
    tables = tuple(
        TableCounts(name, len(c), int(c.sum()), int((c > 0).sum()), c)
        for name, c in zip(source.features, counts, strict=True)
    )
    return Statistics(tables, "ids", samples)


def prediction_records(known: Known, worlds: Sequence[int]) -> list[dict[str, Any]]:
    """Records `prediction` of every placement: by the law or the counts, and with the rows fetched
    that a replay tells."""
    records: list[dict[str, Any]] = []
    for world in worlds:
        for of in known.placements:
            steps = known.counted(of[0], world)
            fetched = float(np.mean([step.fetched for step in steps]))
            ways = {"counts": (False, None), "counts, replayed": (False, fetched)}
            if known.case.zipf is not None:
                ways = {"law": (True, None), "law, replayed": (True, fetched), **ways}
            found = {way: known.predicted(of, world, *how) for way, how in ways.items()}
            records.append(
                {
                    "kind": "prediction",
                    "source": known.case.name,
                    "world": world,
                    "placement": of[0].kind,
                    "steps": len(steps),
                    "counted": {
                        "collective": float(np.mean([step.sent for step in steps])),
                        "host_read": float(np.mean([step.host_read for step in steps])),
                    },
                    "predicted": {
                        way: {
                            "collective": p.collective_bytes,
                            "host_read": p.traffic.host_in,
                        }
                        for way, p in found.items()
                    },
                }
            )
    return records
