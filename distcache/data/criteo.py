"""Criteo samples as batches: text in memory, or preprocessed arrays on the disk."""

from __future__ import annotations

import copy
import hashlib
import logging
import mmap
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from distcache.data.batch import JaggedIds, SlicedSource, one_each
from distcache.data.criteo_folder import IDS, INTEGERS, Manifest, bags, open_array, read_manifest
from distcache.data.files import BadLines, InputFile, MappedRows, digest_of, find_files, read_text
from distcache.data.samplers import BlockOrder, SampleOrder, Subset, key_of
from distcache.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

SHUFFLE_BLOCK = 4096
"""Consecutive samples that are read together when an epoch is shuffled."""

HASHED = "criteo, hexadecimal values modulo the rows"
"""How values became ids where there is no vocabulary."""

_BLOCK_BYTES = 16 << 20
"""Bytes of text that are parsed at once; parsing takes several times that for a while."""


@dataclass(frozen=True)
class CriteoSpec:
    """Which files to read, and how.

    `paths`: a preprocessed folder; or text: a file (plain or gzip), a glob of files, or a sequence
    of either, in order of time (the matches of a glob are sorted, numbers by value); `table_rows`:
    rows of the 26 tables, empty for those of the folder; `on_bad_line`: of text, `error`, or `skip`
    with a count; `shuffle`: training samples in an order of (seed, epoch) that moves blocks of
    `shuffle_block` neighbours (see `BlockOrder`), or in their own; `dtype`: float32 or float64, of
    dense features and labels (the features have float32's precision in both).
    """

    paths: str | Path | Sequence[str | Path]
    table_rows: Sequence[int] = ()
    global_batch_size: int = 2048
    seed: int = 0
    on_bad_line: str = "error"
    dtype: torch.dtype = torch.float32
    shuffle: bool = True
    shuffle_block: int = SHUFFLE_BLOCK


class CriteoBatches(SlicedSource):
    """A `BatchSource` of samples [0, train_samples) to train on and the rest held out, in order.

    Features are `cat_0` to `cat_25`. `bag_sizes`: ids per bag of each table (`multi_hot.bags`),
    None for one. Two sources of the same samples give the same batches, whose dense features and
    labels are read when they are loaded. `fingerprint`: a digest of all samples.
    `vocabulary`: how the text's values became ids.
    """

    vocabulary = HASHED

    def __init__(
        self,
        spec: CriteoSpec,
        table_rows: Sequence[int],
        samples: int,
        train_samples: int,
        bag_sizes: Sequence[int] | None = None,
        fingerprint: str = "",
    ) -> None:
        self.spec = spec
        self.table_rows = tuple(int(rows) for rows in table_rows)
        self.features = tuple(f"cat_{index}" for index in range(IDS))
        self.dense_features = INTEGERS
        self.samples, self.train_samples = samples, train_samples
        self.first_held_out, self._bag_sizes = train_samples, bag_sizes
        super().__init__(train_samples, samples - train_samples, spec.global_batch_size)
        self.order = self._ordered(train_samples, key_of(spec.seed, 0))
        self.identity = {"data.path": fingerprint, "data.shuffle": str(spec.shuffle)}
        if spec.shuffle:
            self.identity["data.shuffle_block"] = str(spec.shuffle_block)

    def in_file_order(self) -> CriteoBatches:
        """The same samples, not shuffled; shares all that holds them."""
        other = copy.copy(self)
        other.order = SampleOrder(self.train_samples, 0, shuffle=False)
        other.order.hint = self.will_need
        return other

    @abstractmethod
    def values(self, name: str, lines: np.ndarray) -> np.ndarray:
        """Of samples `lines` int64 `[b]`: `ids` `[b, 26]`, `dense` features float32 `[b, 13]` or
        `labels` uint8 `[b]`."""

    def dense_and_labels(self, samples: np.ndarray) -> tuple[Tensor, Tensor]:
        """See `SlicedSource.dense_and_labels`."""
        found = (torch.from_numpy(self.values(name, samples)) for name in ("dense", "labels"))
        dense, labels = (tensor.to(self.spec.dtype) for tensor in found)
        return dense, labels

    def ids_of(self, samples: np.ndarray, epoch: int) -> JaggedIds:
        """See `SlicedSource.ids_of`."""
        columns = self.values("ids", samples).T.astype(np.int64, order="C")
        if self._bag_sizes is None:
            values = torch.from_numpy(columns.ravel())
            return JaggedIds(self.features, values, one_each(len(values)))
        tables = zip(columns, self.table_rows, self._bag_sizes, strict=True)
        parts = [bags(c, t, rows, size).ravel() for t, (c, rows, size) in enumerate(tables)]
        lengths = torch.tensor(list(self._bag_sizes)).repeat_interleave(len(samples))
        values = torch.from_numpy(np.concatenate(parts))
        return JaggedIds.of_lengths(self.features, values, lengths, None)

    def order_of(self, chosen: Subset, which: int) -> SampleOrder | BlockOrder:
        """See `SlicedSource.order_of`: neighbours among `chosen` stay near each other."""
        return self._ordered(chosen.count, key_of(self.spec.seed, 0, which))

    def _ordered(self, samples: int, seed: int) -> SampleOrder | BlockOrder:
        """An order of `samples` samples, shuffled by blocks where the spec says so."""
        if not self.spec.shuffle or not samples:
            return SampleOrder(samples, seed, shuffle=False)
        return BlockOrder(samples, seed, self.spec.shuffle_block)


