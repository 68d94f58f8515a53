"""Users and items: positives, negatives, held-out parts, ids and tables, settings."""

from __future__ import annotations

import numpy as np
import pytest
from batch_checks import check_slices
from interaction_files import CSV, HEADER, LINES, samples, source, write

from distcache.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("one_thread")


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
