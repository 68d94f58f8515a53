"""`manifest.json`: what a folder of preprocessed data holds. Written last: then all is there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from distcache.data.raw.checksum import hash_blocks, hash_tasks
from distcache.errors import DataError

NAME = "manifest.json"
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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it, so that it is either whole or not there."""
    partial = folder / f"{NAME}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / NAME)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. Raises DataError where there is none or it cannot be understood."""
    path = folder / NAME
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"data.path={folder} has no {NAME}: it is no result of python -m distcache.preprocess, "
            "or an unfinished one (run the same command again to go on); for text files give a "
            f"glob such as '{folder}/*.txt'"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"data.path: {path} cannot be read ({error})") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise DataError(f"data.path: {path} is not a manifest of format {FORMAT}")
    try:
        arrays = {
            name: ArrayFile(**file | {"shape": tuple(file["shape"])})
            for name, file in values["arrays"].items()
        }
        values["table_rows"] = tuple(values["table_rows"])
        values["multi_hot"] = values["multi_hot"] and tuple(values["multi_hot"])
        values["arrays"] = arrays
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
    array = np.load(path, mmap_mode="r")
    return ArrayFile(
        dtype=array.dtype.str,
        shape=tuple(array.shape),
        bytes=path.stat().st_size,
        checksum=hashlib.sha256(b"".join(digests)).hexdigest(),
    )


def open_array(folder: Path, manifest: Manifest, name: str) -> np.ndarray:
    """An array by memory map; DataError where the file is not what the manifest says."""
    array, wrong = _map_array(folder, manifest, name)
    if array is None:
        raise DataError(
            f"data.path: {wrong}: run the same command of python -m distcache.preprocess again, "
            "which makes the folder anew"
        )
    return array


def find_damage(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with the first file that is missing, cut, or of another shape; None if all
    are as the manifest says. Contents are not read: see `verify`."""
    for name in manifest.arrays:
        array, wrong = _map_array(folder, manifest, name)
        if array is None:
            return wrong
    return None


def _map_array(folder: Path, manifest: Manifest, name: str) -> tuple[np.ndarray | None, str]:
    """An array by memory map, or None and what is wrong with its file."""
    path, expected = folder / name, manifest.arrays.get(name)
    if expected is None:
        return None, f"the manifest in {folder} has no {name}"
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return None, f"{path} has {size:,} bytes, not {expected.bytes:,}"
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        return None, f"{path} cannot be read ({error})"
    if array.dtype.str != expected.dtype or array.shape != expected.shape:
        return None, (
            f"{path} holds {array.dtype} {array.shape}, and the manifest says {expected.dtype} "
            f"{expected.shape}"
        )
    return array, ""


def verify(folder: Path) -> Manifest:
    """Read every file and compare checksums. Raises DataError that names the first wrong file."""
    manifest = read_manifest(folder)
    for name, expected in manifest.arrays.items():
        open_array(folder, manifest, name)
        found = describe_array(
            folder / name, [hash_blocks(task) for task in hash_tasks(folder / name)]
        )
        if found != expected:
            raise DataError(
                f"data.path: {folder / name} has checksum {found.checksum}, not "
                f"{expected.checksum}: it was changed or damaged; remove {folder} and "
                "preprocess again"
            )
    return manifest
