"""Make or reuse the Python environment: torch first, then everything else with --no-deps.

    python launch/install.py [--dry-run]

Runs on the standard library alone. The last line on stdout is the environment's python; what an
installation says goes to stderr. A dry run prints what would be installed and changes nothing.
pip's own configuration (indexes, find-links, proxies, caches) is respected. Environment variables:

DISTCACHE_VENV         folder of the environment; default: an activated one that has a suitable
                       torch, else .venv in the checkout
DISTCACHE_TORCH_INDEX  one more package index, for torch and fbgemm, for instance
                       https://download.pytorch.org/whl/cpu (a CPU build, much smaller) or .../cu130
DISTCACHE_ACCELERATOR  cpu or cuda, instead of looking for a GPU
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from pick import (
    TORCH,
    InstallError,
    State,
    Target,
    Torch,
    choose_target,
    find_accelerator,
    fingerprint,
    lines,
    pinned,
    rest_commands,
    supported,
    torch_commands,
)

IMPORTS = "import torch, fbgemm_gpu, torchrec, hydra, distcache"
INSPECT = """
import importlib.metadata as m, importlib.util, json, pathlib, re, runpy, sys
names = {re.sub('[-_.]+', '-', d.name).lower(): d.version for d in m.distributions() if d.name}
spec, torch = importlib.util.find_spec('torch'), None
if spec and spec.origin:
    about = runpy.run_path(str(pathlib.Path(spec.origin).with_name('version.py')))
    torch = [str(about['__version__']), about.get('cuda')]
names = dict(sorted(names.items()))
print(json.dumps({'python': sys.version_info[:2], 'packages': names, 'torch': torch}))
"""


def inspect(python: str) -> State | None:
    """What the environment of `python` holds, without importing torch; None if it does not run."""
    try:
        run = subprocess.run([python, "-c", INSPECT], capture_output=True, text=True, cwd="/")
        found = json.loads(run.stdout)
    except (OSError, ValueError):
        return None
    torch = Torch(*found["torch"]) if found["torch"] else None
    return State((found["python"][0], found["python"][1]), found["packages"], torch)


def explain(python: str, state: State | None) -> str | None:
    """None when the parts import together; else what failed, why it may, and the way out."""
    run = subprocess.run([python, "-c", IMPORTS], capture_output=True, text=True, cwd="/")
    if run.returncode == 0:
        return None
    said = run.stderr.strip().splitlines()[-1:] or [f"exit code {run.returncode}"]
    packages = state.packages if state else {}
    there = [f"{n} {v}" for n, v in packages.items() if n.startswith(("torch", "fbgemm"))]
    return (
        f"the installed packages do not import together: {said[0]}\n"
        f"  there: {', '.join(sorted(there))}\n"
        "  why: every fbgemm release fits exactly one torch minor version, and its CUDA build one "
        "CUDA version;\n  otherwise it fails with undefined symbols or missing libraries\n"
        "  way out: DISTCACHE_ACCELERATOR=cpu for a machine without a working GPU driver; "
        "DISTCACHE_TORCH_INDEX\n  for the index of your CUDA version (torch and fbgemm then come "
        f"from one place); or remove {Path(python).parent.parent} and run again"
    )


def say(*words: object) -> None:
    """Print to stderr."""
    print(*words, file=sys.stderr, flush=True)


def show(commands: list[list[str]]) -> None:
    """Print commands, and under each what its lock files hold."""
    for command in commands:
        print("  " + shlex.join(command))
        files = [Path(b) for a, b in itertools.pairwise(command) if a == "-r"]
        for line in lines(*files):
            print("      " + line)


def execute(commands: list[list[str]]) -> None:
    """Run each command, its output on stderr; raise InstallError at the first that fails."""
    for command in commands:
        say("+ " + shlex.join(command))
        if code := subprocess.run(command, stdout=sys.stderr).returncode:
            raise InstallError(
                f"exit code {code}: {shlex.join(command)}\n  what went wrong is above; once that "
                "is put right, run again: what is installed is kept"
            )


def dry_run(target: Target, state: State | None, accelerator: str, index: list[str]) -> None:
    """Print what an install would do; without an environment, with the torch it would bring."""
    show(torch_commands(target, state, index))
    cuda = accelerator == "cuda" and not any(url.rstrip("/").endswith("/cpu") for url in index)
    if target.own and not pinned(state):
        packages = state.packages if state else {}
        state = State(sys.version_info[:2], packages, Torch(TORCH, "..." if cuda else None))
    commands, why = rest_commands(target, state or State((0, 0)), accelerator, index)
    show(commands)
    print(f"  ({why})")


def install(target: Target, state: State | None, accelerator: str, index: list[str]) -> None:
    """Install in two passes, the second by the torch that the first left; then try the imports."""
    execute(torch_commands(target, state, index))
    if not (state := inspect(target.python)):
        raise InstallError(f"{target.python} does not run: remove {target.folder}, and run again")
    commands, why = rest_commands(target, state, accelerator, index)
    say(why)
    execute(commands)
    if problem := explain(target.python, inspect(target.python)):
        raise InstallError(problem)


def main(arguments: list[str], env: Mapping[str, str]) -> int:
    """Make, reuse or (with --dry-run) show the environment; 1 with an explanation on failure."""
    try:
        target, accelerator = choose_target(env, inspect), find_accelerator(env)
        index = env.get("DISTCACHE_TORCH_INDEX")
        index = ["--extra-index-url", index] if index else []
        state = inspect(target.python)
        python = state.python if state else sys.version_info[:2]
        if not supported(python):
            raise InstallError(
                f"{target.folder} runs Python {python[0]}.{python[1]}, but distcache needs 3.11 or "
                "3.12: remove the folder, or name another in DISTCACHE_VENV"
            )
        marker = target.folder / ".distcache-installed"
        done = marker.is_file() and marker.read_text() == fingerprint(target, state, env)
        if "--dry-run" in arguments:
            print(f"environment {target.folder}, accelerator {accelerator}:")
            if done:
                print("  complete, nothing to install")
            else:
                dry_run(target, state, accelerator, index)
        elif not done:
            say(f"environment {target.folder}, accelerator {accelerator}: installing")
            install(target, state, accelerator, index)
            marker.write_text(fingerprint(target, inspect(target.python), env))
        print(target.python)
    except InstallError as error:
        say(f"install: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
