"""Reader of checkpoints over `torch.distributed.checkpoint` (DCP): blocks, compared with checksums.

Nothing that a file holds is executed. DCP's list of values is a pickle, of which only DCP's own
records are built, and its structure is checked before it is used.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.futures import Future

from distcache.checkpoint.manifest import (
    METADATA,
    WAY_OUT,
    Manifest,
    damaged,
    is_count,
    is_text,
    open_plain,
    shown,
)
from distcache.checkpoint.writer import TABLES, as_bytes, finished_future
from distcache.data.own import load_plain
from distcache.engine.whole import CHANGED
from distcache.errors import ConfigError, DataError


def _member(owner: Any, name: Any) -> metadata._MEM_FORMAT_ENCODING:
    """`getattr`, by which Python 3.11.2 pickles a member of an enum: of DCP's alone. Raises
    UnpicklingError for any other."""
    if owner is metadata._MEM_FORMAT_ENCODING and name in owner.__members__:
        return owner[name]
    raise pickle.UnpicklingError(f"it asks for {name!r} of {owner!r}")


_RECORDS = (
    metadata.Metadata,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    filesystem._StorageInfo,
)
"""DCP's classes whose instances have attributes in a pickle."""

_CLASSES: dict[tuple[str, str], Any] = {
    (known.__module__, known.__qualname__): known
    for known in (
        *_RECORDS,
        metadata._MEM_FORMAT_ENCODING,
        torch.serialization._get_layout,
        pathlib.PosixPath,
    )
} | {("builtins", "getattr"): _member}
"""What DCP's `.metadata` is made of, beside sizes and dtypes."""


class MetadataUnpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Reads pickles of DCP's classes and of what Python has built in, and refuses all others before
    anything of theirs is called.

    It is the unpickler written in Python, because that in C lets the opcode BUILD set attributes of
    any object on its stack: also of the known classes and functions, for the whole process.
    """

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]

    def find_class(self, module: str, name: str) -> Any:
        """A known class, or a dtype. Raises UnpicklingError for any other."""
        found = _CLASSES.get((module, name))
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            found = found if isinstance(found, torch.dtype) or found is torch.Size else None
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return found

    def _build(self) -> None:
        """The opcode BUILD, for instances of DCP's records alone. Raises UnpicklingError."""
        target = self.stack[-2]
        state = self.stack[-1]
        if type(target) not in _RECORDS:
            raise pickle.UnpicklingError(f"it sets attributes of {shown(target)}")
        if isinstance(state, dict):
            is_plain = all(is_text(name) and not name.startswith("__") for name in state)
        else:  # of `TensorProperties.__setstate__`; others would set attributes of slots
            is_plain = isinstance(target, metadata.TensorProperties)
        if not is_plain or "__setstate__" in vars(target):
            raise pickle.UnpicklingError(f"it sets other attributes of a {type(target).__name__}")
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]

    dispatch[pickle.BUILD[0]] = _build


def load_metadata(data: bytes) -> metadata.Metadata:
    """DCP's list of values in a pickle. Raises UnpicklingError, or whatever bytes make of it."""
    found = MetadataUnpickler(io.BytesIO(data)).load()
    if not isinstance(found, metadata.Metadata):
        raise pickle.UnpicklingError(f"it is a {type(found).__name__}")
    if not isinstance(found.state_dict_metadata, dict) or not isinstance(found.storage_data, dict):
        raise pickle.UnpicklingError("it has no mappings of values and of their places")
    for index, info in found.storage_data.items():
        if not _is_place(index, info):
            raise pickle.UnpicklingError(f"{shown(index)} has no place of a block")
    for name, value in found.state_dict_metadata.items():
        if not _is_value(name, value, found.storage_data):
            raise pickle.UnpicklingError(f"{shown(name)} is no value with blocks that have places")
    found.storage_meta = found.storage_meta or metadata.StorageMeta()
    return found


def _is_place(index: Any, info: Any) -> bool:
    return (
        isinstance(index, metadata.MetadataIndex)
        and is_text(index.fqn)
        and isinstance(index.offset, torch.Size | None)
        and isinstance(info, filesystem._StorageInfo)
        and is_text(info.relative_path)
        and is_count(info.offset)
        and is_count(info.length)
    )


