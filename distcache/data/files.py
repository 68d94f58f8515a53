"""Input files by name or glob, and whether they are still the files that were seen first."""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distcache.errors import DataError


@dataclass(frozen=True)
class InputFile:
    """A file as it was found: its length in bytes and its time of modification (ns)."""

    path: Path
    length: int
    modified_ns: int

    def check_unchanged(self) -> None:
        """Raise DataError if the file has gone or is another one since it was found."""
        try:
            now = self.path.stat()
        except OSError as error:
            raise DataError(
                f"{self.path} has gone while it was being read ({error.strerror}): leave the files "
                "in place until training ends"
            ) from error
        if (now.st_size, now.st_mtime_ns) != (self.length, self.modified_ns):
            raise DataError(
                f"{self.path} has changed while it was being read (it had {self.length} bytes, now "
                f"{now.st_size}): leave the files in place until training ends"
            )


def input_files(key: str, paths: str | Path | Sequence[str | Path], what: str) -> list[InputFile]:
    """The files that `paths` name, in order, the matches of a glob sorted (numbers by value).

    `key`: the config key that names them; `what`: what such a file holds, for messages. Raises
    DataError for a name without a match, for a folder, and for a file that cannot be read.
    """
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        literal = Path(path)
        matches = [literal] if literal.exists() else [Path(p) for p in glob.glob(str(path))]
        if not matches:
            raise DataError(
                f"{key}={path}: there is no such file and nothing matches (working directory "
                f"{Path.cwd()}); give {what} or a quoted glob"
            )
        found += sorted(matches, key=_natural_order)
    if not found:
        raise DataError(f"{key} names no file: give {what} or a quoted glob")
    return [_seen(key, path, what) for path in found]


def _seen(key: str, path: Path, what: str) -> InputFile:
    """The file at `path`, with what `check_unchanged` compares."""
    if path.is_dir():
        raise DataError(
            f"{key}: {path} is a folder; for all of its files give a glob such as '{path}/*' "
            f"({what})"
        )
    try:
        with path.open("rb"):
            stat = path.stat()
    except OSError as error:
        raise DataError(f"{key}: {path} cannot be read ({error.strerror})") from error
    return InputFile(path, stat.st_size, stat.st_mtime_ns)


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """A sort key by which part-2 comes before part-10."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]
