"""One process group, used by one thread at a time: collectives that count bytes and name who is
missing; work whose failure on one rank all ranks learn of."""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distcache.comm.rendezvous import (
    differences,
    failure_of_others,
    first_line,
    has_ended,
    named_ranks,
    raise_if_different,
)
from distcache.comm.world import Nodes, World
from distcache.errors import DistcacheError, PeerError, on_all_ranks
from distcache.streams import DeviceEvent
from distcache.versions import DISTRIBUTIONS, FBGEMM_DISTRIBUTIONS, SOURCE, versions_here

log = logging.getLogger(__name__)

# -----------------------------------------------------------------------------
# What a rank sends: bytes of collectives by category, and a wrapper that counts other code's.
#
# Bytes are per rank, by the algorithms that move least.

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


def bytes_beyond(nbytes: int, send_splits: Sequence[int], near: range) -> int:
    """Of `nbytes` that a rank sends in parts of `send_splits`, one for each rank, those that go to
    others than the ranks `near`."""
    total = sum(send_splits)
    far = total - sum(send_splits[near.start : near.stop])
    return nbytes * far // total if total else 0


class CollectiveCounters:
    """Bytes that this rank sent, by category; for one thread at a time, as a `Link`.

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
        self.reset()

    def reset(self) -> None:
        """Forget all that was counted."""
        self.collective_bytes = self.dense_collective_bytes = 0
        self.planning_bytes = self.inter_node_bytes = 0

    def count(self, category: str, nbytes: int, between: int = 0) -> None:
        """Add `nbytes` to one of CATEGORIES; `between`: how many went to ranks of other nodes."""
        vars(self)[category] += nbytes
        if category != PLANNING:
            self.inter_node_bytes += between

    def count_all_reduce(self, category: str, tensor: Tensor, world_size: int) -> None:
        """Count an all-reduce of `tensor` over all ranks."""
        self._count_ring(category, all_reduce_bytes(tensor.nbytes, world_size))

    def count_all_gather(self, category: str, tensor: Tensor, world_size: int) -> None:
        """Count an all-gather over all ranks, whose whole buffer is `tensor`."""
        self._count_ring(category, gather_bytes(tensor.nbytes, world_size))

    def _count_ring(self, category: str, nbytes: int) -> None:
        """Count `nbytes` that go round a ring in rank order: the last rank of a node sends them to
        another node."""
        last = self.nodes and self._rank == self.nodes.ranks(self.nodes.of(self._rank))[-1]
        self.count(category, nbytes, nbytes if last else 0)

    def values(self) -> dict[str, int]:
        """The categories' counters by name, and where there are several nodes the one of those."""
        names = CATEGORIES if self.nodes is None else (*CATEGORIES, "inter_node_bytes")
        return {name: getattr(self, name) for name in names}


COUNTED = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "all_to_all_single": "input",
    "all_to_all": "input_tensor_list",
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "all_gather_single": "output_tensor",
    "reduce_scatter": "input_list",
    "reduce_scatter_tensor": "input",
    "reduce_scatter_single": "input",
}
"""The functions of torch.distributed that `count_collectives` wraps (`_single`: from 2.13 on), and
which argument holds the whole buffer."""


def _sent(name: str, call: dict[str, Any], nodes: Nodes | None) -> tuple[Tensor, int, int]:
    """Of a call on this rank: a tensor (for its dtype), the bytes that this rank sends in it, and
    how many of them go to ranks of other nodes."""
    group, given = call.get("group"), call[COUNTED[name]]
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    tensors = given if isinstance(given, list) else [given]
    nbytes, size = sum(tensor.nbytes for tensor in tensors), len(ranks)
    here = nodes.of(dist.get_rank()) if nodes else 0
    outside = [nodes is not None and nodes.of(rank) != here for rank in ranks]
    if name.startswith("all_to_all"):
        splits = call.get("input_split_sizes") or [1] * size
        if name == "all_to_all":
            splits = [tensor.nbytes for tensor in tensors]
        away = sum(part for part, far in zip(splits, outside, strict=True) if far)
        between = nbytes * away // max(1, sum(splits))
        return tensors[0], bytes_beyond(nbytes, splits, range(me, me + 1)), between
    sent = (all_reduce_bytes if name == "all_reduce" else gather_bytes)(nbytes, size)
    return tensors[0], sent, sent if outside[(me + 1) % size] else 0


