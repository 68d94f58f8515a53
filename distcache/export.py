"""Export: `python -m distcache.export resume=<run folder or checkpoint> output=<folder> ...`.

Tables of a checkpoint, in original ids, become files that others read: safetensors, or rows as
Parquet. No model is made, and no more than a block of a table is in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distcache.cli.compose import Line, run_command
from distcache.cli.run import open_folder
from distcache.config import option
from distcache.errors import ConfigError, DistcacheError
from distcache.ops.reference import as_numpy
from distcache.store.table_files import Stored, read_ids, write_tables


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
    """Run the command line; its exit code."""
    return run_command("export", ExportConfig, go, arguments)


def go(line: Line[ExportConfig], command: Sequence[str]) -> int:
    """Write the files of a checkpoint's tables."""
    given = line.values
    for key in ("resume", "output"):
        if not getattr(given, key):
            raise ConfigError(f"{key} is not set: give {key}=<folder>")
    if given.rows and (given.since or len(given.tables) != 1):
        raise ConfigError(f"rows={given.rows}: give the one table with these ids by tables=<name>")
    # Imported here: `--help` needs no trainer.
    from distcache.checkpoint.files import find, naming_intact

    with renamed("resume"):
        folder = find(Path(given.resume))
    with naming_intact(folder), open_folder(Path(given.output), "output"):
        _write(given, folder)
    return 0


def _write(given: ExportConfig, folder: Path) -> None:
    """Write the files of the tables in the checkpoint `folder`."""
    tables = tables_of("resume", folder)
    rows: dict[str, np.ndarray] | None = None
    if unknown := sorted(set(given.tables) - set(tables)):
        raise ConfigError(f"tables={unknown}: the checkpoint has {', '.join(tables)}")
    chosen = {name: tables[name] for name in given.tables or tables}
    if given.rows:
        (name,) = given.tables
        rows = {name: read_ids(Path(given.rows), chosen[name].shape[0])}
    if given.since:
        from distcache.checkpoint.files import find
        from distcache.checkpoint.weights import weights_since

        with renamed("since"):
            since = find(Path(given.since))
        older = tables_of("since", since)
        known, rows = weights_since(folder, since), {}
        for name, own in chosen.items():
            if name in known:
                chosen[name], rows[name] = known[name]
            else:
                rows[name] = changed_rows(name, own, older.get(name))
    write_tables(Path(given.output), given.format, chosen, rows)


@contextmanager
def renamed(key: str) -> Iterator[None]:
    """Errors about `trainer.resume` name `key`, which a user of this command gives."""
    try:
        yield
    except DistcacheError as error:
        error.reword({"trainer.resume": key})
        raise


def tables_of(key: str, folder: Path) -> dict[str, Stored]:
    """The weights by table in the checkpoint `folder`, which `key` names."""
    from distcache.checkpoint.weights import checkpoint_values

    with renamed(key):
        stored = checkpoint_values(folder)
    begin, end = "tables.", ".weight"
    return {
        name.removeprefix(begin).removesuffix(end): value
        for name, value in stored.items()
        if name.startswith(begin) and name.endswith(end)
    }


def changed_rows(name: str, new: Stored, old: Stored | None) -> np.ndarray:
    """The ids, int64, of rows whose bits are others than in an `old` table, or that it lacks.

    Raises ConfigError for another width or dtype.
    """
    if old is None:
        return np.arange(new.shape[0])
    if (old.shape[1:], old.dtype) != (new.shape[1:], new.dtype):
        raise ConfigError(
            f"table {name!r} was {old.shape[1]} x {old.dtype} and is {new.shape[1]} x {new.dtype}: "
            "leave since out, and write it whole"
        )
    found = [np.arange(old.shape[0], new.shape[0])]
    for rows in new.ranges():
        stop = min(rows.stop, old.shape[0])
        if rows.start < stop:
            blocks = (stored.block(rows.start, stop) for stored in (new, old))
            now, was = (as_numpy(block).view(np.uint8) for block in blocks)
            found.append(rows.start + np.flatnonzero((now != was).any(axis=1)))
    return np.sort(np.concatenate(found))


if __name__ == "__main__":
    sys.exit(main())
