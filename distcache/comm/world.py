"""The ranks of one job: nodes, process groups, and worlds made from what the caller has."""

from __future__ import annotations

import itertools
import os
import socket
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from distcache.comm.rendezvous import (
    LEAST_TIMEOUT_S,
    Place,
    announce_process,
    exchange,
    find_place,
    first_line,
    generation,
    raise_if_different,
    stale_keys_remedy,
    whole_number,
)
from distcache.errors import ConfigError, PeerError

# -----------------------------------------------------------------------------
# The nodes of a job: which ranks share a machine's memory, as all ranks agree before they start.
#
# A node is what one torchrun agent starts: two agents on one machine are two nodes.


@dataclass(frozen=True)
class Nodes:
    """`sizes[n]`: ranks of node n; the ranks of a node are consecutive, nodes in rank order."""

    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(self.sizes)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """First rank of each node."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    def of(self, rank: int) -> int:
        """The node of `rank`."""
        return bisect_right(self.firsts, rank) - 1

    def ranks(self, node: int) -> range:
        """The ranks of `node`."""
        return range(self.firsts[node], self.firsts[node] + self.sizes[node])


@dataclass(frozen=True)
class Claim:
    """What a rank says of itself before there is any process group. `group`: torchrun's number of
    its agent, or None; `device`, `backend`: what it picked; `error`: why it cannot take part;
    `size`: how many ranks it was told of."""

    local_rank: int
    local_size: int
    host: str
    group: str | None
    device: str
    backend: str
    error: str | None = None
    size: int = 0


def agree_on_claims(claims: Sequence[Claim]) -> Nodes:
    """The nodes that the ranks' claims amount to; the same value or ConfigError on every rank."""
    raise_if_different(
        [{"WORLD_SIZE": str(claim.size)} for claim in claims], "start all with one number"
    )
    for rank, claim in enumerate(claims):
        if claim.error is not None:
            raise ConfigError(f"rank {rank} ({claim.host}): {claim.error}")
    where = [{"trainer.device": own.device, "trainer.backend": own.backend} for own in claims]
    raise_if_different(where, "set these keys to what all nodes have", "the nodes")
    starts = [0, *(rank for rank, claim in enumerate(claims) if rank and claim.local_rank == 0)]
    nodes = Nodes(tuple(stop - start for start, stop in pairwise([*starts, len(claims)])))
    for first, size in zip(starts, nodes.sizes, strict=True):
        head, members = claims[first], claims[first : first + size]
        want = [(local, size, head.host, head.group) for local in range(size)]
        if [(one.local_rank, one.local_size, one.host, one.group) for one in members] != want:
            seen = [
                f"rank {at} on {one.host} has LOCAL_RANK={one.local_rank}, "
                f"LOCAL_WORLD_SIZE={one.local_size}, GROUP_RANK={one.group}"
                for at, one in enumerate(claims[first : first + max(size, head.local_size)], first)
            ]
            raise ConfigError(
                f"rank {first} ({head.host}) says that it is the first of {head.local_size} ranks "
                "on one node: these must be numbered one after the other and run on one machine "
                f"under one agent, as torchrun does; but {'; '.join(seen)}"
            )
    return nodes


def nodes_of_names(names: Sequence[str]) -> Nodes:
    """The nodes of ranks that know only the name of their machine; ConfigError where those of one
    name are not consecutive."""
    sizes: dict[str, int] = {}
    for rank, name in enumerate(names):
        if name in sizes and names[rank - 1] != name:
            local = [at for at, other in enumerate(names) if other == name]
            raise ConfigError(
                f"the ranks on {name} are {local}: number the ranks of a node in a row, as "
                "torchrun does, or pass a process_group whose ranks are"
            )
        sizes[name] = sizes.get(name, 0) + 1
    return Nodes(tuple(sizes.values()))


_number = itertools.count()
"""Worlds that this process has opened so far, as many as every other rank's."""


