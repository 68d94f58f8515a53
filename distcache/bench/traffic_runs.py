"""Short real runs of the traffic bench: their counters beside what is computed without them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from distcache.bench.report import Record
from distcache.bench.traffic_replay import Shape, TrafficSettings, hybrid_record, replay_traffic
from distcache.cli.compose import override
from distcache.engine.groups import Placement
from distcache.errors import ConfigError

KEYS = ("collective_bytes", "planning_bytes")
"""Counters that are compared."""


def run_records(shape: Shape, worlds: Sequence[int], steps: int, shrink: int) -> list[Record]:
    """Counted and computed bytes per rank and step, of `steps` steps from the first on: hybrid
    table-wise by TorchRec, and `auto` with objective `bytes`.

    `shrink` divides the tables' rows, which must fit in memory as often as there are runs at once.
    """
    rows = tuple(max(1, count // shrink) for count in shape.table_rows)
    small = replace(shape, table_rows=rows, slots=max(64, shape.slots // shrink))
    small = replace(small, slots=-(-small.slots // 64) * 64)
    return [record for world in worlds for record in _of_world(small, world, steps)]


def _of_world(shape: Shape, world: int, steps: int) -> list[Record]:
    common = {"kind": "run", "world": world, "steps": steps}
    hybrid, choice = hybrid_record(shape, world), shape.choice(world)
    hot = ()
    if choice.replicated_rows:
        hot = shape.of_ranks([choice.replicated_rows.get(t.name, 0) for t in shape.tables])
    settings = TrafficSettings(
        world, (shape.slots,), Placement(choice.placement, hot=hot), (0,), shape.lookahead,
        shape.prefetch,
    )  # fmt: skip
    order = (("train", step) for step in range(steps))
    found = list(replay_traffic(shape.source(world), shape.tables, settings, order))
    expected = {
        "collective_bytes": float(np.mean([step.sent for step in found])),
        "planning_bytes": float(np.mean([step.planning for step in found])),
    }
    auto = ("parallel=data", "cache.placement=auto", "cache.objective=bytes")
    ahead = (f"cache.lookahead={shape.lookahead}", f"cache.prefetch={shape.prefetch}")
    table_wise = ("parallel=hybrid", "parallel.sharding=table_wise")
    counted = {
        "hybrid": counters(shape, world, steps, table_wise),
        "auto": counters(shape, world, steps, (*auto, *ahead, f"cache.rows={shape.slots}")),
    }
    pooled = {"collective_bytes": hybrid["sent_mean"], "planning_bytes": hybrid["planning_mean"]}
    computed = {"hybrid": pooled, "auto": expected}
    return [
        {**common, "layout": name, "counted": counted[name], "computed": computed[name]}
        for name in ("hybrid", "auto")
    ]


def counters(shape: Shape, world: int, steps: int, words: Sequence[str]) -> dict[str, float]:
    """Bytes per rank and step of `KEYS` that a run with these overrides counts."""
    common = (
        "data=synthetic",
        f"data.table_rows=[{','.join(map(str, shape.table_rows))}]",
        f"data.zipf={shape.zipf}",
        f"data.global_batch_size={shape.batch * world}",
        f"trainer.seed={shape.seed}",
        f"model.embedding_dim={shape.dim}",
        f"model.dense_arch=[{shape.dim}]",
        "model.over_arch=[16,1]",
        "optim=sgd",
        f"trainer.steps={steps}",
        "trainer.eval_steps=0",
        "trainer.device=cpu",
        "run.save=false",
        "run.digest=false",
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}")
    with tempfile.TemporaryDirectory(prefix="traffic-") as folder:
        command = [sys.executable, *torchrun, "-m", "distcache.train", *common, *words]
        command.append(override("run.dir", Path(folder) / "run"))
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "error" in line.lower()]
            raise ConfigError(f"a run of {world} ranks failed: {' / '.join(said[:2])}")
        summary = json.loads((Path(folder) / "run/summary.json").read_text())
    return {key: summary[key] / steps for key in KEYS}
