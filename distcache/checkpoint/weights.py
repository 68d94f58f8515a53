"""What a checkpoint, or files of tables, have by name: read block by block, without a model."""

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

from distcache.checkpoint.files import finished
from distcache.checkpoint.manifest import Manifest
from distcache.checkpoint.reader import BlockReader, StoredRows
from distcache.checkpoint.writer import TABLES
from distcache.comm.link import together
from distcache.comm.world import World
from distcache.errors import ConfigError
from distcache.layout import TableSpec
from distcache.parallel.base import Parallel
from distcache.store.table_files import Stored, find_weights, read_safetensors

logger = logging.getLogger(__name__)


def checkpoint_values(folder: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint by name, such as `tables.<name>.weight`, to be read later, each
    block compared with its checksum. Raises DataError where the checkpoint is damaged."""
    reader, found = BlockReader(folder, Manifest.read(folder)), dict[str, Stored]()

    def block(rows: StoredRows, start: int, stop: int) -> Tensor:
        return rows.take(np.arange(start, stop))

    for name, value in reader.values.state_dict_metadata.items():
        if isinstance(value, metadata.TensorStorageMetadata) and len(value.size):
            rows = partial(block, StoredRows(reader, name, value))
            found[name] = Stored(tuple(value.size), value.properties.dtype, rows)
    return found


def weights_since(folder: Path, since: Path) -> dict[str, tuple[Stored, np.ndarray]]:
    """Where the checkpoint in `folder` rests on the one in `since`: by table, but for those that it
    has whole, the ids, int64, ascending, of rows that changed, and weights, those of these rows
    (others: 0), for which nothing is read in `since`. None where it does not.

    Raises DataError where one of both is damaged.
    """
    found, manifest = dict[str, tuple[Stored, np.ndarray]](), Manifest.read(folder)
    base = None if manifest.base is None else manifest.base[1].crc32
    if base is None or Manifest.read(since).crc32 != base:
        return found
    reader = BlockReader(folder, manifest)

    def block(name: str, stored: Stored, start: int, stop: int) -> Tensor:
        rows = torch.zeros(stop - start, *stored.shape[1:], dtype=stored.dtype)
        reader.put_changed(name, start, rows)
        return rows

    for name, stored in checkpoint_values(folder).items():
        if name in reader.older and name.endswith(".weight"):
            table = name.removeprefix(TABLES).removesuffix(".weight")
            changed = replace(stored, block=partial(block, name, stored))
            found[table] = changed, reader.changed_ids(table)[0]
    return found


def init_from(
    path: Path,
    names: Mapping[str, Any],
    mode: Parallel,
    tables: Sequence[TableSpec],
    world: World,
) -> None:
    """Let tables and dense parameters of a new `mode` start from those of the same names in a
    checkpoint, or in the `*.safetensors` of a folder; called by all ranks.

    `names`: of tables, what they are called there. A warning names the dense parameters that are
    not stored there. Raises ConfigError for what does not fit, and DataError for damaged files, on
    all ranks.
    """
    found, dense, said = dict[int, Stored](), dict[str, Stored](), ""
    drawn: list[str] = []  # dense parameters that nothing is stored for
    unused: list[str] = []  # stored tensors that are no table of this run, nor a dense parameter

    def find() -> None:
        nonlocal said
        folders = finished(path)
        stored = checkpoint_values(folders[0]) if folders else read_safetensors(path)
        weights, said = find_weights(stored, tables, names)
        found.update(weights)
        for name, parameter in mode.dense_state().items():
            value = stored.get(f"dense.{name}") or stored.get(name)
            if value is None:
                drawn.append(name)
            if value is not None and value.shape != parameter.shape:
                raise ConfigError(
                    f"dense parameter {name!r} has shape {list(parameter.shape)}, and "
                    f"{list(value.shape)} in {path}: give a model of the same dense part, or only "
                    "tables, as distcache.export writes them"
                )
            if value is not None:
                dense[name] = value
        used = {id(value) for value in (*found.values(), *dense.values())}
        prefix = "dense." if folders else ""  # a checkpoint has optimizer state beside these
        unused.extend(
            name
            for name, value in stored.items()
            if name.startswith(prefix) and id(value) not in used
        )

    together(world, find)
    for index, value in found.items():
        mode.fill_table(index, value)
    state = mode.dense_state()
    for name, value in dense.items():
        state[name].copy_(value.block(0, value.shape[0]))
    if world.is_first:
        logger.info("from %s: %s; %d of %d dense parameters", path, said, len(dense), len(state))
        if drawn:
            logger.warning(
                "trainer.init_from=%s: %d of %d dense parameters are not stored there and keep "
                "their initial values: %s; stored and not used: %s",
                *(path, len(drawn), len(state), _listed(drawn), _listed(unused) or "none"),
            )


def _listed(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
