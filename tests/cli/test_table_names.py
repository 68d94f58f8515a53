"""Tables with odd names: each has a file of its own, whose name gives the table's back."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
from pyarrow import parquet
from torch import nn

import distcache
from distcache import export

NAMES = [
    "Items",
    "items",
    "ITEMS",
    "x/y",
    "..",
    ".hidden",
    "new\nline",
    "größe",
    "表",
    "50%2F",
    "a b",
]
ROWS = 6


class Sum(nn.Module):
    """A logit from the sum of all that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return pooled.flatten(1).sum(1) * self.weight


def specs(names: list[str]) -> list[distcache.TableSpec]:
    return [
        distcache.TableSpec(name, ROWS + index, 4, (f"f{index}",))
        for index, name in enumerate(names)
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of `distcache.fit` over tables of these names."""
    folder = tmp_path_factory.mktemp("names") / "run"
    ids = torch.arange(2 * len(NAMES)) % ROWS
    offsets = torch.arange(2 * len(NAMES) + 1)
    loader = [(torch.ones(2, 1), (ids, offsets), torch.tensor([0.0, 1.0]))] * 2
    settings = {"run.dir": str(folder), "trainer.device": "cpu"}
    distcache.fit(loader, specs(NAMES), Sum(), optimizer="sgd", settings=settings)
    return folder


@pytest.mark.parametrize("form", ["safetensors", "parquet"])
def test_each_table_has_a_visible_file_that_gives_its_name_back(run, tmp_path, form):
    assert export.main([f"resume={run}", f"output={tmp_path}/tables", f"format={form}"]) == 0
    files = sorted(path.name for path in (tmp_path / "tables").iterdir())
    assert sorted(unquote(name.removesuffix(f".{form}")) for name in files) == sorted(NAMES)
    assert len({name.lower() for name in files}) == len(NAMES)
    assert not any(name.startswith(".") for name in files)
    if form == "parquet":
        for name in files:
            index = NAMES.index(unquote(name.removesuffix(".parquet")))
            assert parquet.read_metadata(tmp_path / "tables" / name).num_rows == ROWS + index


def vectors(run: Path, folder: Path) -> dict[str, list[list[float]]]:
    """The rows of each table of a run's newest checkpoint."""
    assert export.main([f"resume={run}", f"output={folder}", "format=parquet"]) == 0
    return {
        unquote(path.stem): parquet.read_table(path)["vector"].to_pylist()
        for path in folder.iterdir()
    }


def test_a_run_starts_from_the_files_of_such_tables(run, tmp_path):
    """A step changes one row of each table; all others are those of the files."""
    assert export.main([f"resume={run}", f"output={tmp_path}/tables"]) == 0
    ids = torch.arange(len(NAMES)) % ROWS
    batch = (torch.ones(1, 1), (ids, torch.arange(len(NAMES) + 1)), torch.ones(1))
    settings = {"run.dir": str(tmp_path / "new"), "trainer.device": "cpu"}
    settings["trainer.init_from"] = str(tmp_path / "tables")
    distcache.fit([batch], specs(NAMES), Sum(), optimizer="sgd", settings=settings)
    old = vectors(run, tmp_path / "old")
    new = vectors(tmp_path / "new", tmp_path / "after")
    assert old.keys() == new.keys() == set(NAMES)
    for index, name in enumerate(NAMES):
        pairs = enumerate(zip(old[name], new[name], strict=True))
        changed = [row for row, (before, after) in pairs if before != after]
        assert changed == [index % ROWS]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "a text of at least one letter"),
        (7, "a text of at least one letter"),
        ("n" * 300, "takes 300 bytes in a file's name"),
        ("表" * 30, "30 characters takes 270 bytes"),
        ("\ud800", "cannot be written in UTF-8"),
    ],
)
def test_names_that_cannot_be_file_names_are_refused_at_construction(name, words):
    with pytest.raises(distcache.errors.ConfigError, match=words):
        distcache.TableSpec(name, 5, 4, ("f",))
    with pytest.raises(distcache.errors.ConfigError, match=words):
        distcache.CachedEmbedding(5, 4, name=name)
