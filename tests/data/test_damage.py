"""Damaged Parquet files and interactions: a named error, or what the intact parts say."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from damaged import damage
from parquet_files import columns, source, write

from distcache.data.files import BadLines, inspect
from distcache.data.interactions import csv_numbers, line_numbers, read_csv, read_user_lines
from distcache.errors import DataError


def seen(path: Path) -> list[bytes]:
    """All that training and evaluation see of a Parquet file."""
    stream, found = source(path), []
    batches = [stream.train_batch(step, 0, 1) for step in range(stream.steps_per_epoch or 0)]
    batches += [stream.eval_batch(index, 0, 1) for index in range(stream.eval_batches or 0)]
    for batch in batches:
        for part in (batch.dense, batch.labels, batch.ids.values, batch.ids.offsets):
            found.append(part.numpy().tobytes())
    return found


def damage_bytes(content: bytes, dice: random.Random) -> bytes:
    """Changed bytes anywhere or in the footer, a piece missing, or the end."""
    text, size = bytearray(content), len(content)
    match dice.randrange(4):
        case 0:
            for _ in range(dice.randint(1, 4)):
                text[dice.randrange(size)] = dice.randrange(256)
        case 1:
            text[dice.randrange(size - 3000, size)] = dice.randrange(256)
        case 2:
            at = dice.randrange(size)
            del text[at : at + dice.randint(1, 50)]
        case 3:
            del text[dice.randrange(size) :]
    return bytes(text)


def fuzz_parquet(folder: Path, seeds: range) -> None:
    """Pages have checksums, so that nothing but the intact values may come out."""
    good, bad = folder / "good.parquet", folder / "bad.parquet"
    write(good, columns(40))
    pq.write_table(pq.read_table(good), good, row_group_size=10, write_page_checksum=True)
    whole, content = seen(good), good.read_bytes()
    for seed in seeds:
        bad.write_bytes(damage_bytes(content, random.Random(seed)))
        try:
            assert seen(bad) == whole, seed
        except DataError as error:
            assert str(bad) in str(error), seed
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def test_damaged_parquet(tmp_path):
    fuzz_parquet(tmp_path, range(250))


@pytest.mark.slow
def test_many_damaged_parquet_files(tmp_path):
    fuzz_parquet(tmp_path, range(250, 5000))


RANDOM = np.random.default_rng(0)
RATED = [
    f"{RANDOM.integers(50)},{RANDOM.integers(90)},{RANDOM.integers(1, 11) / 2},{10**9 + n}"
    for n in range(30)
]
LISTED = [" ".join(map(str, [user, *RANDOM.integers(0, 90, 5)])) for user in range(20)]
HEADER = b"userId,movieId,rating,timestamp\n"
TEXTS = {
    "csv": "\n".join(RATED).encode() + b"\n",
    "lines": "\n".join(LISTED).encode() + b"\n",
}


def read_plainly(text: bytes, kind: str) -> tuple[np.ndarray, list[int]]:
    """Numbers of the good lines by the definitions, and the numbers of the bad lines."""
    good, bad = [], []
    for number, line in enumerate(text.removesuffix(b"\n").split(b"\n"), start=1):
        line = line.removesuffix(b"\r")
        try:
            if kind == "csv":
                values = csv_numbers(line, b",", 4)
                if max(values[:2]) >= 2**53:
                    raise DataError("beyond float64")
                good.append(values)
            else:
                user, *items = line_numbers(line)
                good += [(user, item, 0.0, 0.0) for item in items]
        except DataError:
            bad.append(number)
    return np.array(good, dtype=np.float64).reshape(-1, 4), bad


def fuzz_interactions(folder: Path, seeds: range) -> None:
    """The first line of a CSV stays whole: it says how many fields there are."""
    path = folder / "a.txt"
    for seed in seeds:
        dice, kind = random.Random(seed), ("csv", "lines")[seed % 2]
        text = damage(TEXTS[kind], dice)
        first = b"7,7,1.5,7\n" if kind == "csv" else b""
        path.write_bytes((HEADER if seed % 4 == 0 else b"") + first + text)
        expected, bad = read_plainly(first + text, kind)
        after = 1 if seed % 4 == 0 else 0
        lines = BadLines("skip")
        found = (
            read_csv([inspect(path)], ",", lines)
            if kind == "csv"
            else read_user_lines([inspect(path)], lines)
        )
        parts = (found.users, found.items, found.ratings, found.times)[: 4 if kind == "csv" else 2]
        got = np.stack([part.astype(np.float64) for part in parts], axis=1)
        assert np.array_equal(got, expected[:, : len(parts)]), seed
        assert lines.count == len(bad) + (after if kind == "lines" else 0), seed
        numbers = [number + after for number in bad][:5]
        if kind == "csv":
            assert [int(line.split(":")[1]) for line in lines.first[:5]] == numbers, seed


def test_damaged_interactions(tmp_path):
    fuzz_interactions(tmp_path, range(400))


@pytest.mark.slow
def test_many_damaged_interactions(tmp_path):
    fuzz_interactions(tmp_path, range(400, 12_000))


@pytest.mark.parametrize("first", [b"-1,5,3.0,9", b"\xef\xbb\xbf1,5,3.0,9", b"\x001,5,3.0,9"])
def test_a_malformed_first_line_is_no_header(tmp_path, first):
    path = tmp_path / "a.csv"
    path.write_bytes(first + b"\n" + TEXTS["csv"])
    with pytest.raises(DataError, match=r"a\.csv:1: user .* is not a whole number"):
        read_csv([inspect(path)], ",", BadLines("error"))


@pytest.mark.parametrize("rating", [b"1_0", b" 4", b"4 ", b"nan", b"inf", b"1e400", b"9" * 400])
def test_ratings_are_plain_numbers(tmp_path, rating):
    path = tmp_path / "a.csv"
    path.write_bytes(b"1,2,3,4\n1,3," + rating + b",5\n")
    with pytest.raises(DataError, match=r"a\.csv:2: rating .* is not a finite number"):
        read_csv([inspect(path)], ",", BadLines("error"))


def test_leading_zeros_are_no_digits(tmp_path):
    path, zeros = tmp_path / "a", b"0" * 5000
    path.write_bytes(b"1 " + zeros + b"7 8\n")
    found = read_user_lines([inspect(path)], BadLines("error"))
    assert (found.users.tolist(), found.items.tolist()) == ([1, 1], [7, 8])
    for odd in (b"", b"2, 3,4,5\n"):  # read the fast way, and line by line
        path.write_bytes(zeros + b"7,00012,1,2\n" + odd)
        found = read_csv([inspect(path)], ",", BadLines("skip"))
        assert (found.users.tolist(), found.items.tolist()) == ([7], [12])
