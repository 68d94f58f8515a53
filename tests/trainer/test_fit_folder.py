"""The run folder of `distcache.fit`: a new one for each call, and the same cell run again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distcache
from distcache.layout import TableSpec

TABLE = TableSpec(name="t", rows=50, dim=4, features=("f",))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(3 + TABLE.dim, 1)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.over(torch.cat([dense, pooled], dim=1)).squeeze(1)


def items(count: int) -> list:
    draw = torch.Generator().manual_seed(count)
    return [
        (
            torch.randn(8, 3, generator=draw),
            (torch.randint(0, TABLE.rows, (8,), generator=draw), torch.arange(9)),
            torch.randint(0, 2, (8,), generator=draw).float(),
        )
        for _ in range(count)
    ]


def fitted(**settings: Any) -> Any:
    torch.manual_seed(0)
    given = {"cache.ratio": 1.0, "trainer.device": "cpu"}
    given |= {key.replace("__", "."): value for key, value in settings.items()}
    return distcache.fit(items(6), [TABLE], Net(), eval_loader=items(2), settings=given)


def contents(folder: Path) -> dict[Path, bytes]:
    """Bytes by file, without the metrics, to which an evaluation adds a line."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files if path.name != "metrics.jsonl"}


def test_each_call_has_a_folder_of_its_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = fitted()
    (folder,) = (tmp_path / "runs").iterdir()
    before = contents(folder)
    assert list(folder.glob("checkpoints/step_00000006/manifest.json"))
    second = fitted()
    assert second.summary["state_digest"] == first.summary["state_digest"]
    assert contents(folder) == before
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(names) == 2 and folder.name in names
    assert all("-data" in name for name in names), names


def test_a_run_that_has_ended_gives_its_result_again_and_warns(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="nothing to train")
        first = fitted(run__dir=str(folder))
    before = contents(folder)
    with pytest.warns(UserWarning, match=r"nothing to train after step 6 .*run\.overwrite=True"):
        again = fitted(run__dir=str(folder))
    assert again.summary == first.summary and first.summary["steps"] == 6
    assert contents(folder) == before
    anew = fitted(run__dir=str(folder), run__overwrite=True)
    assert anew.summary["steps"] == 6 and not anew.notice
