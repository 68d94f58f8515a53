"""One process group as one thread uses it: collectives that count bytes and name who is missing.

gloo has no all-to-all for CUDA tensors, so those are staged through host memory here, in one
place. With one rank every collective is a copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from distcache.comm.counters import CollectiveCounters
from distcache.comm.failure import first_failure
from distcache.comm.world import World
from distcache.errors import PeerError

_ROLL_CALL_S = 3.0
"""How long a rank whose wait failed listens for the others before it names the missing."""


class Link:
    """Collectives of `group`, for one thread only; `name` tells errors which conversation it is.

    Every method is called by all ranks in the same order. A failing or expired wait raises
    PeerError that names the rank that failed first, or the ranks that did not come.
    """

    def __init__(
        self,
        world: World,
        group: dist.ProcessGroup | None,
        counters: CollectiveCounters,
        name: str,
    ) -> None:
        self.world, self.group, self.counters, self.name = world, group, counters, name
        on_gpu = world.size > 1 and world.device.type == "cuda"
        self._staged = on_gpu and dist.get_backend(group) == "gloo"

    def all_to_all(
        self,
        tensor: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        category: str,
        what: str,
    ) -> Tensor:
        """Send `send_counts[r]` leading entries of `tensor` to each rank r; returns what came.

        `[sum(send_counts), ...]` in rank order -> `[sum(receive_counts), ...]` in rank order.
        """
        if self.world.size == 1:
            return tensor
        self.counters.count_all_to_all(
            category, tensor, send_counts, self.world.rank, self.world.size
        )
        source = tensor.cpu() if self._staged else tensor.contiguous()
        out = source.new_empty((sum(receive_counts), *tensor.shape[1:]))
        with _Diagnosis(self, what):
            dist.all_to_all_single(
                out, source, list(receive_counts), list(send_counts), group=self.group
            )
        return out.to(tensor.device) if self._staged else out

    def all_reduce(self, tensor: Tensor, category: str, what: str) -> None:
        """Sum `tensor` over the ranks in place."""
        if self.world.size == 1:
            return
        self.counters.count_all_reduce(category, tensor, self.world.size)
        with _Diagnosis(self, what):
            dist.all_reduce(tensor, group=self.group)

    def all_gather(self, tensor: Tensor, category: str, what: str) -> list[Tensor]:
        """Every rank's `tensor` (equal shapes), in rank order."""
        if self.world.size == 1:
            return [tensor]
        out = [torch.empty_like(tensor) for _ in range(self.world.size)]
        self.counters.count(category, tensor.nbytes * (self.world.size - 1))
        with _Diagnosis(self, what):
            dist.all_gather(out, tensor, group=self.group)
        return out

    def barrier(self, what: str) -> None:
        """Wait for all ranks."""
        if self.world.size == 1:
            return
        with _Diagnosis(self, what):
            dist.barrier(group=self.group)


class _Diagnosis:
    """Turns a failed wait into a PeerError that names the culprit."""

    def __init__(self, link: Link, what: str) -> None:
        self.link, self.what = link, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise explain(self.link.world, f"{self.link.name}: {self.what}", error) from error


def explain(world: World, what: str, error: BaseException) -> PeerError:
    """The PeerError for a failed wait of this rank: asks the store who failed or is missing."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    try:
        world.store.set(f"distcache/waiting/{world.rank}", what)
        deadline = time.monotonic() + _ROLL_CALL_S
        absent = [rank for rank in range(world.size) if rank != world.rank]
        while absent and time.monotonic() < deadline:
            failure = first_failure(world.store)
            if failure is not None and failure[0] != world.rank:
                return PeerError(f"stopped because rank {failure[0]} failed: {failure[1]}")
            absent = [r for r in absent if not world.store.check([f"distcache/waiting/{r}"])]
            time.sleep(0.1)
    except RuntimeError:  # the store itself is gone: its host was the one that left
        return PeerError(f"rank {world.rank} waited in {what}: the job's store is gone ({reason})")
    if absent:
        names = ", ".join(f"rank {rank}" for rank in absent)
        return PeerError(
            f"rank {world.rank} waited in {what}; {names} did not come within "
            f"trainer.timeout_s={world.timeout_s:g} or ended ({reason})"
        )
    return PeerError(f"rank {world.rank} waited in {what}, as did all others ({reason})")