class CriteoArrays(CriteoBatches):
    """The `BatchSource` of a preprocessed folder: nothing is read but what a batch needs.

    Dense features and labels are read when a batch is loaded. Raises DataError for a folder that is
    unfinished, damaged or cut.
    """

    def __init__(self, spec: CriteoSpec) -> None:
        self.folder = Path(str(spec.paths))
        self.manifest = manifest = read_manifest(self.folder)
        if spec.table_rows and tuple(spec.table_rows) != manifest.table_rows:
            raise ConfigError(
                f"data.table_rows={list(spec.table_rows)}, but {self.folder} was preprocessed to "
                f"{list(manifest.table_rows)}: use data.table_rows=[], or preprocess "
                "again with those rows"
            )
        super().__init__(
            spec,
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
        if isinstance(self.order, BlockOrder):
            for rows in self._arrays.values():
                rows.advise(0, manifest.train_samples, mmap.MADV_RANDOM)
            self.order.hint = partial(_will_need, list(self._arrays.values()))
        held_out = manifest.samples - manifest.train_samples
        said = f"{self.folder}: {manifest.samples:,} samples, {held_out:,} held out"
        logger.info(f"{said}, fingerprint {manifest.fingerprint[:16]}")

    def will_need(self, start: int, stop: int) -> None:
        """See `SlicedSource.will_need`."""
        _will_need(list(self._arrays.values()), start, stop)

    def values(self, name: str, lines: np.ndarray) -> np.ndarray:
        """See `CriteoBatches.values`."""
        found = self._arrays[name].take(lines)
        if name == "labels" and (found > 1).any():
            at = int(np.argmax(found > 1))
            raise DataError(
                f"data.path: {self.folder / 'labels.npy'}: sample {lines[at]} has the label "
                f"{found[at]}, not 0 or 1: the file is damaged; see python -m "
                f"distcache.preprocess verify=true output={self.folder}"
            )
        return found

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
        rows.advise(start, stop, mmap.MADV_WILLNEED)


class CriteoSource(CriteoBatches):
    """The `BatchSource` of Criteo text, read into memory as compact arrays; one id a feature.

    The first six sevenths of the lines train, shuffled anew in each epoch; the last seventh is
    held out, in file order. Dense features are log(1 + max(x, 0)), 0 where missing. `bad_lines`:
    malformed lines left out. Raises DataError for missing, malformed or changing files, ConfigError
    without pyarrow.
    """

    def __init__(self, spec: CriteoSpec) -> None:
        self.bad_lines = BadLines(spec.on_bad_line)
        files = find_files("data.path", spec.paths, "a file of Criteo lines")
        self._arrays = self._read(files, spec.table_rows)
        lines = len(self._arrays["labels"])
        train = lines * 6 // 7
        self.bad_lines.report()
        if train == 0:
            more = f" and {len(files) - 1} more" if len(files) > 1 else ""
            raise DataError(
                f"data.path: {lines} good lines in {files[0].path}{more} (skipped: "
                f"{self.bad_lines.example()}); at least 2 are needed to train and hold out"
            )
        digest = digest_of(*self._arrays.values())
        super().__init__(spec, spec.table_rows, lines, train, fingerprint=digest)
        split = f"{train} train, {lines - train} held out, {self.bad_lines.count} skipped"
        logger.info(f"read {lines} lines of {len(files)} files: {split}")

    def values(self, name: str, lines: np.ndarray) -> np.ndarray:
        """See `CriteoBatches.values`."""
        return self._arrays[name][lines]

    def _read(self, files: Sequence[InputFile], table_rows: Sequence[int]) -> dict[str, np.ndarray]:
        """`labels`, `dense` and `ids` of all files in order."""
        try:
            from distcache.data.criteo_text import MAX_LINE, parse_blocks
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"data=criteo reads text with {error.name}, which is not installed: install "
                "distcache[data]"
            ) from error
        found = []
        for file in files:
            blocks, bad = (
                read_text(file, _BLOCK_BYTES, MAX_LINE),
                partial(self.bad_lines.add, file.path),
            )
            found += [rows for rows, _ in parse_blocks(blocks, table_rows, bad)]
        names = ("labels", "dense", "ids")
        return {name: np.concatenate([getattr(rows, name) for rows in found]) for name in names}
