"""Criteo Kaggle files as batches, read into memory as compact arrays."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from distcache.data.batch import Batch, JaggedIds, slice_bounds
from distcache.data.criteo_text import IDS, INTEGERS, CriteoRows, parse_block
from distcache.data.hashing import key_of
from distcache.data.samplers import BatchSpans, SampleOrder, SampleSpan
from distcache.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 16 << 20
"""Bytes of text that are parsed at once; parsing takes several times that for a while."""


@dataclass(frozen=True)
class CriteoSpec:
    """Which files to read, and how. Raises ConfigError that names the key.

    `paths`: a file, a glob of files, or a sequence of either, in order of time (the matches of a
    glob are sorted, numbers by value); `table_rows`: rows of the 26 tables; `on_bad_line`:
    `error`, or `skip` with a count; `dtype`: torch.float32 or torch.float64, of dense features
    and labels.
    """

    paths: str | Path | Sequence[str | Path]
    table_rows: Sequence[int]
    global_batch_size: int = 2048
    seed: int = 0
    on_bad_line: str = "error"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if len(self.table_rows) != IDS or any(rows < 1 for rows in self.table_rows):
            raise ConfigError(
                f"data.table_rows={list(self.table_rows)}: Criteo data has {IDS} tables of at "
                f"least 1 row, got {len(self.table_rows)}"
            )
        if self.on_bad_line not in ("error", "skip"):
            raise ConfigError(f"data.on_bad_line={self.on_bad_line!r} is not 'error' or 'skip'")
        if self.dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"data comes in float32 or float64, not {self.dtype}")


class CriteoSource:
    """The `BatchSource` of a `CriteoSpec`; features are `cat_0` to `cat_25`, one id each.

    The first six sevenths of the lines train, shuffled anew in each epoch; the last seventh is
    held out, in file order. Dense features are log(1 + max(x, 0)), 0 where missing.
    `skipped_lines`: malformed lines left out. Raises DataError for missing or malformed files.
    """

    def __init__(self, spec: CriteoSpec) -> None:
        self.spec = spec
        self.table_rows = tuple(int(rows) for rows in spec.table_rows)
        self.features = tuple(f"cat_{index}" for index in range(IDS))
        self.dense_features = INTEGERS
        self.skipped_lines = 0
        paths = find_files(spec.paths)
        self._labels, self._dense, self._ids = self._read(paths)
        lines = len(self._labels)
        self._train_samples = lines * 6 // 7
        if self._train_samples == 0:
            raise DataError(
                f"data.path: {lines} good lines in {_names(paths)} (skipped: "
                f"{self.skipped_lines}); at least 2 are needed to train and hold out"
            )
        self._train = BatchSpans(self._train_samples, spec.global_batch_size)
        self._eval = BatchSpans(lines - self._train_samples, spec.global_batch_size)
        self._order = SampleOrder(self._train_samples, key_of(spec.seed, 0))
        logger.info(
            "read %d lines of %d files: %d train, %d held out, %d skipped",
            lines,
            len(paths),
            self._train_samples,
            lines - self._train_samples,
            self.skipped_lines,
        )

    @property
    def steps_per_epoch(self) -> int | None:
        """Training steps of one epoch."""
        return self._train.per_epoch

    @property
    def eval_batches(self) -> int | None:
        """Held-out global batches."""
        return self._eval.per_epoch

    def train_batch(self, step: int, rank: int, world_size: int) -> Batch:
        """This rank's slice of training step `step`, counted from 0 across epochs."""
        span = self._train.locate(step)
        low, high = slice_bounds(span.size, rank, world_size)
        lines = self._order.positions(span.epoch, span.start + low, span.start + high)
        return self._batch(lines, span, step, low, "train")

    def eval_batch(self, index: int, rank: int, world_size: int) -> Batch:
        """This rank's slice of held-out global batch `index`."""
        if index >= (self._eval.per_epoch or 0):
            raise DataError(f"held-out batch {index} of {self.eval_batches} does not exist")
        span = self._eval.locate(index)
        low, high = slice_bounds(span.size, rank, world_size)
        lines = np.arange(span.start + low, span.start + high) + self._train_samples
        return self._batch(lines, span, index, low, "eval")

    def _batch(self, lines: np.ndarray, span: SampleSpan, index: int, low: int, kind: str) -> Batch:
        values = self._ids[lines].T.astype(np.int64, order="C").ravel()
        return Batch(
            dense=torch.from_numpy(self._dense[lines]),
            ids=JaggedIds(
                features=self.features,
                values=torch.from_numpy(values),
                offsets=torch.arange(len(values) + 1),
            ),
            labels=torch.from_numpy(self._labels[lines]).to(self.spec.dtype),
            global_size=span.size,
            index=index,
            epoch=span.epoch,
            first_sample=low,
            kind=kind,
        )

    def _read(self, paths: Sequence[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Labels uint8 `[n]`, dense `[n, 13]` and ids `[n, 26]` of all files in order."""
        dtype = torch.empty(0, dtype=self.spec.dtype).numpy().dtype
        labels, dense, ids = [], [], []
        for path in paths:
            for rows in self._read_file(path):
                labels.append(rows.labels)
                dense.append(np.log1p(np.maximum(rows.integers, 0)).astype(dtype))
                ids.append(rows.ids)
        return np.concatenate(labels), np.concatenate(dense), np.concatenate(ids)

    def _read_file(self, path: Path) -> Iterator[CriteoRows]:
        """The rows of one file, block by block."""
        table_rows = np.array(self.table_rows, dtype=np.int64)
        first_line, skipped_before = 1, self.skipped_lines

        def on_error(line: int, error: DataError) -> None:
            where = f"{path}:{first_line + line}: {error}"
            if self.spec.on_bad_line == "error":
                raise DataError(
                    f"{where}; correct the line, or leave such lines out with data.on_bad_line=skip"
                ) from None
            if self.skipped_lines == skipped_before:
                logger.warning("skipped %s", where)
            self.skipped_lines += 1

        for block in _whole_lines(path):
            rows, lines = parse_block(block, table_rows, on_error)
            first_line += lines
            yield rows
        if first_line == 1:
            raise DataError(f"data.path: {path} is empty")
        if self.skipped_lines > skipped_before:
            skipped = self.skipped_lines - skipped_before
            logger.warning("%s: skipped %d of %d lines", path, skipped, first_line - 1)


def find_files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files that `paths` name, globs resolved; DataError for none, or for a folder."""
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else paths:
        literal = Path(path)
        matches = [literal] if literal.exists() else [Path(p) for p in glob.glob(str(path))]
        if not matches:
            raise DataError(
                f"data.path={path}: there is no such file and nothing matches; give a file of "
                "Criteo lines or a quoted glob of files"
            )
        found += sorted(matches, key=_natural_order)
    folders = [path for path in found if not path.is_file()]
    if folders:
        raise DataError(
            f"data.path: {folders[0]} is not a file; for all files of a folder give a glob "
            f"such as '{folders[0]}/*.txt'"
        )
    if not found:
        raise DataError("data.path names no file: give a file of Criteo lines or a glob of files")
    return found


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """A sort key by which day_2 comes before day_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def _names(paths: Sequence[Path]) -> str:
    """A short list of files for a message."""
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _whole_lines(path: Path) -> Iterator[bytes]:
    """The bytes of a file in blocks of about `_BLOCK_BYTES` that end at a line end."""
    rest = b""
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            block = rest + block
            cut = block.rfind(b"\n") + 1
            if cut:
                yield block[:cut]
            rest = block[cut:]
    if rest:
        yield rest
