"""Files of a checkpoint: written with checksums in one pass, whole or not there, read without
executing what they hold.

A folder is a checkpoint once it has its manifest, which is written last: when every rank has
brought its files and the folder to the disk. No folder is renamed: network file systems will do.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import stat
import threading
import zlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config

from distcache.data.own import load_plain
from distcache.engine.whole import CHANGED
from distcache.errors import ConfigError, DataError, DistcacheError
from distcache.store.memory import describe_bytes
from distcache.store.table_files import open_regular
from distcache.trainer.manifest_checks import FORMAT, check_files, check_header, load_metadata

TABLES = "tables."
"""What begins the names of tables' values; `CHANGED` before these: of their rows that changed."""

MANIFEST = "manifest.json"
"""Name of the file that lists the files of a checkpoint; written last."""

METADATA = ".metadata"
"""Name of DCP's file that lists the values of a checkpoint."""

_SUMS_OF_FORMAT_2 = "checksums.json"
"""A file of checkpoints of format 2 only, by which these are recognized and refused."""

UNFINISHED = ".manifest"
"""A manifest that is being written."""

WAY_OUT = "resume from another checkpoint, or from a copy of this one"

Mark = tuple[int, int]
"""Where a stored block ends in its file, in bytes, and the CRC-32 of the file up to there."""

