"""Which rank failed first: recorded by each failing rank in a store that all ranks share."""

from __future__ import annotations

import json
import re
import time
import traceback
from dataclasses import dataclass

import torch.distributed as dist

from distcache.errors import DistcacheError, PeerError

GRACE_S = 2.0
"""How long a rank that fails because of another waits for that one's record, seconds."""

NETWORK_WORDS = ("connection closed by peer", "connection reset", "socket", "gloo", "nccl")
"""Words in a RuntimeError of torch that say that another rank went away."""


def record_failure(store: dist.Store | None, rank: int, error: BaseException) -> None:
    """Record that `rank` failed with `error`; records keep the order in which they were made."""
    if store is None:
        return
    record = {
        "rank": rank,
        "message": describe(error),
        "secondary": is_secondary(error),
        "traceback": traceback_of(error),
    }
    try:
        store.set(f"failure/{store.add('failure/count', 1)}", json.dumps(record))
    except (RuntimeError, dist.DistError):
        return  # The store died with the rank that served it; there is nobody left to tell.


@dataclass(frozen=True)
class Failure:
    """A recorded failure; `secondary`: it only says that another rank failed or is missing;
    `traceback`: where it happened, for an error that nobody raised on purpose."""

    rank: int
    text: str
    secondary: bool
    traceback: str = ""

    @property
    def message(self) -> str:
        """What the other ranks say about it."""
        return (
            self.text if self.secondary else f"stopped because rank {self.rank} failed: {self.text}"
        )


def first_failure(store: dist.Store | None) -> tuple[int, str] | None:
    """(rank, message) of the failure that came first, a cause before its consequences; or None."""
    failures = _recorded(store)
    return (failures[0].rank, failures[0].text) if failures else None


def traceback_of(error: BaseException) -> str:
    """Where an error happened that this package did not raise on purpose, else nothing."""
    if isinstance(error, DistcacheError):
        return ""
    return "".join(traceback.format_exception(error))


def first_traceback(store: dist.Store | None) -> str:
    """`traceback_of` the failure that came first; empty where there is none."""
    failures = _recorded(store)
    return failures[0].traceback if failures else ""


def failure_of_others(store: dist.Store | None, rank: int) -> Failure | None:
    """The first failure of another rank than `rank`, a cause before its consequences; or None."""
    return next((failure for failure in _recorded(store) if failure.rank != rank), None)


def _recorded(store: dist.Store | None) -> list[Failure]:
    """All recorded failures: causes first, each kind in the order in which it was recorded."""
    try:
        return _read(store)
    except (RuntimeError, dist.DistError):
        return []


def _read(store: dist.Store | None) -> list[Failure]:
    if store is None:
        return []
    count = store.add("failure/count", 0)
    keys = [f"failure/{number}" for number in range(1, count + 1)]
    found = [json.loads(store.get(key)) for key in keys if store.check([key])]
    failures = [
        Failure(item["rank"], item["message"], item["secondary"], item["traceback"])
        for item in found
    ]
    return sorted(failures, key=lambda failure: failure.secondary)


def cause_of(
    store: dist.Store | None, rank: int, error: BaseException, grace_s: float = GRACE_S
) -> tuple[int, str]:
    """Record this rank's failure; return the (rank, message) that caused it, maybe its own.

    A failure that another rank must have caused waits up to `grace_s` seconds for that one.
    """
    deadline = time.monotonic() + (grace_s if is_secondary(error) else 0.0)
    try:
        while not _read(store) and time.monotonic() < deadline:
            time.sleep(0.05)
    except (RuntimeError, dist.DistError):
        return rank, describe(error)  # The store has gone, and every look at it would be logged.
    record_failure(store, rank, error)
    return first_failure(store) or (rank, describe(error))


def is_secondary(error: BaseException) -> bool:
    """Whether an error says that another rank failed or went away."""
    if isinstance(error, PeerError | dist.DistError):
        return True
    if isinstance(error, DistcacheError) and error.from_rank is not None:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in NETWORK_WORDS)


def describe(error: BaseException) -> str:
    """The error's message; its type where it has none or is not one of this package's, and then
    what was noted of where it happened."""
    text = str(error).strip()
    if isinstance(error, DistcacheError) and text:
        return text
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__) + notes


def first_line(error: BaseException) -> str:
    """What an error says, in one line, without the source position and advice that gloo adds."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    line = text.splitlines()[0].partition(". This is typically caused")[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", line)
