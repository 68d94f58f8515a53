"""One process at a time on one output folder, and none on a folder that holds something else."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from distcache.data.raw.manifest import NAME
from distcache.data.raw.work import Work
from distcache.errors import ConfigError

_POLL_S = 0.05
_STARTING_S = 1.0
"""A process that was killed while it started another one holds its lock for a moment."""
_LEAVING_S = 10.0
"""How long workers of a killed run may take to end; they look for their parent twice a second."""


@contextmanager
def alone(work: Work) -> Iterator[None]:
    """Keep other processes from the same work. Raises ConfigError while one is at it, and for an
    output folder that holds something else."""
    with _lock_file(work) as lock, (work.folder / "workers").open("a") as workers:
        if not _locked(lock, _STARTING_S):
            raise ConfigError(
                f"output={work.output}: another process is working on it: wait for it, or name "
                "another folder"
            )
        if not _locked(workers, _LEAVING_S):
            raise ConfigError(
                f"output={work.output}: workers of a run that was killed are still there after "
                f"{_LEAVING_S:g} s: end these processes, then start again"
            )
        fcntl.flock(workers, fcntl.LOCK_UN)  # for the workers of this run
        yield


def _lock_file(work: Work) -> IO[str]:
    """The opened lock in the work folder, which is made where it may be. Raises ConfigError."""
    ours = (work.folder / "plan.json", work.output / NAME)  # a manifest: of a damaged result
    try:
        used = work.output.is_dir() and any(entry.name != "work" for entry in work.output.iterdir())
        if used and not any(path.exists() for path in ours):
            raise ConfigError(f"output={work.output} is not empty: name a new folder")
        work.folder.mkdir(parents=True, exist_ok=True)
        return (work.folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"output={work.output} cannot be made a folder, or written ({error.strerror}: "
            f"{error.filename}): name a new folder in a place that you may write to"
        ) from error


def _locked(file: IO[str], seconds: float) -> bool:
    """Whether this process got the file's lock for itself within some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
        time.sleep(_POLL_S)
