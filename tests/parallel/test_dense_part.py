"""The dense part: evaluation with its modes and buffers, and what a step undone leaves behind;
bfloat16 rounds its products and nothing else; TF32 on request.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scenarios import Scenario, SmallNet, table
from torch import Tensor, nn

from distcache.errors import ConfigError
from distcache.models import build_model, initialise
from distcache.parallel.base import predict, tf32
from distcache.parallel.cached import CachedParallel, CachedSettings

TABLES = (table("a", 30), table("b", 7))


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


@pytest.mark.parametrize("schedule", ["overlapped", "serial"])
def test_evaluation_is_made_in_evaluation_mode(world, schedule: str) -> None:
    run = Scenario(TABLES)
    batch = run.batch(0)
    model = Moody(batch.dense.shape[1] + run.pooled_width)
    chosen = CachedSettings("data", (40,), 1, 1, schedule=schedule)
    mode = CachedParallel(world, run.tables, run.features, model, run.optimizer, chosen)
    before = {name: value.clone() for name, value in model.named_buffers()}
    stream = mode.stream(run.batch(0, kind="eval") for _ in range(2))
    first, second = (mode.eval_step(step) for step in stream)
    assert torch.equal(first, second)
    assert model.training and model.drop.training
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name])
    mode.close()


@pytest.mark.parametrize("delay", [0, 2])
def test_buffers_are_those_before_a_loss_that_is_not_finite(world, delay: int) -> None:
    run = Scenario(TABLES)
    found = []
    for bad in (3, None):
        torch.manual_seed(0)
        model = Moody(5 + run.pooled_width)
        chosen = CachedSettings("data", (40,), 1, 1, result_delay=delay)
        mode = CachedParallel(world, run.tables, run.features, model, run.optimizer, chosen)
        batches = [run.batch(at) for at in range(3 if bad is None else 6)]
        if bad is not None:
            batches[bad] = replace(batches[bad], dense=batches[bad].dense * torch.nan)
        for step in mode.stream(batches):
            mode.train_step(step)
        mode.flush()
        found.append({name: value.clone() for name, value in model.named_buffers()})
        mode.close()
    assert int(found[0]["norm.num_batches_tracked"]) == 3
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


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


def test_another_value_is_refused_by_the_mode_too(world) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.amp=fp16 is unknown"):
        predict(SmallNet(5, 8), torch.zeros(2, 5), torch.zeros(2, 8), "fp16")
    case = Scenario(TABLES, steps=2)
    settings = CachedSettings("resident", amp="half")
    args = (world, case.tables, case.features, case.model(), case.optimizer, settings)
    mode = CachedParallel(*args)
    with pytest.raises(ConfigError, match="off or bf16"):
        for step in mode.stream(case.batch(s) for s in range(2)):
            mode.train_step(step)
    mode.close()


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
