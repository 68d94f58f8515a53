"""Checks of ids before anything is looked up: an id outside its table is never trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from distcache.data.batch import UNKNOWN, Batch, JaggedIds
from distcache.errors import ConfigError, DataError
from distcache.layout import TableSpec

_ID_DTYPES = (torch.int64, torch.int32)


def check_ids(
    ids: JaggedIds,
    table_rows: Sequence[int],
    table_names: Sequence[str],
    first_sample: int = 0,
    on_bad_id: str = "error",
) -> JaggedIds:
    """The ids, every one inside its table: `ids` itself where nothing had to change.

    `table_rows`, `table_names`: of the table that each feature reads, one entry per feature;
    `first_sample`: position of the slice in the global batch, for messages. An id that is negative
    or beyond its table is an error (`on_bad_id="error"`), or taken modulo the table's rows
    (`"hash"`). Raises DataError, also for malformed offsets or weights and for float ids.
    """
    if on_bad_id not in ("error", "hash"):
        raise ConfigError(f"data.on_bad_id={on_bad_id!r} is not 'error' or 'hash'")
    if not len(ids.features) == len(table_rows) == len(table_names):
        raise DataError(
            f"{len(ids.features)} features, but {len(table_rows)} tables and {len(table_names)} "
            "table names: give the table that each feature reads"
        )
    offsets = _checked_offsets(ids)
    _check_weights(ids)
    values = ids.values.numpy().astype(np.int64, copy=False)
    edges = offsets[:: max(ids.batch_size, 1)] if ids.batch_size else np.zeros(1, dtype=np.int64)
    if not _is_any_beyond(values, edges.tolist(), table_rows):
        return (
            ids
            if ids.values.dtype == torch.int64
            else replace(ids, values=torch.from_numpy(values))
        )
    rows = np.asarray(table_rows, dtype=np.int64)
    limits = np.repeat(rows, np.diff(edges))
    bad = (values < 0) | (values >= limits)
    if on_bad_id == "hash":
        return replace(ids, values=torch.from_numpy(np.where(bad, values % limits, values)))
    place = int(np.argmax(bad))
    bag = int(np.searchsorted(offsets, place, side="right")) - 1
    feature, sample = divmod(bag, ids.batch_size)
    raise DataError(
        f"feature {ids.features[feature]!r}, sample {first_sample + sample} of the global batch: "
        f"id {int(values[place])} is not in table {table_names[feature]!r}, which has "
        f"{int(rows[feature])} rows (ids 0 to {int(rows[feature]) - 1}); {int(bad.sum())} such ids "
        "in this slice. Correct the data or the table's rows, or take such ids modulo the "
        "table's rows with data.on_bad_id=hash"
    )


def _is_any_beyond(values: np.ndarray, edges: list[int], table_rows: Sequence[int]) -> bool:
    """Whether an id is outside its table; the ids of feature f are `edges[f : f + 2]`."""
    unsigned = values.view(np.uint64)  # so that negative ids are beyond every table too
    bounds = zip(table_rows, edges, edges[1:], strict=False)
    return any(start < stop and unsigned[start:stop].max() >= rows for rows, start, stop in bounds)


def _checked_offsets(ids: JaggedIds) -> np.ndarray:
    """The offsets as int64, after all that must hold for them and for the values' shape."""
    if ids.values.dtype not in _ID_DTYPES or ids.values.dim() != 1:
        raise DataError(
            f"ids are {ids.values.dtype} of shape {list(ids.values.shape)}; give int64 of shape [n]"
        )
    if ids.offsets.dtype not in _ID_DTYPES or ids.offsets.dim() != 1 or not len(ids.offsets):
        raise DataError(
            f"offsets are {ids.offsets.dtype} of shape {list(ids.offsets.shape)}; give int64 of "
            "shape [features * samples + 1]"
        )
    offsets, features = ids.offsets.numpy().astype(np.int64, copy=False), len(ids.features)
    if (len(offsets) - 1) % max(features, 1) or (features == 0 and len(offsets) > 1):
        raise DataError(
            f"{len(offsets)} offsets do not fit {features} features: give features * samples + 1"
        )
    if offsets[0] != 0 or offsets[-1] != len(ids.values):
        raise DataError(
            f"offsets go from {offsets[0]} to {offsets[-1]}; they must go from 0 to the number of "
            f"ids, {len(ids.values)}"
        )
    falling = offsets[1:] < offsets[:-1]
    if falling.any():
        falls = np.flatnonzero(falling)
        feature, sample = divmod(int(falls[0]), ids.batch_size)
        raise DataError(
            f"offsets fall from {offsets[falls[0]]} to {offsets[falls[0] + 1]} at feature "
            f"{ids.features[feature]!r}, sample {sample} of the slice; they must never decrease"
        )
    return offsets


def _check_weights(ids: JaggedIds) -> None:
    """Weights are float, one per id."""
    weights = ids.weights
    if weights is None:
        return
    if not weights.dtype.is_floating_point or tuple(weights.shape) != (len(ids.values),):
        raise DataError(
            f"weights are {weights.dtype} of shape {list(weights.shape)} for {len(ids.values)} "
            f"ids; give one float per id, shape [{len(ids.values)}]"
        )


class BatchCheck:
    """Every id inside its table, every feature in its place; DataError names what is not."""

    def __init__(
        self, tables: Sequence[TableSpec], features: Sequence[str], on_bad_id: str
    ) -> None:
        reader = {feature: table for table in tables for feature in table.features}
        self._features, self._on_bad_id = tuple(features), on_bad_id
        self._rows = [reader[feature].rows for feature in features]
        self._names = [reader[feature].name for feature in features]

    def __call__(self, batch: Batch) -> Batch:
        """`batch`, with ids brought into their tables where `on_bad_id` says so."""
        try:
            return self._checked(batch)
        except DataError as error:
            text = str(error)
            if batch.global_size == UNKNOWN:  # where the slice lies is not known either
                text = text.replace("of the global batch", "of this rank's slice")
            raise DataError(f"{batch.kind} batch {batch.index}: {text}") from error

    def _checked(self, batch: Batch) -> Batch:
        if batch.ids.features != self._features:
            raise DataError(
                f"it has the features {list(batch.ids.features)}; this model reads "
                f"{list(self._features)}, in this order"
            )
        ids = check_ids(batch.ids, self._rows, self._names, batch.first_sample, self._on_bad_id)
        return replace(batch, ids=ids)
