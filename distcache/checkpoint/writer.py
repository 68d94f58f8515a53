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
from distcache.engine.full_tables import ChangedRows, Snapshot
from distcache.errors import DistcacheError
from distcache.store.memory import describe_bytes

TABLES = "tables."
"""Prefix of the names of tables' values. After the prefix `CHANGED`: only rows that changed."""

BLOCK_BYTES = 16 << 20
"""Approximate bytes of a block. Below 32 MiB glibc's allocator keeps a block's memory for the next
one; new pages would cost as much as the checksum."""

_REST = 4.0
"""Seconds of rest per second of CPU time of the thread that writes beside training. It shares
caches and memory bandwidth with training, even if a core is free for it."""

_SPLIT_TYPES = (Tensor, torch.nn.Parameter, ChangedRows)
"""Types that are written in blocks. DTensor and ShardedTensor are written as DCP does."""


class BlockSavePlanner(DefaultSavePlanner):
    """DCP planner that splits plain tensors into blocks of rows.

    If several ranks hold a table (in shared memory, or as copies), each block is written by one of
    them, so that the ranks share even a single table evenly. DCP copies a view before it writes it
    and reads a stored piece as a whole; blocks bound both to `BLOCK_BYTES`, whereas a whole table
    would be in memory twice.
    """

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        """`snapshot`: source of the tables' rows if training continues meanwhile. Call in the
        thread that writes."""
        super().__init__()
        self._snapshot = snapshot
        self._cpu_seconds = time.thread_time()

    def create_local_plan(self) -> planner.SavePlan:
        """Return DCP's plan with every plain tensor split into blocks."""
        plan = super().create_local_plan()
        items: list[planner.WriteItem] = []
        for item in plan.items:
            is_split = type(self.state_dict[item.index.fqn]) in _SPLIT_TYPES
            items += split(item, BLOCK_BYTES) if is_split else [item]
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: planner.WriteItem) -> Any:
        """Return the rows of one block, or the value that DCP's planner returns."""
        name = write_item.index.fqn
        data = write_item.tensor_data
        value = self.state_dict[name]
        if type(value) not in _SPLIT_TYPES or data is None or not data.chunk.sizes:
            return super().resolve_data(write_item)
        start = data.chunk.offsets[0]
        count = data.chunk.sizes[0]
        if isinstance(value, ChangedRows):
            table_value = value.of
            ids = value.ids[start - value.first :][:count]
            rows = value.read(ids)
        else:
            table_value = name if name.startswith(TABLES) else None
            ids = np.arange(start, start + count)
            rows = value.detach().narrow(0, start, count)
        if self._snapshot is None or table_value is None:
            return rows
        self._snapshot.hurry.wait(_REST * (time.thread_time() - self._cpu_seconds))
        self._cpu_seconds = time.thread_time()
        return self._snapshot.block(table_value, ids, rows)


def split(item: planner.WriteItem, block_bytes: int) -> Iterator[planner.WriteItem]:
    """Yield the blocks of one item of a plan, or the item itself if it fits into one block."""
    data = item.tensor_data
    count, *rest = data.chunk.sizes if data is not None and data.chunk.sizes else (0,)
    row_bytes = torch.Size(rest).numel() * data.properties.dtype.itemsize if count else 1
    rows_per_block = max(1, block_bytes // max(row_bytes, 1))
    if rows_per_block >= count:
        yield item
        return
    for start in range(0, count, rows_per_block):
        offsets = torch.Size([data.chunk.offsets[0] + start, *[0] * len(rest)])
        sizes = torch.Size([min(rows_per_block, count - start), *rest])
        chunk = metadata.ChunkStorageMetadata(offsets, sizes)
        yield planner.WriteItem(
            index=metadata.MetadataIndex(item.index.fqn, offsets),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(chunk, data.properties, data.size),
        )


@dataclass(frozen=True)
class _BlockResult(WriteResult):
    """DCP's result of one written item, with the mark of its block."""

    mark: Mark


class BlockWriter(FileSystemWriter):
    """DCP writer that computes a checksum for each block.

    `files`, on rank 0 after `finish`: the marks of the blocks of all files, for a manifest.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files: dict[str, list[Mark]] = {}

    def prepare_global_plan(self, plans: list[planner.SavePlan]) -> list[planner.SavePlan]:
        """Check free disk space on rank 0. Raises DistcacheError if the values do not fit."""
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
        """Write this rank's blocks. One of them is in memory at a time."""
        name = f"__{self.rank}_0.distcp"
        results: list[WriteResult] = []
        if plan.items:
            # torch's own checksum of a record would cost another pass, and nothing reads it.
            without_crc32 = config.patch("save.compute_crc32", False)
            with BlockFile(self.path / name) as file, without_crc32:
                for item in plan.items:
                    start = file.end
                    try:
                        torch.save(compact_on_cpu(planner.resolve_data(item)), file)
                    except RuntimeError as error:
                        # torch.save also failed to end its archive, which hides the cause.
                        raise file.error or error from error
                    length = file.end - start
                    place = filesystem._StorageInfo(name, start, length)
                    mark = (file.end, file.crc)
                    results.append(_BlockResult(item.index, length, place, mark))
        sync_folder(self.path)
        return completed_future(results)

    def finish(self, metadata: metadata.Metadata, results: list[list[WriteResult]]) -> None:
        """Write DCP's list of values on rank 0, after all ranks have written."""
        metadata.version = filesystem.CURRENT_DCP_VERSION
        all_results: list[Any] = [result for of_rank in results for result in of_rank]
        metadata.storage_data = {result.index: result.storage_data for result in all_results}
        for result in all_results:
            self.files.setdefault(result.storage_data.relative_path, []).append(result.mark)
        with BlockFile(self.path / METADATA) as file:
            file.write(pickle.dumps(metadata))
            self.files[METADATA] = [(file.end, file.crc)]
        sync_folder(self.path)


def completed_future(value: Any) -> Future:
    """Return a future that has `value` already."""
    future: Future = Future()
    future.set_result(value)
    return future


def compact_on_cpu(tensor: Tensor) -> Tensor:
    """Return `tensor` on the CPU with a storage of its own size, since torch.save writes whole
    storages. Memory is shared with `tensor` where possible."""
    values = tensor.detach().cpu().contiguous()
    if values.untyped_storage().nbytes() == values.nbytes:
        return values
    if not values.nbytes:  # an empty tensor has no bytes that could be viewed
        return torch.empty_like(values)
    # NumPy's view of the bytes becomes a storage of this part only.
    part = torch.from_numpy(values.view(-1).view(torch.uint8).numpy())
    return part.view(values.dtype).view(values.shape)


def as_bytes(value: Any) -> Tensor:
    """Return a value that is no tensor as bytes, uint8 `[n]`: bytes as they are, others as JSON."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)].clone()
