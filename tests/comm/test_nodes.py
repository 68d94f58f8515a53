"""Nodes: which ranks share one, agreed before any group is made, and refusals that say why."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from node_cases import open_nodes
from ranks import run_ranks

from distcache.comm.world import (
    Claim,
    Nodes,
    agree_on_claims,
    close_world,
    current_world,
    nodes_of_names,
    open_world,
)
from distcache.errors import ConfigError, DistcacheError

COMMAND = (["a=1", "b=2"], {"distcache": "1", "numpy": "5"})


def claims(*sizes: int) -> list[Claim]:
    """What ranks on nodes of `sizes` ranks say."""
    return [
        Claim(local, size, f"host{node}", str(node), "cpu", "gloo", None, sum(sizes), *COMMAND)
        for node, size in enumerate(sizes)
        for local in range(size)
    ]


def test_places_and_bytes_between_them() -> None:
    nodes = agree_on_claims(claims(2, 1, 3))
    assert nodes == Nodes((2, 1, 3))
    assert [nodes.of(rank) for rank in range(6)] == [0, 0, 1, 2, 2, 2]
    assert [list(nodes.ranks(node)) for node in range(3)] == [[0, 1], [2], [3, 4, 5]]
    assert [nodes.peer(rank, 0) for rank in range(6)] == [0, 1, 0, 0, 1, 0]
    assert [nodes.peer(rank, 2) for rank in range(6)] == [3, 4, 3, 3, 4, 5]
    nodes = Nodes((2, 2))
    assert nodes.bytes_between(1, [3, 0, 2, 5], 100) == 70
    assert nodes.bytes_between(1, [0, 0, 0, 0], 0) == 0
    assert [nodes.ring_bytes_between(rank, 10) for rank in range(4)] == [0, 10, 0, 10]
    assert Nodes((4,)).ring_bytes_between(3, 10) == 0


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (1, {"local_rank": 0}, "rank 0 .* the first of 2 ranks on one node: .* rank 1 .*_RANK=0,"),
        (3, {"local_size": 1}, "rank 2 .*; but rank 2 .*; rank 3 on host1 .*LOCAL_WORLD_SIZE=1"),
        (2, {"local_size": 0}, r"rank 2 \(host1\) says that it is the first of 0 ranks"),
        (0, {"local_size": -1}, r"rank 0 \(host0\) says that it is the first of -1 ranks"),
        (1, {"host": "other"}, "on one machine .*; but rank 0 on host0 .*; rank 1 on other has"),
        (3, {"group": "0"}, "under one agent, .* GROUP_RANK=1; .* GROUP_RANK=0"),
        (2, {"backend": "nccl"}, "backend is gloo on rank 0 .host0. and nccl on rank 2 .host1."),
        (2, {"device": "cuda"}, "set trainer.device to one that all nodes have"),
        (3, {"error": "no GPU here"}, "rank 3 .host1.: no GPU here"),
        (3, {"size": 5}, "WORLD_SIZE is '4' on ranks 0-2 and '5' on rank 3: start all with one"),
        (3, {"arguments": ["a=1"]}, "command lines differ: b is '2' on ranks 0-2 .* on rank 3;"),
        (3, {"versions": {"distcache": "2", "numpy": "5"}}, "and '2' on rank 3; install the same"),
    ],
)
def test_what_cannot_work_is_refused(rank: int, change: dict, message: str) -> None:
    found = claims(2, 2)
    found[rank] = replace(found[rank], **change)
    with pytest.raises(ConfigError, match=message):
        agree_on_claims(found)


def test_what_need_not_be_the_same(caplog) -> None:
    found = claims(2)
    found[1] = replace(found[1], arguments=["b=2", "a=1"], versions=COMMAND[1] | {"numba": "7"})
    assert agree_on_claims(found, rank=0) == agree_on_claims(found, rank=1) == Nodes((2,))
    assert caplog.text.count("the ranks' versions differ: numba is") == 1
    two_agents = [replace(claim, host="here") for claim in claims(2, 2)]
    assert agree_on_claims(two_agents) == Nodes((2, 2))


def test_ranks_that_go_round_the_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the ranks on a are \[0, 2\]: number the ranks"):
        nodes_of_names(["a", "b", "a", "b"])
    assert nodes_of_names(["a", "a", "b"]) == Nodes((2, 1))


def refused(rank: int, size: int) -> str:
    """Ranks dealt out to the nodes in turn."""
    os.environ |= {"LOCAL_RANK": str(rank // 2), "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(DistcacheError) as caught:
        open_world("cpu", "gloo", 30)
    assert not dist.is_initialized()
    return str(caught.value)


def test_every_rank_says_why() -> None:
    messages = run_ranks(refused, 4)
    assert len(set(messages)) == 1 and "as torchrun does" in messages[0]


def opened(rank: int, size: int) -> list:
    """Nodes of one job after another."""
    found = []
    for sizes in ((3,), (1, 2), (1, 1, 1)):
        world = open_nodes(rank, sizes)
        group = world.node_group and dist.get_process_group_ranks(world.node_group)
        found.append((world.nodes.sizes, world.first_local, world.local_rank, group))
        close_world(world)
    return found


def test_worlds_of_nodes() -> None:
    third = run_ranks(opened, 3)[2]
    assert third == [((3,), 0, 2, None), ((1, 2), 1, 1, [1, 2]), ((1, 1, 1), 2, 0, None)]


def in_a_part(rank: int, size: int) -> tuple | None:
    """Nodes among the ranks of a process group that is not all."""
    dist.init_process_group("gloo")
    socket.gethostname = lambda: ("a", "b", "b", "c")[rank]
    members = dist.new_group([1, 2, 3])
    found = None
    if rank:
        worlds = [current_world(torch.device("cpu"), members, 60) for _ in range(2)]
        for world in worlds:
            group = dist.get_process_group_ranks(world.node_group)
            found = (world.rank, world.nodes.sizes, world.local_rank, group)
            close_world(world)
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_nodes_of_a_process_group() -> None:
    sizes = (2, 1)
    ends = run_ranks(in_a_part, 4)
    assert ends == [None, (0, sizes, 0, [1, 2]), (1, sizes, 1, [1, 2]), (2, sizes, 0, [3])]
