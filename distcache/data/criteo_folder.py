"""What to make of which text, and what came of it: settings, `manifest.json`, checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from distcache.config import option
from distcache.data.files import read_json
from distcache.data.samplers import hash_counters, key_of
from distcache.errors import DataError

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
"""Memory of a worker: its modules, what a part's counts take, and a block being parsed."""
MAIN_BYTES = 200 << 20


@dataclass
class PreprocessSettings:
    """The keys of `distcache.preprocess`, which checks them and makes numbers of their words.

    Then `rows` and `multi_hot` have a number for each of the 26 tables, or are None: a vocabulary;
    one id a bag.
    """

    input: list[str] = option([], "text files or globs, in order of time", positional=True)
    output: str = option("", "folder of the result, and of unfinished work")
    mode: str = option(
        "vocabulary",
        "vocabulary: rows by falling count, row 0 for ids outside it, row 1 for missing ids; "
        "hash: value modulo the table's rows, missing ids in row 0",
        choice=("vocabulary", "hash"),
    )
    rows: Any = option(
        None, "mode=hash: 26 numbers [a,b,...], or kaggle, or terabyte", only=("hash",), by="mode"
    )
    min_count: int = option(
        1, "vocabulary: least count in training samples", least=1, only=("vocabulary",), by="mode"
    )
    split: str = option(
        "seventh",
        "held out: seventh, last_file or none",
        choice=("seventh", "last_file", "none"),
    )
    workers: Any = option("auto", "processes; auto: what cores and memory allow", counted=1)
    memory: Any = option("2g", "bytes that all processes together may take")
    multi_hot: Any = option(
        False, "bags of MLPerf's sizes in place of single ids, by a fixed rule; or 26 sizes"
    )
    on_bad_line: str = option("error", "error, or skip with a count", choice=("error", "skip"))
    part: Any = option("64m", "bytes of text that are one restartable unit")
    verify: bool = option(False, "only compare the checksums of output")

    @property
    def work(self) -> Path:
        """The folder of all unfinished work."""
        return Path(self.output, "work")

    def workers_for(self) -> int:
        """Processes that may work at once."""
        wanted = len(os.sched_getaffinity(0)) if self.workers == "auto" else self.workers
        return min(wanted, max(1, (self.memory - MAIN_BYTES) // WORKER_BYTES))

    def identity(self) -> dict[str, object]:
        """All that the result depends on, as JSON values."""
        others = ("input", "output", "workers", "memory", "verify")
        return {key: value for key, value in vars(self).items() if key not in others}


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
    path within the folder to file. `inputs`: name and bytes of each text file;
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
    if not isinstance(values, dict) or "format" not in values:
        raise DataError(f"data.path: {path} is no manifest of python -m distcache.preprocess")
    if values["format"] != FORMAT:
        raise DataError(
            f"data.path: {path} has format {values['format']!r}, and this version of distcache "
            f"reads format {FORMAT}: run python -m distcache.preprocess again"
        )
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
    path, expected = folder / name, manifest.arrays.get(name)
    try:
        size = path.stat().st_size
        if expected is None:
            wrong = f"the manifest in {folder} has no {name}"
        elif size != expected.bytes:
            wrong = f"{path} has {size:,} bytes, not {expected.bytes:,}"
        else:
            array = np.load(path, mmap_mode="r")
            if (array.dtype.str, array.shape) == (expected.dtype, expected.shape):
                return array
            wrong = (
                f"{path} holds {array.dtype} {array.shape}, and the manifest says "
                f"{expected.dtype} {expected.shape}"
            )
    except (OSError, ValueError) as error:
        wrong = f"{path} cannot be read ({error})"
    raise DataError(
        f"data.path: {wrong}: run the same command of python -m distcache.preprocess again, "
        "which makes the folder anew"
    )


def find_damage(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with the first file that is missing, cut, or of another shape; None if all
    are as the manifest says. Contents are not read: see `verify`."""
    try:
        for name in manifest.arrays:
            open_array(folder, manifest, name)
    except DataError as error:
        return str(error).removeprefix("data.path: ")
    return None


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
