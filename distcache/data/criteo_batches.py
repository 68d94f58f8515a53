"""Batches of Criteo samples, whatever holds them: text in memory, or arrays on the disk."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distcache.data.batch import Batch, JaggedIds, unloaded
from distcache.data.criteo_text import IDS, INTEGERS
from distcache.data.hashing import key_of
from distcache.data.raw.multi_hot import bags
from distcache.data.samplers import BlockOrder, SampleOrder
from distcache.data.slices import BatchSlice, SlicedSource
from distcache.data.subset import Subset
from distcache.errors import ConfigError

SHUFFLE_BLOCK = 4096
"""Consecutive samples that are read together when an epoch is shuffled."""


HASHED = "criteo, hexadecimal values modulo the rows"
"""How values became ids where there is no vocabulary."""


@dataclass(frozen=True)
class BatchSettings:
    """How samples become batches. Raises ConfigError that names the key.

    `shuffle`: training samples in an order of (seed, epoch) that moves blocks of `shuffle_block`
    neighbours (see `BlockOrder`), or in their own; `dtype`: float32 or float64, of dense features
    and labels (the features have float32's precision in both).
    """

    global_batch_size: int = 2048
    seed: int = 0
    dtype: torch.dtype = torch.float32
    shuffle: bool = True
    shuffle_block: int = SHUFFLE_BLOCK

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"data comes in float32 or float64, not {self.dtype}")


class CriteoBatches(SlicedSource):
    """A `BatchSource` of samples [0, train_samples) to train on and the rest held out, in order.

    Features are `cat_0` to `cat_25`. `bag_sizes`: ids per bag of each table (`multi_hot.bags`),
    None for one. Two sources of the same samples give the same batches. `deferred`: dense features
    and labels are read when a batch is loaded. `fingerprint`: a digest of all samples.
    `vocabulary`: how the text's values became ids.
    """

    deferred = True
    vocabulary = HASHED

    def __init__(
        self,
        settings: BatchSettings,
        table_rows: Sequence[int],
        samples: int,
        train_samples: int,
        bag_sizes: Sequence[int] | None = None,
        fingerprint: str = "",
    ) -> None:
        self.table_rows = tuple(int(rows) for rows in table_rows)
        self.features = tuple(f"cat_{index}" for index in range(IDS))
        self.dense_features = INTEGERS
        self.samples, self.train_samples = samples, train_samples
        self._dtype, self._bag_sizes, self._settings = settings.dtype, bag_sizes, settings
        super().__init__(train_samples, samples - train_samples, settings.global_batch_size)
        seed = key_of(settings.seed, 0)
        self._order: SampleOrder | BlockOrder = SampleOrder(train_samples, seed, shuffle=False)
        if settings.shuffle:
            self._order = BlockOrder(train_samples, seed, settings.shuffle_block)
        self.identity = {"data.path": fingerprint, "data.shuffle": str(settings.shuffle)}
        if settings.shuffle:
            self.identity["data.shuffle_block"] = str(settings.shuffle_block)

    def in_file_order(self) -> CriteoBatches:
        """The same samples, not shuffled; shares all that holds them."""
        other = copy.copy(self)
        other._order = SampleOrder(self.train_samples, 0, shuffle=False)
        return other

    @abstractmethod
    def read_ids(self, lines: np.ndarray) -> np.ndarray:
        """Ids `[b, 26]` of samples `lines` int64 `[b]`."""

    @abstractmethod
    def read_rest(self, lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Dense features float32 `[b, 13]` and labels uint8 `[b]` of samples `lines`."""

    def read(self, part: BatchSlice) -> Batch:
        """See `SlicedSource.read`."""
        if part.kind == "train":
            return self.take(self._order.positions(part.span.epoch, part.start, part.stop), part)
        return self.take(np.arange(part.start, part.stop) + self.train_samples, part)

    def take(self, samples: np.ndarray, part: BatchSlice) -> Batch:
        """See `SlicedSource.take`."""

        def load() -> tuple[Tensor, Tensor]:
            dense, labels = (torch.from_numpy(values) for values in self.read_rest(samples))
            return dense.to(self._dtype), labels.to(self._dtype)

        ids, count = self._jagged(self.read_ids(samples)), len(samples)
        batch = part.batch(unloaded(count, INTEGERS), ids, unloaded(count), load)
        return batch if self.deferred else batch.loaded()

    def ids_of(self, samples: np.ndarray, epoch: int) -> JaggedIds:
        """See `SlicedSource.ids_of`."""
        return self._jagged(self.read_ids(samples))

    def order_of(self, chosen: Subset, which: int) -> SampleOrder | BlockOrder:
        """See `SlicedSource.order_of`: neighbours among `chosen` stay near each other."""
        seed = key_of(self._settings.seed, 0, which)
        if not self._settings.shuffle or not chosen.count:
            return SampleOrder(chosen.count, seed, shuffle=False)
        return BlockOrder(chosen.count, seed, self._settings.shuffle_block)

    def _jagged(self, ids: np.ndarray) -> JaggedIds:
        """Bags of all features from ids `[b, 26]`."""
        if self._bag_sizes is None:
            values = ids.T.astype(np.int64, order="C").ravel()
            offsets = torch.arange(len(values) + 1)
        else:
            columns = ids.T.astype(np.int64, order="C")
            tables = zip(columns, self.table_rows, self._bag_sizes, strict=True)
            parts = [bags(c, t, rows, size).ravel() for t, (c, rows, size) in enumerate(tables)]
            values = np.concatenate(parts)
            lengths = torch.tensor(list(self._bag_sizes)).repeat_interleave(len(ids))
            offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        return JaggedIds(self.features, torch.from_numpy(values), offsets)
