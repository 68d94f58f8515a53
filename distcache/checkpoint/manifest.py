"""Manifest of a checkpoint, and the checksummed files that it lists.

A folder is a checkpoint once it has its manifest. Rank 0 writes it last, after every rank has
flushed its files and the folder to disk. No folder is renamed, so network file systems work too.
Nothing that a manifest holds is executed, and its structure is checked whatever its checksum says.
"""

from __future__ import annotations

import io
import json
import os
import stat
import zlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from distcache.errors import ConfigError, DataError, DistcacheError
from distcache.store.table_files import open_regular

FORMAT = 3
"""Version of the layout of a checkpoint. No other version is read."""

MANIFEST = "manifest.json"
"""Name of the file that lists the files of a checkpoint; written last."""

METADATA = ".metadata"
"""Name of DCP's file that lists the values of a checkpoint."""

UNFINISHED = ".manifest"
"""Name of a manifest while it is being written."""

_SUMS_OF_FORMAT_2 = "checksums.json"
"""A file of checkpoints of format 2 only, by which these are recognized and refused."""

REMEDY = "resume from another checkpoint, or from a copy of this one"

Mark = tuple[int, int]
"""End of a block in its file, in bytes, and the CRC-32 of the file up to there."""

_READ_BYTES = 1 << 18
"""Bytes of one read. They are still in the processor's cache when their checksum is computed."""


# --------------------------------------------------------------------------------------------------
# The manifest.


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint.

    `header`: JSON values that describe the run or the loop; `files`: the marks of each file's
    blocks, in order, by name; `base`: folder and manifest of the whole checkpoint that this one
    rests on, which has the tables that this one lacks (None: this one is whole).

    The checksum of a block continues from that of the block before it. Thus the last one is the
    checksum of the file, and one pass computes all of them.
    """

    header: dict[str, Any]
    files: dict[str, list[Mark]]
    base: tuple[Path, Manifest] | None = None

    @property
    def crc32(self) -> str:
        """Checksum of the manifest, independent of spaces and of the order of keys."""
        body = json.dumps({"header": self.header, "files": self.files}, sort_keys=True)
        return f"{zlib.crc32(body.encode()):08x}"

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(marks[-1][0] for marks in self.files.values() if marks)

    def write(self, folder: Path) -> None:
        """Make `folder`, whose files are on disk, a checkpoint. Raises DistcacheError."""
        body = {"header": self.header, "files": self.files}
        text = json.dumps({"crc32": self.crc32, "checkpoint": body})
        try:
            with BlockFile(folder / UNFINISHED) as file:
                file.write(text.encode())
            # Renamed, so that a process that is killed here leaves no half of a manifest.
            (folder / UNFINISHED).rename(folder / MANIFEST)
            sync_folder(folder)
        except OSError as error:
            raise DistcacheError(f"{folder / MANIFEST}: {error.strerror}") from error

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of a checkpoint, after a check that all files of it and of the
        checkpoint that it rests on exist in their lengths.

        Raises DataError, with the name of the folder, if one of both is damaged or lacks a file;
        ConfigError for another format.
        """
        if not (folder / MANIFEST).is_file():
            if (folder / _SUMS_OF_FORMAT_2).is_file():
                raise _other_format(folder, 2)
            raise DataError(f"{folder} has no {MANIFEST}, so it was never finished: {REMEDY}")
        manifest = _read_checked(folder)
        base_folder = _base_folder(folder, manifest.header)
        if base_folder is None:
            return manifest
        try:
            base = _read_checked(base_folder)
            if base.crc32 != manifest.header["base"]["crc32"]:
                raise DataError(f"{base_folder} is another checkpoint than the one that was there")
        except DataError as error:
            raise DataError(
                f"{folder} has only the rows that changed since {base_folder.name}: {error}"
            ) from error
        return replace(manifest, base=(base_folder, base))

    def verify(self, folder: Path) -> None:
        """Raise DataError with the name of a file in `folder` that differs from what was written.

        Reads all files.
        """
        for name, marks in self.files.items():
            ends = [end for end, _ in marks]
            for start, end in pairwise([0, *ends]):
                self.block(folder, name, start, end - start)

    def block(self, folder: Path, name: str, start: int, length: int) -> bytes:
        """Return the block of file `name` that begins at byte `start`.

        Raises DataError if there is no such block, or it differs from what was written.
        """
        self.checksums(folder, name, start, length)  # before memory is allocated for it
        data = bytearray(length)
        self.read_into([memoryview(data)], folder, name, start)
        return bytes(data)

    def read_into(self, parts: Sequence[memoryview], folder: Path, name: str, start: int) -> None:
        """Fill `parts`, byte buffers, one after the other, with the block of file `name` that
        begins at byte `start`. After a DataError, as of `block`, their content is invalid."""
        crc, expected = self.checksums(folder, name, start, sum(map(len, parts)))
        is_complete = True
        with open_plain(folder / name) as file:
            file.seek(start)
            for part in parts:
                for offset in range(0, len(part), _READ_BYTES):
                    piece = part[offset : offset + _READ_BYTES]
                    is_complete &= file.readinto(piece) == len(piece)
                    crc = zlib.crc32(piece, crc)
        if not is_complete or crc != expected:
            raise damaged(folder, name, len(self.files))

    def checksums(self, folder: Path, name: str, start: int, length: int) -> tuple[int, int]:
        """Return the checksums of file `name` up to the begin and up to the end of a block.

        Raises DataError if there is no such block.
        """
        marks = self.files.get(name, [])
        end = start + length
        place = bisect_left(marks, (end, 0))
        before = marks[place - 1] if place else (0, 0)
        if place == len(marks) or (before[0], marks[place][0]) != (start, end):
            raise damaged(folder, name, len(self.files))
        return before[1], marks[place][1]

    def _check_files(self, folder: Path) -> None:
        """Raise DataError unless all files are regular ones in `folder` with their lengths."""
        for name, marks in self.files.items():
            if name != Path(name).name or "\0" in name or name in ("", "..", MANIFEST):
                raise DataError(f"the checkpoint {folder} names the file {name!r}, outside of it")
            try:
                status = (folder / name).lstat()
            except OSError as error:
                raise DataError(f"the checkpoint {folder} lacks {name}: {REMEDY}") from error
            length = marks[-1][0] if marks else 0
            if not stat.S_ISREG(status.st_mode) or status.st_size != length:
                raise damaged(folder, name, 1)

    def _check_header(self, folder: Path) -> None:
        """Raise ConfigError for a format that is not read here, DataError for an invalid header."""
        version = self.header.get("format")
        if type(version) is int and version != FORMAT:
            raise _other_format(folder, version)
        try:
            if type(version) is not int:
                raise ValueError(f"'format' is {version!r}, and must be {FORMAT}")
            check_header(self.header)
        except ValueError as error:
            raise DataError(
                f"the manifest of the checkpoint {folder} is invalid: {error}: {REMEDY}"
            ) from error


