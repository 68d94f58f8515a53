"""What a hybrid step costs: its time, and the device bytes of what stays between steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from distcache.parallel.durations import Durations
from distcache.pipeline.clock import WAIT, Span, Watcher

LANE = "training"
"""Where all of it runs, for spans."""


class StepClock:
    """Times steps: on the CPU by the clock, on CUDA by events read one step later.

    `watchers` see each step's span, host time, and its wait for a batch.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._times_ms = Durations()
        self._pending: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._batches, self._load_s, self._wait_s, self._hidden_s = 0, 0.0, 0.0, 0.0
        self._seen, self._waits = 0, list[Span]()
        self.watchers: list[Watcher] = []

    def batch(self, kind: str, load_s: float, asked: float) -> None:
        """Note a batch that took `load_s` seconds to load beside the steps and that the loop,
        which `asked` for it at that time, has now."""
        got = time.perf_counter()
        self._waits = [Span(WAIT, LANE, self._seen, asked, got)]
        if kind == "train":
            self._batches += 1
            self._load_s += load_s
            self._wait_s += got - asked
            self._hidden_s += max(0.0, load_s - (got - asked))

    def load_ms(self) -> dict[str, float]:
        """Mean milliseconds per batch of `load` and `wait`."""
        return {"load": self._per_batch(self._load_s), "wait": self._per_batch(self._wait_s)}

    def hidden_ms(self) -> dict[str, float]:
        """Mean milliseconds per batch of `load` that no step waited for."""
        return {"load": self._per_batch(self._hidden_s)}

    def _per_batch(self, seconds: float) -> float:
        return 1e3 * seconds / max(1, self._batches)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the training step that runs inside."""
        with self.shown("step", "train"):
            if not self._cuda:
                start = time.perf_counter()
                yield
                self._times_ms.add((time.perf_counter() - start) * 1e3)
                return
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            yield
            events[1].record()
            self._harvest()
            self._pending = events

    @contextmanager
    def shown(self, name: str, kind: str) -> Iterator[None]:
        """Let `watchers` see what runs inside, if it ends well; the next batch has a new number."""
        start = time.perf_counter()
        yield
        spans = [*self._waits, Span(name, LANE, self._seen, start, time.perf_counter())]
        for watcher in self.watchers:
            watcher(self._seen, kind, spans)
        self._seen, self._waits = self._seen + 1, []

    def _harvest(self) -> None:
        if self._pending is not None:
            # Long done: the loss of the step after it has been read since.
            self._pending[1].synchronize()
            self._times_ms.add(self._pending[0].elapsed_time(self._pending[1]))
            self._pending = None

    def median_ms(self) -> float | None:
        """Median milliseconds of a step without the first ten, or of all where there are no more;
        None before any."""
        self._harvest()
        found = self._times_ms.percentiles((50,))
        if found is not None:
            return found[0]
        return statistics.median(self._times_ms.skipped) if self._times_ms.skipped else None


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
