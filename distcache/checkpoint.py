"""Checkpoints as files: `python -m distcache.checkpoint verify|show|convert=<folder>`.

A folder is a checkpoint, or a run with several. Nothing that it holds is executed.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcache.cli.run import human_bytes
from distcache.config import option
from distcache.errors import ConfigError, DataError

if TYPE_CHECKING:
    from distcache.cli.compose import Line
    from distcache.trainer.manifest import Manifest

log = logging.getLogger("distcache.checkpoint")


@dataclass
class CheckpointConfig:
    """The keys of `distcache.checkpoint`."""

    verify: str = option("", "a folder: whether all is as it was written")
    show: str = option("", "a folder: what it holds")
    convert: str = option("", "a folder of format 2: give it the manifest of the one after it")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    from distcache.cli.compose import run_command

    return run_command("checkpoint", CheckpointConfig, go, arguments)


def go(line: Line[CheckpointConfig], command: Sequence[str]) -> int:
    """Look at each checkpoint of the folders that were given; 1 where one is damaged."""
    from distcache.trainer.checkpoint import finished
    from distcache.trainer.manifest import MANIFEST, Manifest

    given, damaged = vars(line.values), 0
    if not any(given.values()):
        raise ConfigError("give verify=<folder>, show=<folder> or convert=<folder>")
    for what, path in given.items():
        folders = finished(Path(path)) if path else []
        if path and not folders:
            raise ConfigError(f"{what}={path}: there is no checkpoint")
        for folder in folders:
            try:
                manifest = Manifest.read(folder)
                if what == "verify":
                    manifest.verify(folder)
                    rest = "" if manifest.base is None else f", rests on {manifest.base[0]}"
                    log.info("%s is intact: %s%s", folder, human_bytes(manifest.nbytes), rest)
                    if manifest.base is not None and manifest.base[0] not in folders:
                        folders.append(manifest.base[0])
                elif what == "show":
                    log.info("%s: %s", folder, described(folder, manifest))
                elif not (folder / MANIFEST).exists():
                    manifest.write(folder)
                    log.info("%s has a manifest now", folder)
            except DataError as error:
                log.error("%s", error)
                damaged = 1
    return damaged


def described(folder: Path, manifest: Manifest) -> str:
    """What a checkpoint says of itself, and its values, in lines."""
    from distcache.trainer.manifest import BlockReader

    header, lines = manifest.header, [f"{human_bytes(manifest.nbytes)}"]
    for key in ("step", "format", "base", "metrics", "phase", "run", "versions"):
        lines += _told(key, header.get(key))
    reader = BlockReader(folder, manifest)
    changed = reader.changed.rows
    for name, value in sorted(reader.values.state_dict_metadata.items()):
        shape = getattr(value, "size", None)
        kind = "" if shape is None else f"{list(shape)} {value.properties.dtype}"
        here = f", {changed[name]} rows here" if name in changed else ""
        lines.append(f"{name} {kind}{here}")
    return "\n  ".join(lines)


def _told(key: str, value: Any) -> list[str]:
    """`key: value` of a manifest in lines, those of a mapping below it; none for None."""
    if not isinstance(value, dict):
        text = value if isinstance(value, str) else json.dumps(value)
        return [] if value is None else [f"{key}: {text}"]
    shown = {name: own for name, own in value.items() if name != "tables"}  # which are listed
    below = [line for name, own in shown.items() for line in _told(name, own)]
    return [f"{key}:", *(f"  {line}" for line in below)] if below else []


if __name__ == "__main__":
    sys.exit(main())
