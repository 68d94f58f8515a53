"""Criteo samples that `python -m distcache.preprocess` left on the disk, by memory map."""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from distcache.data.batch import Batch
from distcache.data.criteo_batches import HASHED, BatchSettings, CriteoBatches
from distcache.data.mapped import MappedRows
from distcache.data.raw.manifest import Manifest, open_array, read_manifest
from distcache.data.read_ahead import ReadAhead
from distcache.data.samplers import BlockOrder, SampleOrder
from distcache.data.slices import BatchSlice
from distcache.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


class CriteoArrays(CriteoBatches):
    """The `BatchSource` of a preprocessed folder: nothing is read but what a batch needs.

    `table_rows`: None, or what the folder must have. Dense features and labels are read when a
    batch is loaded. Raises DataError for a folder that is unfinished, damaged or cut.
    """

    def __init__(
        self, folder: str | Path, settings: BatchSettings, table_rows: Sequence[int] | None = None
    ) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = read_manifest(self.folder)
        manifest = self.manifest
        if table_rows is not None and tuple(table_rows) != manifest.table_rows:
            raise ConfigError(
                f"data.table_rows={list(table_rows)}, but {folder} was preprocessed to "
                f"{list(manifest.table_rows)}: use data.table_rows=[], or preprocess "
                "again with those rows"
            )
        super().__init__(
            settings,
            manifest.table_rows,
            manifest.samples,
            manifest.train_samples,
            manifest.multi_hot,
            manifest.fingerprint,
        )
        self.vocabulary = _vocabulary(manifest)
        self._arrays = {}
        for name in ("labels", "dense", "ids"):
            array = open_array(self.folder, manifest, f"{name}.npy")
            self._arrays[name] = MappedRows(self.folder / f"{name}.npy", array)
        self._ahead: ReadAhead | None = None
        if isinstance(self._order, BlockOrder):
            for rows in self._arrays.values():
                rows.visit_at_random(manifest.train_samples)
            self._ahead = ReadAhead(self._order, partial(_will_need, [*self._arrays.values()]))
        logger.info(
            "%s: %s samples, %s held out, fingerprint %s",
            folder,
            f"{manifest.samples:,}",
            f"{manifest.samples - manifest.train_samples:,}",
            manifest.fingerprint[:16],
        )

    def in_file_order(self) -> CriteoArrays:
        """See `CriteoBatches.in_file_order`."""
        other = copy.copy(self)
        other._order = SampleOrder(self.train_samples, 0, shuffle=False)
        other._ahead = None
        return other

    def read(self, part: BatchSlice) -> Batch:
        """See `SlicedSource.read`."""
        if self._ahead is not None and part.kind == "train":
            self._ahead.reach(part.span.epoch, part.span.start, part.span.stop)
        return super().read(part)

    def will_need(self, start: int, stop: int) -> None:
        """See `SlicedSource.will_need`."""
        _will_need([*self._arrays.values()], start, stop)

    def read_ids(self, lines: np.ndarray) -> np.ndarray:
        """See `CriteoBatches.read_ids`."""
        return self._arrays["ids"].take(lines)

    def read_rest(self, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `CriteoBatches.read_rest`."""
        dense, labels = self._arrays["dense"].take(lines), self._arrays["labels"].take(lines)
        if (labels > 1).any():
            at = int(np.argmax(labels > 1))
            raise DataError(
                f"data.path: {self.folder / 'labels.npy'}: sample {lines[at]} has the label "
                f"{labels[at]}, not 0 or 1: the file is damaged; see python -m "
                f"distcache.preprocess --verify output={self.folder}"
            )
        return dense, labels

    def counts(self, table: int) -> np.ndarray:
        """How often each row of a table occurs in training samples, int64 `[rows]`, by map."""
        return open_array(self.folder, self.manifest, f"counts/cat_{table}.npy")


def _vocabulary(manifest: Manifest) -> str:
    """How the text's values became ids: the rule, or a digest of the vocabulary, and the bags."""
    text = HASHED
    if manifest.mode != "hash":
        names = sorted(name for name in manifest.arrays if name.startswith("vocabulary/"))
        sums = "".join(manifest.arrays[name].checksum for name in names)
        text = f"criteo, {manifest.mode} {hashlib.sha256(sums.encode()).hexdigest()[:16]}"
    return text if manifest.multi_hot is None else f"{text}, bags of {list(manifest.multi_hot)}"


def _will_need(arrays: Sequence[MappedRows], start: int, stop: int) -> None:
    """Samples [start, stop) are read soon. No method, so that a source which is dropped unmaps its
    files at once."""
    for rows in arrays:
        rows.will_need(start, stop)
