"""The ranks of one job and the process groups that they share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from distcache.comm.failure import first_line
from distcache.comm.liveness import announce_process
from distcache.comm.nodes import Nodes, agree_on_nodes, claim_of, exchange_claims
from distcache.comm.rendezvous import is_launched, whole_number
from distcache.errors import ConfigError, PeerError

_WATCHDOG_S = timedelta(seconds=30)
"""How much longer than the ranks themselves NCCL's watchdog waits."""


_number = itertools.count()
"""Worlds that this process has opened so far, as many as every other rank's."""


@dataclass(frozen=True)
class World:
    """Who this rank is, its device, and one process group per thread that communicates.

    `device_group`: rows, gradients and control, in program order; the thread that moves rows uses
    it too, while the main thread does not (`pipeline.schedule`).
    `host_group`: gloo, small CPU tensors and objects, from the main thread only.
    `planning_group`: gloo, used by the planner's background thread only.
    `node_group`: this node's ranks, of the device group's kind and under the same rules; None on
    one node; a rank that is alone on its node may have one of itself, or None.
    A world of one rank may have none (None): it never communicates.
    `node_sizes`: ranks of each node; () is one node.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    backend: str
    timeout_s: float
    device_group: dist.ProcessGroup | None
    host_group: dist.ProcessGroup | None
    planning_group: dist.ProcessGroup | None
    store: dist.Store
    node_sizes: tuple[int, ...] = ()
    node_group: dist.ProcessGroup | None = None

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


def pick_device(device: str, local_rank: int) -> torch.device:
    """`auto`, `cpu` or `cuda` to this rank's device; local ranks share GPUs round-robin."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch sees no CUDA device: use device=cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def pick_backend(backend: str, device: torch.device, local_size: int) -> str:
    """`auto`, `gloo` or `nccl` to the device group's backend; NCCL wants a GPU per rank."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if backend == "auto":
        return "nccl" if gpus >= local_size and gpus > 0 else "gloo"
    if backend == "nccl" and gpus < local_size:
        raise ConfigError(
            f"trainer.backend=nccl needs a GPU per rank: {local_size} local ranks, {gpus} GPUs; "
            "use trainer.backend=gloo, whose ranks may share a GPU"
        )
    return backend


def open_world(
    device: str = "auto",
    backend: str = "auto",
    timeout_s: float = 300.0,
    store: dist.Store | None = None,
) -> World:
    """Join the job that torchrun's environment describes; without one, a world of one rank.

    `store`: where the ranks record failures and look for them; None is the process groups' own.
    Raises ConfigError for a device or backend that some node does not have, and for ranks whose
    places do not make nodes, on every rank; PeerError naming ranks that do not come, or where the
    store or a rank goes away while the groups are made.
    """
    launched = is_launched()
    rank, size = whole_number("RANK", 0), whole_number("WORLD_SIZE", 1)
    local_rank = whole_number("LOCAL_RANK", rank)
    local_size = whole_number("LOCAL_WORLD_SIZE", size)
    timeout = timedelta(seconds=timeout_s)
    own: dist.Store = dist.HashStore()
    if launched:
        # The store outlives a world, with the addresses of its groups: the next one needs its own.
        shared, _, _ = next(iter(dist.rendezvous("env://", rank, size, timeout=timeout)))
        shared.set_timeout(timeout)
        own = dist.PrefixStore(f"distcache/world/{next(_number)}", shared)
    where, name, nodes = _meet(own, (rank, size, local_rank, local_size), device, backend)
    # NCCL's watchdog ends the process when it sees a timeout: later than the rank itself does.
    patience = timeout + _WATCHDOG_S if name == "nccl" else timeout
    if where.type == "cuda":
        torch.cuda.set_device(where)
    try:
        dist.init_process_group(name, store=own, timeout=patience, rank=rank, world_size=size)
        store = store or dist.distributed_c10d._get_default_store()
        announce_process(store, rank)
        groups = {
            "device_group": dist.distributed_c10d._get_default_group(),
            "host_group": dist.new_group(backend="gloo", timeout=timeout),
            "planning_group": dist.new_group(backend="gloo", timeout=timeout),
            "node_group": make_node_group(
                nodes, rank, lambda ranks: dist.new_group(ranks, backend=name, timeout=patience)
            ),
        }
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
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        device=where,
        backend=name,
        timeout_s=timeout_s,
        store=store,
        node_sizes=nodes.sizes,
        **groups,
    )


def _meet(
    store: dist.Store, place: tuple[int, int, int, int], device: str, backend: str
) -> tuple[torch.device, str, Nodes]:
    """This rank's device, the device group's backend, and the nodes, on which all ranks agree.

    `place`: rank, world size, local rank, local size.
    """
    rank, size, local_rank, local_size = place
    refused: ConfigError | None = None
    where, name = torch.device("cpu"), "gloo"
    try:
        where = pick_device(device, local_rank)
        name = pick_backend(backend, where, local_size)
    except ConfigError as error:
        refused = error
    own = claim_of(local_rank, local_size, where.type, name, str(refused) if refused else None)
    claims = exchange_claims(store, rank, size, own)
    if refused is not None:
        raise refused
    return where, name, agree_on_nodes(claims)


def make_node_group(
    nodes: Nodes, rank: int, make: Callable[[list[int]], dist.ProcessGroup]
) -> dist.ProcessGroup | None:
    """The group of the node of `rank`, where there are several nodes and it has several ranks.

    Called by all ranks; `make` makes a group of some ranks, and all ranks make the same ones.
    """
    own = None
    for node, size in enumerate(nodes.sizes):
        if nodes.count > 1 and size > 1:
            group = make(list(nodes.ranks(node)))
            own = group if node == nodes.of(rank) else own
    return own


def close_world(world: World, orderly: bool = True) -> None:
    """Leave the job; `orderly` ends wait for one another first.

    A process that ends with live gloo groups aborts now and then, so every end comes here.
    """
    if not dist.is_initialized():
        return
    if orderly:
        dist.barrier(group=world.host_group)
    elif world.backend == "nccl":
        # Without it, leaving waits for kernels that never end.
        for group in filter(None, (world.node_group, world.device_group)):
            group.abort()
    dist.destroy_process_group()
