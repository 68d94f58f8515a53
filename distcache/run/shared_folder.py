"""Whether all nodes see one and the same folder, as checkpoints and traces need it."""

from __future__ import annotations

import logging
import time
import uuid
from pathlib import Path

from distcache.comm.agree import together
from distcache.comm.first import on_first
from distcache.comm.world import World
from distcache.errors import ConfigError, DistcacheError

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long a network file system may take to show another node's file, seconds."""

_POLL_S = 0.1


def blind_ranks(world: World, folder: Path) -> list[int]:
    """The first ranks of the nodes that do not see what rank 0 writes into `folder`, which is
    there; called by all ranks. None on one node."""
    if world.nodes.count == 1:
        return []
    name = on_first(world, lambda: _leave_mark(folder))
    seen = together(world, lambda: world.local_rank > 0 or _sees(folder / name))
    on_first(world, lambda: (folder / name).unlink(missing_ok=True))
    return [rank for rank, sees in enumerate(seen) if not sees]


def check_run_folder(world: World, folder: Path, needed_by: str | None) -> None:
    """Refuse a run folder that is not the same on all nodes where `needed_by` (a key) needs that.

    Else a warning says what will not work. Called by all ranks, once rank 0 has made the folder.
    Raises ConfigError.
    """
    blind = blind_ranks(world, folder)
    if not blind:
        return
    where = (
        f"run.dir={folder} is not the same folder on the node(s) of ranks {blind} as on rank 0's"
    )
    if needed_by is not None:
        raise ConfigError(
            f"{where}, and {needed_by} has all nodes write there: name a folder that all nodes "
            "share (NFS, Lustre ...), the same path on each"
        )
    if world.is_first:
        log.warning("%s: nothing can be saved should this run be stopped", where)


def require_shared(world: World, folder: Path) -> None:
    """Raise DistcacheError where not all nodes see `folder`, before anything is written there."""
    if blind := blind_ranks(world, folder):
        raise DistcacheError(
            f"not saved: {folder} is not the same folder on the node(s) of ranks {blind} as on "
            "rank 0's; set run.dir to one that all nodes share"
        )


def _leave_mark(folder: Path) -> str:
    name = f".shared-{uuid.uuid4().hex}"
    (folder / name).touch()
    return name


def _sees(path: Path) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
