"""The console command: `distcache <command> [arguments]`, or `python -m distcache <command> ...`.

Each command is also a module, `python -m distcache.<command>`, which torchrun needs.
"""

from __future__ import annotations

import difflib
import runpy
import sys
from collections.abc import Sequence

from distcache.versions import versions_here

COMMANDS = {
    "train": "train a model; torchrun -m distcache.train starts several ranks",
    "evaluate": "evaluate a checkpoint on held-out data",
    "compare": "train in several modes and compare losses, speed and memory",
    "analyze": "count accesses of the data, and replay cache sizes and policies",
    "plan": "predict memory and step times of the modes before a run",
    "preprocess": "make arrays of Criteo text, to train on",
    "export": "write the tables of a checkpoint as safetensors or Parquet",
    "checkpoint": "verify or show checkpoints",
}
"""Purposes of the commands, by name."""

USAGE_ERROR = 2
"""Exit code of a call without a command that exists, as of argparse."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the module of a command with the rest of the arguments; return the exit code."""
    command, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if command in ("--help", "-h", "help"):
        sys.stdout.write(usage())
        return 0
    if command in ("--version", "-V"):
        sys.stdout.write(f"distcache {versions_here()['distcache']}\n")
        return 0
    if command not in COMMANDS:
        close = difflib.get_close_matches(command, COMMANDS, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"there is {', '.join(COMMANDS)}"
        sys.stderr.write(f"error: {command}: no such command: {remedy}\n")
        return USAGE_ERROR
    sys.argv = [f"distcache {command}", *rest]
    runpy.run_module(f"distcache.{command}", run_name="__main__", alter_sys=True)
    return 0  # of a module that ends without sys.exit


def usage() -> str:
    """Return the text of `distcache --help`."""
    lines = ["usage: distcache <command> [key=value ...]", "", "commands:"]
    lines += [f"  {name:<12}{purpose}" for name, purpose in COMMANDS.items()]
    lines += ["", "distcache <command> --help shows the keys of a command."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
