"""The machine, versions and commit that a run used: `environment.json` of its folder."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from distcache.versions import FBGEMM_DISTRIBUTIONS, installed

DISTRIBUTIONS = (
    *("distcache", "torch", "torchrec", *FBGEMM_DISTRIBUTIONS),
    *("numpy", "numba", "hydra-core"),
)


def describe_environment(world_size: int) -> dict[str, Any]:
    """Hardware, versions, commit and command line as JSON values; None where one is unknown."""
    import torch

    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {name: installed(name) for name in DISTRIBUTIONS}
    versions["torch"] = torch.__version__
    versions["cuda"] = torch.version.cuda
    return {
        "hardware": {
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": memory_bytes(),
            "gpus": gpus(),
        },
        "system": platform.platform(),
        "versions": versions,
        "commit": commit(Path(__file__).resolve().parents[2]),
        "command": sys.argv,
        "threads": torch.get_num_threads(),
        "world_size": world_size,
    }


def write_environment(run_dir: Path, world_size: int) -> None:
    """Write `environment.json` into a run folder."""
    text = json.dumps(describe_environment(world_size), indent=2)
    (run_dir / "environment.json").write_text(text + "\n")


def cpu_model() -> str | None:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def memory_bytes() -> int | None:
    """Bytes of memory that this process may use: the machine's, or its cgroup's limit if less."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    limits = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    for name in limits:
        path = Path(name)
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            return min(total, int(text))
    return total


def gpus() -> list[dict[str, Any]]:
    """Name and bytes of memory of each GPU that torch sees."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append({"name": properties.name, "memory_bytes": properties.total_memory})
    return found


def commit(checkout: Path) -> dict[str, Any] | None:
    """Commit of a checkout and whether it has changes; None where it is none, or git is missing."""
    if not (checkout / ".git").exists():
        return None
    try:
        head = _git(checkout, "rev-parse", "HEAD")
        changes = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": head, "dirty": bool(changes)}


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()
