"""Errors that a user can act on: each names the value, the key and the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class DistcacheError(Exception):
    """Base of every error that this package raises on purpose. `from_rank`: the rank that failed,
    where this one only tells of it."""

    from_rank: int | None = None

    def reword(self, names: Mapping[str, str]) -> None:
        """Name what a user of another door than the command line gives: `names` by dotted key."""
        text = str(self)
        for key, name in names.items():
            text = text.replace(key, name)
        self.args = (text,)

    def name_module(self, title: str) -> None:
        """Begin the message with the module that it is about, unless `title` is in it already."""
        text = str(self)
        if title not in text:
            self.args = (f"{title}: {text}",)


class ConfigError(DistcacheError, ValueError):
    """A key has a wrong value, or two keys contradict each other."""


class DataError(DistcacheError, ValueError):
    """Input data is malformed: the message names the file and line, or the feature and sample."""


class StepTooLargeError(DistcacheError):
    """A step needs more distinct rows (`rows`) of one home than that home has `slots`."""

    def __init__(self, message: str, rows: int = 0, slots: int = 0) -> None:
        super().__init__(message)
        self.rows, self.slots = rows, slots


class MemoryTooSmallError(DistcacheError):
    """Host or device memory does not hold what was asked for."""


class PeerError(DistcacheError):
    """Another rank failed, is missing, or disagrees; the message names it."""


class NonFiniteLossError(DistcacheError):
    """The summed loss is not finite; nothing was applied, and the state before it was saved."""


class PlanError(DistcacheError):
    """A plan breaks a law, or a batch does not match its plan."""


def unknown_value(key: str, value: object, choices: Iterable[str]) -> ConfigError:
    """Return the error for a value that is none of `choices`, with the one that comes near it."""
    names = list(choices)
    close = difflib.get_close_matches(str(value), names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    listed = " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return ConfigError(f"{key}={value} is unknown: {hint}choose {listed}")


def on_all_ranks(error: E) -> E:
    """Mark `error` as one that every rank raises at the same point, and return it.

    Such an error is not reported to the other ranks: none of them waits, and all of them may go on
    after it.
    """
    with suppress(AttributeError):  # a class with __slots__; a report too many is harmless
        error.is_on_all_ranks = True  # type: ignore[attr-defined]
    return error


def human_bytes(count: float, digits: int = 1) -> str:
    """A byte count in a unit that reads well."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.{digits}f} PiB"
