"""Users and items: their text, positives, negatives, held-out parts; training on real ones."""

from __future__ import annotations

import gzip
import logging
import random
import re
from pathlib import Path

import numpy as np
import pytest
import reference_trainer as reference
import torch
from criteo_lines import damage
from source_runs import summaries

from distcache.cli.compose import compose_overrides, to_config
from distcache.data import interactions
from distcache.data.files import BadLines, inspect
from distcache.data.interactions import (
    InteractionsSource,
    InteractionsSpec,
    csv_numbers,
    line_numbers,
    read_csv,
    read_user_lines,
)
from distcache.errors import DataError
from distcache.store.rows import initial_rows
from distcache.trainer import build
from distcache.trainer.record import auc

LINES = ["0 1 2 3", "1 2", "2 0 1\t4 5", "4 5 5 1", "0 7"]
CSV = ["3,1,4.0,50", "3,2,2.5,10", "0,1,5.0,40", "0,3,3.0,40", "1,4,1.0,20", "3,0,4.5,30"]
HEADER = "userId,movieId,rating,timestamp"


def write(path: Path, lines: list[str], end: str = "\n") -> Path:
    """A file of these lines."""
    path.write_bytes((end.join(lines) + end).encode())
    return path


def source(path, batch=8, **changes) -> InteractionsSource:
    """The source of a file."""
    return InteractionsSource(InteractionsSpec(path, global_batch_size=batch, **changes))


def samples(stream, kind="train", epoch=0) -> list[tuple[int, int, int]]:
    """(user, item, label) of a whole epoch."""
    found, steps = [], range(stream.eval_batches)
    if kind == "train":
        steps = range(epoch * stream.steps_per_epoch, (epoch + 1) * stream.steps_per_epoch)
    for step in steps:
        batch = getattr(stream, f"{kind}_batch")(step, 0, 1)
        users, items = batch.ids.values.reshape(2, -1).tolist()
        found += list(zip(users, items, batch.labels.int().tolist(), strict=True))
    return found


def positives(found) -> list[tuple[int, int]]:
    return sorted((user, item) for user, item, label in found if label)


def test_lines_with_each_users_last_item_held_out(tmp_path):
    stream = source(write(tmp_path / "a.txt", LINES), negatives=2)
    assert stream.table_rows == (5, 8) and stream.features == ("user", "item")
    train = [(0, 1), (0, 2), (0, 3), (1, 2), (2, 0), (2, 1), (2, 4), (4, 5), (4, 5)]
    for epoch in (0, 1):
        assert positives(samples(stream, epoch=epoch)) == train
    assert [s[:2] for s in samples(stream, "eval") if s[2]] == [(2, 5), (4, 1), (0, 7)]
    assert stream.steps_per_epoch == 4 and stream.eval_batches == 2  # 27 and 9 samples
    assert stream.train_batch(0, 0, 1).dense.tolist() == [[1.0]] * 8
    alone = source(write(tmp_path / "b.txt", ["0 0 1 2", "1 0 1"]))
    assert len(samples(alone)) == 15  # a user with every item still gets negatives


@pytest.mark.parametrize("sampling", ["uniform", "popularity"])
def test_negatives(tmp_path, sampling):
    lines = [f"{user} " + " ".join(str(user + 1000 * k) for k in range(5)) for user in range(50)]
    lines += [f"{user} 7000 " for user in range(50)]  # the last one, popular and held out
    lines += [f"{user} 6000 {100 + user}" for user in range(50, 80)]
    stream = source(write(tmp_path / "a.txt", lines), 64, negatives=3, sampling=sampling)
    found = samples(stream)
    train = set(positives(found))
    negatives = [(user, item) for user, item, label in found if not label]
    assert len(negatives) == 3 * len(positives(found)) and not set(negatives) & train
    items = {item for _, item in train}
    assert {item for _, item in negatives} <= items  # 7000 is not in training
    share = np.mean([item == 6000 for _, item in negatives])
    expected = 30 / 280 if sampling == "popularity" else 1 / len(items)
    assert abs(share - expected) < 0.03
    other = [s[:2] for s in samples(stream, epoch=1) if not s[2]]
    assert sorted(other) != sorted(negatives)
    every = train | set(positives(samples(stream, "eval")))
    held_out = [s for s in samples(stream, "eval") if not s[2]]
    assert held_out and not {s[:2] for s in held_out} & every


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_by_time(tmp_path, header, end):
    path = write(tmp_path / "a.csv", [HEADER] * header + CSV, end)
    stream = source(path, held_out_by="time", held_out=0.5, negatives=1)
    assert positives(samples(stream)) == [(1, 4), (3, 0), (3, 2)]
    held_out = [s[:2] for s in samples(stream, "eval") if s[2]]
    assert held_out == [(0, 1), (0, 3), (3, 1)]  # in order of time, ties in file order


