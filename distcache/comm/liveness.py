"""Whether another rank's process still runs, as far as this machine can tell."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist


def announce_process(store: dist.Store, rank: int) -> None:
    """Tell the others which process `rank` is; each rank does so when it joins."""
    store.set(_key(rank), json.dumps([_process_space(), os.getpid(), _started(os.getpid())]))


def has_ended(store: dist.Store, rank: int) -> bool:
    """Whether the process of `rank` is known to have ended.

    False where it runs, and where it cannot be seen from here (another machine or container).
    """
    if not store.check([_key(rank)]):
        return False
    space, process, started = json.loads(store.get(_key(rank)))
    return space == _process_space() and _started(process) != started


def _key(rank: int) -> str:
    return f"distcache/process/{rank}"


def _process_space() -> str:
    """Equal for processes that see one another under the same numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(process: int) -> str | None:
    """When a process started (clock ticks after boot); None for one that has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    state, *others = text.rpartition(")")[2].split()  # the name before it may hold blanks
    return None if state in "ZX" else others[18]
