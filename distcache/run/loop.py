"""The training loop: steps and evaluations along a schedule, until its end or a reason to stop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from distcache.checkpoint import TrainerState
from distcache.comm.world import World
from distcache.data.batch import Batch
from distcache.errors import DistcacheError, PlanError
from distcache.evaluate import EvalResult, Evaluation
from distcache.metrics.progress import Progress
from distcache.metrics.timing import StepTimes
from distcache.parallel.base import Parallel, Step, StepResult
from distcache.run.digest import chain_loss
from distcache.run.schedule import Schedule
from distcache.run.stop import StopRequest


@dataclass
class Outcome:
    """How far the loop came and what it saw: equal on all ranks, but for the times.

    `evaluation` is that of the final state; None where training stopped before it. `bad`: the
    result of a step whose loss is not finite; it is not part of `state`.
    """

    state: TrainerState
    times: StepTimes = field(default_factory=StepTimes)
    final_loss: float | None = None
    evaluation: EvalResult | None = None
    bad: StepResult | None = None
    start_step: int = field(init=False)

    def __post_init__(self) -> None:
        self.start_step = self.state.step


@dataclass(frozen=True)
class _Run:
    """A training step that was run and whose result nobody has looked at."""

    index: int
    epoch: int
    samples: int
    seconds: float
    result: StepResult


@dataclass
class Loop:
    """One pass over a schedule; `rates` gives the dense and the embedding rate of a step."""

    mode: Parallel
    world: World
    schedule: Schedule
    rates: Callable[[int], tuple[float, float]]
    stop: StopRequest
    report: Progress
    outcome: Outcome
    evaluation: Evaluation = field(default_factory=Evaluation)
    mark: float = 0.0
    over: bool = False
    unread: deque[_Run] = field(default_factory=deque)

    def run(self, batches: Iterable[Batch]) -> Outcome:
        """Go through the batches, which the mode draws ahead of training as it needs them.

        Ends after the same step on all ranks: at the end of the schedule, when some rank was
        asked to stop, or at a loss that is not finite; the last two set `over`. What the mode has
        drawn ahead is dropped. May be called again, with other batches, unless it is `over`.
        """
        stream = self.mode.stream(batches)
        self.mark = time.perf_counter()
        try:
            for step in stream:
                run = self.evaluate if step.batch.kind == "eval" else self.train
                if run(step):
                    self.over = True
                    break
            self.over |= self.look()
        except DistcacheError:
            with suppress(DistcacheError):  # what was run before the error counts
                self.look()
            raise
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()
        return self.outcome

    def train(self, step: Step) -> bool:
        """One training step; whether the loop is over."""
        index = step.batch.index
        due = self.outcome.state.step + len(self.unread)
        if index != due:
            raise PlanError(
                f"the {type(self.mode).__name__} stream gave training step {index} where "
                f"{due} is due"
            )
        self.mode.set_lr(*self.rates(index))
        result = self.mode.train_step(step, stop=self.stop.requested)
        ended = time.perf_counter()
        batch = step.batch
        ran = _Run(index, batch.epoch, batch.global_size, ended - self.mark, result)
        self.unread.append(ran)
        self.mark = ended
        return self.look(keep=self.mode.result_delay)

    def look(self, keep: int = 0) -> bool:
        """Look at the results of the steps that were run, but for the last `keep`; whether the
        loop is over: then at all of them, for all ranks have run as many."""
        over = False
        while len(self.unread) > (0 if over else keep):
            over |= self.finish(self.unread.popleft())
            if self.outcome.bad is not None:
                self.unread.clear()  # nothing of these was applied
        return over

    def finish(self, ran: _Run) -> bool:
        """Count a training step; whether it is the last."""
        outcome, result = self.outcome, ran.result
        if result.bad_ranks or not math.isfinite(result.loss):
            outcome.bad = result
            return True
        outcome.times.add(ran.seconds, ran.samples)
        digest = chain_loss(outcome.state.loss_digest, result.loss)
        done = ran.index + 1
        outcome.state = TrainerState(done, digest, self.schedule.position(done))
        outcome.final_loss, outcome.evaluation = result.loss, None
        self.report.step(done, ran.epoch, result, outcome.times, self.mode, outcome.state.phase)
        return result.stop

    def evaluate(self, step: Step) -> bool:
        """One evaluation batch; whether the loop is over (a stop need not wait for a long one)."""
        if self.look():
            return True
        self.evaluation.add(self.mode.eval_step(step), step.batch.labels)
        if self.evaluation.batches == self.schedule.eval_batches:
            self.evaluated(self.evaluation.finish(self.world))
        self.mark = time.perf_counter()
        return self.stop.agreed(self.world) is not None

    def evaluated(self, result: EvalResult) -> None:
        """Take up the result of a whole evaluation, which is the same on all ranks."""
        outcome = self.outcome
        phase = self.schedule.learn(outcome.state.step, result.logloss)
        outcome.state = replace(outcome.state, phase=phase)
        outcome.evaluation, self.evaluation = result, Evaluation()
        self.report.evaluation(outcome.state.step, result, phase)
