"""Criteo lines for tests, what they say read the plain way, folders made of them, damaged text."""

from __future__ import annotations

import random
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from distcache.data.criteo_folder import Manifest, PreprocessSettings
from distcache.data.criteo_job import preprocess
from distcache.data.criteo_tables import Part, PartReport, parse_part, part_file, read_rows
from distcache.data.criteo_text import CriteoRows, dense_of, parse_line
from distcache.data.files import inspect
from distcache.errors import DataError
from distcache.preprocess import checked

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
    return preprocess(checked(PreprocessSettings(paths, str(output), **values)), show)


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
    text, settings = inspect(path), PreprocessSettings(output=str(path.parent), rows=rows)
    settings.on_bad_line = "skip"
    (settings.work / "parts").mkdir(parents=True, exist_ok=True)
    part = Part(0, "0000-0000000", text, 0, text.bytes, 0)
    report = parse_part(settings, part)
    if not read:
        return report, None
    pieces = [vars(rows).values() for rows in read_rows(part_file(settings, part.name, ".rows"))]
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


ODD = [b"\x00", b"\xff", b"\xc3\x28", b" ", b"\t", b"\n", b"\r", b"\r\n", b"-", b"+", b"x", b"_"]
ODD += [b"g", b".", b"0x", b'"', b"0" * 30, b"f" * 17, b"9" * 19, b"\xef\xbb\xbf", b"\x1a"]


def damage(text: bytes, dice: random.Random) -> bytes:
    """One to three changes of the kinds that disks, networks and editors make."""
    for _ in range(dice.randint(1, 3)):
        at, until = sorted((dice.randrange(len(text) + 1), dice.randrange(len(text) + 1)))
        match dice.randrange(8):
            case 0:
                text = text[:at] + dice.randbytes(1) + text[at + 1 :]
            case 1 | 2:
                text = text[:at] + dice.choice(ODD) + text[at:]
            case 3:
                text = text[:at] + dice.choice(ODD) + text[at + dice.randint(1, 3) :]
            case 4:
                text = text[:at] + text[min(until, at + dice.randint(1, 300)) :]
            case 5:
                text = text[:at] + text[at : at + dice.randint(1, 300)] + text[at:]
            case 6:
                text = text[: max(1, until)]
            case 7:
                fields = text.split(b"\t")
                one, other = dice.randrange(len(fields)), dice.randrange(len(fields))
                fields[one], fields[other] = fields[other], fields[one]
                text = b"\t".join(fields)
        if not text:
            return b"\n"
    return text
