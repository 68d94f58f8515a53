"""The interface of the parallel modes: `data`, `hybrid`, `resident`, `host`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from distcache.data.batch import Batch
from distcache.pipeline.clock import Watcher


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer for rows and dense part: the same values in every mode.

    `name`: `sgd`, `adagrad`, `rowwise_adagrad` or `adam`. Rates are set per step by `set_lr`.
    """

    name: str
    eps: float = 1e-8
    betas: tuple[float, float] = (0.9, 0.999)
    initial_accumulator: float = 0.0


@dataclass(frozen=True)
class Step:
    """A batch with the mode's own handles on it (for cached modes: its plans, one per group, and
    the step on its way through the stages)."""

    batch: Batch
    plans: Any = None
    flight: Any = None


@dataclass(frozen=True)
class StepResult:
    """What all ranks agree on after a training step.

    `loss`: mean over the global batch, float64; `bad_ranks`: ranks whose loss is not finite
    (then nothing was applied); `stop`: whether some rank asked to stop after this step.
    """

    loss: float
    bad_ranks: tuple[int, ...]
    stop: bool


class LateResult(StepResult):
    """A result that is read when someone looks at it: the device may still be at work."""

    def __init__(self, read: Callable[[], StepResult]) -> None:
        object.__setattr__(self, "_read", read)

    def __getattribute__(self, name: str) -> Any:
        if name in ("loss", "bad_ranks", "stop"):
            return getattr(object.__getattribute__(self, "_read")(), name)
        return object.__getattribute__(self, name)


class Parallel(ABC):
    """A model whose tables lie in one of four ways; every method is called by all ranks in order.

    The dense part is `model(dense [b, F], pooled [b, sum of widths]) -> logits [b]`.
    """

    result_delay: int = 0
    """How many steps later the result of a step is best looked at; earlier means waiting for it.
    At most so many later steps change nothing after one whose loss is not finite."""

    scratch: Path | None = None
    """Folder on disk for temporary files; None: the system's."""

    @abstractmethod
    def stream(self, batches: Iterable[Batch]) -> Iterator[Step]:
        """The batches with what the mode must know before each runs (plans), in order."""

    @abstractmethod
    def train_step(self, step: Step, stop: bool = False) -> StepResult:
        """Forward, backward, sync and apply; `stop`: this rank asks to stop after this step."""

    @abstractmethod
    def eval_step(self, step: Step) -> Tensor:
        """Logits `[b]` of this rank's slice; changes no weight."""

    @abstractmethod
    def set_lr(self, dense_lr: float, embedding_lr: float) -> None:
        """Learning rates of the coming steps."""

    @abstractmethod
    def flush(self) -> None:
        """Make the whole tables readable by `table_block` and `state_dict`."""

    @abstractmethod
    def table_block(self, table: int, start: int, stop: int) -> Tensor | None:
        """Rows [start, stop) of a table in original ids, `[stop - start, D]` on the CPU.

        Rank 0 gets the tensor, others may get None. After `flush`.
        """

    @abstractmethod
    def dense_state(self) -> dict[str, Tensor]:
        """The dense parameters by name, unwrapped, in parameter order (CPU or device tensors)."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that `torch.distributed.checkpoint` must save for the same trajectory to go on.

        Keys: `tables.<name>.weight`, `tables.<name>.<state>`, `dense.<parameter>`,
        `dense_optim.*`, counters. Tensors are whole tables in original ids (or shards of them).
        """

    def blank_state(self) -> dict[str, Any]:
        """`state_dict` to be filled by a load: the values of its tensors do not matter."""
        return self.state_dict()

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, after `torch.distributed.checkpoint` filled it."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """This mode's values of `summary.json`; None where a value does not exist here."""

    def errors_are_common(self) -> bool:
        """Whether what the stream raised was raised on all ranks, after the same whole step."""
        return False

    def progress(self) -> dict[str, Any]:
        """This rank's numbers for a log line; no wait. None that this mode does not have.

        `hit_rate`: so far. Since the last call, per training step: `stage_ms`, `stage_hidden_ms`,
        `stall_ms` (the loop waited for plans and rows), and `hidden_share`, the part of planning
        and movement that nothing waited for.
        """
        return {}

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` with the spans of each step once it has ended, if the mode has any."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Stop threads and free tables; safe to call twice."""
