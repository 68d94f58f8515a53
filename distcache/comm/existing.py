"""A world made from what the caller already has: torch.distributed's default group, or nothing.

The trainer opens its own world (`world.open_world`); a module inside somebody else's training loop
takes the ranks as they are, and makes groups of its own so that its collectives never meet those
of the loop (DDP's, for one).
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from distcache.comm.liveness import announce_process
from distcache.comm.nodes import Nodes, nodes_of_names
from distcache.comm.world import World, make_node_group
from distcache.errors import ConfigError

_number = itertools.count()
"""Worlds that this process has made so far: keeps their keys in the store apart."""


def current_world(
    device: torch.device,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = 300.0,
) -> World:
    """The world of the ranks of `process_group` (None: all), with new groups of its own.

    Called by all of these ranks. Without an initialised torch.distributed it is a world of one
    rank, without groups. Rows travel by NCCL where `process_group` has it for CUDA tensors and
    `device` is one, else by gloo. Raises ConfigError where the local ranks of a node (those of
    one host name) are not numbered in a row.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise ConfigError("process_group was given, but torch.distributed is not initialised")
        return _lone_world(device, timeout_s)
    ranks = dist.get_process_group_ranks(process_group)
    rank, size = dist.get_rank(process_group), len(ranks)
    nccl = device.type == "cuda" and "nccl" in dist.get_backend_config(process_group).lower()
    backend = "nccl" if nccl else "gloo"

    def new_group(backend: str, members: Sequence[int] = range(size)) -> dist.ProcessGroup:
        timeout = timedelta(seconds=timeout_s)
        own = [ranks[member] for member in members]
        if process_group is None:
            return dist.new_group(own, backend=backend, timeout=timeout)
        return dist.new_group(own, timeout=timeout, backend=backend, use_local_synchronization=True)

    def node_group(nodes: Nodes) -> dist.ProcessGroup | None:
        if process_group is None:
            return make_node_group(nodes, rank, lambda members: new_group(backend, members))
        # Names of groups count those that a rank has: all ranks make one, alone on a node too.
        return new_group(backend, nodes.ranks(nodes.of(rank))) if nodes.count > 1 else None

    host_group = new_group("gloo")
    seen: list = [None] * size
    dist.all_gather_object(seen, (socket.gethostname(), next(_number)), group=host_group)
    nodes = nodes_of_names([host for host, _ in seen])
    local = nodes.ranks(nodes.of(rank))
    shared = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"distcache/{ranks[0]}/{seen[0][1]}", shared)
    announce_process(store, rank)
    return World(
        rank=rank,
        size=size,
        local_rank=rank - local[0],
        local_size=len(local),
        device=device,
        backend=backend,
        timeout_s=timeout_s,
        device_group=new_group(backend),
        host_group=host_group,
        planning_group=new_group("gloo"),
        store=store,
        node_sizes=nodes.sizes,
        node_group=node_group(nodes),
    )


def leave_world(world: World, orderly: bool = True) -> None:
    """Let go of the groups that `current_world` made, and of nothing else.

    `orderly` ends wait for one another first.
    """
    made = (world.node_group, world.device_group, world.host_group, world.planning_group)
    if orderly and world.host_group is not None:
        dist.barrier(group=world.host_group)
    elif world.backend == "nccl":
        # Without it, leaving waits for kernels that never end.
        for group in filter(None, (world.node_group, world.device_group)):
            group.abort()
    for group in made:
        if group is not None:
            dist.destroy_process_group(group)


def _lone_world(device: torch.device, timeout_s: float) -> World:
    return World(
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        device=device,
        backend="none",
        timeout_s=timeout_s,
        device_group=None,
        host_group=None,
        planning_group=None,
        store=dist.HashStore(),
    )
