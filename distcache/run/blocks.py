"""Planners for `torch.distributed.checkpoint`: big tensors in blocks, nothing left unread."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from distcache.errors import ConfigError

BLOCK_BYTES = 64 << 20
"""About how many bytes one block of a table has in a checkpoint."""


class BlockSavePlanner(DefaultSavePlanner):
    """Writes plain tensors in blocks of rows.

    A table that several ranks hold (shared memory, or copies) is one set of blocks, each written
    once by one of them, so that the ranks share even a single table evenly. The storage layer
    copies a view before it writes it, and reads a stored piece whole: blocks bound both to
    `block_bytes`, where a whole table would be in memory twice.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        super().__init__()
        self.block_bytes = block_bytes

    def create_local_plan(self) -> SavePlan:
        """The default plan with every big plain tensor split into blocks."""
        plan = super().create_local_plan()
        items = [block for item in plan.items for block in split(item, self.block_bytes)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The rows of one block, or what the default planner says."""
        value = self.state_dict[write_item.index.fqn]
        data = write_item.tensor_data
        if data is None or write_item.type is not WriteItemType.SHARD or not is_plain(value):
            return super().resolve_data(write_item)
        return value.detach().narrow(0, data.chunk.offsets[0], data.chunk.sizes[0])


def is_plain(value: object) -> bool:
    """Whether `value` is a tensor that holds all of its elements (no DTensor, no ShardedTensor)."""
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def split(item: WriteItem, block_bytes: int) -> Iterator[WriteItem]:
    """The blocks of an item of a plan; the item itself unless it is a plain tensor beyond one."""
    data = item.tensor_data
    if item.type is not WriteItemType.TENSOR or data is None or len(data.size) == 0:
        yield item
        return
    count, *rest = data.size
    row_bytes = torch.Size(rest).numel() * data.properties.dtype.itemsize
    step = max(1, block_bytes // max(row_bytes, 1))
    if step >= count:
        yield item
        return
    for start in range(0, count, step):
        offsets = torch.Size([start, *[0] * len(rest)])
        chunk = ChunkStorageMetadata(offsets, torch.Size([min(step, count - start), *rest]))
        yield WriteItem(
            index=MetadataIndex(item.index.fqn, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, data.properties, data.size),
        )


class CompleteLoadPlanner(DefaultLoadPlanner):
    """Refuses to load when the checkpoint holds a value that no rank asks for.

    The default planner refuses the reverse, a value asked for that is not there. Ranks may ask
    for different values: those that share memory need to read it only once.
    """

    def __init__(self, other: set[str]) -> None:
        """`other`: stored names that are read elsewhere."""
        super().__init__()
        self.other = other

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Raises ConfigError naming what would be left unread."""
        wanted = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        stored = self.metadata.state_dict_metadata if self.metadata else {}
        unread = sorted(
            name
            for name, value in stored.items()
            if name not in wanted | self.other
            and not (isinstance(value, TensorStorageMetadata) and value.size.numel() == 0)
        )
        if unread:
            more = f" and {len(unread) - 5} more" if len(unread) > 5 else ""
            raise ConfigError(
                f"the checkpoint holds values that this run does not have: {', '.join(unread[:5])}"
                f"{more}; resume with the settings it was made with"
            )
        return super().create_global_plan(global_plan)