def _is_value(name: Any, value: Any, places: Mapping[metadata.MetadataIndex, Any]) -> bool:
    """Return True for a value of a known kind, all of whose blocks have a place."""
    if not is_text(name):
        return False
    if isinstance(value, metadata.BytesStorageMetadata):
        return metadata.MetadataIndex(name) in places
    if not isinstance(value, metadata.TensorStorageMetadata):
        return False
    properties = value.properties
    if not isinstance(properties, metadata.TensorProperties) or not isinstance(value.chunks, list):
        return False
    return (
        isinstance(value.size, torch.Size)
        and isinstance(properties.dtype, torch.dtype)
        and all(_is_block(name, chunk, len(value.size), places) for chunk in value.chunks)
    )


def _is_block(
    name: str, chunk: Any, dimensions: int, places: Mapping[metadata.MetadataIndex, Any]
) -> bool:
    if not isinstance(chunk, metadata.ChunkStorageMetadata):
        return False
    for sizes in (chunk.offsets, chunk.sizes):
        if not isinstance(sizes, torch.Size) or len(sizes) != dimensions:
            return False
    return metadata.MetadataIndex(name, chunk.offsets) in places


def _read_metadata(folder: Path, data: bytes) -> metadata.Metadata:
    try:
        return load_metadata(data)
    except Exception as error:  # whatever bytes make of it
        raise DataError(f"{folder / METADATA} is no list of values ({error}): {WAY_OUT}") from error


_READERS = 4
"""Threads of a rank that read blocks: on one node the first rank reads what all ranks share."""

_Wanted = tuple[planner.ReadItem, Tensor]
"""A part of a block, and where it goes."""


def _described(head: bytes | bytearray) -> bytes:
    """What the bytes of a block before its values say of these: all before the last of the zip
    file's records, which begins with the checksum of the values."""
    return bytes(head[: head.rfind(b"PK\3\4")])


