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

_SUMS_OF_FORMAT_2 = "checksums.json"
"""A file of checkpoints of format 2 only, by which these are recognized and refused."""

UNFINISHED = ".manifest"
"""A manifest that is being written."""

WAY_OUT = "resume from another checkpoint, or from a copy of this one"

Mark = tuple[int, int]
"""Where a stored block ends in its file, in bytes, and the CRC-32 of the file up to there."""

_PIECE_BYTES = 1 << 18
"""Bytes that are read at a time: a processor's cache holds them until their checksum is taken."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `header`: what its run says of it, JSON values; `files`: the marks
    of each file's blocks, in order, by name; `base`: the whole checkpoint, and its folder, whose
    tables it has as far as it has none of its own (None: it is whole itself).

    The checksum of a block goes on from that of the block before it, so the last one is the whole
    file's, and both are computed in one pass.
    """

    header: dict[str, Any]
    files: dict[str, list[Mark]]
    base: tuple[Path, Manifest] | None = None

    @property
    def crc32(self) -> str:
        """The checksum of the manifest, whatever its spaces and the order of its keys."""
        body = json.dumps({"header": self.header, "files": self.files}, sort_keys=True)
        return f"{zlib.crc32(body.encode()):08x}"

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(marks[-1][0] for marks in self.files.values() if marks)

    def write(self, folder: Path) -> None:
        """Make `folder`, whose files are on the disk, a checkpoint. Raises DistcacheError."""
        body = {"header": self.header, "files": self.files}
        text = json.dumps({"crc32": self.crc32, "checkpoint": body})
        try:
            with BlockFile(folder / UNFINISHED) as file:
                file.write(text.encode())
            (folder / UNFINISHED).rename(folder / MANIFEST)  # a process that dies leaves no half
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
            raise DataError(f"{folder} has no {MANIFEST}, so it was never finished: {WAY_OUT}")
        found = _read_manifest(folder)
        found._check_files(folder)
        found._check_header(folder)
        if (where := _base_folder(folder, found.header)) is None:
            return found
        try:
            base = _read_manifest(where)
            base._check_files(where)
            base._check_header(where)
            if base.crc32 != found.header["base"]["crc32"]:
                raise DataError(f"{where} is another checkpoint than the one that was there")
        except DataError as error:
            raise DataError(
                f"{folder} has the rows alone that changed since {where.name}: {error}"
            ) from error
        return replace(found, base=(where, base))

    def _check_files(self, folder: Path) -> None:
        """Raise DataError unless all files are in `folder` itself, in their lengths."""
        for name, marks in self.files.items():
            if name != Path(name).name or "\0" in name or name in ("", "..", MANIFEST):
                raise DataError(f"the checkpoint {folder} names the file {name!r}, outside of it")
            try:
                found = (folder / name).lstat()
            except OSError as error:
                raise DataError(f"the checkpoint {folder} lacks {name}: {WAY_OUT}") from error
            length = marks[-1][0] if marks else 0
            if not stat.S_ISREG(found.st_mode) or found.st_size != length:
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
                f"the manifest of the checkpoint {folder} is invalid: {error}: {WAY_OUT}"
            ) from error

    def verify(self, folder: Path) -> None:
        """Raise DataError naming a file of `folder` that is not as it was written."""
        for name, marks in self.files.items():
            ends = [end for end, _ in marks]
            for start, end in pairwise([0, *ends]):
                self.block(folder, name, start, end - start)

    def block(self, folder: Path, name: str, start: int, length: int) -> bytes:
        """The block of file `name` from byte `start` on. Raises DataError unless it is one, and as
        it was written."""
        self._sums(folder, name, start, length)  # before there is memory for it
        data = bytearray(length)
        self.read_into([memoryview(data)], folder, name, start)
        return bytes(data)

    def read_into(self, parts: Sequence[memoryview], folder: Path, name: str, start: int) -> None:
        """Fill `parts`, bytes, one after the other, with the block of file `name` from byte `start`
        on. Raises DataError as `block` does; what the parts hold then is worth nothing."""
        crc, expected = self._sums(folder, name, start, sum(map(len, parts)))
        is_whole = True
        with open_plain(folder / name) as file:
            file.seek(start)
            for part in parts:
                for at in range(0, len(part), _PIECE_BYTES):
                    piece = part[at : at + _PIECE_BYTES]
                    is_whole &= file.readinto(piece) == len(piece)
                    crc = zlib.crc32(piece, crc)
        if not is_whole or crc != expected:
            raise damaged(folder, name, len(self.files))

    def _sums(self, folder: Path, name: str, start: int, length: int) -> tuple[int, int]:
        """The checksums of file `name` up to a block of it and up to its end. Raises DataError
        where there is none."""
        marks, end = self.files.get(name, []), start + length
        at = bisect_left(marks, (end, 0))
        before = marks[at - 1] if at else (0, 0)
        if at == len(marks) or (before[0], marks[at][0]) != (start, end):
            raise damaged(folder, name, len(self.files))
        return before[1], marks[at][1]


