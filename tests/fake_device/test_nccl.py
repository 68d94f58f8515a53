"""Ranks whose collectives are in stream order, as NCCL's are: what the device promises of them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
from ebc_cases import Pooled, batches, cached, loss_of, mixed_configs, part
from fake_device.fake_cuda import DEVICE
from fake_device.process import run
from fake_device.runs import digest_of
from torch.nn.parallel import DistributedDataParallel

from distcache import lookahead


def on_ranks(call: tuple[Any, Any]) -> Any:
    """A function of rank and argument, in a job of its own."""
    from fake_device import fake_nccl  # where the device is

    work, argument = call
    with fake_nccl.nccl():
        dist.init_process_group("nccl")
        try:
            return work(dist.get_rank(), argument)
        finally:
            dist.destroy_process_group()


def promises(rank: int, _: None) -> list[list[float]]:
    """What each collective gives; none of them is waited for by the host."""
    ours = (torch.arange(3.0) + 10 * rank).cuda()
    there = torch.full((2,), rank + 1.0, device="cuda")
    waits = DEVICE.counts["host wait", "MainThread"]
    beside, found = torch.cuda.Stream(), []
    work = dist.all_reduce(there, async_op=True)
    with torch.cuda.stream(beside):
        found.append(there.clone())  # before it is done, or even made
    work.wait()
    found.append(there.clone())
    out = torch.empty(2 + 2 * rank, device="cuda")
    dist.all_to_all_single(out, ours, [rank + 1] * 2, [1, 2])
    found.append(out)
    parts = [torch.empty(2, device="cuda") for _ in range(2)]
    dist.all_gather(parts, there + rank)
    found += parts
    whole = torch.empty(4, device="cuda")
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, there + rank)
    found.append(whole)
    dist.broadcast(there, src=1)
    found.append(there)
    assert DEVICE.counts["host wait", "MainThread"] == waits
    return [value.tolist() for value in found]


def refused(rank: int, what: str) -> str:
    """The error of ranks that differ."""
    other, there = dist.new_group(backend="nccl"), torch.ones(4, device="cuda")
    try:
        if what == "operation":
            dist.all_reduce(there) if rank else dist.broadcast(there, src=0)
        elif what == "size":
            dist.all_reduce(there[rank:])
        elif what == "splits":
            dist.all_to_all_single(there, there.clone(), [2, 2], [2 - rank, 2 + rank])
        else:
            for group in (other, None) if rank else (None, other):
                dist.all_reduce(there, group=group)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    finally:  # the other rank hears of what differs as long as this one's connections are there
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{what} {rank}", "")
        store.wait([f"{what} {one}" for one in range(2)], timedelta(seconds=30))
    return ""


def test_collectives_are_in_stream_order_and_ranks_in_one_order(guard: Path) -> None:
    differ = ["operation", "size", "splits", "communicators"]
    calls = [(promises, None), *((refused, what) for what in differ)]
    (first, second), *errors = run(guard, on_ranks, calls, 2)
    assert first[0] != [3, 3] != second[0]
    assert first[1:] == [[3, 3], [0, 10], [3, 3], [4, 4], [3, 3, 4, 4], [3, 3]]
    assert second[1:] == [[3, 3], [1, 2, 11, 12], [3, 3], [4, 4], [3, 3, 4, 4], [3, 3]]
    for what, by_rank in zip(differ, errors, strict=True):
        assert all("issue in different orders: [['" in error for error in by_rank), (what, by_rank)


def with_ddp(rank: int, settings: dict[str, Any]) -> str:
    """The digest of losses and weights of a loop over a collection under DDP."""
    ebc = cached(tables=mixed_configs(), device="cuda", **settings)
    ddp, losses = DistributedDataParallel(Pooled(ebc).to("cuda")), []
    ddp.logger = Mock()  # torch's own counts times with events that are no Python's
    dense = torch.optim.SGD(ddp.parameters(), lr=0.1)
    given = [part(batch, rank, 2) for batch in batches(12, tables=mixed_configs())]
    for batch in lookahead(given, ebc) if settings.get("prefetch") else given:
        batch.dense_features = batch.dense_features.to("cuda", non_blocking=True)
        loss = loss_of(ddp, batch)
        dense.zero_grad()
        loss.backward()
        ebc.step()
        dense.step()
        losses.append(loss.detach())
    state = {name: value.cpu() for name, value in ddp.state_dict().items()}
    total = torch.stack(losses)
    dist.all_reduce(total)
    state["losses"] = total.cpu()
    ebc.close()
    digest = "".join(digest_of(state[name]) for name in sorted(state))
    return digest


SERIAL = {"rows": 260, "schedule": "serial"}


def test_a_collection_under_ddp_has_the_same_bits(guard: Path) -> None:
    """Rows that it moves ahead keep out of the way of DDP's own collectives."""
    ahead = [{"rows": 260, "prefetch": prefetch} for prefetch in (0, 1, 2, 3)]
    given = [SERIAL, SERIAL | {"prefetch": 1}, *ahead]
    found = run(guard, on_ranks, [(with_ddp, one) for one in given], 2)
    assert len({digest for by_rank in found for digest in by_rank}) == 1
