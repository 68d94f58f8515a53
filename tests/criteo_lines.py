"""Criteo lines for tests, what they say read the plain way, and folders made of them."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from distcache.data.files import inspect
from distcache.data.raw.job import preprocess
from distcache.data.raw.parts import CriteoRows, dense_of, parse_line
from distcache.data.raw.settings import Manifest, PreprocessSettings
from distcache.data.raw.tables import PartReport, PartTask, parse_part, read_rows
from distcache.errors import DataError

ROWS = (1000, 7, 5000, 300, 305, 24, 500, 633, 3, 100, 83, 51, 94, 27, 92, 61, 10, 52, 73, 4)
ROWS = (*ROWS, 200, 18, 15, 81, 105, 72)


def make_lines(count: int, seed: int = 0, missing: float = 0.1) -> list[bytes]:
    """Lines of `count` samples, ids skewed, some fields empty."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, count)
    integers = np.floor(np.exp(random.random((count, 13)) * 9)).astype(int) - 3
    ids = np.floor(np.exp(random.random((count, 26)) * 6)).astype(np.uint64)
    ids = (ids * np.uint64(2654435761)) % np.uint64(2**32)
    empty = random.random((count, 39)) < missing
    lines = []
    for i in range(count):
        fields = [str(labels[i]), *map(str, integers[i]), *(f"{value:08x}" for value in ids[i])]
        shown = [fields[0], *("" if e else f for e, f in zip(empty[i], fields[1:], strict=True))]
        lines.append("\t".join(shown).encode())
    return lines


def with_fields(line: bytes, changes: dict[int, bytes]) -> bytes:
    """The line with some of its fields replaced."""
    return b"\t".join(changes.get(at, field) for at, field in enumerate(line.split(b"\t")))


def write_lines(path: Path, lines: list[bytes]) -> Path:
    """A file of these lines."""
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def quiet(stage: str, total: int, unit: str, done: int):
    """A `Progress` that shows nothing."""
    return nullcontext(SimpleNamespace(update=lambda n: None))


def preprocessed(inputs: Path | list[Path], output: Path, show=quiet, **settings) -> Manifest:
    """The folder `output` of some text, in one process, in mode `hash` unless said otherwise."""
    paths = [str(path) for path in (inputs if isinstance(inputs, list) else [inputs])]
    values = {"workers": 1, "mode": "hash"} | settings
    if values["mode"] == "hash":
        values.setdefault("rows", ROWS)
    return preprocess(PreprocessSettings(paths, str(output), **values), show)


def in_parts(inputs: Path | list[Path], output: Path, show=quiet, **settings) -> Manifest:
    """The same in parts of few lines."""
    return preprocessed(inputs, output, show, **{"part": 20_000} | settings)


def same_files(one: Path, other: Path) -> bool:
    """Whether two results have the same arrays, to the byte."""
    names = [sorted(p.relative_to(f) for p in f.rglob("*.npy")) for f in (one, other)]
    return names[0] == names[1] and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names[0]
    )


def parsed(path: Path, rows, read: bool = True) -> tuple[PartReport, CriteoRows | None]:
    """The report of a whole file as one part without its malformed lines, and what it holds."""
    text = inspect(path)
    task = PartTask(0, "0000-0000000", text, 0, text.bytes, 0, str(path.parent), rows, True)
    report = parse_part(task)
    if not read:
        return report, None
    pieces = [vars(rows).values() for rows in read_rows(path.parent / f"{task.name}.rows")]
    arrays = (None if c[0] is None else np.concatenate(c) for c in zip(*pieces, strict=True))
    return report, CriteoRows(*arrays)


def command(*arguments: str) -> list[str]:
    """The command line of a job."""
    return [sys.executable, "-m", "distcache.preprocess", *arguments]


def read_plainly(
    text: bytes, rows: tuple[int, ...] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Labels, dense features and ids of the good lines of a text; numbers from 1 of the bad."""
    good, bad = [], []
    for number, line in enumerate(text.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            good.append(parse_line(line, rows))
        except DataError:
            bad.append(number)
    labels = np.array([row[0] for row in good], dtype=np.uint8)
    dense = dense_of(np.array([row[1] for row in good], dtype=np.int64).reshape(-1, 13))
    ids = np.array([row[2] for row in good], dtype=np.uint64).reshape(-1, 26)
    return labels, dense, ids, bad
