"""Checkpoints as files: `python -m distcache.checkpoint verify|show=<folder>`.

A folder is a checkpoint, or a run with several. Nothing that it holds is executed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from distcache.config import option
from distcache.errors import ConfigError, DataError, human_bytes

if TYPE_CHECKING:
    from distcache.checkpoint.manifest import Manifest
    from distcache.cli.compose import Line

log = logging.getLogger("distcache.checkpoint")

_SHOWN = ("step", "format", "base", "metrics", "phase", "run", "versions")
"""What `show` says of a manifest's header."""


@dataclass
class CheckpointConfig:
    """The keys of `distcache.checkpoint`."""

    verify: str = option("", "a folder: whether all is as it was written")
    show: str = option("", "a folder: what it holds")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    from distcache.cli.compose import run_command

    return run_command("checkpoint", CheckpointConfig, go, arguments)


def go(line: Line[CheckpointConfig], command: Sequence[str]) -> int:
    """Look at each checkpoint of the folders that were given; 1 where one is damaged."""
    from distcache.checkpoint.files import finished
    from distcache.checkpoint.manifest import Manifest
    from distcache.checkpoint.reader import BlockReader

    given, damaged = vars(line.values), 0
    if not any(given.values()):
        raise ConfigError("give verify=<folder> or show=<folder>")
    for what, path in given.items():
        folders = finished(Path(path)) if path else []
        if path and not folders:
            raise ConfigError(f"{what}={path}: there is no checkpoint")
        for folder in folders:
            try:
                manifest = Manifest.read(folder)
                if what == "verify":
                    manifest.verify(folder)
                    BlockReader(folder, manifest)  # the list of values is one
                    rest = "" if manifest.base is None else f", rests on {manifest.base[0]}"
                    log.info("%s is intact: %s%s", folder, human_bytes(manifest.nbytes), rest)
                    if manifest.base is not None and manifest.base[0] not in folders:
                        folders.append(manifest.base[0])
                else:
                    log.info("%s: %s", folder, described(folder, manifest))
            except (ConfigError, DataError) as error:  # damaged, or of a newer version
                log.error("%s", error)
                damaged = 1
    return damaged


def described(folder: Path, manifest: Manifest) -> str:
    """What a checkpoint says of itself, and its values, in lines."""
    from distcache.checkpoint.reader import BlockReader
    from distcache.engine.whole import CHANGED

    shown = {key: manifest.header.get(key) for key in _SHOWN}
    if shown["run"] is not None:
        shown["run"] = shown["run"] | {"tables": len(shown["run"]["tables"])}  # they are listed
    told = {key: value for key, value in shown.items() if value not in (None, {})}
    lines = [human_bytes(manifest.nbytes), *OmegaConf.to_yaml(told).splitlines()]
    reader = BlockReader(folder, manifest)
    for name, value in sorted(reader.values.state_dict_metadata.items()):
        shape = getattr(value, "size", None)
        kind = "" if shape is None else f"{list(shape)} {value.properties.dtype}"
        changed = getattr(reader.own.get(CHANGED + name), "size", None)
        here = "" if changed is None else f", {changed[0]} rows here"
        lines.append(f"{name} {kind}{here}")
    return "\n  ".join(lines)


if __name__ == "__main__":
    sys.exit(main())
