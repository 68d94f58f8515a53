"""Users and items: positives, negatives, held-out parts, odd lines; trained on real ones."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path

import numpy as np
import pytest
import reference_trainer as reference
import torch
from batch_checks import check_slices
from source_runs import digests, summaries

from distcache.cli.compose import compose_overrides, to_config
from distcache.data.interactions import InteractionsSource, InteractionsSpec
from distcache.data.interactions_text import _fast_block, csv_numbers
from distcache.errors import ConfigError, DataError
from distcache.metrics.binary import auc
from distcache.run import build
from distcache.store.initial import initial_rows


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


LINES = ["0 1 2 3", "1 2", "2 0 1\t4 5", "4 5 5 1", "0 7"]
CSV = ["3,1,4.0,50", "3,2,2.5,10", "0,1,5.0,40", "0,3,3.0,40", "1,4,1.0,20", "3,0,4.5,30"]
HEADER = "userId,movieId,rating,timestamp"


def write(path: Path, lines: list[str], end: str = "\n") -> Path:
    path.write_bytes((end.join(lines) + end).encode())
    return path


def source(path, batch=8, **changes) -> InteractionsSource:
    return InteractionsSource(InteractionsSpec(path, global_batch_size=batch, **changes))


def samples(stream, kind="train", epoch=0) -> list[tuple[int, int, int]]:
    """(user, item, label) of a whole epoch."""
    found, steps = [], stream.steps_per_epoch
    for at in range(steps if kind == "train" else stream.eval_batches):
        take = stream.train_batch if kind == "train" else stream.eval_batch
        batch = take(at + (epoch * steps if kind == "train" else 0), 0, 1)
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
    for step in (0, 3, 5):
        check_slices(stream, step, "train")
    check_slices(stream, 1, "eval")
    batch = stream.train_batch(0, 0, 1)
    assert batch.dense.tolist() == [[1.0]] * 8


@pytest.mark.parametrize("sampling", ["uniform", "popularity"])
def test_negatives(tmp_path, sampling):
    lines = [f"{user} " + " ".join(str(user + 1000 * k) for k in range(5)) for user in range(50)]
    lines += [f"{user} 7000 " for user in range(50)]  # the last one, popular and held out
    lines += [f"{user} 6000 {100 + user}" for user in range(50, 80)]
    stream = source(write(tmp_path / "a.txt", lines), 64, negatives=3, sampling=sampling)
    found = samples(stream)
    train = set(positives(found))
    negatives = [(user, item) for user, item, label in found if not label]
    assert len(negatives) == 3 * len(positives(found))
    assert not set(negatives) & train
    items = {item for _, item in train}
    assert {item for _, item in negatives} <= items  # 7000 is not in training
    share = np.mean([item == 6000 for _, item in negatives])
    expected = 30 / 280 if sampling == "popularity" else 1 / len(items)
    assert abs(share - expected) < 0.03
    assert samples(stream) == found  # the same again
    other = [s[:2] for s in samples(stream, epoch=1) if not s[2]]
    assert sorted(other) != sorted(negatives)
    every = train | set(positives(samples(stream, "eval")))
    held_out = [s for s in samples(stream, "eval") if not s[2]]
    assert held_out and not {s[:2] for s in held_out} & every
    assert (
        source(tmp_path / "a.txt", 64, negatives=3, sampling=sampling, seed=1)
        .train_batch(0, 0, 1)
        .ids.values.tolist()
        != stream.train_batch(0, 0, 1).ids.values.tolist()
    )


def test_a_user_with_every_item_still_gets_negatives(tmp_path):
    stream = source(write(tmp_path / "a.txt", ["0 0 1 2", "1 0 1"]))
    assert len(samples(stream)) == 15


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_by_time(tmp_path, header, end):
    lines = [HEADER] * header + CSV
    stream = source(
        write(tmp_path / "a.csv", lines, end), held_out_by="time", held_out=0.5, negatives=1
    )
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


def test_the_fast_way_is_the_definition():
    rng = np.random.default_rng(0)
    rows = [
        f"{rng.integers(0, 10**9)},{rng.integers(0, 10**6)},{rng.integers(0, 11) / 2},"
        f"{rng.integers(0, 2**40)}"
        for _ in range(500)
    ]
    block = ("\n".join(rows) + "\n").encode()
    found = _fast_block(block, b",", 4)
    assert found is not None
    assert found.tolist() == [list(csv_numbers(row.encode(), b",", 4)) for row in rows]
    for odd in (
        "1,2,,3",
        "1,2,nan,3",
        "1,2,1e3,3",
        "-1,2,3,4",
        "1,2,3",
        "",
        '"1",2,3,4',
        "1.5,2,3,4",
    ):
        assert _fast_block(block + odd.encode() + b"\n", b",", 4) is None, odd


BAD_LINES = {
    "word": ("7 x3 4", "item 'x3' is not a whole number"),
    "negative": ("-7 3", "user '-7' is not a whole number"),
    "fraction": ("7 3.5", "item '3.5' is not a whole number"),
    "no items": ("7 ", "user '7' has no items"),
    "empty": ("", "the line is empty"),
    "nul": ("7 3\0 4", r"item '3\\x00' is not"),
    "too long": ("7 " + "1" * 19, "is not a whole number from 0 to"),
    "underscore": ("7 1_0", "item '1_0'"),
}
BAD_CSV = {
    "word": ("7,x,1,1", "item 'x' is not a whole number"),
    "negative": ("7,-1,1,1", "item '-1' is not a whole number"),
    "nan": ("7,1,nan,1", "rating 'nan' is not a finite number"),
    "no rating": ("7,1,,1", "rating '' is not a finite number"),
    "time": ("7,1,1,yesterday", "time 'yesterday' is not a finite number"),
    "fields": ("7,1,1", r"3 fields instead of 4 \(user, item, rating, time\)"),
    "header": (HEADER, "the header stands here again"),
    "empty": ("", "1 fields instead of 4"),
}


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [(LINES, *case) for case in BAD_LINES.values()]
    + [([HEADER, *CSV], *case) for case in BAD_CSV.values()],
    ids=[*BAD_LINES, *(f"csv {name}" for name in BAD_CSV)],
)
def test_a_malformed_line_is_named_or_skipped(tmp_path, caplog, good, bad, message):
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


def test_the_report_quotes_the_first_ten(tmp_path):
    stream = source(write(tmp_path / "a.txt", [*LINES, *["bad"] * 30]), on_bad_line="skip")
    assert stream.bad_lines.count == 30 and len(stream.bad_lines.first) == 10
    assert stream.bad_lines.first[0].startswith(f"{tmp_path}/a.txt:6: ")


def test_a_line_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("distcache.data.lines.LONGEST", 1 << 20)
    path = write(tmp_path / "a.txt", [*LINES, "9 " + "1 " * (1 << 20), "5 1 2"])
    with pytest.raises(DataError, match=r"a\.txt:6: the line is longer than 1 MiB"):
        source(path)
    stream = source(path, on_bad_line="skip")
    assert stream.bad_lines.count == 1 and stream.table_rows == (6, 8)


def test_gzip_is_read_by_its_content(tmp_path):
    """Told by its first bytes; the name without .gz says whether it is CSV."""
    for name, content in (("a.txt", LINES), ("a.csv", [HEADER, *CSV])):
        plain = write(tmp_path / name, content)
        for packed in (tmp_path / f"{name}.gz", tmp_path / "b" / name):
            packed.parent.mkdir(exist_ok=True)
            packed.write_bytes(gzip.compress(plain.read_bytes()))
            stream = source(packed)
            assert stream.identity == source(plain).identity
            assert samples(stream) == samples(source(plain))
    worse = write(tmp_path / "worse.txt", [*LINES, "bad", *LINES])
    packed = tmp_path / "worse.gz"
    packed.write_bytes(gzip.compress(worse.read_bytes()))
    with pytest.raises(DataError, match=r"worse\.gz:6: user 'bad' is not a whole"):
        source(packed)
    assert source(packed, on_bad_line="skip").bad_lines.count == 1


def test_damaged_gzip_is_never_skipped(tmp_path):
    whole = gzip.compress("".join(f"{n} {n * n}\n" for n in range(20_000)).encode())
    path = tmp_path / "a.txt.gz"
    crc = whole[:-6] + bytes([whole[-6] ^ 1]) + whole[-5:]
    flipped = whole[:30_000] + bytes(64) + whole[30_064:]
    for damaged in (whole[:-2000], whole[:5], crc, flipped):
        path.write_bytes(damaged)
        # What is unpacked of flipped bytes may be a bad line before it breaks off.
        for how in ("skip",) if damaged is flipped else ("error", "skip"):
            with pytest.raises(
                DataError, match=r"the gzip data is damaged or cut off at line \d+ or"
            ):
                source(path, on_bad_line=how)
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r"a\.txt\.gz is empty: there is nothing in the gzip"):
        source(path)


def test_lines_that_look_like_csv_are_told_apart(tmp_path):
    for line, hint in (
        ("1::1193::5::978300760", r"'1::1193.* for CSV give data\.format=csv data\.delimiter='::'"),
        ("1,1193,5", r"data\.format=csv; correct the line"),
        ("1;1193", r"data\.delimiter=';'"),
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


def test_files(tmp_path):
    with pytest.raises(DataError, match="no such file and nothing matches"):
        source(tmp_path / "none.txt")
    with pytest.raises(DataError, match="is a folder"):
        source(tmp_path)
    with pytest.raises(DataError, match=r"a\.txt is empty"):
        source(write(tmp_path / "a.txt", [], end=""))
    with pytest.raises(DataError, match="no interaction that could be used"):
        source(write(tmp_path / "a.csv", [HEADER]))
    with pytest.raises(DataError, match="no interaction that could be used"):
        source(write(tmp_path / "b.csv", CSV), min_rating=9)
    with pytest.raises(DataError, match="5 fields separated by"):
        source(write(tmp_path / "c.csv", ["1,2,3,4,5"]))
    for part in (2, 10):
        write(tmp_path / f"part-{part}.txt", [f"{part} 1 2 3"])
    both = source(str(tmp_path / "part-*.txt"))
    assert [s[0] for s in samples(both, "eval") if s[2]] == [2, 10]


def test_ids_and_tables(tmp_path):
    path = write(tmp_path / "a.txt", LINES)
    assert source(path, table_rows=(10, 20)).table_rows == (10, 20)
    with pytest.raises(DataError, match=r"item 7 is not in its table, which has 4 rows"):
        source(path, table_rows=(5, 4))
    hashed = source(path, table_rows=(5, 4), on_bad_id="hash")
    assert max(item for _, item, _ in samples(hashed)) == 3
    far = write(tmp_path / "far.txt", ["1 " + "9" * 18, "12345678901 3 4"])
    with pytest.raises(DataError, match=r"too far for tables of a row per id.*on_bad_id=hash"):
        source(far)
    assert source(far, table_rows=(100, 100), on_bad_id="hash").table_rows == (100, 100)


def test_settings_are_checked(tmp_path):
    path = write(tmp_path / "a.txt", LINES)
    for changes, message in (
        ({"format": "tsv"}, "data.format='tsv'"),
        ({"sampling": "hard"}, "data.negative_sampling='hard'"),
        ({"held_out_by": "user"}, "data.held_out_by='user'"),
        ({"negatives": 0}, "data.negatives=0"),
        ({"held_out": 1.5}, "data.held_out=1.5"),
        ({"delimiter": ""}, "data.delimiter is empty"),
        ({"table_rows": (3,)}, r"data.table_rows=\[3\]"),
        ({"on_bad_line": "no"}, "data.on_bad_line='no'"),
    ):
        with pytest.raises(ConfigError, match=message):
            source(path, **changes)


# --- training on real interactions ---------------------------------------------------------------


def amazon(shared_data: Path, *more: str) -> list[str]:
    path = shared_data / "amazon_book_interactions.txt"
    return ["experiment=interactions", f"data.path={path}", *more]


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


def test_real_interactions_are_learnt(shared_data, tmp_path):
    """One epoch of `experiment=interactions`: chance is 0.5, the bits are the same in two modes."""
    runs = [amazon(shared_data, f"parallel={mode}") for mode in ("data", "resident")]
    found = summaries(runs, tmp_path)
    assert digests(found[0]) == digests(found[1])
    assert found[0]["steps"] == 269 and 0 < found[0]["hit_rate"] < 1
    assert found[0]["eval_auc"] == found[1]["eval_auc"] > 0.75
    loss, area = independent(runs[0])
    assert found[0]["eval_auc"] == pytest.approx(area, abs=1e-4)
    assert found[0]["final_loss"] == pytest.approx(loss, rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_real_interactions_are_learnt_beyond_popularity(shared_data, tmp_path, world_size):
    """Negatives as popular as positives: what is learnt is who likes what. Four epochs of Adam.

    The bar is 1e-4, or ten times what the independent trainer drifts with its samples reversed.
    """
    more = ["optim=adam", "optim.dense_lr=0.005", "optim.embedding_lr=0.005"]
    more += ["data.negative_sampling=popularity", "trainer.steps=1076"]
    runs = [amazon(shared_data, *more, f"parallel={mode}") for mode in ("data", "resident")]
    found = summaries(runs, tmp_path, world_size, timeout=280)
    assert digests(found[0]) == digests(found[1])
    assert found[0]["eval_auc"] > 0.72
    areas = [independent(runs[0], reverse)[1] for reverse in (False, True)]
    print(f"AUC {found[0]['eval_auc']:.6f}, independent {areas[0]:.6f}, reversed {areas[1]:.6f}")
    assert abs(found[0]["eval_auc"] - areas[0]) < max(1e-4, 10 * abs(areas[0] - areas[1]))