def rests_on(folder: Path) -> Path | None:
    """Return the folder of the whole checkpoint that the one in `folder` rests on, which may not
    exist; None if the one in `folder` is whole. Raises DataError for a damaged manifest."""
    return _base_folder(folder, _read_manifest(folder).header)


def _read_checked(folder: Path) -> Manifest:
    """Return the manifest in `folder` after the checks of its files and of its header."""
    manifest = _read_manifest(folder)
    manifest._check_files(folder)
    manifest._check_header(folder)
    return manifest


def _read_manifest(folder: Path) -> Manifest:
    """Read a manifest alone. Raises DataError if there is none, or it is damaged."""
    path = folder / MANIFEST
    try:
        with open_regular(path) as file:  # a base's manifest may be a FIFO or a device
            content = json.loads(file.read())
        body = content["checkpoint"]
        if not isinstance(body["header"], dict):
            raise ValueError("'header' is no mapping")
        manifest = Manifest(body["header"], check_files(body["files"]))
        if content["crc32"] != manifest.crc32:
            raise ValueError("its checksum differs from its content")
    except FileNotFoundError as error:
        raise DataError(f"there is no {path}: {REMEDY}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {REMEDY}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}): {REMEDY}") from error
    return manifest


def _base_folder(folder: Path, header: Mapping[str, Any]) -> Path | None:
    """Return the folder that `header` names as the base of the checkpoint in `folder`, if any."""
    base = header.get("base")
    if base is None:
        return None
    name = base.get("folder") if isinstance(base, dict) else base
    if not isinstance(name, str) or name != Path(name).name or "\0" in name or name in ("", ".."):
        raise DataError(f"the checkpoint {folder} rests on {name!r}, which is not beside it")
    # `parent` of a link, or of `x/..`, would not be the folder that has the checkpoint.
    is_indirect = folder.is_symlink() or folder.name in ("", "..")
    return (folder.resolve() if is_indirect else folder).parent / name


