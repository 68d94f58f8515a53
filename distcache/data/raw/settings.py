"""What to make of which text, and what came of it: settings, `manifest.json`, checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from distcache.data.files import read_json
from distcache.data.samplers import hash_counters, key_of
from distcache.errors import ConfigError, DataError

INTEGERS, IDS = 13, 26
"""Columns of a line of Criteo text, after its label."""

KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
TERABYTE_ROWS = (
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
)
PRESETS = {"kaggle": KAGGLE_ROWS, "terabyte": TERABYTE_ROWS}
MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids per sample of each table in MLPerf's multi-hot Criteo data."""

_PURPOSE = 0x6D756C7469  # "multi": keeps these keys apart from those of other random numbers


def bags(ids: np.ndarray, table: int, rows: int, size: int) -> np.ndarray:
    """Bags int64 `[n, size]` of int64 `ids` `[n]` of table number `table`, a fixed function.

    MLPerf's multi-hot Criteo data has such bags drawn once for every id; the sizes are its own, the
    rule is this project's: the bag of id r in table t of R rows with h ids is r itself, then for
    k = 1 to h - 1 the id hash(r * h + k under the key of t) modulo R.
    """
    result = np.empty((len(ids), size), dtype=np.int64)
    result[:, 0] = ids
    if size > 1:
        places = np.arange(1, size, dtype=np.uint64)
        counters = ids.astype(np.uint64)[:, None] * np.uint64(size) + places
        hashed = hash_counters(counters, key_of(_PURPOSE, table))
        result[:, 1:] = (hashed % np.uint64(rows)).astype(np.int64)
    return result


OUT_OF_VOCABULARY, MISSING, FIRST = 0, 1, 2
"""Rows of a vocabulary: ids outside it, missing ids, and the first of its ids."""

WORKER_BYTES = 208 << 20
"""Memory of a worker: its modules, a part's arrays twice, and a block being parsed."""
_MAIN_BYTES = 200 << 20


