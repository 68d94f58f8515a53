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
    REMEDY,
    Manifest,
    damaged,
    is_count,
    is_text,
    open_plain,
    shorten,
)
from distcache.checkpoint.writer import TABLES, as_bytes, completed_future
from distcache.data.own import load_plain
from distcache.engine.full_tables import CHANGED
from distcache.errors import ConfigError, DataError

# --------------------------------------------------------------------------------------------------
# DCP's list of values.


def _enum_member(owner: Any, name: Any) -> metadata._MEM_FORMAT_ENCODING:
    """Replacement of `getattr`, by which Python 3.11.2 pickles members of an enum.

    Raises UnpicklingError for anything but a member of DCP's enum.
    """
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
"""DCP's classes whose instances may set attributes in a pickle."""

_CLASSES: dict[tuple[str, str], Any] = {
    (known.__module__, known.__qualname__): known
    for known in (
        *_RECORDS,
        metadata._MEM_FORMAT_ENCODING,
        torch.serialization._get_layout,
        pathlib.PosixPath,
    )
} | {("builtins", "getattr"): _enum_member}
"""Classes and functions that DCP's `.metadata` refers to, besides sizes and dtypes."""


class MetadataUnpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Unpickler of DCP's classes and of Python's built-in values.

    Everything else is refused before any of its code is called. The base class is the unpickler
    written in Python, because in the C implementation the opcode BUILD sets attributes of any
    object on the stack, also of the known classes and functions, for the whole process.
    """

    dispatch: ClassVar = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]

    def find_class(self, module: str, name: str) -> Any:
        """Return a known class, or a dtype. Raises UnpicklingError for any other."""
        known = _CLASSES.get((module, name))
        if known is None and module == "torch":
            attribute = getattr(torch, name, None)
            if isinstance(attribute, torch.dtype) or attribute is torch.Size:
                known = attribute
        if known is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return known

    def _build(self) -> None:
        """Execute the opcode BUILD for instances of DCP's records only. Raises UnpicklingError."""
        target = self.stack[-2]
        state = self.stack[-1]
        if type(target) not in _RECORDS:
            raise pickle.UnpicklingError(f"it sets attributes of {shorten(target)}")
        if isinstance(state, dict):
            is_plain = all(is_text(name) and not name.startswith("__") for name in state)
        else:
            # State of `TensorProperties.__setstate__`. Of other classes it would set slots.
            is_plain = isinstance(target, metadata.TensorProperties)
        if not is_plain or "__setstate__" in vars(target):
            raise pickle.UnpicklingError(f"it sets other attributes of a {type(target).__name__}")
        pickle._Unpickler.load_build(self)  # type: ignore[attr-defined]

    dispatch[pickle.BUILD[0]] = _build


def load_metadata(data: bytes) -> metadata.Metadata:
    """Return DCP's list of values from a pickle, with a checked structure.

    Raises UnpicklingError, or any other exception that invalid bytes cause.
    """
    values = MetadataUnpickler(io.BytesIO(data)).load()
    if not isinstance(values, metadata.Metadata):
        raise pickle.UnpicklingError(f"it is a {type(values).__name__}")
    entries = values.state_dict_metadata
    places = values.storage_data
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise pickle.UnpicklingError("it has no mappings of values and of their places")
    for index, place in places.items():
        if not _is_place(index, place):
            raise pickle.UnpicklingError(f"{shorten(index)} has no place of a block")
    for name, value in entries.items():
        if not _is_value(name, value, places):
            raise pickle.UnpicklingError(f"{shorten(name)} is no value with blocks in files")
    values.storage_meta = values.storage_meta or metadata.StorageMeta()
    return values


