"""The loop in docs/checkpoints.md goes on to the same bits after a rank was killed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import TORCHRUN, environment, train

import distcache
from distcache.errors import PeerError

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
SECTION = PAGE.split("\n## Kill and restart in your own loop\n")[1].split("\n## ")[0]
VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

KILL = """    if step == {step} and rank == 1 and not Path("killed").exists():
        Path("killed").touch()
        __import__("os").kill(__import__("os").getpid(), 9)
    step += 1
"""
"""Rank 1 ends itself once, in place of the line that counts a step."""
END = """state = model.module.state_dict()
if rank == 0:
    torch.save({name: value.clone() for name, value in state.items()}, "end.pt")
model.module.items.close()
"""


def write_loop(folder: Path, killed_at: int) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    changes = {"    step += 1\n": KILL.format(step=killed_at), "model.module.items.close()\n": END}
    for before, after in changes.items():
        assert code.count(before) == 1
        code = code.replace(before, after)
    folder.mkdir()
    (folder / "loop.py").write_text(code)


def compare_ends(folder: Path, other: Path) -> None:
    found, expected = (torch.load(own / "end.pt") for own in (folder, other))
    assert found.keys() == expected.keys() and len(found) == 3
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    kept = sorted(path.parent.name for path in folder.glob("checkpoints/*/manifest.json"))
    assert kept == ["step_00000050", "step_00000060"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of the loop that was never killed."""
    folder = tmp_path_factory.mktemp("restarts") / "whole"
    write_loop(folder, killed_at=-1)
    done = train([], folder, 2, ("loop.py",))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("step", [3, 27])
def test_the_loop_goes_on_to_the_same_bits(whole: Path, tmp_path: Path, step: int) -> None:
    folder = tmp_path / "killed"
    write_loop(folder, killed_at=step)
    done = train([], folder, 2, ("loop.py",))
    assert done.returncode == 1 and (folder / "killed").exists(), done.stderr
    assert not (folder / "end.pt").exists()
    done = train([], folder, 2, ("loop.py",))
    assert done.returncode == 0, done.stderr
    compare_ends(folder, whole)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_starts_the_loop_again(whole: Path, tmp_path: Path) -> None:
    """The command of the page, in fresh interpreters."""
    (line,) = re.findall(r"^TORCH_.* torchrun .*$", SECTION, re.MULTILINE)
    command = line.split()
    name, _, value = command[0].partition("=")
    assert (name, command[-1]) == (VARIABLE, "loop.py")
    words = [word for word in command[2:] if word != "--standalone"]
    folder = tmp_path / "killed"
    write_loop(folder, killed_at=27)
    done = subprocess.run(
        [*TORCHRUN, "--local-addr=127.0.0.1", *words],
        cwd=folder,
        env=environment(**{name: value}),
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0 and (folder / "killed").exists(), done.stderr
    compare_ends(folder, whole)


def test_groups_that_cannot_be_made_after_a_restart_name_the_variable(
    monkeypatch, tmp_path: Path
) -> None:
    def refuse(*arguments, **how):
        raise RuntimeError("connectFullMesh failed: Connection refused")

    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        monkeypatch.setattr(dist, "new_group", refuse)
        for count, is_named in (("0", False), ("1", True)):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
            bag = distcache.CachedEmbeddingBag(50, 4, name="items", rows=20)
            with pytest.raises(PeerError, match="Connection refused") as caught:
                bag(torch.arange(4).view(2, 2))
            assert (f"{VARIABLE}=1" in str(caught.value)) == is_named
    finally:
        dist.destroy_process_group()