@dataclass(frozen=True)
class PreprocessSettings:
    """One job. Raises ConfigError that names the key.

    `mode`: `vocabulary` or `hash`; `rows`: of the 26 tables (`hash`); `min_count`: training
    samples in which an id of a vocabulary must occur; `split`: what is held out: `seventh` (the
    last of the samples), `last_file` or `none`; `workers`: processes, None for what cores and
    `memory` (bytes, all processes together) allow; `multi_hot`: ids per bag of each table, None
    for one; `on_bad_line`: `error` or `skip`; `part`: bytes of text that are one unit of work.
    """

    input: Sequence[str]
    output: str
    mode: str = "vocabulary"
    rows: Sequence[int] | None = None
    min_count: int = 1
    split: str = "seventh"
    workers: int | None = None
    memory: int = 2 << 30
    multi_hot: Sequence[int] | None = None
    on_bad_line: str = "error"
    part: int = field(default=64 << 20)

    def __post_init__(self) -> None:
        choices = {
            "mode": ("vocabulary", "hash"),
            "split": ("seventh", "last_file", "none"),
            "on_bad_line": ("error", "skip"),
        }
        for key, allowed in choices.items():
            if getattr(self, key) not in allowed:
                raise ConfigError(
                    f"{key}={getattr(self, key)} is unknown: choose {' or '.join(allowed)}"
                )
        for key in ("min_count", "workers", "part"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ConfigError(f"{key}={value}: give a whole number of at least 1")
        if self.memory < _MAIN_BYTES + WORKER_BYTES:
            least = (_MAIN_BYTES + WORKER_BYTES) >> 20
            raise ConfigError(f"memory={self.memory}: give at least {least} MiB, in bytes")
        self._check_tables()

    def _check_tables(self) -> None:
        if self.mode == "hash" and self.rows is None:
            raise ConfigError("mode=hash needs rows=[26 numbers], rows=kaggle or rows=terabyte")
        if self.mode == "vocabulary" and self.rows is not None:
            raise ConfigError(
                "rows is a key of mode=hash: a vocabulary finds its rows in the data; leave it out"
            )
        if self.mode == "hash" and self.min_count != 1:
            raise ConfigError(f"min_count={self.min_count} is a key of mode=vocabulary alone")
        for key, more in (("rows", "kaggle or terabyte"), ("multi_hot", "true or false")):
            values = getattr(self, key)
            listed = isinstance(values, list | tuple) and len(values) == IDS
            counts = listed and all(type(value) is int and value >= 1 for value in values)
            if values is not None and not counts:
                raise ConfigError(
                    f"{key}={values}: give {IDS} whole numbers of at least 1 [a,b,...], {more}"
                )

    @property
    def table_rows(self) -> tuple[int, ...] | None:
        """Rows of the tables that ids are hashed to; None in mode `vocabulary`."""
        return None if self.rows is None else tuple(int(rows) for rows in self.rows)

    def workers_for(self, bytes_each: int = WORKER_BYTES) -> int:
        """Processes that may work at once when each takes `bytes_each` of memory."""
        fit = max(1, (self.memory - _MAIN_BYTES) // max(bytes_each, WORKER_BYTES))
        return min(self.workers or len(os.sched_getaffinity(0)), fit)

    def identity(self) -> dict[str, object]:
        """All that the result depends on, as JSON values."""
        return {
            key: list(value) if key in ("rows", "multi_hot") and value else value
            for key, value in vars(self).items()
            if key not in ("input", "output", "workers", "memory")
        }


HASHED_BYTES = 16 << 20
"""Bytes under one hash of a file's checksum, which is one over the hashes of all blocks, so that
many processes can make it together."""


def hash_block(block: tuple[str, int]) -> bytes:
    """The SHA-256 of the block of a file (path) that begins at some byte."""
    path, start = block
    with open(path, "rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(HASHED_BYTES)).digest()


def hash_blocks(path: Path) -> list[tuple[str, int]]:
    """The blocks of a file, in order, for many processes to hash together."""
    return [(str(path), start) for start in range(0, path.stat().st_size, HASHED_BYTES)]


NAME = "manifest.json"
"""What a folder of preprocessed data holds. Written last: then all is there."""
FORMAT = 1


@dataclass(frozen=True)
class ArrayFile:
    """An array of the folder: its file has `bytes` bytes, header included.

    `checksum`: SHA-256 over the SHA-256 of its consecutive blocks of 16 MiB, in hexadecimal.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """What the folder holds.

    Samples [0, train_samples) train, the others are held out, all in order of time. `arrays`:
    path within the folder to file. `inputs`: name, bytes, lines and samples of each text file;
    `skipped`: count of malformed lines and the first ten. `settings`: what the user asked for.
    `fingerprint`: SHA-256 of all that a training run can see; equal where the data is equal.
    """

    samples: int
    train_samples: int
    table_rows: tuple[int, ...]
    mode: str
    multi_hot: tuple[int, ...] | None
    arrays: dict[str, ArrayFile]
    inputs: list[dict[str, Any]]
    skipped: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]
    fingerprint: str = ""
    format: int = FORMAT

    def with_fingerprint(self) -> Manifest:
        """This manifest with the fingerprint of its content."""
        seen = {
            "samples": self.samples,
            "train_samples": self.train_samples,
            "table_rows": list(self.table_rows),
            "multi_hot": self.multi_hot and list(self.multi_hot),
            "arrays": {name: file.checksum for name, file in sorted(self.arrays.items())},
        }
        text = json.dumps(seen, sort_keys=True)
        return replace(self, fingerprint=hashlib.sha256(text.encode()).hexdigest())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises DataError where there is none or it cannot be understood."""
    path = folder / NAME
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"data.path: {path} cannot be read ({error})") from error
    if values is None:
        raise DataError(
            f"data.path={folder} has no {NAME}: it is no result of python -m distcache.preprocess, "
            "or an unfinished one (run the same command again to go on); for text files give a "
            f"glob such as '{folder}/*.txt'"
        )
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise DataError(f"data.path: {path} is not a manifest of format {FORMAT}")
    try:
        for key in ("table_rows", "multi_hot"):
            values[key] = values[key] and tuple(values[key])
        for name, file in values["arrays"].items():
            values["arrays"][name] = ArrayFile(**file | {"shape": tuple(file["shape"])})
        manifest = Manifest(**values)
        intact = manifest.with_fingerprint() == manifest
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"data.path: {path} lacks or misspells something ({error})") from error
    if not intact:
        raise DataError(
            f"data.path: {path} does not have its fingerprint any more: it was changed since it "
            "was written; preprocess again"
        )
    return manifest


def describe_array(path: Path, digests: Sequence[bytes]) -> ArrayFile:
    """An array file's entry; `digests`: the hashes of its blocks, in order."""
    array, checksum = np.load(path, mmap_mode="r"), hashlib.sha256(b"".join(digests)).hexdigest()
    return ArrayFile(array.dtype.str, tuple(array.shape), path.stat().st_size, checksum)


def open_array(folder: Path, manifest: Manifest, name: str) -> np.ndarray:
    """An array by memory map; DataError where the file is not what the manifest says."""
    try:
        return _map_array(folder, manifest, name)
    except DataError as error:
        raise DataError(
            f"data.path: {error}: run the same command of python -m distcache.preprocess again, "
            "which makes the folder anew"
        ) from error


def find_damage(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with the first file that is missing, cut, or of another shape; None if all
    are as the manifest says. Contents are not read: see `verify`."""
    try:
        for name in manifest.arrays:
            _map_array(folder, manifest, name)
    except DataError as error:
        return str(error)
    return None


def _map_array(folder: Path, manifest: Manifest, name: str) -> np.ndarray:
    path, expected = folder / name, manifest.arrays.get(name)
    if expected is None:
        raise DataError(f"the manifest in {folder} has no {name}")
    try:
        size = path.stat().st_size
        array = np.load(path, mmap_mode="r") if size == expected.bytes else None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error})") from error
    if array is None:
        raise DataError(f"{path} has {size:,} bytes, not {expected.bytes:,}")
    if array.dtype.str != expected.dtype or array.shape != expected.shape:
        raise DataError(
            f"{path} holds {array.dtype} {array.shape}, and the manifest says {expected.dtype} "
            f"{expected.shape}"
        )
    return array


def verify(folder: Path) -> Manifest:
    """Read every file and compare checksums. Raises DataError that names the first wrong file."""
    manifest = read_manifest(folder)
    for name, expected in manifest.arrays.items():
        open_array(folder, manifest, name)
        path = folder / name
        found = describe_array(path, [hash_block(block) for block in hash_blocks(path)])
        if found != expected:
            raise DataError(
                f"data.path: {folder / name} has checksum {found.checksum}, not "
                f"{expected.checksum}: it was changed or damaged; remove {folder} and "
                "preprocess again"
            )
    return manifest
