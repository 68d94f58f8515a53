"""What a hybrid step costs: its time, and the device bytes of what stays between steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

WARM_UP_STEPS = 10
"""Steps left out of timings, as long as there are more."""


class StepClock:
    """Times steps: on the CPU by the clock, on CUDA by events read one step later."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._times_ms: list[float] = []
        self._pending: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._loads: list[tuple[float, float]] = []

    def add_load(self, load_s: float, wait_s: float) -> None:
        """Note seconds: a batch took to load beside the steps, and a step waited for it."""
        self._loads.append((load_s, wait_s))

    def load_ms(self) -> dict[str, float]:
        """Mean milliseconds per batch of `load` and `wait`."""
        count = max(1, len(self._loads))
        load, wait = (1e3 * sum(pair[i] for pair in self._loads) / count for i in (0, 1))
        return {"load": load, "wait": wait}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time what runs inside."""
        if not self._cuda:
            start = time.perf_counter()
            yield
            self._times_ms.append((time.perf_counter() - start) * 1e3)
            return
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        yield
        events[1].record()
        self._harvest()
        self._pending = events

    def _harvest(self) -> None:
        if self._pending is not None:
            # Long done: the loss of the step after it has been read since.
            self._pending[1].synchronize()
            self._times_ms.append(self._pending[0].elapsed_time(self._pending[1]))
            self._pending = None

    def median_ms(self) -> float | None:
        """Median milliseconds of a step without the first ten; None before any."""
        self._harvest()
        times = self._times_ms[WARM_UP_STEPS:] or self._times_ms
        return statistics.median(times) if times else None


def nbytes_by_part(
    weights: Mapping[str, Any], row_states: Mapping[str, Mapping[str, Any]], dense_optimizer: Any
) -> tuple[int, int]:
    """Bytes of this rank's shards with their state, and of the dense part.

    The dense part is parameters, as many gradients, and optimizer state.
    """
    sharded = [*weights.values(), *(s for states in row_states.values() for s in states.values())]
    embedding = sum(shard.tensor.nbytes for tensor in sharded for shard in tensor.local_shards())
    dense = 0
    for group in dense_optimizer.param_groups:
        for parameter in group["params"]:
            state = dense_optimizer.state[parameter].values()
            dense += 2 * parameter.nbytes
            dense += sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
    return embedding, dense
