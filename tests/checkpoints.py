"""Checkpoints as tests make them: of any mode, written by the package or by DCP itself."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from distcache.checkpoint.files import (
    file_world,
    make_checkpoint_folder,
    newest_checkpoint,
    write_checkpoint,
)
from distcache.checkpoint.manifest import Manifest
from distcache.checkpoint.reader import BlockReader
from distcache.checkpoint.state import (
    Identity,
    TrainerState,
    capture,
    load_checkpoint,
    most_bytes,
    read_start,
)
from distcache.comm.world import World


class Plain:
    """A mode as far as checkpoints know one, with any values as its state."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def state_dict(self, since: int | None = None) -> dict[str, Any]:
        return dict(self.values)

    blank_state = state_dict

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


_COMMON = ("mode", "world_size", "dtype", "optimizer", "seed", "global_batch_size")


def identity_of(*values: Any, steps_per_epoch: int | None = None) -> dict[str, Any]:
    """What a run has in common with its checkpoints: of `_COMMON` in order, and its tables."""
    given = zip((*_COMMON, "tables"), values, strict=True)
    return dict(given) | {"model": {}, "steps_per_epoch": steps_per_epoch, "data": ()}


def save(folder: Path, mode: Any, identity: Identity, state: TrainerState, world: World) -> None:
    """Write a checkpoint of `mode`; by all ranks."""
    header = {"run": identity} | state.header()
    with file_world(world, most_bytes(identity)) as files:
        make_checkpoint_folder(files, folder)
        write_checkpoint(folder, capture(mode, {}, False), header, files)


def resume(
    path: Path, mode: Any, identity: Identity, world: World, same_data: bool = True
) -> TrainerState:
    """Compare, then load, as a run does; the state of training."""
    with file_world(world, most_bytes(identity)) as files:
        start = read_start(newest_checkpoint(path), identity, files, same_data)
        load_checkpoint(start, mode, files)
    return start.state


def save_with_dcp(
    folder: Path, values: Mapping[str, Any], identity: Identity, state: TrainerState
) -> None:
    """Write a checkpoint on one rank with DCP's own writer, which pickles all but tensors."""
    dcp_save(dict(values), storage_writer=FileSystemWriter(folder))
    places = FileSystemReader(folder).read_metadata().storage_data.values()
    files: dict[str, list[tuple[int, int]]] = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        ends = {p.offset + p.length for p in places if p.relative_path == path.name}
        files[path.name] = [(end, zlib.crc32(data[:end])) for end in sorted(ends | {len(data)})]
    Manifest({"format": 3, "run": identity} | state.header(), files).write(folder)


class Payload:
    """Code that runs where a pickle is loaded: makes the folder `mark`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read by DCP itself; where it rests on another one, together
    with that."""
    manifest, reader = Manifest.read(folder), FileSystemReader(folder)
    if manifest.base is not None:
        reader = BlockReader(folder, manifest)
    stored = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.zeros(value.size, dtype=value.properties.dtype)
        for name, value in stored.items()
        if hasattr(value, "size")
    }
    torch.distributed.checkpoint.load(state, storage_reader=reader)
    return state
