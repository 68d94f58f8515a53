"""The lock on a run folder, and the removal of what a refused start has written there."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from distcache.cli.run import make_folder, not_writable, remove_empty
from distcache.comm.rendezvous import process_has_ended, this_process
from distcache.errors import ConfigError, DistcacheError, PeerError

log = logging.getLogger(__name__)

LOCK = ".lock"
"""Name of the lock file of a run folder."""

PATIENCE_S, _POLL_S = 3.0, 0.1
"""Seconds to wait for a run that is about to end, as ranks are whose agent was killed; seconds
between two tries."""

_START_FILES = frozenset({"config.yaml", "environment.json", "metrics.jsonl", "bad_lines.json"})
"""Files that a start writes before the first step."""

_locked: set[Path] = set()
"""Run folders that this process holds: record locks do not exclude their own process."""


@contextmanager
def hold_run_folder(run_dir: Path) -> Iterator[None]:
    """Make `run_dir` and hold it against other runs; for rank 0.

    Where the block raises an error of this package before the first step, a folder that was empty
    or missing is left as it was. Raises ConfigError where the folder cannot be written, and where
    another process holds it.
    """
    try:
        created = make_folder(run_dir, 0o700)  # training data may be private
        was_empty = not any(run_dir.iterdir())
    except OSError as error:
        raise not_writable(run_dir, "run.dir", error) from error
    key = run_dir.resolve()
    try:
        if key in _locked:
            raise _in_use(run_dir, "this process")
        lock = _lock(run_dir)
    except BaseException:
        remove_empty(created)
        raise
    _locked.add(key)
    refused = False
    try:
        yield
    except PeerError:  # another rank failed, which is no refusal
        raise
    except DistcacheError:
        refused = was_empty
        raise
    finally:
        if refused:
            _remove_start(run_dir)
        with suppress(OSError):
            (run_dir / LOCK).unlink()
        os.close(lock)  # lets the lock go, after the file has gone: see `_lock`
        _locked.discard(key)
        if refused:
            remove_empty(created)


def _remove_start(run_dir: Path) -> None:
    """Remove the files of a start, unless there is more, or a step was done."""
    files = [path for path in run_dir.iterdir() if path.name != LOCK]
    metrics = run_dir / "metrics.jsonl"
    is_trained = metrics.exists() and metrics.stat().st_size > 0
    if is_trained or any(path.name not in _START_FILES for path in files):
        return
    for path in files:
        path.unlink(missing_ok=True)


# -----------------------------------------------------------------------------
# The lock file: locked by the kernel as long as the process lives, so that a killed run blocks
# nobody. Record locks (`lockf`), not `flock`: worker processes that are forked do not inherit them,
# and network file systems have them.


def _lock(run_dir: Path) -> int:
    """The file descriptor of the locked file. Raises ConfigError where another process holds it."""
    path, deadline = run_dir / LOCK, time.monotonic() + PATIENCE_S
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise not_writable(run_dir, "run.dir", error) from error
        try:
            holder = _read_holder(lock)
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_free = True
            except (BlockingIOError, PermissionError):
                is_free = False
            except OSError as error:
                is_free = _is_free_without_locks(run_dir, holder, error)
            if is_free and _is_file(lock, path):
                _write_holder(lock)
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        if not is_free and time.monotonic() > deadline:
            raise _in_use(run_dir, holder.get("text", "another process"))
        time.sleep(0 if is_free else _POLL_S)


def _is_file(lock: int, path: Path) -> bool:
    """True if the open file still has its name; a run that ended has removed it otherwise."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(lock), path.stat())
    return False


def _read_holder(lock: int) -> dict:
    """The process that a lock file names: `text` for messages, and `process` of `this_process`."""
    with suppress(ValueError, OSError):
        holder = json.loads(os.pread(lock, 4096, 0))
        if isinstance(holder, dict):
            return holder
    return {}


def _write_holder(lock: int) -> None:
    text = f"process {os.getpid()} on host {socket.gethostname()}"
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps({"text": text, "process": this_process()}).encode(), 0)


def _is_free_without_locks(run_dir: Path, holder: dict, error: OSError) -> bool:
    """False where the named process runs on this host, for a file system that has no locks; a
    warning says that other hosts are not seen."""
    process = holder.get("process")
    is_here = isinstance(process, list) and process[:1] == this_process()[:1]
    if is_here and not process_has_ended(process):
        return False
    log.warning(
        "run.dir=%s is on a file system without locks (%s): a second run in it that starts on "
        "another host would not be refused",
        run_dir,
        error.strerror,
    )
    return True


def _in_use(run_dir: Path, holder: str) -> ConfigError:
    return ConfigError(
        f"run.dir={run_dir} is in use: {holder} trains there. Name another folder, or wait for "
        "the end of that run"
    )
