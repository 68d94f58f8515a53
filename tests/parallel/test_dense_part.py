"""The dense part: evaluation with its modes and buffers, and what a step undone leaves behind;
bfloat16 rounds its products and nothing else; TF32 on request.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from scenarios import Scenario, table
from torch import Tensor, nn

from distcache.models import build_model, initialise
from distcache.parallel.base import predict, tf32
from distcache.parallel.cached import CachedParallel, CachedSettings

TABLES = (table("a", 30), table("b", 7))
RUN = Scenario(TABLES)


class Moody(nn.Module):
    """A model whose training differs from its evaluation: dropout, and running means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop, self.over = (
            nn.BatchNorm1d(width),
            nn.Dropout(0.5),
            nn.Linear(width, 1),
        )

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.over(self.drop(self.norm(torch.cat([dense, pooled], 1)))).squeeze(1)


def moody(world, **how) -> tuple[CachedParallel, Moody]:
    torch.manual_seed(0)
    model = Moody(5 + RUN.pooled_width)
    settings = CachedSettings("data", (40,), 1, 1, **how)
    return CachedParallel(world, TABLES, RUN.features, model, RUN.optimizer, settings), model


def buffers(model: nn.Module) -> dict[str, list]:
    return {name: value.tolist() for name, value in model.named_buffers()}


@pytest.mark.parametrize("schedule", ["overlapped", "serial"])
def test_evaluation_is_made_in_evaluation_mode(world, schedule: str) -> None:
    mode, model = moody(world, schedule=schedule)
    before = buffers(model)
    stream = mode.stream(RUN.batch(0, kind="eval") for _ in range(2))
    first, second = (mode.eval_step(step) for step in stream)
    assert torch.equal(first, second)
    assert model.training and model.drop.training and buffers(model) == before
    mode.close()


@pytest.mark.parametrize("delay", [0, 2])
def test_buffers_are_those_before_a_loss_that_is_not_finite(world, delay: int) -> None:
    found = []
    for bad in (3, None):
        mode, model = moody(world, result_delay=delay)
        batches = [RUN.batch(at) for at in range(3 if bad is None else 6)]
        if bad is not None:
            batches[bad] = replace(batches[bad], dense=batches[bad].dense * torch.nan)
        for step in mode.stream(batches):
            mode.train_step(step)
        mode.flush()
        found.append(buffers(model))
        mode.close()
    assert found[0] == found[1] and found[0]["norm.num_batches_tracked"] == 3


class Watched(nn.Module):
    """Needs no bags in its backward, which notes whether somebody holds them there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.held = nn.Parameter(torch.ones(())), list[bool]()

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        means, bags = pooled.mean(dim=1), weakref.ref(pooled)
        means.register_hook(lambda _: self.held.append(bags() is not None))
        return self.scale * means


def test_backward_may_have_the_memory_of_bags(world) -> None:
    """Else large batches touch as much memory anew in each step."""
    model, parts = Watched(), (TABLES, RUN.features)
    settings = CachedSettings("data", (40,), 1, 1)
    mode = CachedParallel(world, *parts, model, RUN.optimizer, settings)
    for step in mode.stream(RUN.batch(at) for at in range(3)):
        mode.train_step(step)
    mode.close()
    assert model.held == [False] * 3


@pytest.mark.parametrize("name", ["dlrm", "dcn_v2"])
def test_products_round_and_nothing_else(name: str) -> None:
    model = initialise(build_model(name, 5, [8, 8], [16, 8], [16, 1], 2, 4), 0, torch.float32)
    seen: list[torch.dtype] = []
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda _, inputs, out: seen.append(out.dtype))
    draw = torch.Generator().manual_seed(0)
    dense = torch.randn(32, 5, generator=draw)
    pooled = torch.randn(32, 16, generator=draw, requires_grad=True)
    exact = predict(model, dense, pooled, "off")
    assert set(seen) == {torch.float32} and torch.equal(exact, model(dense, pooled))
    seen.clear()
    logits = predict(model, dense, pooled, "bf16")
    assert set(seen) == {torch.bfloat16}
    assert logits.dtype == torch.float32 and not torch.equal(logits, exact)
    assert torch.allclose(logits, exact, atol=2**-6 * exact.abs().max().item())
    logits.sum().backward()
    assert pooled.grad.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


PARTS = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)


def switches() -> list[str]:
    """What torch does with float32 products and convolutions on CUDA."""
    return [part.fp32_precision for part in PARTS]


@pytest.mark.parametrize("usual", ["none", "tf32"])
def test_tf32_is_off_unless_asked_and_comes_back(usual: str) -> None:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    everything, at_first = torch.backends.fp32_precision, switches()
    try:
        torch.backends.fp32_precision = usual
        before = switches()
        with tf32(False):
            assert switches() == ["ieee"] * 3
            assert not (matmul.allow_tf32 or cudnn.allow_tf32)  # the older switches are read too
        assert switches() == before
        with pytest.raises(KeyError), tf32(True):
            assert switches() == ["tf32"] * 3 and matmul.allow_tf32 and cudnn.allow_tf32
            raise KeyError
        assert switches() == before
    finally:
        torch.backends.fp32_precision = everything
        for part, value in zip(PARTS, at_first, strict=True):
            part.fp32_precision = value
