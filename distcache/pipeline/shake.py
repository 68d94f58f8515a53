"""Random delays at every hand-over between threads: a debugging mode that shakes out races."""

from __future__ import annotations

import random
import threading
import time


class Shaker:
    """Called before every stage and hand-over, in every thread: sleeps up to `most_ms`, or not.

    Two calls in three return at once, so that threads run in bursts as well as one by one. The
    delays of a thread depend on `seed` and the thread's name; results must depend on none.
    """

    def __init__(self, most_ms: float, seed: int = 0) -> None:
        self._most_s, self._seed = most_ms / 1e3, seed
        self._local = threading.local()

    def __call__(self) -> None:
        draw = getattr(self._local, "draw", None)
        if draw is None:
            draw = self._local.draw = random.Random(
                f"{self._seed} {threading.current_thread().name}"
            )
        if draw.random() < 1 / 3:
            time.sleep(draw.random() * self._most_s)


def shaker(most_ms: float, seed: int = 0) -> Shaker | None:
    """A Shaker, or None for no delays."""
    return Shaker(most_ms, seed) if most_ms > 0 else None
