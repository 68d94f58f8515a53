"""Hot and cold phases of an epoch: how long each is, and what the held-out loss does to that.

The shuffle scheduler of FAE (Adnan et al., VLDB 2022): a share r of the hot batches, then the same
share of the cold ones, and so on. Where the held-out loss rises over a phase, r is halved; after
`STEADY_FALLS` falls in a row it is doubled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from distcache.data.hot_cold import COLD, HOT

STEADY_FALLS = 4
"""Falls of the held-out loss in a row after which the rate is doubled."""

Sizes = Callable[[int], tuple[int, int]]
"""Hot and cold batches of an epoch."""


@dataclass(frozen=True)
class Phase:
    """Where training stands among the phases; part of a checkpoint.

    `hot`, `cold`: batches of `epoch` that are trained; `kind`: of this phase, empty before the
    first; `left`: its batches to come; `until`: share of the epoch's batches of each kind that are
    trained when this phase and its partner have ended; `rate`: r; `falls`: of the held-out loss
    in a row; `loss`: the last one; `due`: whether the phase has ended and its evaluation has not
    been looked at.
    """

    rate: float
    epoch: int = 0
    hot: int = 0
    cold: int = 0
    kind: str = ""
    left: int = 0
    until: float = 0.0
    falls: int = 0
    loss: float | None = None
    due: bool = False

    def forward(self, batches: int) -> Phase:
        """After so many more batches of this phase, at most `left`."""
        done = getattr(self, self.kind) + batches if self.kind else 0
        left = self.left - batches
        counted = {self.kind: done} if self.kind else {}
        return replace(self, left=left, due=self.due or (batches > 0 and left == 0), **counted)

    def within(self, sizes: Sizes) -> Phase:
        """The same phase in an epoch of `sizes`: beyond the end of either kind nothing is done.

        It makes a difference where training goes on with other batches than it began with.
        """
        done = {HOT: self.hot, COLD: self.cold}
        most = dict(zip((HOT, COLD), sizes(self.epoch), strict=True))
        done = {kind: min(done[kind], most[kind]) for kind in done}
        left = min(self.left, most[self.kind] - done[self.kind]) if self.kind else 0
        return replace(self, left=left, **done)

    def next(self, sizes: Sizes) -> Phase:
        """The phase after this one, which has ended: not empty, of the same or the next epoch."""
        phase = self
        while True:
            hot, cold = sizes(phase.epoch)
            if phase.kind == HOT and phase.cold < (end := math.ceil(phase.until * cold)):
                return replace(phase, kind=COLD, left=end - phase.cold, due=False)
            if (phase.hot, phase.cold) == (hot, cold):
                phase = replace(phase, epoch=phase.epoch + 1, hot=0, cold=0, kind="", until=0.0)
                continue
            until = phase.until + phase.rate
            phase = replace(phase, until=1.0 if until > 1 - 1e-9 else until, kind=HOT)
            if phase.hot < (end := math.ceil(phase.until * hot)):
                return replace(phase, left=end - phase.hot, due=False)

    def learn(self, loss: float | None, least: float) -> Phase:
        """After the evaluation at the end of this phase; a loss that does not exist says nothing.

        The rate is not lowered below `least`, nor raised above 1.
        """
        if loss is None:
            return replace(self, due=False)
        rate, falls = self.rate, self.falls
        if self.loss is not None and loss > self.loss:
            rate, falls = max(rate / 2, min(rate, least)), 0
        elif self.loss is not None and loss < self.loss:
            falls += 1
            if falls == STEADY_FALLS:
                rate, falls = min(2 * rate, 1.0), 0
        return replace(self, rate=rate, falls=falls, loss=loss, due=False)

    def values(self) -> dict[str, Any]:
        """As plain values; `Phase(**values)` is this phase."""
        return asdict(self)


class PhaseClock:
    """The phase after each step of a run, from `phase` after `step` steps on.

    The rate stays between `least` batches of the larger kind and all of both.
    """

    def __init__(self, phase: Phase, step: int, sizes: Sizes, least: int = 1) -> None:
        self._phase, self._step, self._sizes, self._least = phase, step, sizes, max(least, 1)

    def at(self, step: int) -> Phase:
        """After `step` steps; of the current phase or at its end."""
        return self._phase.forward(step - self._step)

    def begin(self, step: int) -> Phase:
        """The phase that goes on after `step` steps, or else the next one, which begins."""
        phase = self.at(step)
        self._phase, self._step = phase if phase.left else phase.next(self._sizes), step
        return self._phase

    def learn(self, step: int, loss: float | None) -> Phase:
        """The phase after `step` steps and an evaluation, which counts where one was due."""
        phase = self.at(step)
        if phase.due:
            phase = phase.learn(loss, self._least / max(self._sizes(phase.epoch)))
        self._phase, self._step = phase, step
        return self._phase


def phase_at(step: int, rate: float, sizes: Sizes) -> Phase:
    """Where `step` steps lead whose held-out losses are not known, at a fixed rate."""
    clock, done = PhaseClock(Phase(rate), 0, sizes), 0
    while done < step:
        done = min(done + clock.begin(done).left, step)
    return replace(clock.at(step), due=False)