@contextmanager
def count_collectives(counters: CollectiveCounters) -> Iterator[CollectiveCounters]:
    """Count every call of torch.distributed's tensor collectives in this process meanwhile.

    Code that looks the functions up as `torch.distributed.<name>` is counted, on whatever thread,
    one at a time (TorchRec does, in eager mode); floating payloads as `collective_bytes`, integers
    as `planning_bytes`. Object collectives and process-group methods are not. The originals are put
    back on exit, also after an error; one such block at a time.
    """

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            if dist.get_rank(bound.get("group")) >= 0:
                tensor, nbytes, between = _sent(name, bound, counters.nodes)
                floating = tensor.is_floating_point() or tensor.is_complex()
                counters.count(ROWS if floating else PLANNING, nbytes, between)
            return original(*args, **kwargs)

        return call

    originals = {name: getattr(dist, name) for name in COUNTED if hasattr(dist, name)}
    try:
        for name, original in originals.items():
            setattr(dist, name, counted(name, original))
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


# -----------------------------------------------------------------------------
# Who is missing: what ranks that wait long write to the job's store, and read from it.


class Waiting:
    """One wait of this rank, for `what` in the conversation `link`; free while it is short."""

    def __init__(self, world: World, link: str, what: str) -> None:
        self._world, self._what = world, f"{link}: {what}"
        self._key = f"distcache/waiting/{link}"
        self._announced = False

    def announce(self) -> None:
        """Say in the store that this rank waits here.

        Raises PeerError if another rank has failed meanwhile.
        """
        if not self._announced:
            self._announced = True
            with suppress(RuntimeError):  # without its store, the wait itself must fail
                self._world.store.set(f"{self._key}/{self._world.rank}", self._what)
        failure = failure_of_others(self._world.store, self._world.rank)
        if failure is not None:
            raise PeerError(failure.message)

    def over(self) -> None:
        """The wait ended well."""
        if self._announced:
            with suppress(RuntimeError):
                self._world.store.set(f"{self._key}/{self._world.rank}", "")

    def explain(self, error: BaseException) -> PeerError:
        """The PeerError for a wait that ended with `error`: who failed, ended or did not come."""
        world, reason = self._world, first_line(error)
        where = f"rank {world.rank} waited in {self._what}"
        try:
            world.store.set(f"{self._key}/{world.rank}", self._what)
            found = self._call_roll(where, reason)
        except RuntimeError:
            agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            host = "torchrun" if agent else "rank 0"
            found = f"{where}; {host} ended, and the job's store with it ({reason})"
        return PeerError(found)

    def _call_roll(self, where: str, reason: str) -> str:
        """What the store says about the other ranks, listening for a few seconds."""
        world, deadline = self._world, time.monotonic() + 3.0
        absent = [rank for rank in range(world.size) if rank != world.rank]

        def waits_too(key: str) -> bool:
            return world.store.check([key]) and bool(world.store.get(key))

        while True:
            # In this order: what a rank records, it records before it ends.
            ended = [rank for rank in absent if has_ended(world.store, rank)]
            failure = failure_of_others(world.store, world.rank)
            absent = [rank for rank in absent if not waits_too(f"{self._key}/{rank}")]
            over = not absent or time.monotonic() > deadline
            if failure is not None and (over or ended or not failure.secondary):
                return failure.message
            if ended:
                return f"{where}; {named_ranks(ended)} ended without a word ({reason})"
            if over:
                break
            time.sleep(0.05)
        if absent:
            late, limit = named_ranks(absent), f"trainer.timeout_s={world.timeout_s:g}"
            return f"{where}; {late} did not come within {limit}, or ended ({reason})"
        return f"{where}, as did all others ({reason})"