def _is_place(index: Any, place: Any) -> bool:
    return (
        isinstance(index, metadata.MetadataIndex)
        and is_text(index.fqn)
        and isinstance(index.offset, torch.Size | None)
        and isinstance(place, filesystem._StorageInfo)
        and is_text(place.relative_path)
        and is_count(place.offset)
        and is_count(place.length)
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


def _read_metadata(folder: Path, manifest: Manifest) -> metadata.Metadata:
    """Return the list of values of the checkpoint in `folder`. Raises DataError."""
    marks = manifest.files.get(METADATA, [])
    if len(marks) != 1:
        raise damaged(folder, METADATA, len(manifest.files))
    length = marks[0][0]
    data = manifest.block(folder, METADATA, 0, length)
    try:
        values = load_metadata(data)
    except Exception as error:  # invalid bytes cause exceptions of any kind
        raise DataError(f"{folder / METADATA} is no list of values ({error}): {REMEDY}") from error
    # The list may name any file. Nothing is opened that the manifest does not have.
    for place in values.storage_data.values():
        manifest.checksums(folder, place.relative_path, place.offset, place.length)
    return values


# --------------------------------------------------------------------------------------------------
# Blocks.

_READERS = 4
"""Threads of a rank that read blocks. On one node the first rank reads all that ranks share."""

_Request = tuple[planner.ReadItem, Tensor]
"""A part of a block, and the tensor that receives it."""


def _without_checksum(head: bytes | bytearray) -> bytes:
    """Return the part of a block's head that depends only on dtype and shape of its values: all
    before the last record of the zip file, which begins with the checksum of the values."""
    return bytes(head[: head.rfind(b"PK\3\4")])


class BlockReader(FileSystemReader):
    """DCP reader of the blocks of `BlockWriter`, which compares each with its checksum.

    If the checkpoint rests on another one, blocks of its tables are read from that one, and rows
    that changed since are put in. The source of the rows that changed last stays in memory.

    `values`: the list of all values, as of a whole checkpoint; `own_values`: values in the
    checkpoint's own folder by name; `base_names`: names of the values that are read from the other
    checkpoint.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Read the list of values. Raises DataError if it is damaged."""
        super().__init__(folder)
        self._manifest = manifest
        self._lock = threading.Lock()
        values = _read_metadata(folder, manifest)
        self.values = values
        self.own_values = values.state_dict_metadata
        self.base_names: set[str] = set()
        self._places = values.storage_data
        self._base: BlockReader | None = None
        # Of the last table that was asked for: name, changed ids, and their places in its values.
        self._ids = ("", np.empty(0, np.int64), np.empty(0, np.int64))
        self._changed: StoredRows | None = None
        # Result of `_layout` for the last block of each value and length. Disks read blocks faster
        # if they are not asked for the directory at the end of each one.
        self._layouts: dict[tuple[str, int], tuple[Tensor, bytes]] = {}
        if manifest.base is not None:
            self._base = BlockReader(*manifest.base)
            self.values, self.base_names = _merged(values, self._base.values)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return the list of values, which has been read already."""
        return self.values

    def read_data(self, plan: planner.LoadPlan, planner: planner.LoadPlanner) -> Future[None]:
        """Read the blocks of the plan's items, each of them once."""

        def block_of(request: _Request) -> tuple[str, tuple[int, ...]]:
            index = request[0].storage_index
            return index.fqn, tuple(index.offset or ())

        requests = [(item, planner.resolve_tensor(item).detach()) for item in plan.items]
        # In the order of a value's rows, in which disks read ahead, a run of blocks per thread.
        blocks = [list(group) for _, group in groupby(sorted(requests, key=block_of), block_of)]
        # One run if rows of two checkpoints are joined: then each changed row is read once.
        count = 1 if self.base_names else _READERS
        run_length = max(1, -(-len(blocks) // count))
        runs = [blocks[start : start + run_length] for start in range(0, len(blocks), run_length)]

        def read_run(run: list[list[_Request]]) -> None:
            try:
                for block in run:
                    self._read_block(block)
            except BaseException:
                for other in runs:  # the other threads stop after their current block
                    other.clear()
                raise

        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(read_run, runs))  # raises the error of a thread
        for item, target in requests:
            planner.commit_tensor(item, target)
        return completed_future(None)

    def _read_block(self, requests: Sequence[_Request]) -> None:
        """Read a block, and copy its parts to their targets unless they are there already."""
        stored = self.load_block(requests[0][0].storage_index, requests[0][1])
        for item, target in requests:
            spans = zip(item.storage_offsets, item.lengths, strict=True)
            part = stored[tuple(slice(start, start + count) for start, count in spans)]
            if part.shape != target.shape:
                index = item.storage_index
                reader = self._base if index.fqn in self.base_names and self._base else self
                name = reader._places[index].relative_path
                raise damaged(reader.path, name, len(reader._manifest.files))
            if part.data_ptr() != target.data_ptr():
                target.copy_(part)

    def load_block(self, index: metadata.MetadataIndex, into: Tensor | None = None) -> Tensor:
        """Return a block of a value with its current rows.

        It is `into` itself if that has the block's shape, dtype and memory layout. Raises
        DataError.
        """
        block = self._load_stored(index, into)
        if index.fqn in self.base_names:
            with self._lock:
                self.put_changed(index.fqn, (index.offset or (0,))[0], block)
        return block

    def changed_ids(self, table: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a table's changed rows, int64, ascending, and the place of each of
        these rows in its changed values. Both are empty if the table has none, or is whole."""
        if self._ids[0] != table:
            name = f"{CHANGED}{TABLES}{table}.ids"
            ids = np.empty(0, np.int64)
            if name in self.own_values:
                ids = self.read_value(name).numpy()
            order = ids.argsort(kind="stable")
            self._ids = (table, ids[order], order)
        return self._ids[1:]

    def put_changed(self, name: str, first: int, block: Tensor) -> None:
        """Write the changed rows of a value into `block`, its rows from `first` on.

        Raises DataError if they are missing.
        """
        ids, places = self.changed_ids(name.removeprefix(TABLES).rpartition(".")[0])
        start, stop = np.searchsorted(ids, (first, first + len(block)))
        if start == stop:
            return
        if self._changed is None or self._changed.name != CHANGED + name:
            value = self.own_values.get(CHANGED + name)
            if not isinstance(value, metadata.TensorStorageMetadata):
                raise DataError(f"the checkpoint {self.path} has no {CHANGED}{name}: {REMEDY}")
            self._changed = StoredRows(self, CHANGED + name, value)
        rows = torch.from_numpy(ids[start:stop] - first)
        block[rows] = self._changed.take(places[start:stop])

    def _load_stored(self, index: metadata.MetadataIndex, into: Tensor | None = None) -> Tensor:
        """Return a block as it was last written as a whole, see `load_block`."""
        if self._base is not None and index.fqn in self.base_names:
            return self._base._load_stored(index, into)
        place = self._places[index]
        name = place.relative_path
        key = (index.fqn, place.length)
        layout = self._layouts.get(key) or self._layout(place)
        if layout is not None:
            like, head = layout
            block = self._read_in_place(place, like, head, into)
            if block is not None:
                self._layouts[key] = layout
                return block
        # Not laid out as expected: a small value, or one that DCP itself wrote.
        data = self._manifest.block(self.path, name, place.offset, place.length)
        try:
            value = load_plain(data)
        except DataError as error:
            raise DataError(f"{self.path / name} holds no tensor: {error}") from error
        return value if isinstance(value, Tensor) else as_bytes(value)

    def _read_in_place(
        self, place: Any, like: Tensor, head: bytes, into: Tensor | None
    ) -> Tensor | None:
        """Read a block directly into the memory of a tensor, `into` if it is suitable.

        `like`, `head`: of `_layout`. Returns None if the block has another head. Raises DataError.
        """
        # This takes 40 % of the CPU time of torch.load from a buffer, which copies values twice.
        fits = into is not None and (into.shape, into.dtype) == (like.shape, like.dtype)
        if into is not None and fits and into.device.type == "cpu" and into.is_contiguous():
            block = into
        else:
            block = torch.empty_like(like, device="cpu")
        values = memoryview(block.view(-1).view(torch.uint8).numpy())
        first = bytearray(len(head))
        rest = bytearray(place.length - len(head) - len(values))
        parts = [memoryview(first), values, memoryview(rest)]
        self._manifest.read_into(parts, self.path, place.relative_path, place.offset)
        return block if _without_checksum(first) == _without_checksum(head) else None

    def _layout(self, place: Any) -> tuple[Tensor, bytes] | None:
        """Return a tensor like the block at `place` on the meta device, and the block's bytes
        before its values. None if the values are not contiguous there, or the block is damaged."""
        # Whatever exception invalid bytes cause: the block is then read and checked as a whole.
        with open_plain(self.path / place.relative_path) as file, suppress(Exception):
            block = self._slice_file(file, place)
            like = torch.load(block, map_location="meta", weights_only=True)
            storage = like.untyped_storage()
            start = storage._checkpoint_offset
            is_alone = 0 < like.nbytes == storage.nbytes() <= place.length - start
            if like.is_contiguous() and is_alone:
                file.seek(place.offset)
                return like, file.read(start)
        return None

    def read_value(self, name: str) -> Tensor:
        """Return a small value, which has one dimension if it has several blocks.

        Raises ConfigError if there is none.
        """
        indices = [index for index in self._places if index.fqn == name]
        if not indices:
            raise ConfigError(
                f"the checkpoint {self.path} has no {name}, which this run needs: resume with "
                "the settings it was made with"
            )
        indices.sort(key=lambda index: index.offset or (0,))
        blocks = [self.load_block(index) for index in indices]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


class StoredRows:
    """Rows of a value in a checkpoint.

    The blocks from which rows were taken last stay in memory.
    """

    def __init__(
        self, reader: BlockReader, name: str, value: metadata.TensorStorageMetadata
    ) -> None:
        self.name = name
        self._reader = reader
        self._value = value
        self._starts = np.unique([chunk.offsets[0] for chunk in value.chunks])
        self._blocks: dict[torch.Size, Tensor] = {}

    def take(self, places: np.ndarray) -> Tensor:
        """Return rows `places`, int64 `[m]`, of the value. Raises DataError for damaged blocks."""
        shape = self._value.size
        rows = torch.empty(len(places), *shape[1:], dtype=self._value.properties.dtype)
        blocks: dict[torch.Size, Tensor] = {}
        block_numbers = np.unique(np.searchsorted(self._starts, places, side="right") - 1)
        starts = set(self._starts[block_numbers[block_numbers >= 0]].tolist())
        count = 0  # of the elements that blocks have provided
        for chunk in self._value.chunks:  # several with the same rows if columns are split
            first, *columns = chunk.offsets
            if first not in starts:
                continue
            block = self._blocks.get(chunk.offsets)
            if block is None:
                block = self._load(chunk)
            blocks[chunk.offsets] = block
            here = np.flatnonzero((places >= first) & (places < first + len(block)))
            spans = zip(columns, chunk.sizes[1:], strict=True)
            part = (torch.from_numpy(here), *(slice(at, at + width) for at, width in spans))
            rows[part] = block[torch.from_numpy(places[here] - first)]
            count += len(here) * block[:1].numel()
        self._blocks = blocks
        if count != rows.numel():
            raise DataError(
                f"the checkpoint {self._reader.path} lacks rows of {self.name}: {REMEDY}"
            )
        return rows

    def _load(self, chunk: metadata.ChunkStorageMetadata) -> Tensor:
        block = self._reader.load_block(metadata.MetadataIndex(self.name, chunk.offsets))
        if block.shape != chunk.sizes:
            raise DataError(f"{self._reader.path} has a block of {self.name} of another shape")
        return block


def _merged(
    values: metadata.Metadata, base: metadata.Metadata
) -> tuple[metadata.Metadata, set[str]]:
    """Return the values of a checkpoint together with the tables that only its base has, and the
    names of these tables' values."""
    own = values.state_dict_metadata
    others = base.state_dict_metadata
    merged = {name: value for name, value in own.items() if not name.startswith(CHANGED)}
    base_names = {name for name in others if name.startswith(TABLES)} - merged.keys()
    merged |= {name: others[name] for name in base_names}
    places = {index: at for index, at in base.storage_data.items() if index.fqn in base_names}
    return (
        replace(values, state_dict_metadata=merged, storage_data=values.storage_data | places),
        base_names,
    )
