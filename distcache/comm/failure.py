"""Which rank failed first: recorded by each failing rank in a store that all ranks share."""

from __future__ import annotations

import json
import re
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch.distributed as dist

from distcache.errors import DistcacheError, PeerError

GRACE_S = 2.0
"""How long a rank that fails because of another waits for that one's record, seconds."""

NETWORK_WORDS = ("connection closed by peer", "connection reset", "socket", "gloo", "nccl")
"""Words in a RuntimeError of torch that say that another rank went away."""


@dataclass(frozen=True)
class Failure:
    """A recorded failure; `secondary`: it only says that another rank failed or is missing;
    `traceback`: where it happened, for an error that nobody raised on purpose."""

    rank: int
    text: str
    secondary: bool
    traceback: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """What is recorded of `error`, which ended `rank`."""
        where = [] if isinstance(error, DistcacheError) else traceback.format_exception(error)
        return cls(rank, describe(error), is_secondary(error), "".join(where))

    @property
    def message(self) -> str:
        """What the other ranks say about it."""
        return (
            self.text if self.secondary else f"stopped because rank {self.rank} failed: {self.text}"
        )


def record_failure(store: dist.Store | None, rank: int, error: BaseException) -> None:
    """Record that `rank` failed with `error`; records keep the order in which they were made."""
    if store is None:
        return
    with suppress(RuntimeError, dist.DistError):  # it died with its server: nobody is left to tell
        record = json.dumps(asdict(Failure.of(rank, error)))
        store.set(f"failure/{store.add('failure/count', 1)}", record)


def recorded_failures(store: dist.Store | None) -> list[Failure]:
    """Causes first, each kind in the order in which it was recorded; none where the store died."""
    try:
        return _read(store)
    except (RuntimeError, dist.DistError):
        return []


def failure_of_others(store: dist.Store | None, rank: int) -> Failure | None:
    """The first failure of another rank than `rank`, a cause before its consequences; or None."""
    return next((failure for failure in recorded_failures(store) if failure.rank != rank), None)


def _read(store: dist.Store | None) -> list[Failure]:
    if store is None:
        return []
    count = store.add("failure/count", 0)
    keys = [f"failure/{number}" for number in range(1, count + 1)]
    found = [Failure(**json.loads(store.get(key))) for key in keys if store.check([key])]
    return sorted(found, key=lambda failure: failure.secondary)


def cause_of(
    store: dist.Store | None, rank: int, error: BaseException, grace_s: float = GRACE_S
) -> Failure:
    """Record this rank's failure; return the one that caused it, maybe itself.

    A failure that another rank must have caused waits up to `grace_s` seconds for that one.
    """
    own = Failure.of(rank, error)
    deadline = time.monotonic() + (grace_s if own.secondary else 0.0)
    try:
        while not _read(store) and time.monotonic() < deadline:
            time.sleep(0.05)
    except (RuntimeError, dist.DistError):
        return own  # The store has gone, and every look at it would be logged.
    record_failure(store, rank, error)
    return next(iter(recorded_failures(store)), own)


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
