"""Decides what an environment needs; pure but for looking at files and for a GPU.

torch comes first, at its pinned version with its own dependencies; then a complete lock with
--no-deps; then the torchrec and fbgemm that fit the torch that is there. launch/install.py acts.
Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
FITS = {"2.11": ("1.6.1", "1.6.0"), "2.12": ("1.7.0", "1.7.0"), "2.13": ("1.8.0", "1.8.0")}
"""torch minor version -> (torchrec, fbgemm); every fbgemm fits exactly one torch minor version."""
FBGEMM = {"fbgemm-gpu", "fbgemm-gpu-cpu"}
BUILD, LOCK, TEST = (CHECKOUT / "requirements" / f"{n}.txt" for n in ("build", "lock", "test"))


class InstallError(Exception):
    """The environment cannot be made; the message says why, and the way out."""


@dataclass(frozen=True)
class Torch:
    """A torch: its version, and the CUDA version that it is built for (None: a CPU build)."""

    version: str
    cuda: str | None

    @property
    def minor(self) -> str:
        """Major and minor version, for instance `2.13`."""
        return ".".join(self.version.split(".")[:2])


@dataclass(frozen=True)
class State:
    """What an environment holds: Python version, {normalised name: version}, torch."""

    python: tuple[int, int]
    packages: Mapping[str, str] = field(default_factory=dict)
    torch: Torch | None = None


@dataclass(frozen=True)
class Target:
    """The environment to use; `own`: ours to fill, else the user's, which is only completed."""

    folder: Path
    own: bool

    @property
    def python(self) -> str:
        """Path of its interpreter."""
        return str(self.folder / "bin" / "python")


def supported(python: tuple[int, int]) -> bool:
    """Whether distcache runs on this Python."""
    return (3, 11) <= tuple(python) < (3, 13)


def choose_target(env: Mapping[str, str], look: Callable[[str], State | None]) -> Target:
    """`DISTCACHE_VENV`, else the activated environment if its torch is suitable, else `.venv`.

    `look` tells what the environment of a given interpreter holds.
    """
    if env.get("DISTCACHE_VENV"):
        return Target(Path(env["DISTCACHE_VENV"]).absolute(), own=True)
    default = Target(CHECKOUT / ".venv", own=True)
    active = env.get("VIRTUAL_ENV") or env.get("CONDA_PREFIX")
    if active and Path(active).resolve() != default.folder:
        target = Target(Path(active).absolute(), own=False)
        state = look(target.python)
        if state and supported(state.python) and state.torch and state.torch.minor in FITS:
            return target
    return default


def find_accelerator(env: Mapping[str, str]) -> str:
    """`cpu` or `cuda`: as DISTCACHE_ACCELERATOR says, else by looking for an NVIDIA GPU."""
    given = env.get("DISTCACHE_ACCELERATOR", "auto")
    if given in ("cpu", "cuda"):
        return given
    if given != "auto":
        raise InstallError(f"DISTCACHE_ACCELERATOR={given}: use cpu, cuda or auto")
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return "cuda"
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "cuda" if listed.stdout.startswith("GPU") else "cpu"


def pick_pair(torch: Torch, accelerator: str) -> tuple[list[str], str]:
    """The torchrec and fbgemm that fit `torch` here, as requirements, and a sentence why."""
    if torch.minor not in FITS:
        raise InstallError(
            f"torch {torch.version} is there, but fbgemm releases fit torch {', '.join(FITS)} "
            f"(each exactly one): pip install torch=={TORCH}, or use another environment"
        )
    torchrec, fbgemm = FITS[torch.minor]
    cuda = accelerator == "cuda" and torch.cuda is not None
    why = f"fbgemm {fbgemm} fits torch {torch.minor}; "
    if cuda:
        why += f"CUDA build, for there is a GPU and torch is built for CUDA {torch.cuda}"
    elif accelerator == "cuda":
        why += (
            "CPU build, for torch is a CPU build although there is a GPU: training will not use "
            "it. Way out: remove the environment, and run again with DISTCACHE_TORCH_INDEX unset "
            "or naming an index of CUDA builds"
        )
    else:
        why += "CPU build, for there is no GPU (DISTCACHE_ACCELERATOR=cuda installs for one)"
    name = "fbgemm-gpu" if cuda else "fbgemm-gpu-cpu"
    return [f"torchrec=={torchrec}", f"{name}=={fbgemm}"], why


