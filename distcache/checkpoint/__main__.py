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

_SHOWN_KEYS = ("step", "format", "base", "metrics", "phase", "run", "versions")
"""Keys of a manifest's header that `show` prints."""


@dataclass
class CheckpointConfig:
    """The keys of `distcache.checkpoint`."""

    verify: str = option("", "a folder: whether all is as it was written")
    show: str = option("", "a folder: what it holds")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    from distcache.cli.compose import run_command

    return run_command("checkpoint", CheckpointConfig, go, arguments)


def go(line: Line[CheckpointConfig], command: Sequence[str]) -> int:
    """Verify or show each checkpoint of the given folders; return 1 if one is damaged."""
    from distcache.checkpoint.files import find_checkpoints
    from distcache.checkpoint.manifest import Manifest

    actions = vars(line.values)
    if not any(actions.values()):
        raise ConfigError("give verify=<folder> or show=<folder>")
    exit_code = 0
    for action, path in actions.items():
        folders = find_checkpoints(Path(path)) if path else []
        if path and not folders:
            raise ConfigError(f"{action}={path}: there is no checkpoint")
        for folder in folders:
            try:
                manifest = Manifest.read(folder)
                if action == "show":
                    log.info("%s: %s", folder, describe(folder, manifest))
                    continue
                verify(folder, manifest)
                if manifest.base is not None and manifest.base[0] not in folders:
                    folders.append(manifest.base[0])
            except (ConfigError, DataError) as error:  # another format, or damaged
                log.error("%s", error)
                exit_code = 1
    return exit_code


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare all files of a checkpoint with their checksums. Raises DataError."""
    from distcache.checkpoint.reader import BlockReader

    manifest.verify(folder)
    BlockReader(folder, manifest)  # checks the list of values
    base = "" if manifest.base is None else f", rests on {manifest.base[0]}"
    log.info("%s is intact: %s%s", folder, human_bytes(manifest.nbytes), base)


def describe(folder: Path, manifest: Manifest) -> str:
    """Return the header of a checkpoint and its values as lines of text."""
    from distcache.checkpoint.reader import BlockReader
    from distcache.engine.full_tables import CHANGED

    header = {key: manifest.header.get(key) for key in _SHOWN_KEYS}
    if header["run"] is not None:  # the tables are listed below
        header["run"] = header["run"] | {"tables": len(header["run"]["tables"])}
    present = {key: value for key, value in header.items() if value not in (None, {})}
    lines = [human_bytes(manifest.nbytes), *OmegaConf.to_yaml(present).splitlines()]
    reader = BlockReader(folder, manifest)
    for name, value in sorted(reader.values.state_dict_metadata.items()):
        shape = getattr(value, "size", None)
        kind = "" if shape is None else f"{list(shape)} {value.properties.dtype}"
        changed = getattr(reader.own_values.get(CHANGED + name), "size", None)
        rows = "" if changed is None else f", {changed[0]} rows here"
        lines.append(f"{name} {kind}{rows}")
    return "\n  ".join(lines)


if __name__ == "__main__":
    sys.exit(main())