_PIECE_BYTES = 1 << 18
"""Bytes that are read at a time: a processor's cache holds them until their checksum is taken."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `header`: what its run says of it, JSON values; `files`: the marks
    of each file's blocks, in order, by name; `base`: the whole checkpoint, and its folder, whose
    tables it has as far as it has none of its own (None: it is whole itself).

    The checksum of a block goes on from that of the block before it, so the last one is the whole
    file's, and both are computed in one pass.
    """

    header: dict[str, Any]
    files: dict[str, list[Mark]]
    base: tuple[Path, Manifest] | None = None

    @property
    def crc32(self) -> str:
        """The checksum of the manifest, whatever its spaces and the order of its keys."""
        body = json.dumps({"header": self.header, "files": self.files}, sort_keys=True)
        return f"{zlib.crc32(body.encode()):08x}"

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(marks[-1][0] for marks in self.files.values() if marks)

    def write(self, folder: Path) -> None:
        """Make `folder`, whose files are on the disk, a checkpoint. Raises DistcacheError."""
        body = {"header": self.header, "files": self.files}
        text = json.dumps({"crc32": self.crc32, "checkpoint": body})
        try:
            with BlockFile(folder / UNFINISHED) as file:
                file.write(text.encode())
            (folder / UNFINISHED).rename(folder / MANIFEST)  # a process that dies leaves no half
            sync_folder(folder)
        except OSError as error:
            raise DistcacheError(f"{folder / MANIFEST}: {error.strerror}") from error

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Return the manifest of a checkpoint, after a check that all files of it and of the
        checkpoint that it rests on exist in their lengths.

        Raises DataError, with the name of the folder, if one of both is damaged or lacks a file;
        ConfigError for another format.
        """
        if not (folder / MANIFEST).is_file():
            if (folder / _SUMS_OF_FORMAT_2).is_file():
                raise _other_format(folder, 2)
            raise DataError(f"{folder} has no {MANIFEST}, so it was never finished: {WAY_OUT}")
        found = _read_manifest(folder)
        found._check_files(folder)
        found._check_header(folder)
        if (where := _base_folder(folder, found.header)) is None:
            return found
        try:
            base = _read_manifest(where)
            base._check_files(where)
            base._check_header(where)
            if base.crc32 != found.header["base"]["crc32"]:
                raise DataError(f"{where} is another checkpoint than the one that was there")
        except DataError as error:
            raise DataError(
                f"{folder} has the rows alone that changed since {where.name}: {error}"
            ) from error
        return replace(found, base=(where, base))

    def _check_files(self, folder: Path) -> None:
        """Raise DataError unless all files are in `folder` itself, in their lengths."""
        for name, marks in self.files.items():
            if name != Path(name).name or "\0" in name or name in ("", "..", MANIFEST):
                raise DataError(f"the checkpoint {folder} names the file {name!r}, outside of it")
            try:
                found = (folder / name).lstat()
            except OSError as error:
                raise DataError(f"the checkpoint {folder} lacks {name}: {WAY_OUT}") from error
            length = marks[-1][0] if marks else 0
            if not stat.S_ISREG(found.st_mode) or found.st_size != length:
                raise _damaged(folder, name, 1)

    def _check_header(self, folder: Path) -> None:
        """Raise ConfigError for a format that is not read here, DataError for an invalid header."""
        version = self.header.get("format")
        if type(version) is int and version != FORMAT:
            raise _other_format(folder, version)
        try:
            if type(version) is not int:
                raise ValueError(f"'format' is {version!r}, and must be {FORMAT}")
            check_header(self.header)
        except ValueError as error:
            raise DataError(
                f"the manifest of the checkpoint {folder} is invalid: {error}: {WAY_OUT}"
            ) from error

    def verify(self, folder: Path) -> None:
        """Raise DataError naming a file of `folder` that is not as it was written."""
        for name, marks in self.files.items():
            ends = [end for end, _ in marks]
            for start, end in pairwise([0, *ends]):
                self.block(folder, name, start, end - start)

    def block(self, folder: Path, name: str, start: int, length: int) -> bytes:
        """The block of file `name` from byte `start` on. Raises DataError unless it is one, and as
        it was written."""
        self._sums(folder, name, start, length)  # before there is memory for it
        data = bytearray(length)
        self.read_into([memoryview(data)], folder, name, start)
        return bytes(data)

    def read_into(self, parts: Sequence[memoryview], folder: Path, name: str, start: int) -> None:
        """Fill `parts`, bytes, one after the other, with the block of file `name` from byte `start`
        on. Raises DataError as `block` does; what the parts hold then is worth nothing."""
        crc, expected = self._sums(folder, name, start, sum(map(len, parts)))
        is_whole = True
        with open_plain(folder / name) as file:
            file.seek(start)
            for part in parts:
                for at in range(0, len(part), _PIECE_BYTES):
                    piece = part[at : at + _PIECE_BYTES]
                    is_whole &= file.readinto(piece) == len(piece)
                    crc = zlib.crc32(piece, crc)
        if not is_whole or crc != expected:
            raise _damaged(folder, name, len(self.files))

    def _sums(self, folder: Path, name: str, start: int, length: int) -> tuple[int, int]:
        """The checksums of file `name` up to a block of it and up to its end. Raises DataError
        where there is none."""
        marks, end = self.files.get(name, []), start + length
        at = bisect_left(marks, (end, 0))
        before = marks[at - 1] if at else (0, 0)
        if at == len(marks) or (before[0], marks[at][0]) != (start, end):
            raise _damaged(folder, name, len(self.files))
        return before[1], marks[at][1]


def _read_manifest(folder: Path) -> Manifest:
    """A manifest alone. Raises DataError where there is none, or it is damaged."""
    path = folder / MANIFEST
    try:
        with open_regular(path) as file:  # the base's may be anything
            found = json.loads(file.read())
        body = found["checkpoint"]
        if not isinstance(body["header"], dict):
            raise ValueError("'header' is no mapping")
        manifest = Manifest(body["header"], check_files(body["files"]))
        if found["crc32"] != manifest.crc32:
            raise ValueError("its checksum is another one")
    except FileNotFoundError as error:
        raise DataError(f"there is no {path}: {WAY_OUT}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {WAY_OUT}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}): {WAY_OUT}") from error
    return manifest


def rests_on(folder: Path) -> Path | None:
    """Return the folder of the whole checkpoint that the one in `folder` rests on, which may not
    exist; None if the one in `folder` is whole. Raises DataError for a damaged manifest."""
    return _base_folder(folder, _read_manifest(folder).header)


def _base_folder(folder: Path, header: Mapping[str, Any]) -> Path | None:
    if (told := header.get("base")) is None:
        return None
    name = told.get("folder") if isinstance(told, dict) else told
    if not isinstance(name, str) or name != Path(name).name or "\0" in name or name in ("", ".."):
        raise DataError(f"the checkpoint {folder} rests on {name!r}, which is not beside it")
    unclear = folder.is_symlink() or folder.name in ("", "..")
    return (folder.resolve() if unclear else folder).parent / name


def _other_format(folder: Path, version: int) -> ConfigError:
    return ConfigError(
        f"{folder} has checkpoint format {version}, and this version of distcache reads format "
        f"{FORMAT}: resume with the version of distcache that wrote it, or export its tables with "
        "that version (python -m distcache.export) and start from them by trainer.init_from"
    )


def _damaged(folder: Path, names: str, count: int) -> DataError:
    return DataError(
        f"the checkpoint {folder} is damaged: {names} (of {count} files) not as written, by "
        f"length or checksum: {WAY_OUT}"
    )


def open_plain(path: Path) -> io.BufferedReader:
    """A regular file that is no link, for reading."""
    try:
        return open_regular(path, os.O_NOFOLLOW)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): {WAY_OUT}") from error


# -----------------------------------------------------------------------------
# Writing: each rank a file of its own, block after block.


_BEGIN_BYTES = 16 << 20
"""After so many bytes the disk begins with them, while others are computed."""


class BlockFile(io.FileIO):
    """A new file that its owner alone may read, with its length and checksum so far; on the disk
    once it is left."""

    def __init__(self, path: Path) -> None:
        how = os.O_NOFOLLOW
        super().__init__(path, "xb", opener=lambda name, flags: os.open(name, flags | how, 0o600))
        self.end = self.crc = self._begun = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Append `data`; its length in bytes."""
        left = memoryview(data).cast("B")
        count = len(left)
        self.crc = zlib.crc32(left, self.crc)
        try:
            while len(left):
                left = left[super().write(left) :]
        except OSError as error:
            self.error = error
            raise
        self.end += count
        if (new := self.end - self._begun) >= _BEGIN_BYTES:  # else fsync has it all to do
            os.posix_fadvise(self.fileno(), self._begun, new, os.POSIX_FADV_DONTNEED)
            self._begun = self.end
        return count

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        try:
            if error is None:
                os.fsync(self.fileno())
        finally:
            self.close()


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    there = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(there)
    finally:
        os.close(there)


