"""Weights in checkpoints, by name: read block by block, without a model.

`distcache.export` writes them to other files, and new runs start from them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata

from distcache.checkpoint.files import find_checkpoints
from distcache.checkpoint.manifest import Manifest, list_first
from distcache.checkpoint.reader import BlockReader, StoredRows
from distcache.checkpoint.writer import TABLES
from distcache.comm.link import run_on_all_ranks
from distcache.comm.world import World
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.ops.reference import as_numpy
from distcache.parallel.base import Parallel
from distcache.store.table_files import Stored, find_weights, read_safetensors

logger = logging.getLogger(__name__)

_WEIGHT = ".weight"
"""Suffix of the names of tables' weights."""


def checkpoint_values(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a checkpoint by name, such as `tables.<name>.weight`.

    Their blocks are read later, and compared with their checksums then. Raises DataError for a
    damaged checkpoint.
    """
    reader = BlockReader(folder, Manifest.read(folder))
    tensors: dict[str, Stored] = {}

    def read_block(rows: StoredRows, start: int, stop: int) -> Tensor:
        return rows.take(np.arange(start, stop))

    for name, value in reader.values.state_dict_metadata.items():
        if isinstance(value, metadata.TensorStorageMetadata) and len(value.size):
            read = partial(read_block, StoredRows(reader, name, value))
            tensors[name] = Stored(tuple(value.size), value.properties.dtype, read)
    return tensors


def table_weights(folder: Path) -> dict[str, Stored]:
    """Return the weights of a checkpoint's tables by table. Raises DataError."""
    return {
        name.removeprefix(TABLES).removesuffix(_WEIGHT): value
        for name, value in checkpoint_values(folder).items()
        if name.startswith(TABLES) and name.endswith(_WEIGHT)
    }


# --------------------------------------------------------------------------------------------------
# Rows that changed between two checkpoints.


def weights_since(
    folder: Path, since: Path, names: Sequence[str]
) -> tuple[dict[str, Stored], dict[str, np.ndarray]]:
    """Return the weights of tables `names` in the checkpoint `folder`, and the ids, int64,
    ascending, of their rows that changed since the checkpoint `since`.

    If `folder` rests on `since` and has only changed rows of a table, the ids are those of these
    rows, and nothing of the table is read in `since`: its other rows are 0. Otherwise the rows of
    both are compared. Raises DataError for damaged checkpoints, ConfigError for tables of another
    width or dtype.
    """
    stored_weights = table_weights(folder)
    weights = {name: stored_weights[name] for name in names}
    old_weights = table_weights(since)
    stored = _stored_changes(folder, since, weights)
    ids_by_table: dict[str, np.ndarray] = {}
    for name, weight in list(weights.items()):
        if name in stored:
            weights[name], ids_by_table[name] = stored[name]
        else:
            ids_by_table[name] = changed_rows(name, weight, old_weights.get(name))
    return weights, ids_by_table


def _stored_changes(
    folder: Path, since: Path, weights: Mapping[str, Stored]
) -> dict[str, tuple[Stored, np.ndarray]]:
    """Return weights and ids of the changed rows that the checkpoint in `folder` has itself, by
    table; nothing if it does not rest on the one in `since`."""
    manifest = Manifest.read(folder)
    if manifest.base is None or manifest.base[1].crc32 != Manifest.read(since).crc32:
        return {}
    reader = BlockReader(folder, manifest)

    def read_block(name: str, like: Stored, start: int, stop: int) -> Tensor:
        rows = torch.zeros(stop - start, *like.shape[1:], dtype=like.dtype)
        reader.put_changed(name, start, rows)
        return rows

    changes: dict[str, tuple[Stored, np.ndarray]] = {}
    for table, weight in weights.items():
        name = f"{TABLES}{table}{_WEIGHT}"
        if name in reader.base_names:
            read = partial(read_block, name, weight)
            changes[table] = (replace(weight, block=read), reader.changed_ids(table)[0])
    return changes


def changed_rows(name: str, new: Stored, old: Stored | None) -> np.ndarray:
    """Return the ids, int64, of rows whose bits differ from an `old` table, or that it lacks.

    Raises ConfigError for another width or dtype.
    """
    if old is None:
        return np.arange(new.shape[0])
    if (old.shape[1:], old.dtype) != (new.shape[1:], new.dtype):
        raise ConfigError(
            f"table {name!r} was {old.shape[1]} x {old.dtype} and is {new.shape[1]} x {new.dtype}: "
            "leave since out, and write it whole"
        )
    ids = [np.arange(old.shape[0], new.shape[0])]
    for rows in new.ranges():
        stop = min(rows.stop, old.shape[0])
        if rows.start < stop:
            new_bits = as_numpy(new.block(rows.start, stop)).view(np.uint8)
            old_bits = as_numpy(old.block(rows.start, stop)).view(np.uint8)
            ids.append(rows.start + np.flatnonzero((new_bits != old_bits).any(axis=1)))
    return np.sort(np.concatenate(ids))


# --------------------------------------------------------------------------------------------------
# Start of a run from stored weights.


def init_from(
    path: Path,
    names: Mapping[str, Any],
    mode: Parallel,
    tables: Sequence[TableSpec],
    world: World,
) -> None:
    """Fill tables and dense parameters of a new `mode` with those of the same names in a
    checkpoint, or in the `*.safetensors` of a folder. All ranks call this.

    `names`: for tables with another name there, that name. A warning lists the dense parameters
    that are not stored there. Raises ConfigError for values that do not fit, and DataError for
    damaged files, on all ranks.
    """
    weights: dict[int, Stored] = {}  # by index of the table
    dense: dict[str, Stored] = {}
    missing: list[str] = []  # dense parameters that are not stored
    unused: list[str] = []  # stored tensors that are no table of this run, nor a dense parameter
    summary = ""

    def find() -> None:
        nonlocal summary
        folders = find_checkpoints(path)
        stored = checkpoint_values(folders[0]) if folders else read_safetensors(path)
        matches, summary = find_weights(stored, tables, names)
        weights.update(matches)
        for name, parameter in mode.dense_state().items():
            value = stored.get(f"dense.{name}") or stored.get(name)
            if value is None:
                missing.append(name)
                continue
            if value.shape != parameter.shape:
                raise ConfigError(
                    f"dense parameter {name!r} has shape {list(parameter.shape)}, and "
                    f"{list(value.shape)} in {path}: give a model of the same dense part, or only "
                    "tables, as distcache.export writes them"
                )
            dense[name] = value
        used = {id(value) for value in (*weights.values(), *dense.values())}
        prefix = "dense." if folders else ""  # a checkpoint has optimizer state too
        unused.extend(
            name
            for name, value in stored.items()
            if name.startswith(prefix) and id(value) not in used
        )

    run_on_all_ranks(world, find)
    for index, value in weights.items():
        mode.fill_table(index, value)
    state = mode.dense_state()
    for name, value in dense.items():
        state[name].copy_(value.block(0, value.shape[0]))
    if world.is_first:
        logger.info("from %s: %s; %d of %d dense parameters", path, summary, len(dense), len(state))
        if missing:
            logger.warning(
                "trainer.init_from=%s: %d of %d dense parameters are not stored there and keep "
                "their initial values: %s; stored and not used: %s",
                path,
                len(missing),
                len(state),
                list_first(missing),
                list_first(unused) or "none",
            )
