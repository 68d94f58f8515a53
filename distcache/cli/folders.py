"""Folders that a command leaves its files in."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from distcache.errors import ConfigError


def open_folder(folder: Path, key: str) -> bool:
    """Make the folder that a user gave as `key`; whether there was none.

    Raises ConfigError where that is not possible.
    """
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{key}={folder} cannot be written ({error.strerror}): name another folder"
        ) from error
    return new


def drop_if_empty(folder: Path) -> None:
    """Take back a folder that nothing was written to."""
    with suppress(OSError):
        folder.rmdir()
