"""`distcache.checkpoint`: verification of checkpoints, and their content."""

from __future__ import annotations

import checkpoints
import pytest
import torch

from distcache.checkpoint import __main__ as entry
from distcache.checkpoint.state import TrainerState

IDENTITY = checkpoints.identity_of("data", 1, "float32", "sgd", 0, 16, (("t", 5, 4),))
VALUES = {"tables.t.weight": torch.ones(5, 4), "applied": torch.tensor(7)}


def test_what_checkpoints_are(world, tmp_path, capsys):
    run = tmp_path / "run"
    for step in (7, 12):
        folder, state = run / f"checkpoints/step_{step:08d}", TrainerState(step)
        checkpoints.save(folder, checkpoints.Plain(VALUES), IDENTITY, state, world)

    def said(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert entry.main(list(words)) == code
        return "".join(capsys.readouterr())

    assert said(f"verify={run}").count("is intact") == 2
    shown = said(f"show={run}/checkpoints/step_00000012")
    assert "step: 12" in shown and "tables.t.weight [5, 4] torch.float32" in shown
    (folder / "__0_0.distcp").write_bytes(bytes((folder / "__0_0.distcp").stat().st_size))
    text = said(f"verify={run}", code=1)
    assert text.count("is intact") == 1 and "step_00000012 is damaged: __0_0.distcp" in text
    assert "there is no checkpoint" in said(f"verify={tmp_path}", code=1)


@pytest.mark.parametrize("words", [[], ["verify="], ["verfy=x"]])
def test_what_it_cannot_read(words, capsys):
    assert entry.main(words) == 1
    assert "verify" in capsys.readouterr().err
