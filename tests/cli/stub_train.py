"""`distcache.train` with a stand-in for the trainer; what it does is chosen by `trainer.seed`.

It leaves a made-up run folder. Seeds above 10 fail in the mode `host` alone.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import types
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from distcache.errors import DataError, PeerError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fabricated import summary, write_run

OK, RANK_FAILS, PEER_FIRST, BUG, STOPPED, SLEEPS = range(6)
HOST_FAILS = 11


def train(config, world, run_dir, begun=None):
    """Leave a file per rank, then end in the way that the seed says."""
    (run_dir / f"rank{world.rank}.json").write_text(json.dumps(asdict(config)))
    last = world.rank == world.size - 1
    case = config.trainer.seed
    if case == HOST_FAILS and last and config.parallel.mode == "host":
        raise DataError("feature f3, table t_3: id 99 is beyond its 10 rows")
    if case == RANK_FAILS and last:
        raise DataError("feature f3, table t_3: id 99 is beyond its 10 rows")
    if case == PEER_FIRST:
        if last:
            time.sleep(0.5)
            raise DataError("the cause")
        raise PeerError("rank 1 sent an error")
    if case == BUG and last:
        raise ZeroDivisionError("a bug")
    if case == SLEEPS:
        (run_dir / "asleep").touch()
        time.sleep(50)
    total = torch.ones(1)
    dist.all_reduce(total, group=world.host_group)
    if world.is_first:
        write_run(run_dir, summary(config.parallel.mode, world_size=int(total)))
    if case == STOPPED:
        return SimpleNamespace(summary={}, stopped_by=signal.SIGINT)
    return SimpleNamespace(summary={}, stopped_by=None)


if __name__ == "__main__":
    stub = types.ModuleType("distcache.trainer.trainer")
    stub.train = train
    sys.modules["distcache.trainer.trainer"] = stub
    from distcache.train import main

    sys.exit(main())