def test_csv_by_last_and_ratings(tmp_path):
    path = write(tmp_path / "a.csv", [HEADER, *CSV])
    stream = source(path, negatives=1)
    assert positives(samples(stream, "eval")) == [(0, 3), (3, 1)]  # by time, not by line
    rated = source(path, negatives=1, min_rating=3.0)
    every = positives(samples(rated)) + positives(samples(rated, "eval"))
    assert sorted(every) == [(0, 1), (0, 3), (3, 0), (3, 1)]
    plain = write(tmp_path / "b.csv", ["0;1", "0;2"])
    assert source(plain, delimiter=";", negatives=1).table_rows == (1, 3)
    for changes, key in (({"min_rating": 1.0}, "min_rating"), ({"held_out_by": "time"}, "time")):
        with pytest.raises(DataError, match=rf"data\.(held_out_by=)?{key} was set, but .*b\.csv"):
            source(plain, delimiter=";", **changes)


def test_ids_and_tables(tmp_path):
    path = write(tmp_path / "a.txt", LINES)
    assert source(path, table_rows=(10, 20)).table_rows == (10, 20)
    with pytest.raises(DataError, match=r"item 7 \(.*:5\) is not in its table, which has 4 "):
        source(path, table_rows=(5, 4))
    hashed = source(path, table_rows=(5, 4), on_bad_id="hash")
    assert max(item for _, item, _ in samples(hashed)) == 3
    far = write(tmp_path / "far.txt", ["1 " + "9" * 18, "12345678901 3 4"])
    with pytest.raises(DataError, match=r"too far for tables of a row per id.*on_bad_id=hash"):
        source(far)
    assert source(far, table_rows=(100, 100), on_bad_id="hash").table_rows == (100, 100)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.txt", ["1 2 3", f"2 1 {10**12} 4", "3 1 2 4 5"]),
        ("a.csv", ["1,2", f"2,{10**12}", "1,3"]),
    ],
)
def test_the_line_of_an_id_that_makes_a_table_huge_is_named(tmp_path, caplog, name, lines):
    path = write(tmp_path / name, lines)
    with caplog.at_level(logging.WARNING, logger="distcache"):
        assert source(path).table_rows[1] == 10**12 + 1
    assert f"item 1,000,000,000,000 ({path}:2) gives its table" in caplog.text
    with pytest.raises(DataError, match=re.escape(f"item {10**12} ({path}:2) is not in its table")):
        source(path, table_rows=(5, 9))