def normalised(requirement: str) -> tuple[str, str]:
    """Name, as indexes compare names, and version of a `name==version`."""
    name, version = requirement.split("==")
    return re.sub("[-_.]+", "-", name).lower(), version


def lines(*files: Path) -> list[str]:
    """The requirements in lock files."""
    text = "\n".join(file.read_text() for file in files).splitlines()
    return [line.strip() for line in text if line.strip() and not line.startswith("#")]


def pinned(state: State | None) -> bool:
    """Whether the pinned torch, of whatever build, is there."""
    return bool(state and state.torch and state.torch.version.split("+")[0] == TORCH)


def torch_commands(target: Target, state: State | None, index: list[str]) -> list[list[str]]:
    """Until torch is there: the environment, the build tools, torch with its own dependencies."""
    pip = [target.python, "-m", "pip", "install"]
    commands = [] if state else [[sys.executable, "-m", "venv", str(target.folder)]]
    if not target.own:
        return commands
    tools = lines(BUILD)
    if not state or any(state.packages.get(n) != v for n, v in map(normalised, tools)):
        commands.append([*pip, "--no-deps", *tools])
    if not pinned(state):
        commands.append([*pip, f"torch=={TORCH}", "-c", str(LOCK), *index])
    return commands


def rest_commands(
    target: Target, state: State, accelerator: str, index: list[str]
) -> tuple[list[list[str]], str]:
    """After torch: the lock, the pair that fits torch, the checkout itself; and why that pair."""
    if state.torch is None:
        raise InstallError(f"no torch in {target.folder}: remove it, and run again")
    pip = [target.python, "-m", "pip"]
    install = [*pip, "install", "--no-deps", "--no-build-isolation"]
    packages = state.packages
    pair, why = pick_pair(state.torch, accelerator)
    commands: list[list[str]] = []
    if target.own:
        commands.append([*install, "-r", str(LOCK), "-r", str(TEST)])
        there = FBGEMM & set(packages)
        if there - {normalised(pair[1])[0]}:  # the builds share files: both go, one comes
            commands.append([*pip, "uninstall", "-y", *sorted(there)])
            packages = {name: v for name, v in packages.items() if name not in FBGEMM}
    else:
        missing = [r for r in lines(BUILD, LOCK, TEST) if normalised(r)[0] not in packages]
        commands += [[*install, *missing]] if missing else []
        if normalised(pair[1])[1] in [packages.get(name) for name in FBGEMM]:
            pair, why = pair[:1], why.split(";")[0] + "; the one that is there is kept"
    wanted = [r for r in pair if packages.get(normalised(r)[0]) != normalised(r)[1]]
    commands += [[*install, *wanted, *index]] if wanted else []
    # By a path, not by a finder: a folder `distcache` that a script lies beside (the checkout seen
    # from above) is then no namespace package in the place of this one.
    by_path = ["--config-settings", "editable_mode=compat"]
    return [*commands, [*install, *by_path, "-e", str(CHECKOUT)]], why


def fingerprint(target: Target, state: State | None, env: Mapping[str, str]) -> str:
    """Changes whenever anything that decides the environment, or its content, does."""
    files = [BUILD, LOCK, TEST, *(CHECKOUT / n for n in ("launch/pick.py", "pyproject.toml"))]
    parts = [file.read_text() for file in files]
    parts += [str(CHECKOUT), str(target), find_accelerator(env), repr(state)]
    parts.append(env.get("DISTCACHE_TORCH_INDEX", ""))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
