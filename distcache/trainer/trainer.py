"""The training run, from a config to a summary; read `train` and `Run.go` as tables of contents."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distcache.checkpoint.files import (
    file_world,
    find_checkpoints,
    newest_checkpoint,
    suggest_intact,
)
from distcache.checkpoint.saver import Keeping, Saver
from distcache.checkpoint.state import (
    Identity,
    LossChain,
    Start,
    TrainerState,
    load_checkpoint,
    most_bytes,
    read_start,
    state_digest,
)
from distcache.checkpoint.weights import init_from
from distcache.comm.link import run_on_rank0
from distcache.comm.world import World
from distcache.config.checks import cadence
from distcache.config.tree import Config
from distcache.data.batch import Batch, BatchSource
from distcache.data.files import read_json, write_json
from distcache.engine.gradients import STOP
from distcache.engine.tracing import tracing
from distcache.errors import (
    DataError,
    DistcacheError,
    NonFiniteLossError,
    PeerError,
    PlanError,
    StepTooLargeError,
)
from distcache.layout import TableSpec
from distcache.parallel.base import LateResult, Parallel, Step, StepResult, tf32
from distcache.popularity.hot_cold import HotColdSource, Phase
from distcache.stopping import StopRequest
from distcache.trainer import build
from distcache.trainer.record import (
    SUMMARY_KEYS,
    EvalResult,
    Evaluation,
    Progress,
    StepTimes,
    announce_stop,
    plain,
    stages,
)
from distcache.trainer.schedule import PhasedSchedule, Schedule, arrange, make_schedule
from distcache.versions import versions_here

logger = logging.getLogger(__name__)

# -----------------------------------------------------------------------------
# The training loop: steps and evaluations along a schedule, until its end or a reason to stop.


@dataclass
class Loop:
    """One pass over a schedule from where a run has `begun`: how far it came and what it saw is
    equal on all ranks, but for the times.

    `rates`: the dense and the embedding rate of a step; `evaluation`: of the final state, None
    where training stopped before it; `bad`: the result of a step whose loss is not finite, which
    is not part of `state`.
    """

    mode: Parallel
    world: World
    schedule: Schedule
    rates: Callable[[int], tuple[float, float]]
    stop: StopRequest
    report: Progress
    saver: Saver
    begun: TrainerState
    times: StepTimes = field(default_factory=StepTimes)
    final_loss: float | None = None
    evaluation: EvalResult | None = None
    bad: StepResult | None = None
    evaluating: Evaluation = field(default_factory=Evaluation)
    mark: float = 0.0
    over: bool = False
    empty_seen: bool = False
    """True after the first step without samples."""
    due: bool = False
    """Whether a checkpoint is written before the next training step."""
    given: tuple[float, float] | None = None
    """The rates of the last step."""
    unread: deque[tuple[Batch, float, StepResult]] = field(default_factory=deque)
    """Training steps, with the seconds that they took, whose results nobody has looked at."""

    def __post_init__(self) -> None:
        begun = self.begun
        self.done, self.phase, self.last = begun.step, begun.phase, begun.batch
        self.losses = LossChain(begun.loss_digest)

    @property
    def state(self) -> TrainerState:
        """Where training stands, after `done` steps."""
        return TrainerState(self.done, self.losses.digest(), self.phase, self.last)

    @property
    def metrics(self) -> dict[str, float | None]:
        """Those of the final state; empty without an evaluation."""
        return {} if self.evaluation is None else self.evaluation.values

    def run(self, batches: Iterable[Batch]) -> None:
        """Go through the batches, which the mode draws ahead of training as it needs them.

        Ends after the same step on all ranks: at the end of the schedule, when some rank was
        asked to stop, or at a loss that is not finite; the last two set `over`. What the mode has
        drawn ahead is dropped. May be called again, with other batches, unless it is `over`.
        """
        stream = self.mode.stream(batches)
        self.mark = time.perf_counter()
        try:
            for step in stream:
                if (self.evaluate if step.batch.kind == "eval" else self.train)(step):
                    self.over = True
                    break
            self.over |= self.look()
        except DistcacheError:
            with suppress(DistcacheError):  # what was run before the error counts
                self.look()
            raise
        finally:
            getattr(stream, "close", lambda: None)()

    def train(self, step: Step) -> bool:
        """One training step, after the checkpoint that is due; whether the loop is over."""
        if self.due:  # after the evaluations of the step before, so that none is missing on resume
            if self.look():
                return True
            self.due = False  # also of steps whose results came just now
            self.saver.write(self.state, self.metrics)
            self.mark = time.perf_counter()
        index = step.batch.index
        due = self.done + len(self.unread)
        if index != due:
            mode = type(self.mode).__name__
            raise PlanError(f"the {mode} stream gave training step {index} where {due} is due")
        if (rates := self.rates(index)) != self.given:
            self.mode.set_lr(*rates)
            self.given = rates
        asks, falls_on = self.saver.asks(index + 1)
        result = self.mode.train_step(step, asks | STOP * (self.stop.signal is not None))
        ended = time.perf_counter()
        self.unread.append((step.batch, ended - self.mark, result))
        self.mark = ended
        return self.look(keep=0 if falls_on else self.mode.result_delay)

    def look(self, keep: int = 0) -> bool:
        """Look at the results of the steps that were run, but for the last `keep`; whether the
        loop is over: then at all of them, for all ranks have run as many."""
        over = False
        while len(self.unread) > (0 if over else keep):
            over |= self.finish(*self.unread.popleft())
            if self.bad is not None:
                self.unread.clear()  # nothing of these was applied
        return over

    def finish(self, batch: Batch, seconds: float, result: StepResult) -> bool:
        """Count a training step; whether it is the last."""
        if isinstance(result, LateResult):
            result = result.read()
        if result.bad_ranks or not math.isfinite(result.loss):
            self.bad = result
            return True
        self.times.add(seconds, batch.global_size)
        if batch.is_empty:
            self.warn_of_empty(batch.index)
            result = result._replace(loss=math.nan)
        else:
            self.losses.add(result.loss)
        self.done, self.phase, self.last = batch.index + 1, self.schedule.forward(), batch
        self.final_loss, self.evaluation = result.loss, None
        self.due |= result.save
        if result.waits:
            self.saver.hurry()
        self.report.step(self.done, batch.epoch, result, self.times, self.mode, self.phase)
        return result.stop

    def warn_of_empty(self, step: int) -> None:
        """Say once that a step had no sample."""
        if self.world.is_first and not self.empty_seen:
            logger.warning(
                "step %s has no sample on any rank: it changes nothing and has no loss, as all "
                "such steps (this is said once)",
                f"{step:,}",
            )
        self.empty_seen = True

    def evaluate(self, step: Step) -> bool:
        """One evaluation batch; whether the loop is over (a stop need not wait for a long one)."""
        if self.look():
            return True
        self.evaluating.add(self.mode.eval_step(step), step.batch.labels)
        if self.evaluating.batches == self.schedule.eval_batches:
            result = self.evaluating.finish(self.world)
            phase = self.schedule.learn(result.logloss)
            self.phase = phase
            self.evaluation, self.evaluating = result, Evaluation()
            self.due |= self.saver.is_best(result.values)
            self.report.evaluation(self.done, result, phase)
        self.mark = time.perf_counter()
        return self.stop.agreed(self.world) is not None


# -----------------------------------------------------------------------------
# The run.


@dataclass(frozen=True)
class TrainResult:
    """Result of a run: the summary, and the signal that stopped it (None: it ran to its end).

    `notice`: a sentence for the user where no step was left to train and the summary is that of the
    run which had trained them.
    """

    summary: dict[str, Any]
    stopped_by: int | None
    notice: str = ""


def train(
    config: Config, world: World, run_dir: Path, begun: Callable[[], None] | None = None
) -> TrainResult:
    """Train as `config` says and leave `checkpoints/`, `metrics.jsonl`, `summary.json` in
    `run_dir`, with `data.on_bad_line=skip` also `bad_lines.json`.

    All ranks of `world` call this with the same arguments, from their main thread. An orderly stop
    (Ctrl-C, SIGTERM) returns normally. Raises NonFiniteLossError after saving the state before
    the step; ConfigError for settings that contradict each other, the data or a checkpoint.
    """
    source = build.build_source(config)
    if config.data.verify:  # files that are not read whole anyway
        given = config.trainer.resume not in ("auto", "never")
        earlier = Path(config.trainer.resume).absolute() if given else None
        build.verify_files(source.files.files, world, run_dir, earlier)
    tables = build.build_tables(config, source)
    model = build.build_dense(config, tables, source.dense_features)
    source = arrange(config, world, source, tables)
    starts = find_starts(config, world, run_dir, identity_of(config, world, source, tables))
    begin = next(starts), starts
    mode = build.build_parallel(config, world, tables, model, source)
    bad_lines = getattr(source, "bad_lines", None)
    if bad_lines is not None and bad_lines.skip:  # every rank has read, and skipped, the same
        run_on_rank0(world, lambda: write_json(run_dir / "bad_lines.json", bad_lines.summary()))
    run = Run(config, world, run_dir, source, tables, mode, begin, begun)
    result = run.go(build.build_rates(config))
    if result.notice and world.is_first:
        logger.warning(result.notice)
    return result


def identity_of(
    config: Config, world: World, source: BatchSource, tables: Sequence[TableSpec]
) -> Identity:
    """What a checkpoint of a run has in common with a run that resumes it."""
    return {
        "mode": config.parallel.mode,
        "world_size": world.size,
        "dtype": config.trainer.dtype,
        "optimizer": config.optim.name,
        "seed": config.trainer.seed,
        "model": plain(asdict(config.model)),
        "global_batch_size": getattr(source, "global_batch_size", config.data.global_batch_size),
        "steps_per_epoch": source.steps_per_epoch,
        "tables": tuple(
            (own.name, own.rows, own.dim, *([] if own.dtype is None else [str(own.dtype)]))
            for own in tables
        ),
        "data": tuple(sorted(source.identity.items())),
    }


def find_starts(
    config: Config, world: World, run_dir: Path, identity: Identity
) -> Generator[Start, None, None]:
    """Yield where `trainer.resume` lets the run begin: the newest intact checkpoint of the run
    folder, a given one, or step 0.

    All ranks iterate, before they make tables. Each checkpoint is compared with this run. Throw a
    DataError about a start back in to get the next one. Raises DataError if there are checkpoints,
    and all are damaged.
    """
    resume = config.trainer.resume
    is_auto = resume == "auto"
    same_data = config.trainer.resume_data == "same"
    folders: list[Path] = []
    if is_auto:
        folders = run_on_rank0(world, lambda: find_checkpoints(run_dir))
    elif resume != "never":
        folders = run_on_rank0(world, lambda: [newest_checkpoint(Path(resume))])
    for folder in folders:
        try:
            with file_world(world, most_bytes(identity)) as files:
                start = read_start(folder, identity, files, same_data)
            yield start
        except DataError as error:
            if not is_auto:
                with (
                    file_world(world, most_bytes(identity)) as files,
                    suggest_intact(folder, files),
                ):
                    raise
            if world.is_first:
                logger.warning("passed over: %s", error)
    if folders:
        raise DataError(
            f"no checkpoint in {run_dir} is intact ({len(folders)} are damaged): go on from a copy "
            "by trainer.resume=<folder>, or begin anew by trainer.resume=never run.overwrite=true"
        )
    yield Start()


@dataclass(frozen=True)
class Run:
    """One run's parts: settings, ranks, folder, data, tables, the model in its mode, and where
    training starts, by `find_starts`: the first, and those after it (None: it is asked). `begun`:
    called on rank 0 after the first step."""

    config: Config
    world: World
    run_dir: Path
    source: BatchSource
    tables: Sequence[TableSpec]
    mode: Parallel
    starts: tuple[Start, Generator[Start, None, None]] | None = None
    begun: Callable[[], None] | None = None

    def go(self, rates: Callable[[int], tuple[float, float]]) -> TrainResult:
        """Resume, train, save, digest, summarise; the mode is closed whatever happens.

        `rates`: the dense and the embedding learning rate of a step.
        """
        self.mode.scratch = self.run_dir
        try:
            with file_world(self.world, most_bytes(self.identity())) as files:
                begun = self.resume(files)
                want = self.config.trainer
                if begun.folder is None and want.init_from is not None:
                    where = Path(want.init_from), want.init_names or {}
                    init_from(*where, self.mode, self.tables, self.world)
                with self.saver(files, begun) as saver:
                    return self.go_on(begun.state, rates, saver)
        finally:
            self.mode.close()

    def go_on(
        self, start: TrainerState, rates: Callable[[int], tuple[float, float]], saver: Saver
    ) -> TrainResult:
        """Train from `start` on, save, digest and summarise."""
        schedule = self.schedule(start)
        if self.world.is_first and not schedule.nothing_to_train:
            rows = build.optimizer_spec(self.config)
            item = build.dtype_of(self.config).itemsize
            floats = sum(t.rows * (t.width(item) + rows.state_width(t.dim)) for t in self.tables)
            announce_stop(self.run_dir, floats * item)
        want, trace = self.config.trainer, nullcontext()
        if want.trace:
            trace = tracing(self.world, self.run_dir, self.mode.watch)
        with StopRequest() as stop, tf32(want.tf32), trace:
            with self.progress(schedule) as report:
                how = rates, stop, report, saver, start
                loop = Loop(self.mode, self.world, schedule, *how)
                self.run_steps(loop)
            stopped_by = stop.agreed(self.world)
            if stopped_by is not None and self.world.is_first:
                # At once: the checkpoint of large tables takes its time.
                end = f"{signal.Signals(stopped_by).name}: stopping after step "
                end += f"{loop.done:,}, with a checkpoint in {saver.folder}"
                logger.warning(end)
            measured = self.mode.summary()
            if self.world.is_first and loop.done > start.step and measured.get("stage_ms"):
                logger.info(stages(measured["stage_ms"], measured["stage_hidden_ms"]))
            self.save(loop, stopped_by)
            how = self.mode, self.tables, build.dtype_of(self.config), saver.world
            digest = state_digest(self.config.run.digest.lower(), *how)
            summary, notice = self.summarise(start, loop, measured, digest)
        return TrainResult(summary, stopped_by, notice)

    def saver(self, files: World, begun: Start) -> Saver:
        """What writes this run's checkpoints; `files`: of `file_world`."""
        want, run = self.config.trainer, self.config.run
        every = cadence(want.checkpoint_every) if run.save else (None, None)
        best = None if want.keep_best == "none" else want.keep_best
        header = {
            "run": self.identity(),
            "config": plain(asdict(self.config)),
            "versions": versions_here(),
        }
        keeping = Keeping(every, want.keep_checkpoints, best, want.checkpoint_whole_every)
        return Saver((self.run_dir, begun), self.mode, files, header, self.own_state, keeping)

    def resume(self, files: World) -> Start:
        """Put the checkpoint from which this run goes on into the mode; where it begins.

        Of the run folder's own the newest that is whole. `files`: of `file_world`.
        """
        own = self.config, self.world, self.run_dir, self.identity()
        start, others = self.starts or (None, find_starts(*own))
        start = start or next(others)
        while True:
            try:
                self.load(start, files)
                return start
            except DataError as error:
                start = others.throw(error)

    def load(self, start: Start, files: World) -> None:
        """Put the checkpoint of `start`, if it has one, into the mode."""
        load_checkpoint(start, self.mode, files)

    def own_state(self, state: TrainerState) -> dict[str, bytes]:
        """Values of this rank alone that belong into a checkpoint at `state`, by unique names."""
        return {}

    def schedule(self, start: TrainerState) -> Schedule:
        """The batches to come, from `start` on."""
        want = self.config.trainer
        evaluations = want.eval_every, want.eval_steps
        schedule = make_schedule(self.source, start.step, want.steps, *evaluations)
        if isinstance(self.source, HotColdSource):
            phase = start.phase or Phase(self.config.data.phase_rate)
            schedule = PhasedSchedule(**vars(schedule), phase=phase, sizes=self.source.sizes)
        is_short = want.eval_steps != "all" and schedule.eval_batches < want.eval_steps
        if self.world.is_first and is_short:
            held_out = f"no more than {schedule.eval_batches} batches are held out"
            logger.warning(f"trainer.eval_steps={want.eval_steps}, but {held_out}")
        return schedule

    def run_steps(self, loop: Loop) -> None:
        """Train and evaluate; after an error save the steps before it."""
        begun = loop.done
        try:
            self.walk(loop)
        except (DataError, StepTooLargeError, PeerError):
            # All ranks stand after the steps before one that could not be planned.
            if loop.done > begun and self.mode.errors_are_common():
                try:
                    loop.saver.write(loop.state, loop.metrics, periodic=False)
                except DistcacheError as error:
                    logger.warning("the steps before the error are not saved: %s", error)
            raise

    def walk(self, loop: Loop) -> None:
        """Go through the batches of the source, stream by stream."""
        for batches in loop.schedule.streams(self.source, self.world.rank, self.world.size):
            loop.run(batches)
            if loop.over:
                break

    def progress(self, schedule: Schedule) -> Progress:
        """The report to screen and `metrics.jsonl`, which only rank 0 writes."""
        path = self.run_dir / "metrics.jsonl" if self.world.is_first else None
        want = self.config.trainer
        return Progress(path, schedule, want.log_every, self.begun, want.log_seconds)

    def save(self, loop: Loop, stopped_by: int | None) -> None:
        """Make the tables whole, and write a checkpoint where asked, stopped or not finite.

        Raises NonFiniteLossError after that, where the loss was not finite.
        """
        self.mode.flush()
        if self.config.run.save or stopped_by is not None or loop.bad is not None:
            loop.saver.write(loop.state, loop.metrics, periodic=False)
        if loop.bad is not None:
            ranks = ", ".join(map(str, loop.bad.bad_ranks))
            raise NonFiniteLossError(
                f"step {loop.done}: the loss is not finite"
                f"{f' on rank {ranks}' if ranks else ' when summed over ranks'}; nothing was "
                f"applied, and the state before this step is in {loop.saver.folder}. Lower "
                "optim.dense_lr or optim.embedding_lr, or look at the data of this step"
            )
        if stopped_by is not None and self.world.is_first:
            end = f"stopped by {signal.Signals(stopped_by).name} after step {loop.done:,}"
            logger.warning(f"{end}; go on with run.dir={self.run_dir}")

    def summarise(
        self, start: TrainerState, loop: Loop, measured: dict[str, Any], digest: str | None
    ) -> tuple[dict[str, Any], str]:
        """The summary, equal on all ranks; rank 0 writes it to `summary.json`, unless there is one
        already and no step was trained: then that one, and a notice that says so.

        `measured`: what only the mode knows. `steps` and all measures are this process's.
        """
        values = measured | {
            "mode": self.config.parallel.mode,
            "world_size": self.world.size,
            "first_step": start.step,
            "steps": loop.done - start.step,
            "global_batch_size": self.identity()["global_batch_size"] or None,
            "final_loss": loop.final_loss,
            "samples_per_second": loop.times.samples_per_second(),
            "step_ms": loop.times.step_ms(),
            "table_rows": sum(table.rows for table in self.tables),
            "loss_digest": loop.state.loss_digest.hex() or None,
            "state_digest": digest,
        }
        values |= loop.metrics
        if isinstance(self.source, HotColdSource):
            values["hot_samples"] = self.source.share
            values["phase_rate"] = loop.phase and loop.phase.rate

        def write() -> tuple[dict[str, Any], str]:
            path, limit = self.run_dir / "summary.json", self.config.trainer.steps
            if start.step and not values["steps"] and (earlier := read_json(path)):
                end = "the end of the data" if limit is None else f"trainer.steps={limit}"
                done = f"nothing to train after step {start.step:,} ({end})"
                return earlier, f"{done}: {path} stays as it is, and the result is that one"
            summary = plain({key: values.get(key) for key in SUMMARY_KEYS})
            write_json(path, summary)
            return summary, ""

        return run_on_rank0(self.world, write)

    def identity(self) -> Identity:
        """What a checkpoint of this run has in common with a run that resumes it."""
        return identity_of(self.config, self.world, self.source, self.tables)
