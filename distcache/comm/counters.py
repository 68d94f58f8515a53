"""What a rank sends: bytes of collectives by category, and a wrapper that counts other code's.

Bytes are per rank, by the algorithms that move least: an all-reduce counts 2(W-1)/W of its
buffer, an all-gather, reduce-scatter or broadcast (W-1)/W of the whole buffer, and an all-to-all
exactly what leaves the rank.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distcache.comm.nodes import Nodes
from distcache.errors import DistcacheError

ROWS = "collective_bytes"
DENSE = "dense_collective_bytes"
PLANNING = "planning_bytes"
CATEGORIES = (ROWS, DENSE, PLANNING)


def all_reduce_bytes(nbytes: int, world_size: int) -> int:
    """Bytes that each of `world_size` ranks sends to all-reduce a buffer of `nbytes`."""
    return 2 * (world_size - 1) * nbytes // world_size


def gather_bytes(nbytes: int, world_size: int) -> int:
    """Bytes per rank of an all-gather or reduce-scatter whose whole buffer has `nbytes`."""
    return (world_size - 1) * nbytes // world_size


def all_to_all_bytes(
    nbytes: int, send_splits: Sequence[int] | None, rank: int, world_size: int
) -> int:
    """Bytes that leave `rank` when it sends `nbytes` in parts of `send_splits` (None: equal)."""
    if not send_splits:
        return gather_bytes(nbytes, world_size)
    total = sum(send_splits)
    return nbytes * (total - send_splits[rank]) // total if total else 0


class CollectiveCounters:
    """Bytes that this rank sent, by category; safe to count from several threads.

    `collective_bytes`: row values and row gradients, and any other floating payload of a counted
    library. `dense_collective_bytes`: gradients of the dense part. `planning_bytes`: integers.
    `inter_node_bytes`: those of the first two that went to ranks of other nodes, where there are
    any; of an all-reduce, all-gather, reduce-scatter or broadcast what the last rank of a node
    hands on in a ring in rank order.
    """

    def __init__(self, nodes: Nodes | None = None, rank: int = 0) -> None:
        """`nodes`: where the ranks are, and `rank` this one; None counts nothing between nodes."""
        self.nodes = nodes if nodes is not None and nodes.count > 1 else None
        self._rank = rank
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget all that was counted."""
        with self._lock:
            self.collective_bytes = 0
            self.dense_collective_bytes = 0
            self.planning_bytes = 0
            self.inter_node_bytes = 0

    def count(self, category: str, nbytes: int, between: int = 0) -> None:
        """Add `nbytes` to a category: one of CATEGORIES, else DistcacheError.

        `between`: how many of them went to ranks of other nodes.
        """
        if category not in CATEGORIES:
            raise DistcacheError(f"{category!r} is not a counter: use one of {CATEGORIES}")
        with self._lock:
            setattr(self, category, getattr(self, category) + nbytes)
            if category != PLANNING:
                self.inter_node_bytes += between

    def count_all_reduce(self, category: str, tensor: Tensor, world_size: int) -> None:
        """Count an all-reduce of `tensor` over all ranks."""
        nbytes = all_reduce_bytes(tensor.nbytes, world_size)
        between = self.nodes.ring_bytes_between(self._rank, nbytes) if self.nodes else 0
        self.count(category, nbytes, between)

    def count_all_to_all(
        self,
        category: str,
        tensor: Tensor,
        send_splits: Sequence[int] | None,
        rank: int,
        world_size: int,
    ) -> None:
        """Count an all-to-all over all ranks that sends `tensor`, split along its first dimension;
        `rank`: this one in the group."""
        between = 0
        if self.nodes is not None:
            between = self.nodes.bytes_between(rank, send_splits or [1] * world_size, tensor.nbytes)
        nbytes = all_to_all_bytes(tensor.nbytes, send_splits, rank, world_size)
        self.count(category, nbytes, between)

    def values(self) -> dict[str, int]:
        """The categories' counters by name."""
        return {name: getattr(self, name) for name in CATEGORIES}


