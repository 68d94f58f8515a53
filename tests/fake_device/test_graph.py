"""The dense part as a CUDA graph, on the device that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from fake_device.fake_cuda import CUDAGraph
from fake_device.process import run
from fake_device.runs import Training, trained
from scenarios import OPTIMIZERS, Scenario, SmallNet, table
from torch import Tensor, nn

from distcache.data.batch import Batch
from distcache.errors import ConfigError
from distcache.parallel.cached import CachedSettings

ONE_WIDTH = (table("a", 300), table("b", 40, features=2))
"""Whose bags of one id lie where the graph reads them as soon as they are summed."""
TWO_WIDTHS = (*ONE_WIDTH, table("c", 90, dim=4, pooling="mean"))

SPEC, LR = OPTIMIZERS["adam"]
CASES = {
    "one id": Scenario(ONE_WIDTH, SPEC, LR, bag=1),
    "bags": Scenario(TWO_WIDTHS, SPEC, LR, weighted=True),
}
SCHEDULES = [("lazy", 0), ("moody", 1), ("random", 2)]


@contextmanager
def replays() -> Iterator[list[int]]:
    """The replays of graphs within it, by the operations of the graph."""
    found, replay = list[int](), CUDAGraph.replay

    def counted(self: CUDAGraph) -> None:
        found.append(len(self.work))
        replay(self)

    with patch.object(CUDAGraph, "replay", counted):
        yield found


def ended(call: Training) -> tuple[str, int]:
    """A run's digest, or what it was refused for, and how many of its steps were replayed."""
    with replays() as steps:
        try:
            return trained(call).digest, len(steps)
        except ConfigError as error:
            return str(error), len(steps)


def of(case: Scenario, graph: bool, backend: str = "gloo") -> Training:
    """A run whose losses are all read in the end, with evaluation steps in between."""
    slots = (200,) if len(case.tables) == 2 else (200, 80)
    how = {"result_delay": case.steps, "cuda_graph": graph}
    return Training(case, CachedSettings("data", slots, 2, 1, **how), evals=7, backend=backend)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_graph_has_the_bits_of_what_it_replays(guard: Path, ranks: int) -> None:
    """The first step is recorded, and the last, a smaller one, is launched kernel by kernel."""
    cases = [replace(case, last_batch=10) for case in CASES.values()]
    backend = "gloo" if ranks == 1 else "nccl"
    calls = [of(case, graph, backend) for case in cases for graph in (False, True, True, True)]
    under = [("lazy", 0), *SCHEDULES] * len(cases)
    found = run(guard, ended, calls, ranks, under=under)
    for at in range(0, len(found), 4):
        plain, replayed = found[at], calls[at].case.steps - 2
        assert all(steps == 0 for _, steps in plain)
        for by_rank in found[at + 1 : at + 4]:
            assert by_rank == [(digest, replayed) for digest, _ in plain]


@dataclass(frozen=True)
class Changing(Scenario):
    """Every other ten steps have fewer samples, and one step in between has others."""

    def batch(self, step: int, rank: int = 0, world: int = 1, kind: str = "train") -> Batch:
        size = 9 if step == 4 else 16 if step // 10 % 2 else self.global_batch
        return Scenario.batch(replace(self, global_batch=size), step, rank, world, kind)


def test_the_second_step_of_a_shape_is_recorded(guard: Path) -> None:
    case = Changing(ONE_WIDTH, SPEC, LR, bag=1)
    (plain,), (found,) = run(guard, ended, [of(case, False), of(case, True)])
    # Of 30 steps: one, the odd one, and two for each of two changes.
    assert found == (plain[0], 24) and plain[1] == 0


class Odd(SmallNet):
    """Does in its forward what a graph cannot, or does not."""

    def __init__(self, what: str, *sizes: int) -> None:
        super().__init__(*sizes)
        self.what = what
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        if self.what == "waits":
            return super().forward(dense, pooled) * (1.0 if pooled.sum().item() > 0 else 2.0)
        if self.what == "new buffer":
            self.mean = 0.9 * self.mean + 0.1 * pooled.detach().mean()
        elif self.what == "own buffer":
            self.mean.mul_(0.9).add_(0.1 * pooled.detach().mean())
        else:
            pooled = pooled.mul_(0.5)
        return super().forward(dense, pooled) + self.mean


@dataclass(frozen=True)
class WithOdd(Scenario):
    what: str = ""

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Odd(self.what, 5, self.pooled_width)


def test_what_no_graph_holds_is_refused(guard: Path) -> None:
    refused = {
        "waits": "not permitted when stream is capturing",
        "new buffer": "change them in place",
        "new bags": "a leaf Variable that requires grad",
        "own buffer": "",
    }
    cases = [WithOdd(TWO_WIDTHS, SPEC, LR, what=what) for what in refused]
    calls = [of(case, graph) for case in cases for graph in (False, True)]
    found = [of_first for (of_first,) in run(guard, ended, calls)]
    for plain, replayed, said in zip(found[::2], found[1::2], refused.values(), strict=True):
        assert " " not in plain[0]
        if not said:
            assert replayed == (plain[0], 29)
        else:
            assert said in replayed[0] and "set trainer.cuda_graph=false" in replayed[0]