# -----------------------------------------------------------------------------
# A gloo wait is taken in slices: a rank that waits longer than one says so in the job's store, and
# looks there for failures of others, so that an exception reaches it within seconds whatever it
# waits for. gloo has no all-to-all for CUDA tensors, so those are staged through host memory here,
# in one place. With one rank every collective is a copy.

SLICE_S = 1.0
"""How long a rank waits before it announces that, and between its looks for failures, seconds."""

_SLICE = timedelta(seconds=SLICE_S)


class Link:
    """Collectives of `group`, for one thread at a time; `name` tells errors which talk it is.

    Every method is called by all ranks in the same order. A failing or expired wait raises
    PeerError that names the rank that failed first, or the ranks that did not come.
    """

    def __init__(
        self, world: World, group: dist.ProcessGroup | None, counters: CollectiveCounters, name: str
    ) -> None:
        self.world, self.group, self.counters, self.name = world, group, counters, name
        self._on_host = world.size == 1 or dist.get_backend(group) == "gloo"
        self._staged = world.device.type == "cuda" and self._on_host
        self._unfinished = ""
        """The collective that this rank has left while others may still be in it."""

    def start_all_to_all(
        self,
        tensor: Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
        category: str,
        what: str,
    ) -> Callable[[], Tensor]:
        """Start to send `send_counts[r]` entries of `tensor` to each rank r.

        `tensor` `[sum(send_counts), ...]`: in rank order; it must not change until the result is
        there. Returns a function that waits for the received entries, `[sum(receive_counts), ...]`
        in rank order; it is called once, in the same order on all ranks.
        """
        rank = self.world.rank
        if self.world.size == 1:
            return lambda: tensor
        between = 0
        if (nodes := self.counters.nodes) is not None:
            between = bytes_beyond(tensor.nbytes, send_counts, nodes.ranks(nodes.of(rank)))
        nbytes = bytes_beyond(tensor.nbytes, send_counts, range(rank, rank + 1))
        self.counters.count(category, nbytes, between)
        source = self._sendable(tensor)
        out = source.new_empty((sum(receive_counts), *tensor.shape[1:]))
        splits = list(receive_counts), list(send_counts)
        return self._start(what, tensor.device, dist.all_to_all_single, out, source, *splits)

    def start_all_reduce(self, tensor: Tensor, category: str, what: str) -> Callable[[], Tensor]:
        """Sum `tensor` (contiguous) over the ranks in place; under way, as `start_all_to_all`."""
        if self.world.size == 1:
            return lambda: tensor
        self.counters.count_all_reduce(category, tensor, self.world.size)
        return self._start(what, tensor.device, dist.all_reduce, tensor)

    def all_gather_rows(self, rows: Tensor, counts: Sequence[int], what: str) -> Tensor:
        """Return the rows of all ranks, `[sum(counts), ...]` in rank order.

        `rows` `[counts[rank], ...]`: those of this rank; all ranks give the same `counts`. An
        all-gather of parts that are padded to the largest one, counted as ROWS. Its ring sends a
        row to each node once, where copies to all ranks would cross the network for each of them.
        """
        size, most = self.world.size, max(counts)
        if size == 1 or most == 0:
            return rows
        if len(rows) < most:
            padding = rows.new_empty((most - len(rows), *rows.shape[1:]))
            rows = torch.cat((rows, padding))
        source = self._sendable(rows)
        out = source.new_empty((size * most, *rows.shape[1:]))
        self.counters.count_all_gather(ROWS, out, size)
        gathered = self._start(what, rows.device, _all_gather, out, source)()
        if min(counts) == most:
            return gathered
        parts = gathered.split(most)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def start_all_gather(self, tensor: Tensor, category: str, what: str) -> Callable[[], Tensor]:
        """Every rank's `tensor` (equal shapes), `[W, ...]` in rank order: as `start_all_to_all`.

        For small tensors, of which each rank gets a copy: an all-gather of gloo takes a ring of
        W - 1 messages, one after the other.
        """
        if (size := self.world.size) == 1:
            return lambda: tensor.unsqueeze(0)
        copies = tensor.expand(size, *tensor.shape).contiguous()
        return self.start_all_to_all(copies, [1] * size, [1] * size, category, what)

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """Every rank's `value` (picklable), in rank order; on gloo groups only."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = self.world.size
        sizes = self.start_all_gather(torch.tensor(len(data)), PLANNING, what)().tolist()
        copies, mine = data.repeat(size), [len(data)] * size
        found = self.start_all_to_all(copies, mine, sizes, PLANNING, what)()
        return [pickle.loads(part.numpy().tobytes()) for part in found.split(sizes)]

    def now(self) -> DeviceEvent:
        """A mark of all work on this thread's current CUDA stream. gloo's waits are the host's
        already."""
        if self._on_host:
            return None
        mark = torch.cuda.Event()
        mark.record()
        return mark

    def settle(self, what: str, mark: DeviceEvent) -> None:
        """Wait on the host for `mark`.

        NCCL's waits only order streams, and a host that then reads a result would hang in the
        driver where nothing can name the rank that it waits for.
        """
        if mark is None or mark.query():
            return
        waiting = Waiting(self.world, self.name, what)
        began = looked = time.monotonic()
        while not mark.query():
            time.sleep(5e-5)
            now = time.monotonic()
            if now - began > self.world.timeout_s:
                raise waiting.explain(TimeoutError("the device group's work did not end"))
            if now - looked > SLICE_S:
                looked = now
                waiting.announce()
        waiting.over()

    def _sendable(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in contiguous memory from which this group can send."""
        return (tensor.cpu() if self._staged else tensor).contiguous()

    def _start(
        self,
        what: str,
        device: torch.device,
        collective: Callable[..., Any],
        out: Tensor,
        *arguments: Any,
    ) -> Callable[[], Tensor]:
        """Start a collective that fills `out`; call it to wait, on the host (gloo) or the stream
        (NCCL), for `out` on `device`."""
        if self._unfinished:
            # gloo would match this one with the messages of that one, and end the process.
            raise PeerError(
                f"{self.name}: {what} cannot begin, because rank {self.world.rank} left "
                f"{self._unfinished} after an error: end all ranks and start them again"
            )
        try:
            work = collective(out, *arguments, group=self.group, async_op=True)
        except RuntimeError as error:
            self._unfinished = what
            raise Waiting(self.world, self.name, what).explain(error) from error
        return partial(self._finish, work, what, device, out)

    def _finish(self, work: Any, what: str, device: torch.device, out: Tensor) -> Tensor:
        waiting: Waiting | None = None  # most waits are short
        try:
            if self._on_host:
                while not _done(work):
                    waiting = waiting or Waiting(self.world, self.name, what)
                    waiting.announce()
            else:
                work.wait()
        except RuntimeError as error:
            self._unfinished = what
            raise (waiting or Waiting(self.world, self.name, what)).explain(error) from error
        except PeerError:
            self._unfinished = what
            raise
        if waiting is not None:
            waiting.over()
        return out.to(device) if self._staged else out