@dataclass(frozen=True)
class World:
    """Who this rank is, its device, and one process group per thread that communicates.

    `device_group`: rows, gradients and control, in program order; the thread that moves rows uses
    it too, while the main thread does not (`engine.step`).
    `host_group`: gloo, small CPU tensors and objects, from the main thread only.
    `planning_group`: gloo, the planners' exchanges, used by one thread of the planner at a time.
    A world of one rank may have none (None): it never communicates.
    `node_sizes`: ranks of each node; () is one node. `is_guest`: torch.distributed is somebody
    else's, and the groups alone are this world's.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    timeout_s: float
    store: dist.Store
    device_group: dist.ProcessGroup | None = None
    host_group: dist.ProcessGroup | None = None
    planning_group: dist.ProcessGroup | None = None
    node_sizes: tuple[int, ...] = ()
    is_guest: bool = False

    @cached_property
    def nodes(self) -> Nodes:
        """Which ranks share a node."""
        return Nodes(self.node_sizes or (self.size,))

    @property
    def first_local(self) -> int:
        """The first rank of this node."""
        return self.rank - self.local_rank

    @property
    def is_first(self) -> bool:
        """Whether this is global rank 0, which writes files and the screen."""
        return self.rank == 0


def open_world(
    device: str = "auto",
    backend: str = "auto",
    timeout_s: float = 300.0,
    store: dist.Store | None = None,
) -> World:
    """Join the job that torchrun's environment describes; without one, a world of one rank.

    `store`: a command's, where its ranks meet, record failures and look for them; None is the
    process groups' own. Raises ConfigError for a device or backend that some node does not have,
    and for ranks whose places do not make nodes, on every rank; PeerError naming ranks that do not
    come, or where the store or a rank goes away while the groups are made.
    """
    place = find_place()
    rank, size = place.rank, place.world_size
    timeout, number = timedelta(seconds=timeout_s), next(_number)
    where, claim = _claim(place, device, backend)
    own: dist.Store = dist.HashStore()
    if store is not None:  # before torch's rendezvous, which waits for the ranks it was told of
        # A rank may still be importing.
        nodes = _meet(store, number, rank, claim, max(timeout_s, LEAST_TIMEOUT_S))
    if "RANK" in os.environ:
        # The store outlives a world, with the addresses of its groups: the next one needs its own.
        shared, _, _ = next(iter(dist.rendezvous("env://", rank, size, timeout=timeout)))
        shared.set_timeout(timeout)
        own = dist.PrefixStore(f"distcache/world/{generation()}/{number}", shared)
    if store is None:
        nodes = _meet(own, number, rank, claim, timeout_s)
    name = claim.backend
    # NCCL's watchdog ends the process when it sees a timeout: later than the rank itself does.
    patience = timeout + timedelta(seconds=30) if name == "nccl" else timeout
    if where.type == "cuda":
        torch.cuda.set_device(where)
    try:
        how = {"timeout": patience, "rank": rank, "world_size": size}
        dist.init_process_group(name, store=own, device_id=bound_device(name, where, size), **how)
        store = store or dist.distributed_c10d._get_default_store()
        announce_process(store, rank)
        return World(
            rank=rank,
            size=size,
            local_rank=place.local_rank,
            local_size=place.local_size,
            device=where,
            backend=name,
            timeout_s=timeout_s,
            device_group=dist.distributed_c10d._get_default_group(),
            host_group=dist.new_group(backend="gloo", timeout=timeout),
            planning_group=dist.new_group(backend="gloo", timeout=timeout),
            store=store,
            node_sizes=nodes.sizes,
        )
    except RuntimeError as error:  # torch's own are: DistNetworkError, DistStoreError, ...
        if dist.is_initialized():  # in part: else the next world, or a run, would take it for one
            with suppress(RuntimeError):
                dist.destroy_process_group()
        raise PeerError(
            f"rank {rank} of {size} could not join the others ({first_line(error)}): the "
            "usual reason is a rank, or the agent that serves the store, that ended while the job "
            "started; see what the other ranks say. Where it speaks of an address, set "
            "GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME) to a network interface of this machine"
        ) from error


def _claim(place: Place, device: str, backend: str) -> tuple[torch.device, Claim]:
    """This rank's device, and what it says of itself; why, where it has no such device.

    `device`: `auto`, `cpu` or `cuda`; local ranks share GPUs round-robin. `backend`: of the device
    group, `auto`, `gloo` or `nccl`, which wants a GPU per rank.
    """
    where, name, refused = torch.device("cpu"), "gloo", None
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and device != "cpu" else 0
    if gpus:
        where = torch.device("cuda", place.local_rank % gpus)
        name = "nccl" if gpus >= place.local_size else "gloo"
    elif device == "cuda":
        refused = "trainer.device=cuda, but torch sees no CUDA device: use trainer.device=cpu"
    if backend == "nccl" and gpus < place.local_size:
        refused = refused or (
            f"trainer.backend=nccl needs a GPU per rank: {place.local_size} local ranks, {gpus} "
            "GPUs; use trainer.backend=gloo, whose ranks may share a GPU"
        )
    name = name if backend == "auto" or refused else backend
    agent = (socket.gethostname(), os.environ.get("GROUP_RANK"))
    own = (where.type, name, refused, place.world_size)
    return where, Claim(place.local_rank, place.local_size, *agent, *own)


def bound_device(backend: str, device: torch.device, size: int) -> torch.device | None:
    """The device that the device group of `size` ranks is bound to, None for no device.

    Bound to a device, NCCL makes its communicator with the group, and not in the midst of a step,
    in whichever thread comes first.
    """
    return device if backend == "nccl" and size > 1 else None


def _meet(store: dist.Store, number: int, rank: int, own: Claim, timeout_s: float) -> Nodes:
    """The nodes on which all ranks agree, in the world of this `number`."""
    found = exchange(store, f"distcache/claim/{number}", (rank, own.size), asdict(own), timeout_s)
    if own.error is not None:
        raise ConfigError(own.error)
    known = {of.name for of in fields(Claim)}  # another version's may have others, and is refused
    claims = [Claim(**{k: v for k, v in claim.items() if k in known}) for claim in found]
    nodes = agree_on_claims(claims)
    if len(found) != own.size:  # rank 0 does not know of this one, so it is not among them
        raise ConfigError(
            f"the ranks differ: WORLD_SIZE is {own.size} on rank {rank}, {len(found)} on rank 0: "
            "start all with one number"
        )
    return nodes


def close_world(world: World, orderly: bool = True) -> None:
    """Leave the job; of a world within somebody else's job, let go of its own groups alone.

    `orderly` ends wait for one another first. A process that ends with live gloo groups aborts now
    and then, so every end comes here.
    """
    if not dist.is_initialized():
        return
    if orderly and world.host_group is not None:
        dist.barrier(group=world.host_group)
    elif world.backend == "nccl" and world.device_group is not None:
        # Without it, leaving waits for kernels that never end.
        world.device_group.abort()
    if not world.is_guest:
        dist.destroy_process_group()
        return
    for group in filter(None, (world.device_group, world.host_group, world.planning_group)):
        dist.destroy_process_group(group)


# -----------------------------------------------------------------------------
# A world made from what the caller already has: torch.distributed's default group, or nothing.
#
# A module inside somebody else's training loop takes the ranks as they are, and makes groups of its
# own, so that its collectives never meet those of the loop (DDP's, for one).


def require_group(use: str) -> None:
    """Raise ConfigError where this is one of several ranks without an initialised process group."""
    size = whole_number("WORLD_SIZE", 1)
    if size > 1 and not dist.is_initialized():
        raise ConfigError(
            f"WORLD_SIZE={size}, but torch.distributed is not initialised, so the ranks' weights "
            f"would drift apart: call torch.distributed.init_process_group before {use}, or unset "
            "WORLD_SIZE to train alone"
        )


def current_world(
    device: torch.device, process_group: dist.ProcessGroup | None = None, timeout_s: float = 300.0
) -> World:
    """The world of the ranks of `process_group` (None: all), with new groups of its own.

    Called by all of these ranks. Without an initialised torch.distributed it is a world of one
    rank, without groups. Rows travel by NCCL where `process_group` has it for CUDA tensors and
    `device` is one, else by gloo. Raises ConfigError where the local ranks of a node (those of
    one host name) are not numbered in a row.
    """
    if not dist.is_initialized():
        if process_group is not None:
            raise ConfigError("process_group was given, but torch.distributed is not initialised")
        return World(0, 1, 0, 1, device, "none", timeout_s, dist.HashStore(), is_guest=True)
    ranks = dist.get_process_group_ranks(process_group)
    rank, size = dist.get_rank(process_group), len(ranks)
    nccl = device.type == "cuda" and "nccl" in dist.get_backend_config(process_group).lower()
    backend = "nccl" if nccl else "gloo"

    def new_group(backend: str, bound: torch.device | None = None) -> dist.ProcessGroup:
        try:
            return dist.new_group(
                ranks,
                timeout=timedelta(seconds=timeout_s),
                backend=backend,
                use_local_synchronization=process_group is not None,
                device_id=bound,
            )
        except RuntimeError as error:
            raise PeerError(
                f"rank {rank} of {size} could not make a process group with the others "
                f"({first_line(error)}){stale_keys_remedy()}"
            ) from error

    host_group = new_group("gloo")
    seen: list = [None] * size
    dist.all_gather_object(seen, (socket.gethostname(), next(_number)), group=host_group)
    nodes = nodes_of_names([host for host, _ in seen])
    local = nodes.ranks(nodes.of(rank))
    shared = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"distcache/{generation()}/{ranks[0]}/{seen[0][1]}", shared)
    announce_process(store, rank)
    bound = bound_device(backend, device, size)
    if dist.distributed_c10d._get_default_group().bound_device_id is not None:
        bound = None  # new groups are bound to what that is
    device_group = new_group(backend, bound)
    planning_group = new_group("gloo")
    return World(
        rank=rank,
        size=size,
        local_rank=rank - local[0],
        local_size=len(local),
        device=device,
        backend=backend,
        timeout_s=timeout_s,
        device_group=device_group,
        host_group=host_group,
        planning_group=planning_group,
        store=store,
        node_sizes=nodes.sizes,
        is_guest=True,
    )
