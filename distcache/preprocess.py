"""Preprocess: `python -m distcache.preprocess input=<files> output=<folder> key=value ...`.

Raw Criteo text (Kaggle, or Terabyte days; plain or gzip) becomes memory-mapped arrays for
`data=criteo data.path=<folder>`. The same command goes on after an interruption.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcache.cli.run import progress_bar
from distcache.data.criteo_folder import (
    IDS,
    MAIN_BYTES,
    MLPERF_BAGS,
    PRESETS,
    WORKER_BYTES,
    PreprocessSettings,
    verify,
)
from distcache.errors import ConfigError, DataError

if TYPE_CHECKING:
    from distcache.cli.compose import Line

log = logging.getLogger("distcache.preprocess")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    from distcache.cli.compose import run_command  # not in the workers, which import this file

    said = "stopped; the same command goes on from here"
    return run_command("preprocess", PreprocessSettings, go, arguments, said)


def go(line: Line[PreprocessSettings], command: Sequence[str]) -> int:
    """Preprocess, with a progress bar for each stage, or verify what was; 1 where a file cannot be
    written. Raises ConfigError without pyarrow."""
    given = line.values
    if not given.output:
        raise ConfigError("output is not set: give output=<folder>")
    if given.verify:
        try:
            manifest = verify(Path(given.output))
        except DataError as error:  # which names the key of training
            raise DataError(str(error).replace("data.path", "output")) from error
        log.info("%s is whole: fingerprint %s", given.output, manifest.fingerprint)
        return 0
    settings = checked(given)
    try:
        from distcache.data.criteo_job import preprocess

        manifest = preprocess(settings, progress_bar)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"preprocessing needs {error.name}, which is not installed: install distcache[data]"
        ) from error
    except OSError as error:  # a full disk, most likely
        log.error("%s; the same command goes on from here", error)
        return 1
    samples = f"{manifest.samples:,} samples ({manifest.train_samples:,} train)"
    rows = f"{sum(manifest.table_rows):,} rows in {len(manifest.table_rows)} tables"
    log.info(f"{settings.output}: {samples}, {rows}, fingerprint {manifest.fingerprint[:16]}")
    return 0


def checked(given: PreprocessSettings) -> PreprocessSettings:
    """The settings as numbers. Raises ConfigError that names the key."""
    from distcache.config.checks import at_least, byte_count, check_section, refuse

    check_section("", given)
    rows = PRESETS.get(given.rows, given.rows) if isinstance(given.rows, str) else given.rows
    bags = MLPERF_BAGS if given.multi_hot is True else given.multi_hot or None
    memory, part = (byte_count(key, str(getattr(given, key))) for key in ("memory", "part"))
    at_least("part", part, 1)
    how = f"give {IDS} whole numbers of at least 1 [a,b,...],"
    least = MAIN_BYTES + WORKER_BYTES
    refuse(
        {
            "input is not set: give input=<text files or a quoted glob>": not given.input,
            f"memory={memory}: give at least {least >> 20} MiB, in bytes": memory < least,
            "mode=hash needs rows=[26 numbers], rows=kaggle or rows=terabyte": (
                given.mode == "hash" and rows is None
            ),
            f"rows={rows}: {how} kaggle or terabyte": not _one_per_table(rows),
            f"multi_hot={bags}: {how} true or false": not _one_per_table(bags),
        }
    )
    numbers = {key: value and list(value) for key, value in (("rows", rows), ("multi_hot", bags))}
    return replace(given, memory=memory, part=part, **numbers)


def _one_per_table(values: Any) -> bool:
    """Whether they are a whole number for each table, or not given."""
    listed = isinstance(values, list | tuple) and len(values) == IDS
    return values is None or (listed and all(type(one) is int and one >= 1 for one in values))


if __name__ == "__main__":
    sys.exit(main())
