"""Bytes that every placement sends, beside hybrid table-wise: `python -m distcache.bench.traffic`.

Synthetic ids go through the planners of all ranks in one process, without tensors; the counts are
those of a training run's counters to the byte. Hybrid's are exact by arithmetic. Short real runs
confirm both.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distcache.bench.command import Bench, run_bench
from distcache.bench.options import at_least, option
from distcache.bench.report import Record
from distcache.bench.traffic_prediction import CLICKS, Known, data_cases, prediction_records
from distcache.bench.traffic_replay import (
    PLACEMENTS,
    Extent,
    Shape,
    hybrid_record,
    placement_of,
    replay_record,
    speed_records,
)
from distcache.bench.traffic_runs import run_records
from distcache.bench.traffic_tables import tables
from distcache.data.raw.settings import KAGGLE_ROWS
from distcache.engine.groups import Placement
from distcache.errors import ConfigError

log = logging.getLogger("distcache.bench.traffic")

MODULE = "distcache.bench.traffic"
PURPOSE = "Bytes of every placement beside hybrid table-wise, and their predictions, by replay."


@dataclass(frozen=True)
class TrafficOptions:
    """The keys of the command line."""

    worlds: tuple[int, ...] = option((2, 4, 8, 16, 32, 64), "numbers of ranks")
    batch: int = option(2048, "samples of a rank and step, 26 ids each")
    dim: int = option(16, "width of a row")
    zipf: float = option(1.05, "exponent of the ids")
    cached: float = option(1.5, "slots of a rank, % of all rows")
    share: float = option(0.02, "replicated rows of mixed, % of all rows, the likeliest ones")
    lookahead: int = option(8, "L")
    prefetch: int = option(1, "P")
    steps: int = option(5, "steps counted")
    warm_ids: int = option(12_000_000, "ids after which a cache with free slots is counted, too")
    shrink: int = option(1, "divides the rows of the tables of Criteo Kaggle")
    runs: tuple[int, ...] = option((2, 4), "numbers of ranks of real runs; 0: none")
    run_steps: int = option(6, "steps of a real run, from the first on")
    run_shrink: int = option(8, "divides the rows of the tables of real runs")
    sources: bool = option(True, "predictions on three sources of data")
    folder: str = option("", f"a folder with {CLICKS}; without it, interactions are drawn")
    seed: int = option(0, "of all that is drawn")
    out: str = option("", "the report, a .md file; JSON lines go beside it")

    def __post_init__(self) -> None:
        at_least(2, worlds=min(self.worlds))
        at_least(0, runs=min(self.runs), prefetch=self.prefetch, lookahead=self.lookahead)
        at_least(1, batch=self.batch, dim=self.dim, steps=self.steps, run_steps=self.run_steps)
        at_least(1, shrink=self.shrink, run_shrink=self.run_shrink)
        if 1 in self.runs:
            raise ConfigError("runs=1: one rank sends nothing: give 2 or more, or 0 for no run")
        for key, value in (("cached", self.cached), ("share", self.share)):
            if not 0 < value <= 100:
                raise ConfigError(f"{key}={value} is not a percentage above 0 and at most 100")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; the exit code."""
    return run_bench(Bench("Traffic", MODULE, PURPOSE, TrafficOptions, measure, tables), arguments)


def shape_of(options: TrafficOptions) -> Shape:
    """What is replayed."""
    rows = tuple(max(1, count // options.shrink) for count in KAGGLE_ROWS)
    slots = max(1, round(sum(rows) * options.cached / 100))
    slots = -(-slots // max(options.worlds)) * max(options.worlds)  # homes have equal ranges
    ahead = (options.lookahead, options.prefetch, options.seed)
    return Shape(rows, options.zipf, options.batch, options.dim, slots, *ahead)


def measure(options: TrafficOptions) -> list[Record]:
    """Records `replay`, `choice` and `hybrid` for every number of ranks, `run`, `speed` and
    `prediction`."""
    shape, extent = shape_of(options), Extent(options.steps, options.warm_ids)
    records: list[Record] = []
    for world in options.worlds:
        for name in PLACEMENTS:
            placed = placement_of(shape, name, options.share / 100)
            records.append(replay_record(shape, world, name, placed, extent))
            log.info("W = %d, %s: %.0f B", world, name, records[-1]["sent_mean"])
        records.append(_choice_record(shape, world, records, extent))
        records.append(hybrid_record(shape, world))
    worlds = [world for world in options.runs if world]
    records += run_records(shape, worlds, options.run_steps, options.run_shrink)
    records += speed_records(shape, options.worlds)
    if options.sources:
        records += _prediction_records(options, worlds or [2])
    return records


def _prediction_records(options: TrafficOptions, worlds: Sequence[int]) -> list[Record]:
    """Predictions on three sources."""
    clicks = Path(options.folder) / CLICKS if options.folder else None
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="traffic-") as folder:
        for case in data_cases(Path(folder), clicks):
            records += prediction_records(Known.of(case), worlds)
            log.info("%s: predicted", case.name)
    return records


def _choice_record(shape: Shape, world: int, records: Sequence[Record], extent: Extent) -> Record:
    """What `auto` with objective `bytes` takes, and sends."""
    choice = shape.choice(world)
    known = [r for r in records if r["kind"] == "replay" and r["world"] == world]
    sent = {r["placement"]: r["sent_mean"] for r in known}
    if choice.placement in sent and not choice.replicated_rows:
        chosen = sent[choice.placement]
    else:
        counts = [choice.replicated_rows.get(table.name, 0) for table in shape.tables]
        placed = Placement(choice.placement, hot=shape.of_ranks(counts)), choice.replicated_rows
        chosen = replay_record(shape, world, "auto", placed, extent)["sent_mean"]
    return {
        "kind": "choice",
        "world": world,
        "placement": choice.placement,
        "hot_rows": sum(choice.replicated_rows.values()),
        "why": choice.why,
        "sent_mean": chosen,
        "smallest_fixed": min(sent.values()),
    }


if __name__ == "__main__":
    sys.exit(main())
