"""Sources as an analysis reads them: how ids came about, and the counts of preprocessing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from criteo_lines import ROWS, make_lines, preprocessed, write_lines

from distcache.analyze import main
from distcache.data.criteo import CriteoArrays, CriteoSource, CriteoSpec
from distcache.data.synthetic import SyntheticSource, SyntheticSpec
from distcache.popularity.statistics import check_fits, read_statistics, vocabulary_of


@pytest.mark.parametrize(
    ("mode", "multi_hot"), [("hash", (3, 1, 2, *[1] * 23)), ("vocabulary", None)]
)
def test_counts_of_preprocessing_are_those_of_an_analysis(
    tmp_path: Path, mode: str, multi_hot: tuple[int, ...] | None
) -> None:
    text = write_lines(tmp_path / "a.txt", make_lines(700))
    folder = tmp_path / "made"
    preprocessed(text, folder, mode=mode, multi_hot=multi_hot)
    words = ("data=criteo", f"data.path={folder}", "data.global_batch_size=64", "cache.ratio=0.5")
    assert main([*words, f"output={tmp_path / 'out'}"]) == 0
    counted, given = read_statistics(tmp_path / "out"), read_statistics(folder)
    assert counted.fingerprint == given.fingerprint
    assert counted.samples == given.samples == 600
    for one, other in zip(counted.tables, given.tables, strict=True):
        assert (one.lookups, one.distinct) == (other.lookups, other.distinct)
        assert one.dense().tolist() == other.dense().tolist()
    assert json.loads((tmp_path / "out/report.json").read_text())["read"]["in_order_of_files"]


def test_the_same_vocabulary_and_others(tmp_path: Path) -> None:
    days = [write_lines(tmp_path / f"{d}.txt", make_lines(300, seed=d)) for d in (0, 1)]
    hashed = []
    for number, day in enumerate(days):
        preprocessed(day, tmp_path / f"h{number}")
        hashed.append(CriteoArrays(CriteoSpec(tmp_path / f"h{number}")))
    text = CriteoSource(CriteoSpec(days[0], ROWS))
    assert len({vocabulary_of(source) for source in (*hashed, text)}) == 1
    check_fits(read_statistics(tmp_path / "h0"), hashed[1], "h0")
    check_fits(read_statistics(tmp_path / "h0"), text, "h0")
    preprocessed(days[0], tmp_path / "bags", multi_hot=[2] * 26)
    for number, day in enumerate([*days, days[0]]):
        preprocessed(day, tmp_path / f"v{number}", mode="vocabulary")
    made = [CriteoArrays(CriteoSpec(tmp_path / name)) for name in ("bags", "v0", "v1", "v2")]
    names = [vocabulary_of(source) for source in (text, *made)]
    assert names[2] == names[4] and len(set(names)) == 4


def test_what_fixes_the_hot_ids_of_a_synthetic_stream() -> None:
    def name(**values: float) -> str:
        return vocabulary_of(SyntheticSource(SyntheticSpec([10, 20], **values)))

    assert name() == name(samples=100) == name(bag_size=3)
    assert len({name(), name(seed=1), name(zipf=0.8)}) == 3


def test_file_order_has_the_same_samples(tmp_path: Path) -> None:
    text = write_lines(tmp_path / "a.txt", make_lines(300))
    preprocessed(text, tmp_path / "made")
    source = CriteoArrays(CriteoSpec(tmp_path / "made", (), 40, shuffle_block=8))
    plain = CriteoArrays(CriteoSpec(tmp_path / "made", (), 40, shuffle=False))
    ordered = source.in_file_order()
    for step in range(7):
        batch, wanted = ordered.train_batch(step, 0, 1), plain.train_batch(step, 0, 1)
        assert batch.ids.values.tolist() == wanted.ids.values.tolist()
        assert batch.loaded().labels.tolist() == wanted.loaded().labels.tolist()
    shuffled = source.train_batch(0, 0, 1).ids.values.tolist()
    assert shuffled != plain.train_batch(0, 0, 1).ids.values.tolist()