@dataclass(frozen=True)
class _Written(WriteResult):
    """With the mark of the block."""

    mark: Mark


class BlockWriter(FileSystemWriter):
    """DCP's files with a checksum for each block. `files`, on rank 0 once all is written: the
    marks of all files, for a manifest."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files: dict[str, list[Mark]] = {}

    def prepare_global_plan(self, plans: list[planner.SavePlan]) -> list[planner.SavePlan]:
        """Raises DistcacheError where the disk has no room for the values."""
        items = (item.tensor_data for plan in plans for item in plan.items)
        needed = sum(
            data.chunk.sizes.numel() * data.properties.dtype.itemsize for data in items if data
        )
        free = shutil.disk_usage(self.path).free
        if needed > free:
            raise DistcacheError(
                f"{self.path} has {describe_bytes(free)} free and the checkpoint takes "
                f"{describe_bytes(needed)}: make room there, or keep fewer checkpoints"
            )
        return super().prepare_global_plan(plans)

    def write_data(
        self, plan: planner.SavePlan, planner: planner.SavePlanner
    ) -> Future[list[WriteResult]]:
        """Write this rank's blocks, each of them in memory once."""
        name, written = f"__{self.rank}_0.distcp", list[WriteResult]()
        if plan.items:
            # torch's own checksum of a record would be one pass more, and is never looked at.
            once = config.patch("save.compute_crc32", False)
            with BlockFile(self.path / name) as file, once:
                for item in plan.items:
                    start = file.end
                    try:
                        torch.save(in_memory(planner.resolve_data(item)), file)
                    except RuntimeError as error:  # ending its archive failed too, and hides why
                        raise file.error or error from error
                    length, mark = file.end - start, (file.end, file.crc)
                    place = filesystem._StorageInfo(name, start, length)
                    written.append(_Written(item.index, length, place, mark))
        sync_folder(self.path)
        return _done(written)

    def finish(self, metadata: metadata.Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all ranks have written: DCP's list of values."""
        metadata.version = filesystem.CURRENT_DCP_VERSION
        written: list[Any] = [one for of_rank in results for one in of_rank]
        metadata.storage_data = {one.index: one.storage_data for one in written}
        for one in written:
            self.files.setdefault(one.storage_data.relative_path, []).append(one.mark)
        with BlockFile(self.path / METADATA) as file:
            file.write(pickle.dumps(metadata))
            self.files[METADATA] = [(file.end, file.crc)]
        sync_folder(self.path)


def _done(value: Any) -> Future:
    done: Future = Future()
    done.set_result(value)
    return done


def in_memory(value: Tensor) -> Tensor:
    """A tensor on the CPU, whose memory, which torch.save stores as a whole, has nothing else."""
    here = value.detach().cpu().contiguous()
    if here.untyped_storage().nbytes() == here.nbytes:
        return here
    if not here.nbytes:  # of which no bytes can be viewed
        return torch.empty_like(here)
    own = torch.from_numpy(here.view(-1).view(torch.uint8).numpy())  # a storage of this part alone
    return own.view(here.dtype).view(here.shape)


# -----------------------------------------------------------------------------
# Reading: nothing that a file holds is executed.


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
            raise _damaged(folder, METADATA, len(manifest.files))
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
        return _done(None)

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
                raise _damaged(reader.path, name, len(reader._manifest.files))
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


def as_bytes(value: Any) -> Tensor:
    """A value that is no tensor as the bytes, uint8 `[n]`, that a checkpoint has of it: its own, or
    those of JSON."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)].clone()
