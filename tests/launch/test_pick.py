"""What is installed where: the torch that is there and the GPU decide. The lock files are complete:
every requirement is pinned, and so is whatever it requires."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from launch import pick
from launch.pick import InstallError, State, Target, Torch

CPU, CUDA = Torch("2.13.0+cpu", None), Torch("2.13.0", "13.0")
OWN, THEIRS = Target(Path("/e"), own=True), Target(Path("/e"), own=False)


def everything(torch: Torch, *extra: str) -> State:
    """An environment with the whole lock and `extra` requirements."""
    wanted = [*pick.lines(pick.BUILD, pick.LOCK, pick.TEST), *extra]
    return State((3, 11), dict(map(pick.normalised, wanted)), torch)


@pytest.mark.parametrize(
    ("torch", "accelerator", "pair", "reason"),
    [
        (CPU, "cpu", ["torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0"], "no GPU"),
        (CUDA, "cuda", ["torchrec==1.8.0", "fbgemm-gpu==1.8.0"], "CUDA 13.0"),
        (CUDA, "cpu", ["torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0"], "no GPU"),
        (CPU, "cuda", ["torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0"], "will not use it. Way out"),
        (Torch("2.12.1", "13.0"), "cuda", ["torchrec==1.7.0", "fbgemm-gpu==1.7.0"], "torch 2.12"),
        (Torch("2.11.0", None), "cpu", ["torchrec==1.6.1", "fbgemm-gpu-cpu==1.6.0"], "torch 2.11"),
    ],
)
def test_pair_follows_torch_and_gpu(torch, accelerator, pair, reason) -> None:
    picked, why = pick.pick_pair(torch, accelerator)
    assert picked == pair and reason in why


def test_what_no_pair_fits_is_refused() -> None:
    with pytest.raises(InstallError, match=r"torch 2\.14\.1 is there.*2\.13.*pip install torch=="):
        pick.pick_pair(Torch("2.14.1", None), "cpu")
    with pytest.raises(InstallError, match="DISTCACHE_ACCELERATOR=tpu: use cpu, cuda or auto"):
        pick.find_accelerator({"DISTCACHE_ACCELERATOR": "tpu"})
    assert Torch(pick.TORCH, None).minor in pick.FITS
    assert pick.pinned(State((3, 11), torch=CPU))
    assert not pick.pinned(State((3, 11), torch=Torch("2.12.0", None)))


@pytest.mark.parametrize(
    ("given", "nodes", "listed", "found"),
    [
        ("cpu", True, "", "cpu"),
        ("cuda", False, "", "cuda"),
        ("auto", True, "", "cuda"),
        (None, False, "GPU 0: H100\n", "cuda"),
        (None, False, "No devices found.\n", "cpu"),
        (None, False, None, "cpu"),
    ],
)
def test_accelerator(given, nodes, listed, found, monkeypatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    if listed is not None:
        tool.write_text(f"#!/bin/sh\nprintf '{listed.strip()}'\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self] if nodes else []))
    env = {"DISTCACHE_ACCELERATOR": given} if given else {}
    assert pick.find_accelerator(env) == found


def test_environment_is_ours_unless_an_activated_one_has_a_suitable_torch() -> None:
    ours = Target(pick.CHECKOUT / ".venv", own=True)
    active = {"VIRTUAL_ENV": "/active"}
    good, old = State((3, 12), torch=CUDA), State((3, 12), torch=Torch("2.4.0", None))
    assert pick.choose_target({}, lambda python: None) == ours
    assert pick.choose_target(active, lambda python: good) == Target(Path("/active"), own=False)
    for unfit in (None, State((3, 12)), old, State((3, 10), torch=CUDA)):
        assert pick.choose_target(active, lambda python, state=unfit: state) == ours
    assert pick.choose_target({"VIRTUAL_ENV": str(ours.folder)}, lambda python: good) == ours
    named = {"DISTCACHE_VENV": "/named", **active}
    assert pick.choose_target(named, lambda python: good) == Target(Path("/named"), own=True)


def test_own_environment_gets_torch_before_the_rest() -> None:
    index = ["--extra-index-url", "https://index"]
    venv, tools, torch = pick.torch_commands(OWN, None, index)
    assert venv[1:] == ["-m", "venv", "/e"]
    assert "--no-deps" in tools and tools[-1].startswith("setuptools==")
    assert torch[4:] == [f"torch=={pick.TORCH}", "-c", str(pick.LOCK), *index]
    assert pick.torch_commands(OWN, everything(CPU), index) == []
    lock, pair, checkout = pick.rest_commands(OWN, everything(CPU), "cpu", index)[0]
    assert all("--no-deps" in command for command in (lock, pair, checkout))
    assert lock[-4:] == ["-r", str(pick.LOCK), "-r", str(pick.TEST)]
    assert pair[-4:] == ["torchrec==1.8.0", "fbgemm-gpu-cpu==1.8.0", *index]
    assert checkout[-2:] == ["-e", str(pick.CHECKOUT)]
    state = everything(CUDA, "torchrec==1.8.0", "fbgemm_gpu-cpu==1.8.0")  # one replaces the other
    _, gone, came, _ = pick.rest_commands(OWN, state, "cuda", [])[0]
    assert gone[3:] == ["uninstall", "-y", "fbgemm-gpu-cpu"]
    assert came[-1] == "fbgemm-gpu==1.8.0"


def test_activated_environment_is_only_completed() -> None:
    torch = Torch("2.12.0", None)
    full = everything(torch, "torchrec==1.7.0", "fbgemm-gpu==1.7.0")
    (checkout,), why = pick.rest_commands(THEIRS, full, "cpu", [])
    assert checkout[-2] == "-e" and "kept" in why
    assert pick.torch_commands(THEIRS, full, []) == []
    packages = {n: "0.1" for n in full.packages if n not in ("hydra-core", "torchrec")}
    commands, _ = pick.rest_commands(THEIRS, State((3, 11), packages, torch), "cpu", [])
    assert [command[6:] for command in commands[:2]] == [
        ["hydra-core==1.3.8"],
        ["torchrec==1.7.0", "fbgemm-gpu-cpu==1.7.0"],
    ]


def test_fingerprint_changes_with_what_decides() -> None:
    state, env = everything(CPU), {"DISTCACHE_ACCELERATOR": "cpu"}
    base = pick.fingerprint(OWN, state, env)
    assert base == pick.fingerprint(OWN, everything(CPU), env)
    others = [
        pick.fingerprint(OWN, state, {"DISTCACHE_ACCELERATOR": "cuda"}),
        pick.fingerprint(OWN, state, env | {"DISTCACHE_TORCH_INDEX": "https://index"}),
        pick.fingerprint(OWN, everything(CPU, "numpy==1.0"), env),
        pick.fingerprint(THEIRS, state, env),
    ]
    assert base not in others


OUTSIDE = {"torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"}


def required(name: str) -> set[str]:
    """Names that an installed distribution requires here, without its extras."""
    wanted = map(Requirement, importlib.metadata.requires(name) or [])
    here = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return {canonicalize_name(one.name) for one in here}


def test_every_line_is_pinned_once() -> None:
    wanted = pick.lines(pick.BUILD, pick.LOCK, pick.TEST)
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in wanted)
    names = [pick.normalised(line)[0] for line in wanted]
    assert len(names) == len(set(names))


def test_requirements_of_the_locked_are_locked() -> None:
    names = {pick.normalised(line)[0] for line in pick.lines(pick.BUILD, pick.LOCK, pick.TEST)}
    for name in sorted(names | {"torchrec"}):
        assert required(name) <= names | OUTSIDE, name


def test_triton_is_the_one_that_torch_wants() -> None:
    wanted = [Requirement(one) for one in importlib.metadata.requires("torch") or []]
    named = [one for one in wanted if canonicalize_name(one.name) == "triton"]
    if not named:
        pytest.skip("a CPU build of torch names no triton")
    if importlib.metadata.version("torch").split("+")[0] != pick.TORCH:
        pytest.skip("another torch than the pinned one brings its own triton")
    (ours,) = (v for n, v in map(pick.normalised, pick.lines(pick.TEST)) if n == "triton")
    assert all(ours in one.specifier for one in named)