def _all_gather(out: Tensor, tensor: Tensor, **options: Any) -> Any:
    """Gather tensors of one shape into one, with the function that torch 2.13 renamed."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, tensor, **options)


def _done(work: Any) -> bool:
    """Wait for `work` for one slice; whether it is done. Raises RuntimeError if it failed."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises what went wrong, unless it was done just now
    return True


def host_link(world: World) -> Link:
    """The host group as the main thread uses it outside a step; its bytes are not counted."""
    return Link(world, world.host_group, CollectiveCounters(), "the host group")


# -----------------------------------------------------------------------------
# Work whose failure on one rank all ranks learn of, and values that all must have alike.

T = TypeVar("T")


def run_on_all_ranks(world: World, work: Callable[[], T]) -> list[T]:
    """Run `work` on this rank and return what all ranks' calls returned, by rank.

    Called by all ranks, in the main thread; it ends when every rank's work has ended, so it is a
    barrier too. Where the work of some ranks raises, those ranks raise their own error and the
    others the first failing rank's (its class if it is a DistcacheError, else PeerError), so
    that nobody waits for a rank that gave up. Values must be picklable. Raises PeerError naming
    the ranks that do not come within `world.timeout_s`.
    """
    value = b""
    caught: Exception | None = None
    failure: tuple[type[DistcacheError], str] | None = None  # what others raise, and its message
    try:
        value = pickle.dumps(work())
    except Exception as error:
        caught, failure = error, (PeerError, f"{type(error).__name__}: {error}")
        if isinstance(error, DistcacheError):
            failure = type(error), str(error)
    outcomes = host_link(world).gather_objects((value, failure), _name_of(work))
    if caught is not None:
        raise on_all_ranks(caught)
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            kind, message = failure
            raise on_all_ranks(_told(kind, rank, message))
    return [pickle.loads(value) for value, _ in outcomes]


