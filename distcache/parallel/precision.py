"""Precision of the dense part: bfloat16 under autocast, and TF32 in float32 products."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from distcache.errors import ConfigError


def predict(model: nn.Module, dense: Tensor, pooled: Tensor, amp: str) -> Tensor:
    """Logits `[b]` of `model(dense [b, F], pooled [b, sum of widths])`.

    `amp`: `off`, or `bf16`: the model runs under `torch.autocast`, so that its products are taken
    in bfloat16; parameters, `pooled`, all gradients, and the logits returned keep their dtype.
    Raises ConfigError for another `amp`, and for a model that returns another shape.
    """
    if amp == "off":
        return _checked(model(dense, pooled), len(dense))
    if amp != "bf16":
        raise ConfigError(f"trainer.amp={amp} is unknown: choose off or bf16")
    with torch.autocast(pooled.device.type, torch.bfloat16):
        logits = model(dense, pooled)
    return _checked(logits, len(dense)).to(pooled.dtype)


def _checked(logits: Tensor, samples: int) -> Tensor:
    """`logits`, one for each sample."""
    if tuple(logits.shape) != (samples,):
        raise ConfigError(
            f"the model returned {list(logits.shape)} for {samples} samples: return logits [b], "
            "such as x.squeeze(-1) of [b, 1]"
        )
    return logits


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Let CUDA take float32 products and convolutions in TF32, or not, in this process meanwhile.

    The settings before come back at the end. torch lets convolutions use TF32 unless told not to.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    parts = (matmul, cudnn.conv, cudnn.rnn)
    before = [part.fp32_precision for part in parts]
    # torch keeps two sets of switches and refuses to read the old one where they disagree: both.
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    for part in parts:
        part.fp32_precision = "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        matmul.allow_tf32 = before[0] == "tf32"
        cudnn.allow_tf32 = before[1] == "tf32"
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision
