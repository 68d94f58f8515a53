"""Preprocess: `python -m distcache.preprocess input=<files> output=<folder> key=value ...`.

Raw Criteo text (Kaggle, or Terabyte days; plain or gzip) becomes memory-mapped arrays for
`data=criteo data.path=<folder>`. The same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from distcache.cli.run import set_up_logging
from distcache.data.raw.settings import MLPERF_BAGS, PRESETS, Manifest, PreprocessSettings, verify
from distcache.errors import ConfigError, DataError, DistcacheError

log = logging.getLogger("distcache.preprocess")

INTERRUPTED = 130
_KEY_VALUE = re.compile(r"([a-z][a-z_]*)=(.*)", re.DOTALL)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_EPILOG = """\
every option may also be written key=value, as for distcache.train:

  python -m distcache.preprocess input=train.txt output=kaggle min_count=10
  python -m distcache.preprocess 'input=day_*.gz' output=terabyte mode=hash rows=terabyte \\
      split=last_file --multi-hot
  python -m distcache.preprocess --verify output=kaggle

then: python -m distcache.train data=criteo data.path=kaggle
"""


def main() -> int:
    """Run the command line; its exit code."""
    set_up_logging()
    try:
        given = parse_arguments(sys.argv[1:])
        if given.verify:
            manifest = verified(Path(given.output))
            log.info("%s is whole: fingerprint %s", given.output, manifest.fingerprint)
            return 0
        settings = make_settings(given)
        manifest = run(settings)
        log.info(
            "%s: %s samples (%s train), %s rows in %d tables, fingerprint %s",
            settings.output,
            f"{manifest.samples:,}",
            f"{manifest.train_samples:,}",
            f"{sum(manifest.table_rows):,}",
            len(manifest.table_rows),
            manifest.fingerprint[:16],
        )
    except KeyboardInterrupt:
        log.warning("stopped; the same command goes on from here")
        return INTERRUPTED
    except DistcacheError as error:
        log.error("%s", error)
        return 1
    except OSError as error:  # a full disk, most likely
        log.error("%s; the same command goes on from here", error)
        return 1
    return 0


def verified(folder: Path) -> Manifest:
    """The manifest of a folder, all files compared with it. Raises DataError that names `output`,
    where training says `data.path`."""
    try:
        return verify(folder)
    except DataError as error:
        raise DataError(str(error).replace("data.path", "output")) from error


def run(settings: PreprocessSettings) -> Manifest:
    """Do the job with a progress bar for each stage. Raises ConfigError without pyarrow."""
    try:
        from distcache.data.raw.job import preprocess
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"preprocessing needs {error.name}, which is not installed: install distcache[data]"
        ) from error
    return preprocess(settings, progress_bar)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command line, `key=value` and `--key value` alike."""
    parser = argparse.ArgumentParser(
        prog="python -m distcache.preprocess",
        description="Turn raw Criteo text into memory-mapped arrays for data=criteo.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", nargs="+", action="extend", help="text files or globs, in order of time")
    add("--output", help="folder of the result, and of unfinished work")
    add(
        "--mode",
        default="vocabulary",
        help="vocabulary (default): rows by falling count, row 0 for ids outside it, row 1 for "
        "missing ids; hash: value modulo the table's rows, missing ids in row 0",
    )
    add("--rows", help="mode=hash: 26 numbers [a,b,...], or kaggle, or terabyte")
    add("--min-count", default="1", help="vocabulary: least count in training samples (1)")
    add("--split", default="seventh", help="held out: seventh (default), last_file or none")
    add("--workers", default="auto", help="processes; auto: what cores and memory allow")
    add("--memory", default="2g", help="bytes that all processes together may take (2g)")
    add(
        "--multi-hot",
        nargs="?",
        const="true",
        default="false",
        help="bags of MLPerf's sizes in place of single ids, by a fixed rule; or "
        "26 sizes [a,b,...]",
    )
    add("--on-bad-line", default="error", help="error (default), or skip with a count")
    add("--part", default="64m", help="bytes of text that are one restartable unit (64m)")
    add("--verify", action="store_true", help="only compare the checksums of output")
    typed = list(arguments)
    given, unknown = parser.parse_known_args(list(_as_options(typed)))
    if unknown:
        # As it was typed, which is a key=value more often than not.
        wrong = next(
            (word for word in typed if set(_as_options([word])) & set(unknown)), unknown[0]
        )
        key = wrong.lstrip("-").partition("=")[0].replace("-", "_")
        near = difflib.get_close_matches(key, vars(given), n=1)
        parser.error(f"{wrong}: no such key" + (f"; did you mean {near[0]}?" if near else ""))
    if not given.output:
        parser.error("output is not set: give output=<folder>")
    return given


def _as_options(arguments: Sequence[str]) -> Iterator[str]:
    """`a_b=c` as `--a-b=c`; underscores in option names as hyphens."""
    for argument in arguments:
        found = _KEY_VALUE.fullmatch(argument)
        if found is not None and found[1] == "verify":
            if found[2].lower() == "true":
                yield "--verify"
        elif found is not None and found[1] == "input":
            yield from ("--input", *_listed(found[2]))
        elif found is not None:
            yield f"--{found[1].replace('_', '-')}={found[2]}"
        elif argument.startswith("--"):
            name, equals, value = argument.partition("=")
            yield name.replace("_", "-") + equals + value
        else:
            yield argument


def make_settings(given: argparse.Namespace) -> PreprocessSettings:
    """The checked settings. Raises ConfigError that names the key."""
    if not given.input:
        raise ConfigError("input is not set: give input=<text files or a quoted glob>")
    rows: Sequence[int] | None = None
    if given.rows is not None and given.rows != "null":
        rows = PRESETS.get(given.rows) or _numbers("rows", given.rows, ", kaggle or terabyte")
    bags: Sequence[int] | None = None
    if given.multi_hot.lower() == "true":
        bags = MLPERF_BAGS
    elif given.multi_hot.lower() not in ("false", "null"):
        bags = _numbers("multi_hot", given.multi_hot, ", true or false")
    auto = given.workers in ("auto", "null")
    return PreprocessSettings(
        input=given.input,
        output=given.output,
        mode=given.mode,
        rows=rows,
        min_count=_number("min_count", given.min_count),
        split=given.split,
        workers=None if auto else _number("workers", given.workers),
        memory=_bytes("memory", given.memory),
        multi_hot=bags,
        on_bad_line=given.on_bad_line,
        part=_bytes("part", given.part),
    )


def _listed(text: str) -> list[str]:
    """`[a,b]` as two values, anything else as one."""
    if text.startswith("[") and text.endswith("]"):
        return [part.strip() for part in text[1:-1].split(",")]
    return [text]


def _number(key: str, text: str) -> int:
    try:
        return int(text.replace("_", ""))
    except ValueError:
        raise ConfigError(f"{key}={text}: give a whole number") from None


def _numbers(key: str, text: str, words: str) -> list[int]:
    """The numbers of `[a,b]` or `a,b`; `words`: what else the key takes, for the message."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return [int(part.replace("_", "")) for part in inner.split(",")]
    except ValueError:
        raise ConfigError(f"{key}={text}: give 26 whole numbers [a,b,...]{words}") from None


def _bytes(key: str, text: str) -> int:
    """A number of bytes, with k, m, g or t for powers of 1,024."""
    found = re.fullmatch(r"(\d+)([kmgt]?)(?:i?b)?", text.lower())
    if found is None:
        raise ConfigError(f"{key}={text}: give a number of bytes such as 2g or 512m")
    return int(found[1]) * _UNITS[found[2]]


@contextmanager
def progress_bar(stage: str, total: int, unit: str, done: int) -> Iterator[tqdm]:
    """A bar from `done` on, with rate and remaining time on stderr; a line every ten seconds where
    no one looks."""
    scale = unit != "table"
    often = 0.2 if sys.stderr.isatty() else 10.0
    with tqdm(
        total=total,
        initial=done,
        desc=stage,
        unit=unit,
        unit_scale=scale,
        mininterval=often,
        maxinterval=often,
    ) as bar:
        yield bar


if __name__ == "__main__":
    sys.exit(main())
