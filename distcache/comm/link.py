"""One process group as one thread uses it: collectives that count bytes and name who is missing.

A gloo wait is taken in slices: a rank that waits longer than one says so in the job's store, and
looks there for failures of others, so that an exception reaches it within seconds whatever it
waits for. gloo has no all-to-all for CUDA tensors, so those are staged through host memory here,
in one place. With one rank every collective is a copy.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distcache.comm.counters import PLANNING, CollectiveCounters, all_to_all_bytes
from distcache.comm.rollcall import Waiting
from distcache.comm.world import World
from distcache.streams import Mark

_SLICE_S = 1.0
"""How long a rank waits before it announces that, and between its looks for failures, seconds."""

_PAUSE_S = 5e-5
"""Between two looks at a CUDA event, seconds."""


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
        self._on_host = world.size == 1 or dist.get_backend(group) == "gloo"
        self._staged = world.device.type == "cuda" and self._on_host

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
        return self.start_all_to_all(tensor, send_counts, receive_counts, category, what)()

    def start_all_to_all(
        self,
        tensor: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        category: str,
        what: str,
    ) -> Callable[[], Tensor]:
        """`all_to_all` under way; to be called once, in the same order on all ranks, for the rest.

        Until then `tensor` must stay as it is.
        """
        if self.world.size == 1:
            return lambda: tensor
        self.counters.count_all_to_all(
            category, tensor, send_counts, self.world.rank, self.world.size
        )
        return self._exchange(tensor, (send_counts, receive_counts), self.group, what)

    def within_node(
        self,
        tensor: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        category: str,
        what: str,
    ) -> Tensor:
        """`all_to_all` among the ranks of this node, in their order; for links of the device group.

        Called by all ranks of the node; with one of them it is a copy.
        """
        world = self.world
        if world.local_size == 1:
            return tensor
        group = world.node_group or self.group  # one node has no other group
        nbytes = all_to_all_bytes(tensor.nbytes, send_counts, world.local_rank, world.local_size)
        self.counters.count(category, nbytes)
        return self._exchange(tensor, (send_counts, receive_counts), group, what)()

    def _exchange(
        self,
        tensor: Tensor,
        counts: tuple[Sequence[int], Sequence[int]],
        group: dist.ProcessGroup | None,
        what: str,
    ) -> Callable[[], Tensor]:
        """An all-to-all over `group` of parts of `counts`, (sent, received), under way."""
        send, receive = (list(part) for part in counts)
        source = (tensor.cpu() if self._staged else tensor).contiguous()
        out = source.new_empty((sum(receive), *tensor.shape[1:]))
        wait = self._start(
            lambda: dist.all_to_all_single(out, source, receive, send, group=group, async_op=True),
            what,
        )

        def finish() -> Tensor:
            wait()
            return out.to(tensor.device) if self._staged else out

        return finish

    def start_all_reduce(self, tensor: Tensor, category: str, what: str) -> Callable[[], None]:
        """Sum `tensor` (contiguous) over the ranks in place; under way, as `start_all_to_all`."""
        if self.world.size == 1:
            return lambda: None
        self.counters.count_all_reduce(category, tensor, self.world.size)
        return self._start(lambda: dist.all_reduce(tensor, group=self.group, async_op=True), what)

    def all_gather(self, tensor: Tensor, category: str, what: str) -> Tensor:
        """Every rank's `tensor` (equal shapes), `[W, ...]` in rank order."""
        return self.start_all_gather(tensor, category, what)()

    def start_all_gather(self, tensor: Tensor, category: str, what: str) -> Callable[[], Tensor]:
        """`all_gather` under way, as `start_all_to_all`.

        A copy to each rank: gloo's own all-gather sends as many bytes round a ring, and a small
        one takes twice as long.
        """
        size = self.world.size
        copies = tensor.expand(size, *tensor.shape).contiguous()
        return self.start_all_to_all(copies, [1] * size, [1] * size, category, what)

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Every rank's `value` (picklable), in rank order; on gloo groups only."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = self.world.size
        sizes = self.all_gather(torch.tensor(len(data)), PLANNING, what).tolist()
        copies, mine = data.repeat(size), [len(data)] * size
        parts = self.all_to_all(copies, mine, sizes, PLANNING, what).split(sizes)
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

    def settle(self, what: str, mark: Mark | None = None) -> None:
        """Wait on the host for `mark`, or for all work on this thread's current CUDA stream.

        gloo's waits are the host's already; NCCL's only order streams, and a host that then reads
        a result would hang in the driver where nothing can name the rank that it waits for.
        """
        if mark is None:
            if self._on_host:
                return
            mark = Mark(torch.cuda.Event())
            mark.event.record()
        if mark.event is None or mark.event.query():
            return
        waiting = Waiting(self.world, self.name, what)
        began = looked = time.monotonic()
        while not mark.event.query():
            time.sleep(_PAUSE_S)
            now = time.monotonic()
            if now - began > self.world.timeout_s:
                raise waiting.explain(TimeoutError("the device group's work did not end"))
            if now - looked > _SLICE_S:
                looked = now
                waiting.announce()
        waiting.over()

    def _start(self, issue: Callable[[], Any], what: str) -> Callable[[], None]:
        """Start a collective; call the result to wait: on the host (gloo) or the stream (NCCL)."""
        waiting = Waiting(self.world, self.name, what)
        try:
            work = issue()
        except RuntimeError as error:
            raise waiting.explain(error) from error

        def wait() -> None:
            try:
                if not self._on_host:
                    work.wait()
                    return
                while not _done(work):
                    waiting.announce()
            except RuntimeError as error:
                raise waiting.explain(error) from error
            waiting.over()

        return wait


def _done(work: Any) -> bool:
    """Wait for `work` for one slice; whether it is done. Raises RuntimeError if it failed."""
    try:
        work.wait(timedelta(seconds=_SLICE_S))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises what went wrong, unless it was done just now
    return True


def host_link(world: World) -> Link:
    """The host group as the main thread uses it outside a step; its bytes are not counted."""
    return Link(world, world.host_group, CollectiveCounters(), "the host group")