BAD_LINES = {
    "word": ("7 x3 4", "item 'x3' is not a whole number"),
    "negative": ("-7 3", "user '-7' is not a whole number"),
    "fraction": ("7 3.5", "item '3.5' is not a whole number"),
    "no items": ("7 ", "user '7' has no items"),
    "empty": ("", "the line is empty"),
    "nul": ("7 3\0 4", r"item '3\\x00' is not"),
    "too many digits": ("7 " + "1" * 19, "is not a whole number from 0 to"),
    "underscore": ("7 1_0", "item '1_0'"),
    "too long": ("9 " + "1 " * (1 << 20), "the line is longer than"),
}
BAD_CSV = {
    "word": ("7,x,1,1", "item 'x' is not a whole number"),
    "negative": ("7,-1,1,1", "item '-1' is not a whole number"),
    "far": (f"7,{2**53},1,1", r"id 9007199254740992 is beyond 2\^53 - 1"),
    "no rating": ("7,1,,1", "rating '' is not a finite number"),
    "time": ("7,1,1,yesterday", "time 'yesterday' is not a finite number"),
    "fields": ("7,1,1", r"3 fields instead of 4 \(user, item, rating, time\)"),
    "header": (HEADER, "the header stands here again"),
    "empty": ("", "1 fields instead of 4"),
    "too long": ("7,1,1," + "0" * (1 << 21), "the line is longer than"),
}
for rating in ("1_0", " 4", "4 ", "nan", "inf", "1e400", "9" * 400):
    BAD_CSV[f"rating {rating[:6]}"] = (f"7,1,{rating},1", "rating .* is not a finite number")


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [(LINES, *case) for case in BAD_LINES.values()]
    + [([HEADER, *CSV], *case) for case in BAD_CSV.values()],
    ids=[*BAD_LINES, *(f"csv {name}" for name in BAD_CSV)],
)
def test_a_malformed_line_is_named_or_skipped(tmp_path, caplog, monkeypatch, good, bad, message):
    monkeypatch.setattr(interactions, "LONGEST", 1 << 20)
    name = "a.csv" if good[0] == HEADER else "a.txt"
    path = write(tmp_path / name, [*good[:3], bad, *good[3:]])
    with pytest.raises(DataError, match=message) as error:
        source(path)
    assert f"{path}:4: " in str(error.value) and "data.on_bad_line=skip" in str(error.value)
    with caplog.at_level(logging.WARNING, logger="distcache"):
        stream = source(path, on_bad_line="skip")
    assert stream.bad_lines.count == 1
    assert "skipped 1 malformed lines" in caplog.text and f"{path}:4: " in caplog.text
    (tmp_path / "clean").mkdir()
    assert samples(stream) == samples(source(write(tmp_path / "clean" / name, good)))


def test_ids_that_pandas_wrote_as_floats(tmp_path):
    path = write(tmp_path / "a.csv", [HEADER, *CSV])
    floats = write(tmp_path / "b.csv", [HEADER, *(line.replace(",", ".0,", 2) for line in CSV)])
    assert samples(source(floats)) == samples(source(path))
    with pytest.raises(DataError, match=r"b\.csv:3: user '3\.5' is not a whole number"):
        source(write(floats, [HEADER, CSV[0], "3.5,1,1,1"]))


def test_gzip_is_read_by_its_content(tmp_path):
    """Told by its first bytes; the name without .gz says whether it is CSV."""
    for name, content in (("a.txt", LINES), ("a.csv", [HEADER, *CSV])):
        plain = write(tmp_path / name, content)
        for packed in (tmp_path / f"{name}.gz", tmp_path / "b" / name):
            packed.parent.mkdir(exist_ok=True)
            packed.write_bytes(gzip.compress(plain.read_bytes()))
            assert source(packed).identity == source(plain).identity


def test_damaged_gzip_is_never_skipped(tmp_path):
    whole = gzip.compress("".join(f"{n} {n * n}\n" for n in range(20_000)).encode())
    path = tmp_path / "a.txt.gz"
    crc = whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:]
    flipped = whole[:30_000] + bytes(64) + whole[30_064:]
    broken = r"the gzip data is damaged or cut off at line \d+ or"
    for damaged in (whole[:-2000], whole[:5], crc, flipped):
        path.write_bytes(damaged)
        # What is unpacked of flipped bytes may be a bad line before it breaks off.
        for how in ("skip",) if damaged is flipped else ("error", "skip"):
            with pytest.raises(DataError, match=broken):
                source(path, on_bad_line=how)