def _payload(name: str, call: dict[str, Any], rank: int, world_size: int) -> tuple[Tensor, int]:
    """A tensor of the call (for its dtype) and the bytes that this rank sends in it."""
    if name == "all_reduce":
        return call["tensor"], all_reduce_bytes(call["tensor"].nbytes, world_size)
    if name == "broadcast":
        return call["tensor"], gather_bytes(call["tensor"].nbytes, world_size)
    if name == "all_to_all_single":
        sent = call["input"]
        splits = call.get("input_split_sizes")
        return sent, all_to_all_bytes(sent.nbytes, splits, rank, world_size)
    if name == "all_to_all":
        parts = call["input_tensor_list"]
        return parts[0], sum(part.nbytes for i, part in enumerate(parts) if i != rank)
    if name == "all_gather":
        parts = call["tensor_list"]
        return parts[0], gather_bytes(sum(part.nbytes for part in parts), world_size)
    if name == "reduce_scatter":
        parts = call["input_list"]
        return parts[0], gather_bytes(sum(part.nbytes for part in parts), world_size)
    whole = call["output_tensor"] if name.startswith("all_gather") else call["input"]
    return whole, gather_bytes(whole.nbytes, world_size)


COUNTED = (
    "all_reduce",
    "broadcast",
    "all_to_all_single",
    "all_to_all",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
)
"""The functions of torch.distributed that `count_collectives` wraps (`_single`: from 2.13 on)."""


def _between(name: str, call: dict[str, Any], nbytes: int, nodes: Nodes) -> int:
    """Of `nbytes` that this rank sends in the call, those to ranks of other nodes."""
    group = call.get("group")
    ranks = dist.get_process_group_ranks(group)
    here = nodes.of(dist.get_rank())
    inside = [nodes.of(rank) == here for rank in ranks]
    if name == "all_to_all":
        pairs = zip(call["input_tensor_list"], inside, strict=True)
        return sum(part.nbytes for part, near in pairs if not near)
    if name == "all_to_all_single":
        splits = call.get("input_split_sizes") or [1] * len(ranks)
        outside = sum(part for part, near in zip(splits, inside, strict=True) if not near)
        return call["input"].nbytes * outside // sum(splits) if sum(splits) else 0
    return nbytes if not inside[(dist.get_rank(group) + 1) % len(ranks)] else 0


def _counted(
    name: str, original: Callable[..., Any], counters: CollectiveCounters
) -> Callable[..., Any]:
    """`original` that first counts what it is about to send."""
    signature = inspect.signature(original)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        group = bound.get("group")
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank >= 0:
            tensor, nbytes = _payload(name, bound, rank, size)
            floating = tensor.is_floating_point() or tensor.is_complex()
            between = _between(name, bound, nbytes, counters.nodes) if counters.nodes else 0
            counters.count(ROWS if floating else PLANNING, nbytes, between)
        return original(*args, **kwargs)

    return call


@contextmanager
def count_collectives(counters: CollectiveCounters) -> Iterator[CollectiveCounters]:
    """Count every call of torch.distributed's tensor collectives in this process meanwhile.

    Code that looks the functions up as `torch.distributed.<name>` is counted, on whatever thread
    (TorchRec does, in eager mode); floating payloads as `collective_bytes`, integers as
    `planning_bytes`. Object collectives and process-group methods are not. The originals are put
    back on exit, also after an error; one such block at a time.
    """
    originals = {name: getattr(dist, name) for name in COUNTED if hasattr(dist, name)}
    try:
        for name, original in originals.items():
            setattr(dist, name, _counted(name, original, counters))
        yield counters
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def summing_hook(
    counters: CollectiveCounters,
) -> Callable[[dist.ProcessGroup, dist.GradBucket], torch.futures.Future[Tensor]]:
    """A DDP communication hook that sums gradients over ranks, counted as dense bytes.

    Unlike DDP's own it does not divide by W: losses are already a share of the global mean.
    Register as `ddp.register_comm_hook(group, summing_hook(counters))`.
    """

    # Without annotations: DDP compares them with classes, and here they would be strings.
    def hook(group, bucket):
        buffer = bucket.buffer()
        counters.count_all_reduce(DENSE, buffer, group.size())
        work = group.allreduce([buffer])
        return work.get_future().then(lambda done: done.value()[0])

    return hook