class BlockReader(FileSystemReader):
    """Reads what `BlockWriter` wrote, each block compared with its checksum as it is read.

    Where a checkpoint rests on another one, blocks of its tables are those of that one, with the
    rows that changed since; `older`: the names of these tables' values. `values`: the list of all
    values, as of a whole checkpoint; `own`: of those in its folder. What the last rows that changed
    came from stays in memory.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Raises DataError for a list of values that is damaged."""
        super().__init__(folder)
        self._manifest = manifest
        marks = manifest.files.get(METADATA, [])
        if len(marks) != 1:
            raise damaged(folder, METADATA, len(manifest.files))
        ((length, _),) = marks
        own = _read_metadata(folder, manifest.block(folder, METADATA, 0, length))
        # The list of values may name anything: nothing is opened that the manifest does not have.
        for info in own.storage_data.values():
            manifest._sums(folder, info.relative_path, info.offset, info.length)
        self.values, self._places, self.older = own, own.storage_data, set[str]()
        self.own = own.state_dict_metadata
        self._ids = "", np.empty(0, np.int64), np.empty(0, np.int64)
        self._changed: StoredRows | None = None
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, int], tuple[Tensor, bytes]] = {}
        """Of the last block of a value and a length, what `_blank` gave: a disk that is not asked
        for the list at the end of each block reads them faster."""
        self._base: BlockReader | None = None
        if manifest.base is not None:
            self._base = BlockReader(*manifest.base)
            self.values, self.older = _merged(own, self._base.values)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """The list of values, which was read at the start."""
        return self.values

    def read_data(self, plan: planner.LoadPlan, planner: planner.LoadPlanner) -> Future[None]:
        """Read the blocks that the plan's items are in, each of them once."""

        def place(part: _Wanted) -> tuple[str, tuple[int, ...]]:
            index = part[0].storage_index
            return index.fqn, tuple(index.offset or ())

        wanted = [(item, planner.resolve_tensor(item).detach()) for item in plan.items]
        # In the order of a value's rows. A thread has a run of these, as a disk reads ahead of what
        # lies one after the other; rows that changed are read once where all are at one value.
        blocks = [list(of) for _, of in groupby(sorted(wanted, key=place), place)]
        share = 1 if self.older else max(1, -(-len(blocks) // _READERS))
        runs = [blocks[at : at + share] for at in range(0, len(blocks), share)]

        def read_run(run: list[list[_Wanted]]) -> None:
            try:
                for of in run:
                    self._read_block(of)
            except BaseException:
                for other in runs:  # what is left is for nobody
                    other.clear()
                raise

        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(read_run, runs))  # and raise what one of them raised
        for item, target in wanted:
            planner.commit_tensor(item, target)
        return finished_future(None)

    def _read_block(self, parts: Sequence[_Wanted]) -> None:
        """Read a block, and copy its parts to where they go, unless they are there already."""
        stored = self.load_block(parts[0][0].storage_index, parts[0][1])
        for item, target in parts:
            spans = zip(item.storage_offsets, item.lengths, strict=True)
            part = stored[tuple(slice(start, start + count) for start, count in spans)]
            if part.shape != target.shape:
                index = item.storage_index
                reader = self._base if index.fqn in self.older and self._base else self
                name = reader._places[index].relative_path
                raise damaged(reader.path, name, len(reader._manifest.files))
            if part.data_ptr() != target.data_ptr():
                target.copy_(part)

    def load_block(self, index: metadata.MetadataIndex, into: Tensor | None = None) -> Tensor:
        """The tensor that is a block of a value, as of now: `into` itself where that is one of the
        same shape in the same order. Raises DataError."""
        found = self._load(index, into)
        if index.fqn in self.older:
            with self._lock:
                self.put_changed(index.fqn, (index.offset or (0,))[0], found)
        return found

    def changed_ids(self, table: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a table's rows that changed, int64, ascending, and where in its values each
        of these rows lies. None for a table that has not changed, or is whole."""
        if self._ids[0] != table:
            name, ids = f"{CHANGED}{TABLES}{table}.ids", np.empty(0, np.int64)
            if name in self.own:
                ids = self.whole(name).numpy()
            order = ids.argsort(kind="stable")
            self._ids = table, ids[order], order
        return self._ids[1:]

    def put_changed(self, name: str, first: int, block: Tensor) -> None:
        """Let `block`, rows of a value of the other checkpoint from `first` on, have those that
        changed. Raises DataError where they are not there."""
        ids, places = self.changed_ids(name.removeprefix(TABLES).rpartition(".")[0])
        own = slice(*np.searchsorted(ids, (first, first + len(block))))
        if own.start == own.stop:
            return
        if self._changed is None or self._changed.name != CHANGED + name:
            value = self.own.get(CHANGED + name)
            if not isinstance(value, metadata.TensorStorageMetadata):
                raise DataError(f"the checkpoint {self.path} has no {CHANGED}{name}: {WAY_OUT}")
            self._changed = StoredRows(self, CHANGED + name, value)
        block[torch.from_numpy(ids[own] - first)] = self._changed.take(places[own])

    def _load(self, index: metadata.MetadataIndex, into: Tensor | None = None) -> Tensor:
        """`load_block` as it was last written whole."""
        if self._base is not None and index.fqn in self.older:
            return self._base._load(index, into)
        info = self._places[index]
        name, start, length = info.relative_path, info.offset, info.length
        kind = index.fqn, length
        blank, head = self._seen.get(kind) or self._blank(name, start, length)
        if blank is not None:
            alike = into is not None and (into.shape, into.dtype) == (blank.shape, blank.dtype)
            usable = alike and into.device.type == "cpu" and into.is_contiguous()
            found = into if usable else torch.empty_like(blank, device="cpu")
            values = memoryview(found.view(-1).view(torch.uint8).numpy())
            first, rest = bytearray(len(head)), bytearray(length - len(head) - len(values))
            parts = [memoryview(first), values, memoryview(rest)]
            self._manifest.read_into(parts, self.path, name, start)
            if _described(first) == _described(head):
                self._seen[kind] = blank, head
                return found
        data = self._manifest.block(self.path, name, start, length)
        try:
            found = load_plain(data)
        except DataError as error:
            raise DataError(f"{self.path / name} holds no tensor: {error}") from error
        return found if isinstance(found, Tensor) else as_bytes(found)

    def _blank(self, name: str, start: int, length: int) -> tuple[Tensor | None, bytes]:
        """The tensor of a block without its values, and the block's bytes before these, which lie
        there one after the other; None where it is no such tensor, or damaged."""
        with open_plain(self.path / name) as file, suppress(Exception):  # whatever bytes make of it
            block = self._slice_file(file, filesystem._StorageInfo(name, start, length))
            blank = torch.load(block, map_location="meta", weights_only=True)
            at = blank.untyped_storage()._checkpoint_offset
            size, own = blank.untyped_storage().nbytes(), blank.nbytes
            if blank.is_contiguous() and 0 < own == size <= length - at:
                file.seek(start)
                return blank, file.read(at)
        return None, b""

    def whole(self, name: str) -> Tensor:
        """A small value, of one dimension where it has several blocks. Raises ConfigError where
        there is none."""
        own = [index for index in self._places if index.fqn == name]
        found = sorted(own, key=lambda index: index.offset or (0,))
        if not found:
            raise ConfigError(
                f"the checkpoint {self.path} has no {name}, which this run needs: resume with "
                "the settings it was made with"
            )
        blocks = [self.load_block(index) for index in found]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


class StoredRows:
    """The rows of a value; the blocks that those taken last came from stay in memory."""

    def __init__(
        self, reader: BlockReader, name: str, value: metadata.TensorStorageMetadata
    ) -> None:
        self.name, self._reader, self._value = name, reader, value
        self._starts = np.unique([chunk.offsets[0] for chunk in value.chunks])
        self._held: dict[torch.Size, Tensor] = {}

    def take(self, places: np.ndarray) -> Tensor:
        """Rows `places`, int64 `[m]`, of the value. Raises DataError where blocks are damaged."""
        shape, dtype = self._value.size, self._value.properties.dtype
        out, held, found = torch.empty(len(places), *shape[1:], dtype=dtype), {}, 0
        which = np.unique(np.searchsorted(self._starts, places, side="right") - 1)
        wanted = set(self._starts[which[which >= 0]].tolist())
        for chunk in self._value.chunks:  # several of the same rows where columns are apart
            first, *columns = chunk.offsets
            if first not in wanted:
                continue
            if (block := self._held.get(chunk.offsets)) is None:
                block = self._load(chunk)
            held[chunk.offsets] = block
            own = np.flatnonzero((places >= first) & (places < first + len(block)))
            spans = zip(columns, chunk.sizes[1:], strict=True)
            part = (torch.from_numpy(own), *(slice(at, at + count) for at, count in spans))
            out[part] = block[torch.from_numpy(places[own] - first)]
            found += len(own) * block[:1].numel()
        self._held = held
        if found != out.numel():
            raise DataError(
                f"the checkpoint {self._reader.path} has not all rows of {self.name}: {WAY_OUT}"
            )
        return out

    def _load(self, chunk: metadata.ChunkStorageMetadata) -> Tensor:
        block = self._reader.load_block(metadata.MetadataIndex(self.name, chunk.offsets))
        if block.shape != chunk.sizes:
            raise DataError(f"{self._reader.path} has a block of {self.name} of another shape")
        return block


def _merged(own: metadata.Metadata, base: metadata.Metadata) -> tuple[metadata.Metadata, set[str]]:
    """The values of a checkpoint with the tables of another one that it has not itself, and the
    names of these."""
    found, older = own.state_dict_metadata, base.state_dict_metadata
    values = {name: value for name, value in found.items() if not name.startswith(CHANGED)}
    tables = {name for name in older if name.startswith(TABLES)} - values.keys()
    places = {index: at for index, at in base.storage_data.items() if index.fqn in tables}
    values |= {name: older[name] for name in tables}
    every = own.storage_data | places
    return replace(own, state_dict_metadata=values, storage_data=every), tables
