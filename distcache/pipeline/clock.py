"""What stages took, and how much of that training did not wait for."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

WAIT = "wait"
"""Time that the training loop stood still for a step's plan or rows: the stall."""


@dataclass(frozen=True)
class Span:
    """One stage of one step: when it ran, in seconds of `time.perf_counter`, and on which lane.

    Lanes: `planner` and `movement` are threads beside training, `training` is the loop's own.
    """

    name: str
    lane: str
    step: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@contextmanager
def spanned(spans: list[Span], name: str, lane: str, step: int) -> Iterator[None]:
    """Append the span of what runs inside to `spans`, if it ends well."""
    started = time.perf_counter()
    yield
    spans.append(Span(name, lane, step, started, time.perf_counter()))


Watcher = Callable[[int, str, Sequence[Span]], None]
"""Takes a step's number in its stream, its kind, and its spans, waits included."""


class StageClock:
    """Host seconds spent in each stage and hidden behind training, over `steps` training steps.

    Hidden is what a stage of the planner or the movement took while the loop did not stand still
    for that step: all of it when nothing waited, none when all was waited for.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.hidden: dict[str, float] = defaultdict(float)
        self.steps = 0
        self.watchers: list[Watcher] = []
        self._lap: tuple[int, dict[str, float], dict[str, float]] = (0, {}, {})

    def add(self, step: int, kind: str, spans: Sequence[Span], waits: Sequence[Span]) -> None:
        """Take in one step: `spans` of its stages, and the `waits` of the loop for it."""
        for watcher in self.watchers:
            watcher(step, kind, [*spans, *waits])
        if kind != "train":
            return
        self.steps += 1
        for span in spans:
            self.seconds[span.name] += span.seconds
            if span.lane != "training":
                self.hidden[span.name] += span.seconds - _overlap(span, waits)
        self.seconds[WAIT] += sum(wait.seconds for wait in waits)

    def mean_ms(self) -> dict[str, float]:
        """Milliseconds per step of each stage, and of the loop's `wait`."""
        return self._per_step(self.seconds)

    def hidden_ms(self) -> dict[str, float]:
        """Milliseconds per step of each stage beside training that nothing waited for."""
        return self._per_step(self.hidden)

    def lap(self) -> tuple[dict[str, float], dict[str, float]]:
        """`mean_ms` and `hidden_ms` of the steps since the last lap, or since the beginning."""
        steps, seconds, hidden = self._lap
        self._lap = (self.steps, dict(self.seconds), dict(self.hidden))
        count = self.steps - steps
        return _mean_ms(self.seconds, count, seconds), _mean_ms(self.hidden, count, hidden)

    def _per_step(self, seconds: dict[str, float]) -> dict[str, float]:
        return _mean_ms(seconds, self.steps, {})


def _mean_ms(seconds: dict[str, float], steps: int, before: dict[str, float]) -> dict[str, float]:
    """Milliseconds per step of what was added to `before` in `steps` steps."""
    return {
        name: 1e3 * (total - before.get(name, 0.0)) / max(1, steps)
        for name, total in seconds.items()
    }


def _overlap(span: Span, waits: Iterable[Span]) -> float:
    """Seconds of `span` that lie inside `waits`, which do not overlap one another."""
    return sum(max(0.0, min(span.end, w.end) - max(span.start, w.start)) for w in waits)
