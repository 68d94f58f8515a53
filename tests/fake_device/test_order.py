"""Collectives of several groups are issued in one order on all ranks, as NCCL wants them.

Those of a collection lie where whoever sums dense gradients, as DDP does, issues none: up to the
end of a forward, or behind those of its backward.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ebc_cases import STEPS, batches, cached, part
from fake_device.process import run
from scenarios import Shaker
from torch import nn
from torch.autograd import Variable

from distcache import lookahead
from distcache.engine import step_rows

FORWARD, THEIRS, BACKWARD = "forward has returned", "theirs", "backward has ended"
MOVEMENT = "distcache-movement"


class Summed(nn.Module):
    """Parameters whose gradients are summed as DDP sums them: each is sent as soon as it is there,
    or, as a static graph's first ones, when all are (`late`). That of `scale`, which is used before
    the rows are, comes after theirs."""

    def __init__(self, width: int, said: list[str]) -> None:
        super().__init__()
        self.layer, self._group = nn.Linear(width, 1), dist.new_group(backend="gloo")
        self.scale = nn.Parameter(torch.ones(1))
        self.to("cuda")
        self.said, self.late = said, False
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self._summed)

    def _summed(self, parameter: nn.Parameter) -> None:
        if not self.late:
            self._send(parameter)
        elif parameter is self.scale:
            Variable._execution_engine.queue_callback(self._send_all)

    def _send_all(self) -> None:
        for parameter in self.parameters():
            self._send(parameter)

    def _send(self, parameter: nn.Parameter) -> None:
        time.sleep(0.003)  # others' threads go on
        self.said.append(THEIRS)
        dist.all_reduce(parameter.grad.cpu(), group=self._group)


def issued(call: dict[str, Any]) -> list[str]:
    """The collectives of tensors of the device in the order of their issue; theirs, and what was
    over meanwhile."""
    dist.init_process_group("gloo")
    step_rows.HomeGradient = torch.Tensor  # the device's tensors cannot be of another class
    rank, said = dist.get_rank(), []
    names = ("all_to_all_single", "all_gather_single", "all_gather_into_tensor", "all_reduce")
    plain = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    ebc = cached(device="cuda", timeout_s=60, **call["settings"])
    model = Summed(8 * 5, said)
    ours = ebc.tables.world.device_group

    def spied(collective: Any) -> Any:
        def spy(tensor: torch.Tensor, *args: Any, group: Any = None, **how: Any) -> Any:
            if group is ours:
                said.append(f"ours, {threading.current_thread().name}")
            return collective(tensor, *args, group=group, **how)

        return spy

    for name, collective in plain.items():
        setattr(dist, name, spied(collective))
    ebc.tables.engine.delay_hook = Shaker(rank)
    stream = [part(batch, rank, 2) for batch in batches(STEPS)]
    for step, batch in enumerate(lookahead(stream, ebc)):
        model.late = step % 3 == 0
        scaled = model.scale * 2
        pooled = ebc(batch.sparse_features).values()
        said.append(FORWARD)
        time.sleep(0.003)
        model.layer(pooled * scaled).sum().backward()
        said.append(BACKWARD)
        ebc.step()
    ebc.close()
    for name, collective in plain.items():
        setattr(dist, name, collective)
    dist.barrier()
    dist.destroy_process_group()
    return said


PLACEMENTS = [
    {"rows": 300, "prefetch": 1, "state": "replicated"},
    {"rows": 300, "prefetch": 1, "state": "home", "store_access": "zero_copy"},
    {"rows": 300, "prefetch": 2, "placement": "sharded"},
]


def test_no_exchange_of_ours_lies_where_dense_gradients_are_summed(guard: Path) -> None:
    given = [{"settings": settings} for settings in PLACEMENTS]
    for first, other in run(guard, issued, given, ranks=2):
        assert first == other
        assert f"ours, {MOVEMENT}" in first
        for _ in range(STEPS):
            first = first[first.index(FORWARD) + 1 :]
            meanwhile = first[: first.index(BACKWARD)]
            first = first[len(meanwhile) :]
            assert meanwhile[:3] == [THEIRS] * 3 and len(meanwhile) > 3
            # Then the sums of rows.
            assert not {THEIRS, f"ours, {MOVEMENT}"}.intersection(meanwhile[3:])
        assert THEIRS not in first