def _read_manifest(folder: Path) -> Manifest:
    """A manifest alone. Raises DataError where there is none, or it is damaged."""
    path = folder / MANIFEST
    try:
        with open_regular(path) as file:  # the base's may be anything
            found = json.loads(file.read())
        body = found["checkpoint"]
        if not isinstance(body["header"], dict):
            raise ValueError("'header' is no mapping")
        manifest = Manifest(body["header"], check_files(body["files"]))
        if found["crc32"] != manifest.crc32:
            raise ValueError("its checksum is another one")
    except FileNotFoundError as error:
        raise DataError(f"there is no {path}: {WAY_OUT}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {WAY_OUT}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}): {WAY_OUT}") from error
    return manifest


def rests_on(folder: Path) -> Path | None:
    """Return the folder of the whole checkpoint that the one in `folder` rests on, which may not
    exist; None if the one in `folder` is whole. Raises DataError for a damaged manifest."""
    return _base_folder(folder, _read_manifest(folder).header)


def _base_folder(folder: Path, header: Mapping[str, Any]) -> Path | None:
    if (told := header.get("base")) is None:
        return None
    name = told.get("folder") if isinstance(told, dict) else told
    if not isinstance(name, str) or name != Path(name).name or "\0" in name or name in ("", ".."):
        raise DataError(f"the checkpoint {folder} rests on {name!r}, which is not beside it")
    unclear = folder.is_symlink() or folder.name in ("", "..")
    return (folder.resolve() if unclear else folder).parent / name


def _other_format(folder: Path, version: int) -> ConfigError:
    return ConfigError(
        f"{folder} has checkpoint format {version}, and this version of distcache reads format "
        f"{FORMAT}: resume with the version of distcache that wrote it, or export its tables with "
        "that version (python -m distcache.export) and start from them by trainer.init_from"
    )


def damaged(folder: Path, names: str, count: int) -> DataError:
    return DataError(
        f"the checkpoint {folder} is damaged: {names} (of {count} files) not as written, by "
        f"length or checksum: {WAY_OUT}"
    )


def open_plain(path: Path) -> io.BufferedReader:
    """A regular file that is no link, for reading."""
    try:
        return open_regular(path, os.O_NOFOLLOW)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {WAY_OUT}") from error


_BEGIN_BYTES = 16 << 20
"""After so many bytes the disk begins with them, while others are computed."""


class BlockFile(io.FileIO):
    """A new file that its owner alone may read, with its length and checksum so far; on the disk
    once it is left."""

    def __init__(self, path: Path) -> None:
        how = os.O_NOFOLLOW
        super().__init__(path, "xb", opener=lambda name, flags: os.open(name, flags | how, 0o600))
        self.end = self.crc = self._begun = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Append `data`; its length in bytes."""
        left = memoryview(data).cast("B")
        count = len(left)
        self.crc = zlib.crc32(left, self.crc)
        try:
            while len(left):
                left = left[super().write(left) :]
        except OSError as error:
            self.error = error
            raise
        self.end += count
        if (new := self.end - self._begun) >= _BEGIN_BYTES:  # else fsync has it all to do
            os.posix_fadvise(self.fileno(), self._begun, new, os.POSIX_FADV_DONTNEED)
            self._begun = self.end
        return count

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        try:
            if error is None:
                os.fsync(self.fileno())
        finally:
            self.close()


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    there = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(there)
    finally:
        os.close(there)


_Test = Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


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
    "seed": (_is_int, "a whole number"),
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

_MAY_LACK = {"metrics", "versions", "config"}


def check_header(header: Mapping[str, Any]) -> None:
    """Raise ValueError that names the first key of a manifest's header that is missing or wrong.

    The header is one of a run (`run`) or of a loop (`loop`).
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
            raise ValueError(f"'base' is {shown(header['base'])}, and must be a mapping")
        _check(header["base"], _BASE, "base.")


def _check(values: Mapping[str, Any], schema: _Schema, prefix: str) -> None:
    for key, (is_good, expected) in schema.items():
        if key not in values:
            if key not in _MAY_LACK:
                raise ValueError(f"it lacks '{prefix}{key}'")
        elif not is_good(values[key]):
            raise ValueError(f"'{prefix}{key}' is {shown(values[key])}, and must be {expected}")


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def check_files(files: Any) -> dict[str, list[tuple[int, int]]]:
    """The marks of each file's blocks, by name: (end in bytes, CRC-32), in order.

    Raises ValueError that names a file whose marks are wrong.
    """
    if not isinstance(files, dict):
        raise ValueError(f"'files' is {shown(files)}, and must be a mapping")
    marks_by_name: dict[str, list[tuple[int, int]]] = {}
    for name, marks in files.items():
        before = 0
        marks_by_name[name] = []
        for mark in marks if isinstance(marks, list) else [None]:
            is_mark = isinstance(mark, list) and len(mark) == 2 and all(map(is_count, mark))
            if not is_mark or mark[0] < before or mark[1] >= 2**32:
                raise ValueError(f"the blocks of {name!r} have no ascending ends and checksums")
            before = mark[0]
            marks_by_name[name].append((mark[0], mark[1]))
    return marks_by_name
