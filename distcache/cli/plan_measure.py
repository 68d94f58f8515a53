"""Measure this machine for `distcache.plan`: `torchrun ... -m distcache.cli.plan_measure`.

The ranks time links, row operations and the dense part; rank 0 writes the numbers as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distcache.cli.run import leave, run_job, set_up_logging, train_command
from distcache.comm.rendezvous import find_place
from distcache.comm.world import World, close_world, open_world
from distcache.cost.cluster import Compute
from distcache.errors import DistcacheError
from distcache.models import build_model
from distcache.optim import row_update
from distcache.trainer.measure import DensePart, Measured, measure

log = logging.getLogger(__name__)

DENSE_FEATURES = 13


@dataclass(frozen=True)
class Options:
    """What to measure. `tables`: vectors of `width` elements that the dense part takes."""

    width: int
    tables: int
    batch: int
    optim: str
    out: str = ""


def measured_here(ranks: int, options: Options) -> dict[str, Any]:
    """Start `ranks` local ranks that measure; their numbers, as `Measured` has them, and the device
    (`cpu` or `cuda`)."""
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "measured.json", Path(folder) / "log"
        argument = json.dumps(asdict(options) | {"out": str(out)})
        command = train_command(ranks, [argument], "distcache.cli.plan_measure")
        code = run_job(command, ranks, said)
        if code or not out.exists():
            raise DistcacheError(
                f"measure=true: {ranks} local ranks ended with exit code {code}:\n"
                f"{said.read_text()[-2000:]}"
            )
        return json.loads(out.read_text())


def to_measured(values: dict[str, Any]) -> Measured:
    """What `measured_here` read."""
    compute = Compute(**values["compute"])
    return Measured(values["inside"], values["latency_s"], values["host"], compute)


def main() -> int:
    """One rank of the measurement; its exit code."""
    options = Options(**json.loads(sys.argv[1]))
    place = find_place()
    set_up_logging("INFO", place.rank, place.world_size)
    world: World | None = None
    try:
        world = open_world()
        found = measure(
            world, options.width, row_update(options.optim, 0.0), _dense(options, world)
        )
        if world.is_first:
            values = asdict(found) | {"device": world.device.type, "ranks": world.size}
            Path(options.out).write_text(json.dumps(values))
        close_world(world)
        return 0
    except DistcacheError as error:
        log.error("%s", error)
        return 1
    finally:
        if world is not None:
            close_world(world, orderly=False)


def dense_layers(width: int) -> tuple[Sequence[int], Sequence[int]]:
    """Layers of the dense part that is measured: DLRM's of experiment criteo_kaggle."""
    return (512, 256, 64, width), (512, 256, 1)


def _dense(options: Options, world: World) -> DensePart:
    widths = [options.width] * options.tables
    model = build_model("dlrm", DENSE_FEATURES, widths, *dense_layers(options.width))
    return DensePart(model.to(world.device), DENSE_FEATURES, sum(widths), options.batch)


if __name__ == "__main__":
    leave(main())
