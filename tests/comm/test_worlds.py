"""Worlds of one job after each other; nodes, agreed before any group is made; work of all ranks in
one: values by rank, or every rank raises; how far each rank's clock is from rank 0's; bytes of
collectives: known payloads give known numbers, and rows for all go once to every node."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from node_cases import open_nodes
from ranks import free_port, run_ranks
from torch.nn.parallel import DistributedDataParallel

from distcache.comm.link import (
    COUNTED,
    DENSE,
    PLANNING,
    ROWS,
    CollectiveCounters,
    Link,
    all_reduce_bytes,
    bytes_beyond,
    count_collectives,
    gather_bytes,
    require_equal,
    run_on_all_ranks,
    run_on_rank0,
    summing_hook,
)
from distcache.comm.rendezvous import Place, differences, is_secondary
from distcache.comm.world import (
    Claim,
    Nodes,
    World,
    _claim,
    agree_on_claims,
    bound_device,
    close_world,
    current_world,
    nodes_of_names,
    open_world,
)
from distcache.errors import ConfigError, DistcacheError, PeerError


def many_worlds(rank: int, size: int, port: int) -> tuple[float, int]:
    """Five worlds, each with a group more, and one that the caller makes by himself; a world whose
    second group cannot be made, as where a rank has gone; then another one, whose store is served
    at a `port` of its own: rank 0 may still serve the first one."""
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
    make = dist.new_group

    def fail(*args, **kwargs):
        raise RuntimeError("[x/pair.cc:12] Connection closed by peer. This is typically caused ...")

    dist.new_group = fail
    with pytest.raises(PeerError, match=r"not join the others \(Connection closed by peer\):"):
        open_world("cpu", "gloo", 30)
    assert not dist.is_initialized()
    dist.new_group = make
    os.environ["MASTER_PORT"] = str(port)
    world = open_world("cpu", "gloo", 30)
    close_world(world)
    return total.item(), world.size


def test_one_world_after_the_other_and_after_one_that_was_joined_in_part():
    assert run_ranks(many_worlds, 2, free_port(), timeout=100) == [(2 * 5 * 4 * 2, 2)] * 2


def claims(*sizes: int) -> list[Claim]:
    """What ranks on nodes of `sizes` ranks say."""
    return [
        Claim(local, size, f"host{node}", str(node), "cpu", "gloo", None, sum(sizes))
        for node, size in enumerate(sizes)
        for local in range(size)
    ]


def test_places() -> None:
    nodes = agree_on_claims(claims(2, 1, 3))
    assert nodes == Nodes((2, 1, 3))
    assert [nodes.of(rank) for rank in range(6)] == [0, 0, 1, 2, 2, 2]
    assert [list(nodes.ranks(node)) for node in range(3)] == [[0, 1], [2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (1, {"local_rank": 0}, "rank 0 .* the first of 2 ranks on one node: .* rank 1 .*_RANK=0,"),
        (3, {"local_size": 1}, "rank 2 .*; but rank 2 .*; rank 3 on host1 .*LOCAL_WORLD_SIZE=1"),
        (2, {"local_size": 0}, r"rank 2 \(host1\) says that it is the first of 0 ranks"),
        (0, {"local_size": -1}, r"rank 0 \(host0\) says that it is the first of -1 ranks"),
        (1, {"host": "other"}, "on one machine .*; but rank 0 on host0 .*; rank 1 on other has"),
        (3, {"group": "0"}, "under one agent, .* GROUP_RANK=1; .* GROUP_RANK=0"),
        (2, {"backend": "nccl"}, "nodes differ: trainer.backend is 'gloo' on .*; set these keys"),
        (2, {"device": "cuda"}, "trainer.device is 'cpu' on ranks 0, 1, 3 and 'cuda' on rank 2;"),
        (3, {"error": "no GPU here"}, "rank 3 .host1.: no GPU here"),
        (3, {"size": 5}, "WORLD_SIZE is '4' on ranks 0-2 and '5' on rank 3; start all with one"),
    ],
)
def test_what_cannot_work_is_refused(rank: int, change: dict, message: str) -> None:
    found = claims(2, 2)
    found[rank] = replace(found[rank], **change)
    with pytest.raises(ConfigError, match=message):
        agree_on_claims(found)


@pytest.mark.parametrize(
    ("wanted", "gpus", "message"),
    [
        (("cuda", "auto"), 0, "but torch sees no CUDA device: use trainer.device=cpu"),
        (("auto", "nccl"), 1, "trainer.backend=nccl needs a GPU per rank: 2 local ranks, 1 GPUs;"),
        (("cpu", "nccl"), 4, "2 local ranks, 0 GPUs; use trainer.backend=gloo"),
        (("auto", "gloo"), 1, None),
    ],
)
def test_a_rank_says_why_it_cannot_have_what_is_asked(wanted, gpus, message, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    where, claim = _claim(Place(0, 2, 0, 2), *wanted)
    assert (claim.error is None) if message is None else (message in claim.error)
    assert (where.type, claim.backend) == (
        "cuda" if gpus and "cpu" not in wanted else "cpu",
        "gloo",
    )


def test_communicators_are_made_at_once() -> None:
    device = torch.device("cuda", 1)
    assert bound_device("nccl", device, 2) == device
    assert bound_device("nccl", device, 1) is None
    assert bound_device("gloo", device, 2) is None


def bound_to(rank: int, size: int) -> list[tuple[str, torch.device | None]]:
    """The backends of the groups that a world makes of somebody else's NCCL groups, and what they
    are bound to; gloo's are made in their place."""
    dist.init_process_group("gloo")
    asked, make = [], dist.new_group

    def made(ranks: list[int], backend: str, device_id: torch.device | None, **how: Any) -> Any:
        asked.append((backend, device_id))
        return make(ranks, backend="gloo", **how)

    dist.new_group, dist.get_backend_config = made, lambda group: "cpu:gloo,cuda:nccl"
    world = current_world(torch.device("cuda", 0), timeout_s=60)
    dist.new_group = make
    close_world(replace(world, backend="gloo"))
    dist.destroy_process_group()
    return asked


