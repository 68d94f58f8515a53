"""Export: `python -m distcache.export resume=<run folder or checkpoint> output=<folder> ...`.

Tables of a checkpoint, in original ids, become files that others read: safetensors, or rows as
Parquet. No model is made, and no more than a block of a table is in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distcache.cli.compose import Line, run_command
from distcache.cli.run import open_folder
from distcache.config import option
from distcache.errors import ConfigError
from distcache.store.table_files import read_ids, write_tables


@dataclass
class ExportConfig:
    """The keys of `distcache.export`."""

    resume: str = option(
        "", "a run folder, whose newest checkpoint is read, or a checkpoint", positional=True
    )
    output: str = option("", "folder of the files, one for each table")
    format: str = option("safetensors", "safetensors, or parquet: columns id and vector")
    tables: list[str] = option([], "names of tables; none: all")
    rows: str = option("", "parquet: which rows of the one table; a file with one id a line")
    since: str = option(
        "",
        "parquet: only rows that differ from those of this older checkpoint, or, where resume "
        "rests on that one, the rows that steps named since",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_command("export", ExportConfig, go, arguments)


def go(line: Line[ExportConfig], command: Sequence[str]) -> int:
    """Write the files of a checkpoint's tables."""
    values = line.values
    for key in ("resume", "output"):
        if not getattr(values, key):
            raise ConfigError(f"{key} is not set: give {key}=<folder>")
    if values.rows and (values.since or len(values.tables) != 1):
        raise ConfigError(f"rows={values.rows}: give the one table with these ids by tables=<name>")
    # Imported here: `--help` needs no checkpoints.
    from distcache.checkpoint.files import newest_checkpoint, suggest_intact

    folder = newest_checkpoint(Path(values.resume), "resume")
    with suggest_intact(folder), open_folder(Path(values.output), "output"):
        _write(values, folder)
    return 0


def _write(values: ExportConfig, folder: Path) -> None:
    """Write the files of the tables in the checkpoint `folder`."""
    from distcache.checkpoint.files import newest_checkpoint
    from distcache.checkpoint.weights import table_weights, weights_since

    tables = table_weights(folder)
    if unknown := sorted(set(values.tables) - set(tables)):
        raise ConfigError(f"tables={unknown}: the checkpoint has {', '.join(tables)}")
    names = values.tables or list(tables)
    rows: dict[str, np.ndarray] | None = None
    if values.rows:
        (name,) = names
        rows = {name: read_ids(Path(values.rows), tables[name].shape[0])}
    if values.since:
        tables, rows = weights_since(folder, newest_checkpoint(Path(values.since), "since"), names)
    chosen = {name: tables[name] for name in names}
    write_tables(Path(values.output), values.format, chosen, rows)


if __name__ == "__main__":
    sys.exit(main())
