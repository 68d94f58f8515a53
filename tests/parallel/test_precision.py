"""Precision of the dense part: bfloat16 rounds its products and nothing else; TF32 on request."""

from __future__ import annotations

import pytest
import torch
from scenarios import Scenario, SmallNet, table
from torch import nn

from distcache.comm.world import close_world, open_world
from distcache.errors import ConfigError
from distcache.models import build_model, initialise
from distcache.parallel.base import predict, tf32
from distcache.parallel.cached import CachedParallel, CachedSettings

TABLES = (table("a", 30), table("c", 7, dim=4))


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


def test_another_value_is_refused_by_the_mode_too() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.amp=fp16 is unknown"):
        predict(SmallNet(5, 8), torch.zeros(2, 5), torch.zeros(2, 8), "fp16")
    world = open_world("cpu", "gloo", 60)
    case = Scenario(TABLES, steps=2)
    settings = CachedSettings("resident", amp="half")
    args = (world, case.tables, case.features, case.model(), case.optimizer, settings)
    mode = CachedParallel(*args)
    with pytest.raises(ConfigError, match="off or bf16"):
        for step in mode.stream(case.batch(s) for s in range(2)):
            mode.train_step(step)
    mode.close()
    close_world(world)


def switches() -> list[str]:
    """What torch does with float32 products and convolutions on CUDA."""
    cudnn = torch.backends.cudnn
    parts = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    return [part.fp32_precision for part in parts]


def test_tf32_is_off_unless_asked_and_comes_back() -> None:
    before = switches()
    with tf32(False):
        assert switches() == ["ieee"] * 3
        assert not torch.backends.cuda.matmul.allow_tf32  # the older switches can be read still
        assert not torch.backends.cudnn.allow_tf32
    assert switches() == before
    with pytest.raises(KeyError), tf32(True):
        assert switches() == ["tf32"] * 3
        assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32
        raise KeyError
    assert switches() == before
    everything = torch.backends.fp32_precision
    try:
        torch.backends.fp32_precision = "tf32"
        with tf32(False):
            assert switches() == ["ieee"] * 3
    finally:
        torch.backends.fp32_precision = everything
        for part, value in zip(
            (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn),
            before,
            strict=True,
        ):
            part.fp32_precision = value