def test_a_guests_communicator_is_made_at_once_too() -> None:
    others = [("gloo", None)]
    device = [("nccl", torch.device("cuda", 0))]
    assert run_ranks(bound_to, 2) == [[*others, *device, *others]] * 2


def test_agents_of_one_machine_are_nodes() -> None:
    two_agents = [replace(claim, host="here") for claim in claims(2, 2)]
    assert agree_on_claims(two_agents) == Nodes((2, 2))


def test_ranks_that_go_round_the_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the ranks on a are \[0, 2\]: number the ranks"):
        nodes_of_names(["a", "b", "a", "b"])
    assert nodes_of_names(["a", "a", "b"]) == Nodes((2, 1))


def nodes_of(world: World) -> tuple:
    """Rank, nodes, first rank of its node, and local rank of this rank, which then leaves."""
    close_world(world)
    return world.rank, world.nodes.sizes, world.first_local, world.local_rank


def nodes_of_ranks(rank: int, size: int) -> tuple:
    """Ranks dealt out to the nodes in turn are refused; the next jobs have nodes."""
    os.environ |= {"LOCAL_RANK": str(rank // 2), "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(DistcacheError) as caught:
        open_world("cpu", "gloo", 30)
    assert not dist.is_initialized()
    return str(caught.value), [nodes_of(open_nodes(rank, sizes)) for sizes in ((4,), (1, 3))]


def test_every_rank_knows_the_nodes_or_says_why() -> None:
    messages, found = zip(*run_ranks(nodes_of_ranks, 4), strict=True)
    assert len(set(messages)) == 1 and "as torchrun does" in messages[0]
    assert found[0] == [(0, (4,), 0, 0), (0, (1, 3), 0, 0)]
    assert found[2] == [(2, (4,), 0, 2), (2, (1, 3), 1, 1)]


def in_a_part(rank: int, size: int) -> list[tuple]:
    """Nodes among the ranks of a process group that is not all."""
    dist.init_process_group("gloo")
    socket.gethostname = lambda: ("a", "b", "b", "c")[rank]
    members = dist.new_group([1, 2, 3])
    worlds = [current_world(torch.device("cpu"), members, 60) for _ in range(2 if rank else 0)]
    found = [nodes_of(world) for world in worlds]
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_nodes_of_a_process_group() -> None:
    parts = [(0, (2, 1), 0, 0), (1, (2, 1), 0, 1), (2, (2, 1), 2, 0)]
    assert run_ranks(in_a_part, 4) == [[], *([part] * 2 for part in parts)]


def outcomes(rank: int, size: int) -> list[str]:
    world = open_world("cpu", timeout_s=60)
    seen = []

    def fail(kind: type[Exception], *ranks: int, first: bool = False):
        def work() -> int:
            if rank in ranks:
                raise kind(f"no {rank}")
            return rank

        try:
            seen.append(str((run_on_rank0 if first else run_on_all_ranks)(world, work)))
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
            assert is_secondary(error) == (rank not in ranks), "which rank was the cause"

    fail(ConfigError)
    fail(ConfigError, 1)
    fail(KeyError, 0, 2)
    fail(ConfigError, first=True)
    fail(ConfigError, 0, first=True)
    require_equal(world, {"rows": 4})
    with pytest.raises(ConfigError) as caught:
        require_equal(world, dict.fromkeys("abcde", rank))
    seen.append(str(caught.value))
    close_world(world)
    return seen


def test_all_ranks_learn_of_a_failure_and_of_a_difference() -> None:
    first, second, third = run_ranks(outcomes, 3)
    assert first[:5] == [
        "[0, 1, 2]",
        "ConfigError: rank 1: no 1",
        "KeyError: 'no 0'",
        "0",
        "ConfigError: no 0",
    ]
    assert second[:5] == [
        "[0, 1, 2]",
        "ConfigError: no 1",
        f"{PeerError.__name__}: rank 0: KeyError: 'no 0'",
        "0",
        "ConfigError: rank 0: no 0",
    ]
    assert third[1:] == ["ConfigError: rank 1: no 1", "KeyError: 'no 2'", *second[3:]]
    assert first[5].startswith("the ranks differ: a is 0 on rank 0, 1 on")
    assert "c is 0 on rank 0, 1 on rank 1 and 2 on rank 2 (and 2 more); start" in first[5]
    assert first[5:] == second[5:]


def test_a_difference_names_every_value_and_its_ranks() -> None:
    same = {"rows": 4, "seed": 0}
    seen = [same, same, same, {"rows": 5, "seed": 0}, {"seed": 0}, {"rows": 4, "seed": 7}]
    assert differences(seen) == [
        "rows is 4 on ranks 0-2, 5, 5 on rank 3 and not there on rank 4",
        "seed is 0 on ranks 0-4 and 7 on rank 5",
    ]
    assert differences([same, dict(same)]) == differences([]) == []


def test_formulas() -> None:
    assert [all_reduce_bytes(1200, w) for w in (1, 2, 3, 4)] == [0, 1200, 1600, 1800]
    assert [gather_bytes(1200, w) for w in (1, 2, 3, 4)] == [0, 600, 800, 900]
    assert bytes_beyond(80, [3, 5, 2], range(1, 2)) == 40
    assert bytes_beyond(80, [3, 5, 2], range(1, 3)) == 24
    assert bytes_beyond(0, [0, 0, 0], range(1, 2)) == 0


def _call(name: str, rank: int, dtype: torch.dtype) -> None:
    """One collective of three ranks with payloads of twelve elements."""
    twelve, four = torch.ones(12, dtype=dtype), torch.ones(4, dtype=dtype)
    fours = [torch.zeros(4, dtype=dtype) for _ in range(3)]
    call = getattr(dist, name)
    if name in ("all_reduce", "broadcast"):
        call(*((twelve,) if name == "all_reduce" else (twelve, 0)))
    elif name == "all_to_all_single":
        sizes = [[2, 4, 6][rank]] * 3
        out = torch.zeros(sum(sizes), dtype=dtype)
        call(output=out, input=twelve, output_split_sizes=sizes, input_split_sizes=[2, 4, 6])
    elif name in ("all_gather", "reduce_scatter"):
        call(*((fours, four) if name == "all_gather" else (four, fours)))
    else:
        gathers = name.startswith("all_gather")
        call(*((twelve, four) if gathers else (four, twelve)), async_op=True).wait()


def _collectives(rank: int, size: int) -> tuple:
    """What is counted of each collective, on nodes of two ranks and of one."""
    world = open_nodes(rank, (2, 1))
    before = {name: getattr(dist, name) for name in COUNTED if hasattr(dist, name)}
    seen = {}
    for name in before:
        if name == "all_to_all":  # gloo has none
            continue
        for dtype in (torch.float32, torch.int64):
            counters = CollectiveCounters(world.nodes, rank)
            with count_collectives(counters):
                _call(name, rank, dtype)
            counted = counters.values()
            seen[name, dtype] = counted, counted.pop("inter_node_bytes")
    try:
        with count_collectives(CollectiveCounters()):
            raise KeyError
    except KeyError:
        pass
    assert all(getattr(dist, name) is original for name, original in before.items())
    outside, hooked = CollectiveCounters(), CollectiveCounters()
    with count_collectives(outside):
        dist.broadcast_object_list([1], src=0)
        dist.all_reduce(torch.ones(3), group=world.host_group)
    model = DistributedDataParallel(torch.nn.Linear(4, 2, bias=False))
    model.register_comm_hook(world.device_group, summing_hook(hooked))
    with count_collectives(hooked):
        model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    gradient = model.module.weight.grad.tolist()
    del model
    close_world(world)
    return seen, outside.values(), hooked.values(), gradient


def test_known_payloads_are_counted() -> None:
    for rank, (seen, outside, hooked, gradient) in enumerate(run_ranks(_collectives, 3)):
        assert len(seen) >= 2 * 7
        for (name, dtype), (counted, between) in seen.items():
            # Two thirds of a buffer leave, twice that in an all-reduce; a ring's last rank of a
            # node hands all of it on.
            elements = {"all_reduce": 16, "all_to_all_single": [10, 8, 6][rank]}.get(name, 8)
            beyond = (
                [6, 6, 6][rank] if name == "all_to_all_single" else [0, elements, elements][rank]
            )
            mine, other = (ROWS, PLANNING) if dtype.is_floating_point else (PLANNING, ROWS)
            assert counted == {mine: elements * dtype.itemsize, other: 0, DENSE: 0}, (name, dtype)
            assert between == (beyond * 4 if dtype.is_floating_point else 0), (name, dtype)
        assert outside == {ROWS: 16, PLANNING: 0, DENSE: 0}
        # Summed, not averaged: the ranks give ones, twos and threes; counted as dense alone.
        assert gradient == [[6.0] * 4] * 2
        assert hooked == {ROWS: 0, PLANNING: 0, DENSE: 8 * 4 * 2 * 2 // 3}


def gathered_on_nodes(
    rank: int, size: int, layouts: list[tuple[int, ...]]
) -> list[tuple[int, int]]:
    """Bytes sent, and between nodes, where rows of all ranks are gathered, and checked."""
    found = []
    for sizes in layouts:
        world = open_nodes(rank, sizes)
        counters = CollectiveCounters(world.nodes, rank)
        link = Link(world, world.device_group, counters, "a test")
        for step in range(3):
            counts = [(3 * other + step) % 4 for other in range(size)]  # none, for some
            for each in (counts, [2] * size, [0] * size):
                rows = torch.full((each[rank], 2), float(rank)) + step
                gathered = link.all_gather_rows(rows, each, "rows")
                want = torch.cat([torch.full((c, 2), r + step) for r, c in enumerate(each)])
                assert torch.equal(gathered, want.float()), (sizes, step)
        found.append((counters.collective_bytes, counters.inter_node_bytes))
        close_world(world)
    return found


def test_rows_of_all_ranks_are_gathered_round_a_ring() -> None:
    """Padded to the rank that has most; what leaves a node is what its last rank hands on."""
    layouts = [(4,), (2, 2), (1, 3), (2, 1, 1), (1, 1, 1, 1)]
    by_rank = run_ranks(gathered_on_nodes, 4, layouts)
    sent = 3 * 8 * 3 * (3 + 2)
    for sizes, *of_ranks in zip(layouts, *by_rank, strict=True):
        last = [sum(sizes[: node + 1]) - 1 for node in range(len(sizes))] if len(sizes) > 1 else []
        assert of_ranks == [(sent, sent if rank in last else 0) for rank in range(4)], sizes
