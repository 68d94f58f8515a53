"""Worlds of one job after each other: each with its own names in the store that outlives them."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks

from distcache.comm.world import close_world, open_world
from distcache.errors import PeerError


def many_worlds(rank: int, size: int) -> float:
    """Five worlds, each with a group more, then one that the caller makes by himself."""
    total = torch.zeros(1)
    for _ in range(5):
        world = open_world("cpu", timeout_s=30)
        extra = dist.new_group(backend="gloo")
        for group in (world.device_group, world.host_group, world.planning_group, extra):
            part = torch.ones(1)
            dist.all_reduce(part, group=group)
            total += part
        dist.destroy_process_group(extra)
        close_world(world)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    dist.all_reduce(total, group=dist.new_group(backend="gloo"))
    dist.destroy_process_group()
    return total.item()


def test_one_world_after_the_other():
    assert run_ranks(many_worlds, 2, timeout=100) == [2 * 5 * 4 * 2] * 2


def joined_in_part(rank: int, size: int, port: int) -> tuple[bool, int]:
    """A world whose second group cannot be made, as where a rank has gone; then another one, whose
    store is served at a `port` of its own: rank 0 may still serve the first one."""
    make = dist.new_group

    def fail(*args, **kwargs):
        raise RuntimeError("[x/pair.cc:12] Connection closed by peer. This is typically caused ...")

    dist.new_group = fail
    with pytest.raises(PeerError, match=r"not join the others \(Connection closed by peer\):"):
        open_world("cpu", "gloo", 30)
    dist.new_group, left = make, dist.is_initialized()
    os.environ["MASTER_PORT"] = str(port)
    world = open_world("cpu", "gloo", 30)
    close_world(world)
    return left, world.size


def test_a_world_that_was_joined_in_part_leaves_nothing_behind():
    assert run_ranks(joined_in_part, 2, free_port(), timeout=60) == [(False, 2)] * 2
