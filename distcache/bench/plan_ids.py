"""The ids that the planner's bench plans: a click stream of the chosen size, by step and rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distcache.bench.setting import compose_setting
from distcache.comm.rendezvous import Place
from distcache.config.tree import Config
from distcache.data.batch import BatchSource, slice_bounds
from distcache.errors import ConfigError
from distcache.layout import RowLayout


def compose_plan(size: str, batch: int, overrides: Sequence[str], place: Place) -> Config:
    """The configuration of a size and global batch. Raises ConfigError."""
    config = compose_setting(size, (f"data.global_batch_size={batch}", *overrides), place)
    if config.data.bag_size != 1:
        raise ConfigError(f"data.bag_size={config.data.bag_size}: this bench takes bags of one id")
    return config


class IdStream:
    """Row numbers of the steps of a click stream, each id drawn once."""

    def __init__(self, source: BatchSource, layout: RowLayout, batch: int) -> None:
        self._source, self._offsets, self._batch = source, layout.offsets[:-1], batch
        self._step = 0

    def draw(self, steps: int) -> list[np.ndarray]:
        """Rows int64 `[T, b]` of the coming steps."""
        drawn = []
        for step in range(self._step, self._step + steps):
            values = self._source.train_batch(step, 0, 1).ids.values.numpy()
            drawn.append(values.reshape(len(self._offsets), self._batch) + self._offsets[:, None])
        self._step += steps
        return drawn


def by_rank(rows: np.ndarray, world: int) -> list[np.ndarray]:
    """Rows `[T, b]` as each rank's int64 `[n]`: contiguous samples, feature-major."""
    bounds = [slice_bounds(rows.shape[1], rank, world) for rank in range(world)]
    return [np.ascontiguousarray(rows[:, low:high]).reshape(-1) for low, high in bounds]
