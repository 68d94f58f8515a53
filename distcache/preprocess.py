"""Preprocess: `python -m distcache.preprocess input=<files> output=<folder> key=value ...`.

Raw Criteo text (Kaggle, or Terabyte days; plain or gzip) becomes memory-mapped arrays for
`data=criteo data.path=<folder>`. The same command goes on after an interruption.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcache.cli.run import progress_bar
from distcache.config import option
from distcache.data.criteo_folder import MLPERF_BAGS, PRESETS, Manifest, PreprocessSettings, verify
from distcache.errors import ConfigError, DataError

if TYPE_CHECKING:
    from distcache.cli.compose import Line

log = logging.getLogger("distcache.preprocess")


@dataclass
class PreprocessConfig:
    """The keys of `distcache.preprocess`."""

    input: list[str] = option([], "text files or globs, in order of time")
    output: str = option("", "folder of the result, and of unfinished work")
    mode: str = option(
        "vocabulary",
        "vocabulary: rows by falling count, row 0 for ids outside it, row 1 for missing ids; "
        "hash: value modulo the table's rows, missing ids in row 0",
    )
    rows: Any = option(None, "mode=hash: 26 numbers [a,b,...], or kaggle, or terabyte")
    min_count: int = option(1, "vocabulary: least count in training samples")
    split: str = option("seventh", "held out: seventh, last_file or none")
    workers: Any = option("auto", "processes; auto: what cores and memory allow")
    memory: str = option("2g", "bytes that all processes together may take")
    multi_hot: Any = option(
        False, "bags of MLPerf's sizes in place of single ids, by a fixed rule; or 26 sizes"
    )
    on_bad_line: str = option("error", "error, or skip with a count")
    part: str = option("64m", "bytes of text that are one restartable unit")
    verify: bool = option(False, "only compare the checksums of output")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; its exit code."""
    from distcache.cli.compose import run_command  # not in the workers, which import this file

    said = "stopped; the same command goes on from here"
    return run_command("preprocess", PreprocessConfig, go, arguments, said)


def go(line: Line[PreprocessConfig], command: Sequence[str]) -> int:
    """Preprocess, or verify what was; 1 where a file cannot be written."""
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
    settings = make_settings(given)
    try:
        manifest = run(settings)
    except OSError as error:  # a full disk, most likely
        log.error("%s; the same command goes on from here", error)
        return 1
    samples = f"{manifest.samples:,} samples ({manifest.train_samples:,} train)"
    rows = f"{sum(manifest.table_rows):,} rows in {len(manifest.table_rows)} tables"
    log.info(f"{settings.output}: {samples}, {rows}, fingerprint {manifest.fingerprint[:16]}")
    return 0


def run(settings: PreprocessSettings) -> Manifest:
    """Do the job with a progress bar for each stage. Raises ConfigError without pyarrow."""
    try:
        from distcache.data.criteo_job import preprocess
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"preprocessing needs {error.name}, which is not installed: install distcache[data]"
        ) from error
    return preprocess(settings, progress_bar)


def make_settings(given: PreprocessConfig) -> PreprocessSettings:
    """The checked settings. Raises ConfigError that names the key."""
    from distcache.config.checks import auto_or_count, byte_count

    if not given.input:
        raise ConfigError("input is not set: give input=<text files or a quoted glob>")
    if given.workers is not None:
        auto_or_count("workers", given.workers, 1)
    checked = {
        "rows": PRESETS.get(given.rows, given.rows) if isinstance(given.rows, str) else given.rows,
        "workers": None if given.workers == "auto" else given.workers,
        "memory": byte_count("memory", given.memory),
        "multi_hot": MLPERF_BAGS if given.multi_hot is True else given.multi_hot or None,
        "part": byte_count("part", given.part),
    }
    same = {key: value for key, value in vars(given).items() if key != "verify"}
    return PreprocessSettings(**same | checked)


if __name__ == "__main__":
    sys.exit(main())