def _other_format(folder: Path, version: int) -> ConfigError:
    return ConfigError(
        f"{folder} has checkpoint format {version}, and this version of distcache reads format "
        f"{FORMAT}: resume with the version of distcache that wrote it, or export its tables with "
        "that version (python -m distcache.export) and start from them by trainer.init_from"
    )


def damaged(folder: Path, name: str, count: int) -> DataError:
    """Return the error for a file of a checkpoint, one of `count`, that is not as written."""
    return DataError(
        f"the checkpoint {folder} is damaged: {name} (of {count} files) not as written, by "
        f"length or checksum: {REMEDY}"
    )


# --------------------------------------------------------------------------------------------------
# Files.

_FLUSH_BYTES = 16 << 20
"""The disk starts to write after so many bytes, while more of them are computed."""


class BlockFile(io.FileIO):
    """A new file, readable by its owner only, with its length and checksum so far.

    It is on disk when the `with` block is left without an error.
    """

    def __init__(self, path: Path) -> None:
        no_link = os.O_NOFOLLOW
        super().__init__(
            path, "xb", opener=lambda name, flags: os.open(name, flags | no_link, 0o600)
        )
        self.end = 0
        self.crc = 0
        self.error: OSError | None = None
        self._flushed = 0

    def write(self, data: Any) -> int:
        """Append `data` and return its length in bytes."""
        rest = memoryview(data).cast("B")
        count = len(rest)
        self.crc = zlib.crc32(rest, self.crc)
        try:
            while len(rest):
                rest = rest[super().write(rest) :]
        except OSError as error:
            self.error = error
            raise
        self.end += count
        new_bytes = self.end - self._flushed
        if new_bytes >= _FLUSH_BYTES:  # otherwise fsync writes all of it at the end
            os.posix_fadvise(self.fileno(), self._flushed, new_bytes, os.POSIX_FADV_DONTNEED)
            self._flushed = self.end
        return count

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        try:
            if error is None:
                os.fsync(self.fileno())
        finally:
            self.close()


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_plain(path: Path) -> io.BufferedReader:
    """Open a regular file, no link, for reading. Raises DataError."""
    try:
        return open_regular(path, os.O_NOFOLLOW)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {REMEDY}") from error


# --------------------------------------------------------------------------------------------------
# Checks of the structure: JSON values of known types.

_Test = Callable[[Any], bool]


def is_int(value: Any) -> bool:
    """Return True for an int, but no bool, that fits into 64 bits."""
    return type(value) is int and -(2**63) <= value < 2**63


def is_count(value: Any) -> bool:
    """Return True for an int of at least 0."""
    return is_int(value) and value >= 0


def is_text(value: Any) -> bool:
    """Return True for a str."""
    return isinstance(value, str)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_number(value: Any) -> bool:
    return is_int(value) or isinstance(value, float)


def _is_hexadecimal(value: Any) -> bool:
    digits = set("0123456789abcdef")
    return is_text(value) and len(value) % 2 == 0 and set(value) <= digits


def _is_table(value: Any) -> bool:
    if not isinstance(value, list) or len(value) not in (3, 4):
        return False
    name, rows, dim, *dtype = value
    return is_text(name) and is_count(rows) and is_count(dim) and all(map(is_text, dtype))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_text, value))


