"""What a checkpoint, or files of tables, have by name: read block by block, without a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata

from distcache.comm.link import together
from distcache.comm.world import World
from distcache.errors import ConfigError, DataError
from distcache.layout import TableSpec
from distcache.parallel.base import Parallel
from distcache.store.table_files import Stored, find_weights, read_safetensors
from distcache.trainer.checkpoint import finished
from distcache.trainer.manifest import TABLES, BlockReader, Manifest

logger = logging.getLogger(__name__)


class _Blocks:
    """The stored blocks of one value; those that the last rows came from stay in memory."""

    def __init__(self, reader: BlockReader, name: str, value: metadata.TensorStorageMetadata):
        self._reader, self._name, self._value = reader, name, value
        self._held: dict[tuple[int, ...], Tensor] = {}

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of the value. Raises DataError where blocks are damaged."""
        shape, dtype = self._value.size, self._value.properties.dtype
        out, held, found = torch.empty(stop - start, *shape[1:], dtype=dtype), {}, 0
        for chunk in self._value.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            low, high = max(start, offsets[0]), min(stop, offsets[0] + sizes[0])
            if low >= high:
                continue
            held[offsets] = self._held.get(offsets)
            if held[offsets] is None:
                held[offsets] = self._load(chunk)
            spans = zip(offsets[1:], sizes[1:], strict=True)
            part = out[low - start : high - start, *(slice(at, at + n) for at, n in spans)]
            part.copy_(held[offsets][low - offsets[0] : high - offsets[0]])
            found += part.numel()
        self._held = held
        if found != out.numel():
            raise DataError(f"the checkpoint has not all rows of {self._name}: use another one")
        return out

    def _load(self, chunk: metadata.ChunkStorageMetadata) -> Tensor:
        block = self._reader.load_block(metadata.MetadataIndex(self._name, chunk.offsets))
        if block.shape != chunk.sizes:
            raise DataError(f"{self._reader.path} has a block of {self._name} of another shape")
        return block


def checkpoint_values(folder: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint by name, such as `tables.<name>.weight`, to be read later, each
    block compared with its checksum. Raises DataError where the checkpoint is damaged."""
    reader = BlockReader(folder, Manifest.read(folder))
    return {
        name: Stored(tuple(value.size), value.properties.dtype, _Blocks(reader, name, value).rows)
        for name, value in reader.values.state_dict_metadata.items()
        if isinstance(value, metadata.TensorStorageMetadata) and len(value.size)
    }


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
    for name, value in reader.values.state_dict_metadata.items():
        is_tensor = isinstance(value, metadata.TensorStorageMetadata)
        if is_tensor and name in reader.older and name.endswith(".weight"):
            table = name.removeprefix(TABLES).removesuffix(".weight")
            rows = partial(_changed_rows, reader, name, value)
            stored = Stored(tuple(value.size), value.properties.dtype, rows)
            found[table] = stored, reader.changed.ids(table)[0]
    return found


def _changed_rows(
    reader: BlockReader, name: str, value: metadata.TensorStorageMetadata, start: int, stop: int
) -> Tensor:
    rows = torch.zeros(stop - start, *value.size[1:], dtype=value.properties.dtype)
    reader.changed.put(name, start, rows)
    return rows


def init_from(
    path: Path,
    names: Mapping[str, Any],
    mode: Parallel,
    tables: Sequence[TableSpec],
    world: World,
) -> None:
    """Let tables and dense parameters of a new `mode` start from those of the same names in a
    checkpoint, or in the `*.safetensors` of a folder; called by all ranks.

    `names`: of tables, what they are called there. Raises ConfigError for what does not fit, and
    DataError for damaged files, on all ranks.
    """
    found, dense, said = dict[int, Stored](), dict[str, Stored](), ""

    def find() -> None:
        nonlocal said
        folders = finished(path)
        stored = checkpoint_values(folders[0]) if folders else read_safetensors(path)
        weights, said = find_weights(stored, tables, names)
        found.update(weights)
        for name, parameter in mode.dense_state().items():
            value = stored.get(f"dense.{name}") or stored.get(name)
            if value is not None and value.shape != parameter.shape:
                raise ConfigError(
                    f"dense parameter {name!r} has shape {list(parameter.shape)}, and "
                    f"{list(value.shape)} in {path}: give a model of the same dense part, or only "
                    "tables, as distcache.export writes them"
                )
            if value is not None:
                dense[name] = value

    together(world, find)
    for index, value in found.items():
        mode.fill_table(index, value)
    state = mode.dense_state()
    for name, value in dense.items():
        state[name].copy_(value.block(0, value.shape[0]))
    if world.is_first:
        logger.info("from %s: %s; %d of %d dense parameters", path, said, len(dense), len(state))