def test_lines_that_look_like_csv_are_told_apart(tmp_path):
    for line, hint in (
        ("1::1193::5::978300760", r"'1::1193.* for columns .*data\.format=csv; correct the line"),
        ("1,1193,5", r"data\.format=csv; correct the line"),
        ("1;1193", r"data\.format=csv; correct the line"),
        ("1 1193 3.5", r"data\.format=csv; correct the line"),
        ("a b", r"10\^18 - 1; correct the line"),
    ):
        path = write(tmp_path / "ratings.dat", [line])
        with pytest.raises(DataError, match=hint):
            source(path)
    write(path, ["1::1193::5", "2::5::5"])
    with pytest.raises(DataError, match=r"2 malformed lines, the first .*dat:1: user .*format=csv"):
        source(path, on_bad_line="skip")
    write(path, ["1::3::5", "1::4::5", "2::5::5"])
    assert source(path, format="csv", delimiter="::").table_rows == (3, 6)


def test_files_with_nothing_to_use_and_several_files(tmp_path):
    with pytest.raises(DataError, match="no interaction that could be used"):
        source(write(tmp_path / "a.csv", [HEADER]))
    with pytest.raises(DataError, match="no interaction that could be used"):
        source(write(tmp_path / "b.csv", CSV), min_rating=9)
    with pytest.raises(DataError, match="5 fields separated by"):
        source(write(tmp_path / "c.csv", ["1,2,3,4,5"]))
    for first in ("-1,5,3.0,9", "\ufeff1,5,3.0,9", "\x001,5,3.0,9"):  # is no header
        with pytest.raises(DataError, match=r"d\.csv:1: user .* is not a whole number"):
            source(write(tmp_path / "d.csv", [first, *CSV]))
    for part in (2, 10):
        write(tmp_path / f"part-{part}.txt", [f"{part} 1 2 3 4"])
    both = source(str(tmp_path / "part-*.txt"))
    assert [s[0] for s in samples(both, "eval") if s[2]] == [2, 10]


def test_leading_zeros_are_no_digits(tmp_path):
    path, zeros = tmp_path / "a", b"0" * 5000
    path.write_bytes(b"1 " + zeros + b"7 8\n")
    found = read_user_lines([inspect(path)], BadLines("error"))
    assert (found["user"].tolist(), found["item"].tolist()) == ([1, 1], [7, 8])
    for odd in (b"", b"2, 3,4,5\n"):  # read the fast way, and line by line
        path.write_bytes(zeros + b"7,00012,1,2\n" + odd)
        found, _ = read_csv([inspect(path)], ",", BadLines("skip"))
        assert (found["user"].tolist(), found["item"].tolist()) == ([7], [12])


DRAWN = np.random.default_rng(0).integers(0, 90, (30, 6))
TEXTS = {
    "csv": "".join(f"{a},{b},{c / 2},{10**9 + d}\n" for a, b, c, d, *_ in DRAWN).encode(),
    "lines": "".join(" ".join(map(str, line)) + "\n" for line in DRAWN[:20]).encode(),
}


def read_plainly(text: bytes, kind: str) -> tuple[np.ndarray, list[int]]:
    """Numbers of the good lines by the definitions, and the numbers of the bad lines."""
    good, bad = [], []
    for number, line in enumerate(text.removesuffix(b"\n").split(b"\n"), start=1):
        line = line.removesuffix(b"\r")
        try:
            if kind == "csv":
                good.append(csv_numbers(line, b",", ("user", "item", "rating", "time")))
            else:
                user, *items = line_numbers(line)
                good += [(user, item, 0.0, 0.0) for item in items]
        except DataError:
            bad.append(number)
    return np.array(good, dtype=np.float64).reshape(-1, 4), bad