def _list_of(test: _Test) -> _Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _optional(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _mapping_of(test: _Test) -> _Test:
    return lambda value: isinstance(value, dict) and all(map(test, value.values()))


_COUNT = "a whole number of at least 0"
_Schema = Mapping[str, tuple[_Test, str]]
"""For each key a test of its value, and a description of a valid value."""

_HEADER: _Schema = {
    "step": (is_count, _COUNT),
    "metrics": (_optional(_mapping_of(_optional(_is_number))), "a mapping of numbers"),
    "versions": (_optional(_is_mapping), "a mapping"),
    "config": (_optional(_is_mapping), "a mapping"),
}
_RUN_HEADER: _Schema = {
    "loss_digest": (_is_hexadecimal, "hexadecimal text"),
    "phase": (_optional(_is_mapping), "a mapping"),
}
_RUN: _Schema = {
    **dict.fromkeys(("mode", "dtype", "optimizer"), (is_text, "text")),
    **dict.fromkeys(("world_size", "global_batch_size"), (is_count, _COUNT)),
    "seed": (is_int, "a whole number"),
    "model": (_is_mapping, "a mapping"),
    "steps_per_epoch": (_optional(is_count), _COUNT),
    "tables": (_list_of(_is_table), "a list of [name, rows, width]"),
    "data": (_list_of(_is_pair), "a list of pairs of texts"),
}
_PHASE: _Schema = {
    **dict.fromkeys(("epoch", "hot", "cold", "left", "falls"), (is_count, _COUNT)),
    **dict.fromkeys(("rate", "until"), (_is_number, "a number")),
    "kind": (("", "hot", "cold").__contains__, "hot, cold or empty"),
    "loss": (_optional(_is_number), "a number"),
    "due": (lambda value: isinstance(value, bool), "true or false"),
}
_LOOP: _Schema = {
    "like": (_mapping_of(is_text), "a mapping of texts"),
    "ranks": (lambda value: is_count(value) and value > 0, "a whole number of at least 1"),
}
_BASE: _Schema = dict.fromkeys(("folder", "crc32"), (is_text, "text"))
_OPTIONAL_KEYS = {"metrics", "versions", "config"}


def check_header(header: Mapping[str, Any]) -> None:
    """Raise ValueError with the first key of a manifest's header that is missing or invalid.

    A header describes a training run (key `run`) or a loop with `distcache.save` (key `loop`).
    """
    _check(header, _HEADER, "")
    kind = "loop" if "loop" in header else "run"
    if not isinstance(header.get(kind), dict):
        raise ValueError(f"it lacks a mapping {kind!r}" if kind in header else "it lacks 'run'")
    if kind == "loop":
        _check(header["loop"], _LOOP, "loop.")
    else:
        _check(header, _RUN_HEADER, "")
        _check(header["run"], _RUN, "run.")
    if header.get("phase") is not None:
        _check(header["phase"], _PHASE, "phase.")
        if unknown := sorted(header["phase"].keys() - _PHASE.keys()):
            raise ValueError(f"'phase.{unknown[0]}' is unknown")
    if header.get("base") is not None:
        if not isinstance(header["base"], dict):
            raise ValueError(f"'base' is {shorten(header['base'])}, and must be a mapping")
        _check(header["base"], _BASE, "base.")


def _check(values: Mapping[str, Any], schema: _Schema, prefix: str) -> None:
    for key, (is_valid, expected) in schema.items():
        if key not in values:
            if key not in _OPTIONAL_KEYS:
                raise ValueError(f"it lacks '{prefix}{key}'")
        elif not is_valid(values[key]):
            raise ValueError(f"'{prefix}{key}' is {shorten(values[key])}, and must be {expected}")


def list_first(texts: Sequence[str], separator: str = ", ") -> str:
    """Return the first five texts, and the number of the others, for a message."""
    more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    return separator.join(texts[:5]) + more


def shorten(value: Any) -> str:
    """Return at most 60 characters of `repr(value)`, for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def check_files(files: Any) -> dict[str, list[Mark]]:
    """Return the marks of each file's blocks, by name, from JSON values.

    Raises ValueError with the name of a file whose marks are invalid.
    """
    if not isinstance(files, dict):
        raise ValueError(f"'files' is {shorten(files)}, and must be a mapping")
    marks_by_name: dict[str, list[Mark]] = {}
    for name, marks in files.items():
        previous_end = 0
        marks_by_name[name] = []
        for mark in marks if isinstance(marks, list) else [None]:
            is_mark = isinstance(mark, list) and len(mark) == 2 and all(map(is_count, mark))
            if not is_mark or mark[0] < previous_end or mark[1] >= 2**32:
                raise ValueError(f"the blocks of {name!r} have no ascending ends and checksums")
            previous_end = mark[0]
            marks_by_name[name].append((mark[0], mark[1]))
    return marks_by_name
