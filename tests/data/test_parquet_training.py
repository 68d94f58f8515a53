"""Training from Parquet: the digests of the same data as text, and of all modes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from parquet_files import ROWS, columns, write
from source_runs import digests, summaries

pytestmark = pytest.mark.usefixtures("one_thread")


def criteo_table(path: Path) -> pa.Table:
    """The sample as columns: label, I1 to I13 (nullable integers), C1 to C26 (nullable strings)."""
    fields = [line.split("\t") for line in path.read_text().splitlines()]
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    made = {}
    for at, (name, values) in enumerate(zip(names, zip(*fields, strict=True), strict=True)):
        made[name] = [(value if at > 13 else int(value)) if value else None for value in values]
    return pa.table(made)


@pytest.mark.parametrize("world_size", [1, 2])
def test_criteo_through_parquet_has_the_digests_of_its_text(shared_data, tmp_path, world_size):
    text = shared_data / "criteo_kaggle_sample.txt"
    table = criteo_table(text)
    write(tmp_path / "one.parquet", table, 5000)
    write(tmp_path / "many.parquet", table, 100)
    rows = [1000 + 37 * i for i in range(26)]
    common = [
        f"data.table_rows={rows}",
        "data.global_batch_size=128",
        "trainer.eval_steps=3",
        "model.embedding_dim=4",
        "model.dense_arch=[8,4]",
        "model.over_arch=[8,1]",
        "cache.ratio=0.2",
        "optim=adagrad",
    ]
    parquet = [
        "data=parquet",
        f"data.dense_columns={[f'I{i}' for i in range(1, 14)]}",
        f"data.id_columns={[f'C{i}' for i in range(1, 27)]}",
        "data.string_ids=hex",
        "data.nulls=zero",
        "data.dense_transform=log1p",
    ]
    runs = [["data=criteo", f"data.path={text}"]]
    runs += [[*parquet, f"data.path={tmp_path / name}.parquet"] for name in ("one", "many")]
    runs += [[*parquet, f"data.path={tmp_path}/many.parquet", "data.shuffle_rows=300"]] * 2
    runs[-1] = [*runs[-1], "parallel=resident"]
    runs += [[*run, "data.shuffle=false"] for run in (runs[0], runs[3])]
    found = summaries([[*run, *common] for run in runs], tmp_path / "runs", world_size)
    assert digests(found[1]) == digests(found[0]) == digests(found[2])
    assert found[1]["eval_auc"] == found[0]["eval_auc"]
    assert digests(found[3]) == digests(found[4]) != digests(found[0])
    assert digests(found[5]) == digests(found[6]) != digests(found[0])  # file order


def test_weighted_bags_train_alike_in_all_modes(tmp_path):
    rng = np.random.default_rng(0)
    data = columns(120)
    data["w"] = [rng.uniform(0.5, 1.5, len(bag)).tolist() for bag in data["b"]]
    path = write(tmp_path / "a.parquet", data, 16)
    common = [
        "data=parquet",
        f"data.path={path}",
        "data.label_column=y",
        "data.dense_columns=[x,z]",
        "data.dense_transform=log1p",
        "data.id_columns=[a,b,c]",
        "data.weight_columns={b: w}",
        f"data.table_rows={list(ROWS)}",
        "data.global_batch_size=24",
        "data.shuffle_rows=40",
        "model.embedding_dim=4",
        "model.dense_arch=[8,4]",
        "model.over_arch=[8,1]",
        "cache.rows=256",
    ]
    modes = ("data", "resident", "host", "hybrid")
    found = summaries([[f"parallel={mode}", *common] for mode in modes], tmp_path / "runs", 2)
    assert digests(found[0]) == digests(found[1]) == digests(found[2])
    assert found[3]["final_loss"] == pytest.approx(found[0]["final_loss"], rel=1e-5)
