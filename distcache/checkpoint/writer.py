"""Writer of checkpoints over `torch.distributed.checkpoint` (DCP): tensors in blocks of rows.

Each rank writes one file, block after block, and computes a checksum for each block as it goes.
"""

from __future__ import annotations

import json
import pickle
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config

from distcache.checkpoint.manifest import METADATA, BlockFile, Mark, sync_folder
from distcache.engine.whole import ChangedRows, Snapshot
from distcache.errors import DistcacheError
from distcache.store.memory import describe_bytes

TABLES = "tables."
"""What begins the names of tables' values; `CHANGED` before these: of their rows that changed."""


BLOCK_BYTES = 16 << 20
"""About how many bytes one block of a table has in a checkpoint: few enough that the allocator
keeps their memory from one to the next (glibc: below 32 MiB), for fresh pages cost as much as the
checksum."""

_REST = 4.0
"""Beside training a block that took t seconds of a core is followed by so many times t of rest: it
shares caches and memory with training, also where a core is free for it."""


_PLAIN = (Tensor, torch.nn.Parameter, ChangedRows)
"""What is written in blocks: no DTensor, no ShardedTensor."""


class BlockSavePlanner(DefaultSavePlanner):
    """Writes plain tensors in blocks of rows.

    A table that several ranks hold (shared memory, or copies) is one set of blocks, each written
    once by one of them, so that the ranks share even a single table evenly. The storage layer
    copies a view before it writes it, and reads a stored piece whole: blocks bound both to
    `BLOCK_BYTES`, where a whole table would be in memory twice.
    """

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        """By the thread that writes; `snapshot`: where tables are read, that go on changing."""
        super().__init__()
        self._snapshot, self._used = snapshot, time.thread_time()

    def create_local_plan(self) -> planner.SavePlan:
        """The default plan with every big plain tensor split into blocks."""
        plan, items = super().create_local_plan(), list[planner.WriteItem]()
        for item in plan.items:
            is_plain = type(self.state_dict[item.index.fqn]) in _PLAIN
            items += split(item, BLOCK_BYTES) if is_plain else [item]
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: planner.WriteItem) -> Any:
        """The rows of one block, or what the default planner says."""
        name, data = write_item.index.fqn, write_item.tensor_data
        value, of = self.state_dict[name], name if name.startswith(TABLES) else None
        if type(value) not in _PLAIN or data is None or not data.chunk.sizes:
            return super().resolve_data(write_item)
        start, count = data.chunk.offsets[0], data.chunk.sizes[0]
        if isinstance(value, ChangedRows):
            of, ids = value.of, value.ids[start - value.first :][:count]
            value = value.read(ids)
        else:
            ids, value = np.arange(start, start + count), value.detach().narrow(0, start, count)
        if self._snapshot is None or of is None:
            return value
        self._snapshot.hurry.wait(_REST * (time.thread_time() - self._used))
        self._used = time.thread_time()
        return self._snapshot.block(of, ids, value)


def split(item: planner.WriteItem, block_bytes: int) -> Iterator[planner.WriteItem]:
    """The blocks of a tensor's item of a plan; the item itself where it is no more than one."""
    data = item.tensor_data
    count, *rest = data.chunk.sizes if data is not None and data.chunk.sizes else (0,)
    row_bytes = torch.Size(rest).numel() * data.properties.dtype.itemsize if count else 1
    step = max(1, block_bytes // max(row_bytes, 1))
    if step >= count:
        yield item
        return
    for start in range(0, count, step):
        offsets = torch.Size([data.chunk.offsets[0] + start, *[0] * len(rest)])
        sizes = torch.Size([min(step, count - start), *rest])
        chunk = metadata.ChunkStorageMetadata(offsets, sizes)
        yield planner.WriteItem(
            index=metadata.MetadataIndex(item.index.fqn, offsets),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(chunk, data.properties, data.size),
        )


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
        return finished_future(written)

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


def finished_future(value: Any) -> Future:
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


def as_bytes(value: Any) -> Tensor:
    """A value that is no tensor as the bytes, uint8 `[n]`, that a checkpoint has of it: its own, or
    those of JSON."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)].clone()
