"""Criteo text files as batches, read into memory as compact arrays."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from distcache.data.criteo_batches import SHUFFLE_BLOCK, BatchSettings, CriteoBatches
from distcache.data.criteo_text import IDS, CriteoRows, dense_of, parse_block
from distcache.data.files import InputFile, find_files
from distcache.data.hashing import digest_of
from distcache.data.lines import BadLines
from distcache.data.raw.text import Block, read_text
from distcache.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 16 << 20
"""Bytes of text that are parsed at once; parsing takes several times that for a while."""


@dataclass(frozen=True)
class CriteoSpec:
    """Which files to read, and how. Raises ConfigError that names the key.

    `paths`: a file (plain or gzip), a glob of files, or a sequence of either, in order of time
    (the matches of a glob are sorted, numbers by value); `table_rows`: rows of the 26 tables;
    `on_bad_line`: `error`, or `skip` with a count; the others as in `BatchSettings`.
    """

    paths: str | Path | Sequence[str | Path]
    table_rows: Sequence[int]
    global_batch_size: int = 2048
    seed: int = 0
    on_bad_line: str = "error"
    dtype: torch.dtype = torch.float32
    shuffle: bool = True
    shuffle_block: int = SHUFFLE_BLOCK

    def __post_init__(self) -> None:
        if len(self.table_rows) != IDS or any(rows < 1 for rows in self.table_rows):
            raise ConfigError(
                f"data.table_rows={list(self.table_rows)}: Criteo data has {IDS} tables of at "
                f"least 1 row, got {len(self.table_rows)}"
            )
        if self.on_bad_line not in ("error", "skip"):
            raise ConfigError(f"data.on_bad_line={self.on_bad_line!r} is not 'error' or 'skip'")
        self.batches()

    @classmethod
    def of(
        cls,
        paths: str | Path | Sequence[str | Path],
        table_rows: Sequence[int],
        on_bad_line: str,
        batches: BatchSettings,
    ) -> CriteoSpec:
        """A spec from settings that other sources share."""
        return cls(paths, table_rows, on_bad_line=on_bad_line, **vars(batches))

    def batches(self) -> BatchSettings:
        """The settings that do not speak of files."""
        return BatchSettings(
            self.global_batch_size, self.seed, self.dtype, self.shuffle, self.shuffle_block
        )


class CriteoSource(CriteoBatches):
    """The `BatchSource` of a `CriteoSpec`; one id a feature.

    The first six sevenths of the lines train, shuffled anew in each epoch; the last seventh is
    held out, in file order. Dense features are log(1 + max(x, 0)), 0 where missing. `bad_lines`:
    malformed lines left out. Raises DataError for missing, malformed or changing files.
    """

    def __init__(self, spec: CriteoSpec) -> None:
        self.spec = spec
        self._table_rows = np.array(spec.table_rows, dtype=np.int64)
        self.bad_lines = BadLines(spec.on_bad_line)
        files = find_files("data.path", spec.paths, "a file of Criteo lines")
        self._labels, self._dense, self._ids = self._read(files)
        lines = len(self._labels)
        train = lines * 6 // 7
        self.bad_lines.report()
        if train == 0:
            raise DataError(
                f"data.path: {lines} good lines in {_names(files)} (skipped: "
                f"{self.bad_lines.example()}); at least 2 are needed to train and hold out"
            )
        digest = digest_of(self._labels, self._dense, self._ids)
        super().__init__(spec.batches(), spec.table_rows, lines, train, fingerprint=digest)
        logger.info(
            "read %d lines of %d files: %d train, %d held out, %d skipped",
            lines,
            len(files),
            train,
            lines - train,
            self.bad_lines.count,
        )

    def read_ids(self, lines: np.ndarray) -> np.ndarray:
        """See `CriteoBatches.read_ids`."""
        return self._ids[lines]

    def read_rest(self, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `CriteoBatches.read_rest`."""
        return self._dense[lines], self._labels[lines]

    def _read(self, files: Sequence[InputFile]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Labels uint8 `[n]`, dense float32 `[n, 13]` and ids `[n, 26]` of all files in order."""
        labels, dense, ids = [], [], []
        for file in files:
            for rows in self._read_file(file):
                labels.append(rows.labels)
                dense.append(dense_of(rows.integers))
                ids.append(rows.ids)
        return np.concatenate(labels), np.concatenate(dense), np.concatenate(ids)

    def _read_file(self, file: InputFile) -> Iterator[CriteoRows]:
        """The rows of one file, block by block."""
        first_line = 1
        for block in read_text(file, _BLOCK_BYTES):
            rows, lines = self._parse(block, file.path, first_line)
            first_line += lines
            yield rows

    def _parse(self, block: Block, path: Path, first_line: int) -> tuple[CriteoRows, int]:
        """The rows of a block that begins with line `first_line`, and its number of lines."""

        def on_error(line: int, error: DataError) -> None:
            self.bad_lines.add(path, first_line + line, str(block.explain(line, error)))

        return parse_block(block.text, self._table_rows, on_error)


def _names(files: Sequence[InputFile]) -> str:
    """A short list of files for a message."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{files[0].path}{more}"