def _name_of(work: Callable[[], Any]) -> str:
    """What a rank that waits for the others' part of `work` says that it waits in."""
    return getattr(work, "__qualname__", type(work).__name__).partition(".<locals>")[0]


def _told(kind: type[DistcacheError], rank: int, message: str) -> DistcacheError:
    """The error of `rank`, for other ranks. Made here: a name for it in the frame that raises it
    would be a cycle, which keeps what the frames hold until the garbage is collected."""
    error = kind(f"rank {rank}: {message}")
    error.from_rank = rank
    return error


def require_equal(world: World, values: Mapping[str, Any]) -> None:
    """Raise ConfigError on every rank unless all ranks give equal `values`; called by all ranks.

    The error names the first few keys that differ, with every value and the ranks that have it.
    Values must be picklable; those with the same `repr` are equal.
    """
    way_out = "start all ranks with the same configuration, data and package versions"
    raise_if_different(run_on_all_ranks(world, lambda: dict(values)), way_out)


def run_on_rank0(world: World, action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 and hand its value (picklable) to every rank; all ranks call this.

    Where it raises, every rank raises, as in `run_on_all_ranks`.
    """

    def work() -> Any:
        return action() if world.is_first else None

    work.__qualname__ = _name_of(action)
    return run_on_all_ranks(world, work)[0]


def agree_on_versions(world: World, hybrid: bool = False) -> None:
    """Compare the package versions of all ranks; called by all ranks before they build anything.

    Raises ConfigError on every rank for a difference that matters, with the values and their ranks;
    logs a warning on rank 0 for one that does not. `hybrid`: TorchRec shards the tables.
    """
    found = run_on_all_ranks(world, versions_here)
    # Plans and rows travel between ranks as distcache lays them out, torch computes the steps, and
    # NumPy draws each node's initial rows; TorchRec and fbgemm exchange and update rows in hybrid;
    # Triton compiles the kernels by which each rank updates its own copy of a row on a GPU.
    needed = {"distcache", SOURCE, "torch", "numpy"}
    needed |= {"triton"} if world.device.type == "cuda" else set()
    needed |= {"torchrec", *FBGEMM_DISTRIBUTIONS} if hybrid else set()
    raise_if_different(
        [{k: v for k, v in seen.items() if k in needed} for seen in found],
        "install the same packages on all nodes "
        f"(compared are {', '.join(('python', *DISTRIBUTIONS))})",
    )
    others = differences(found)  # what is left
    if others and world.is_first:
        log.warning("the ranks' versions differ: %s", "; ".join(others))