@pytest.mark.parametrize(
    "seeds", [range(400), pytest.param(range(400, 12_000), marks=pytest.mark.slow)], ids=str
)
def test_damaged_files_are_read_as_line_by_line(tmp_path, monkeypatch, seeds):
    """The first line of a CSV stays whole: it says how many fields there are."""
    monkeypatch.setattr(interactions, "_BLOCK_BYTES", 300)
    path = tmp_path / "a.txt"
    for seed in seeds:
        dice, kind = random.Random(seed), ("csv", "lines")[seed % 2]
        text = damage(TEXTS[kind], dice)
        first = b"7,7,1.5,7\n" if kind == "csv" else b""
        after = 1 if seed % 4 == 0 else 0
        path.write_bytes((HEADER.encode() + b"\n") * after + first + text)
        expected, bad = read_plainly(first + text, kind)
        lines = BadLines("skip")
        if kind == "csv":
            found, fields = read_csv([inspect(path)], ",", lines)
            assert fields == found.dtype.names
        else:
            found = read_user_lines([inspect(path)], lines)
        got = np.stack([found[name].astype(np.float64) for name in found.dtype.names], axis=1)
        assert np.array_equal(got, expected), seed
        assert lines.count == len(bad) + (after if kind == "lines" else 0), seed
        if kind == "csv":
            numbers = [number + after for number in bad][:5]
            assert [int(line.split(":")[1]) for line in lines.first[:5]] == numbers, seed


def amazon(shared_data: Path, *more: str) -> list[str]:
    path = shared_data / "amazon_book_interactions.txt"
    return ["experiment=interactions", f"data.path={path}", "cache.ratio=0.25", *more]


def independent(overrides: list[str], reverse: bool = False) -> tuple[float, float]:
    """The last loss and the held-out AUC of the tests' own trainer over the same batches."""
    config = to_config(compose_overrides(overrides))
    stream = build.build_source(config)
    tables = build.build_tables(config, stream)
    seed, optim = config.trainer.seed, config.optim
    weights = {
        table.name: initial_rows(seed, index, table.rows, table.dim, 0, table.rows)
        for index, table in enumerate(tables)
    }
    model = build.build_dense(config, tables, stream.dense_features)
    settings = reference.Settings(
        optim.name,
        tuple(table.name for table in tables),
        dense_lr=optim.dense_lr,
        embedding_lr=optim.embedding_lr,
        eps=optim.eps,
        initial_accumulator=optim.initial_accumulator,
        reverse=reverse,
    )
    steps = config.trainer.steps or stream.steps_per_epoch
    batches = (stream.train_batch(step, 0, 1) for step in range(steps))
    trained = reference.train(weights, model.state_dict(), model, settings, batches)
    model.load_state_dict(trained.dense)
    bags = {
        name: torch.nn.EmbeddingBag.from_pretrained(table, mode="sum", include_last_offset=True)
        for name, table in trained.tables.items()
    }
    with torch.no_grad():
        parts = [
            reference.logits_of(stream.eval_batch(index, 0, 1), settings, model, bags)
            for index in range(stream.eval_batches)
        ]
    logits, labels = (torch.cat(part).double().numpy() for part in zip(*parts, strict=True))
    return trained.losses[-1], auc(logits, labels)


POPULAR = (
    *("optim=adam", "optim.dense_lr=0.005", "optim.embedding_lr=0.005"),
    *("data.negative_sampling=popularity", "trainer.steps=1076"),
)


@pytest.mark.parametrize(
    ("world_size", "more", "steps", "least"),
    [
        (1, (), 269, 0.75),
        # Negatives as popular as positives: what is learnt is who likes what. Four epochs of Adam.
        pytest.param(1, POPULAR, 1076, 0.72, marks=pytest.mark.slow),
        pytest.param(2, POPULAR, 1076, 0.72, marks=pytest.mark.slow),
    ],
)
def test_real_interactions_are_learnt(shared_data, tmp_path, world_size, more, steps, least):
    """Chance is 0.5. The bar is 1e-4, or for four epochs ten times what the independent trainer
    drifts with its samples reversed."""
    overrides = amazon(shared_data, *more)
    (found,) = summaries([overrides], tmp_path, world_size, timeout=280)
    assert found["steps"] == steps and 0 < found["hit_rate"] < 1 and found["eval_auc"] > least
    loss, area = independent(overrides)
    drift = abs(area - independent(overrides, reverse=True)[1]) if more else 0.0
    assert abs(found["eval_auc"] - area) < max(1e-4, 10 * drift)
    if not more:
        assert found["final_loss"] == pytest.approx(loss, rel=5e-3)
