"""One rank of a checkout's training run, which trains a block of steps whenever it is told to.

`benchmarks.against` starts it as a file of its own, with another checkout first on the path: of
distcache it uses the public door alone (`distcache.fit`), and nothing of this folder. It is told
what to train by JSON, the only argument, and when by a pipe, whose descriptor is `$RANK_PIPE`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import inspect
import itertools
import json
import os
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

import distcache

DENSE = 13
"""Dense features of a sample."""

SETTLE_S = 0.25
"""How long the threads beside training may take, once it stands still, to do what they can do
ahead: from there to there they work for exactly as many steps as training."""

Item = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]


def draw(spec: dict[str, Any], rank: int, ranks: int) -> list[Item]:
    """This rank's batches (dense, (ids, offsets), labels). Ids follow Zipf's law, scattered over
    their tables."""
    batch, rows = spec["batch"], np.array(spec["table_rows"], dtype=np.int64)[:, None]
    samples = (rank + 1) * batch // ranks - rank * batch // ranks
    power = 1.0 - (spec["zipf"] if spec["zipf"] != 1 else 1 + 1e-6)
    items = []
    for step in range(spec["batches"]):
        rng = np.random.default_rng([spec["seed"], rank, step])
        # The inverse of the law's distribution function, with the sum as an integral.
        drawn = 1.0 + rng.random((len(rows), samples)) * ((rows + 1.0) ** power - 1.0)
        likeliest = np.minimum((drawn ** (1.0 / power)).astype(np.int64) - 1, rows - 1)
        ids = likeliest * 2_654_435_761 % rows  # a prime: each has a row of its own
        values, offsets = torch.from_numpy(ids.reshape(-1)), torch.arange(ids.size + 1)
        dense = torch.from_numpy(rng.standard_normal((samples, DENSE), dtype=np.float32))
        labels = torch.from_numpy((rng.random(samples) < 0.25).astype(np.float32))
        items.append((dense, (values, offsets), labels))
    return items


class Net(nn.Module):
    """DLRM, or (`embeddings`) one number times the mean; calls `pace` as each step begins."""

    def __init__(self, spec: dict[str, Any], pace: Pace) -> None:
        super().__init__()
        self._pace, self._width = pace, spec["width"]
        self._bottom: nn.Module | None = None
        if spec["embeddings"]:
            self._scale = nn.Parameter(torch.ones(()))
            return
        vectors = len(spec["table_rows"]) + 1
        self._pairs = torch.tril_indices(vectors, vectors, -1)
        self._bottom = layers([DENSE, *spec["bottom"]], last=True)
        self._top = layers([self._width + self._pairs.shape[1], *spec["top"]], last=False)

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """`(dense [b, F], pooled [b, T D]) -> logits [b]`."""
        self._pace()
        if self._bottom is None:
            return self._scale * pooled.mean(dim=1)
        first = self._bottom(dense)
        vectors = torch.cat([first, pooled], dim=1).view(len(dense), -1, self._width)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self._pairs[0], self._pairs[1]]
        return self._top(torch.cat([first, products], dim=1)).squeeze(1)


def layers(widths: list[int], last: bool) -> nn.Sequential:
    """Linear layers with ReLU between them, and (`last`) behind the last one."""
    found: list[nn.Module] = []
    for below, above in itertools.pairwise(widths):
        found += [nn.Linear(below, above), nn.ReLU()]
    return nn.Sequential(*(found if last else found[:-1]))


OPERATORS = (
    *("add", "radd", "iadd", "sub", "isub", "mul", "rmul", "imul", "truediv", "itruediv"),
    *("and", "or", "xor", "neg", "invert", "lt", "le", "gt", "ge", "getitem", "setitem"),
    *("bool", "int", "float"),
)
"""Of tensors, of which `sys.setprofile` hears nothing unless `tell_operators` was called."""


def tell_operators() -> None:
    """Let functions of this file do what the `OPERATORS` do, so that their time is torch's."""

    def told(plain: Any) -> Any:
        return lambda *given: plain(*given)

    for name in OPERATORS:
        method = f"__{name}__"
        setattr(torch.Tensor, method, told(getattr(torch.Tensor, method)))


class Work:
    """One thread's calls of Python functions but this file's (`calls`), of these the package's
    (`package_calls`), and calls of NumPy's (`numpy_calls`); milliseconds on its core of what is its
    own (`own_ms`), and what told of it: events within it (`own_events`), and calls that are
    another's (`turns`)."""

    def __init__(self) -> None:
        self.meters = dict.fromkeys(METERS, 0.0)
        self.others = [False]
        """Of each call that has not ended, whether its time is another's."""
        self.replayed = 0
        """How many calls there were outside `REPLAYED`, within which all is another's; 0 beside."""
        self._since = time.thread_time()

    def enter(self, other: bool | None) -> None:
        """A call begins, whose time is another's, its own, or (None) as that of its caller."""
        self.others.append(self.others[-1] if other is None else other)
        self._turn(self.others[-2], self.others[-1])

    def leave(self) -> None:
        """The call that began last has ended."""
        if len(self.others) > 1:
            self._turn(self.others.pop(), self.others[-1])
        if len(self.others) <= self.replayed:
            self.replayed = 0

    def _turn(self, before: bool, after: bool) -> None:
        self.meters["own_events"] += not (before or after)
        if before != after:
            self.meters["turns"] += after
            now = time.thread_time()
            self.meters["own_ms"] += 0.0 if before else 1e3 * (now - self._since)
            self._since = now


_CALLS = 20_000

TOLD = ("own_events", "turns")
"""What takes time of a thread's own, since it is told."""

METERS = ("calls", "package_calls", "numpy_calls", "own_ms", *TOLD)
"""What `Calls` tells of each thread."""


REPLAYED = "_dense_pass"
"""The function of the package that a GPU replays from a graph, whatever that calls."""


class Calls:
    """What each thread does by itself, told by `sys.setprofile`, until `over`.

    Not its own is what torch does, the package's kernels (`ops`, which a device does), the model,
    which is this file's, and all of `REPLAYED`; operators of tensors are told (`tell_operators`).
    Compiled loops are a thread's own, and so is what it takes to let go of a tensor's memory.
    """

    def __init__(self) -> None:
        self.threads: dict[int, Work] = defaultdict(Work)
        self.over = False
        package = str(Path(distcache.__file__).parent) + os.sep
        others = (str(Path(torch.__file__).parent) + os.sep, package + "ops" + os.sep, __file__)
        self._package, self._others = package, others
        self._known: dict[str, bool | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """What `sys.setprofile` calls."""
        if self.over:
            sys.setprofile(None)
            return
        work = self.threads[threading.get_ident()]
        if event == "call":
            file = frame.f_code.co_filename
            if frame.f_code.co_name == REPLAYED:
                work.replayed = len(work.others)
            if file != __file__ and not work.replayed:
                work.meters["calls"] += 1
                work.meters["package_calls"] += file.startswith(self._package)
            if file not in self._known:
                other = file.startswith(self._others)
                known = other or file.startswith(self._package)
                self._known[file] = other if known else None
            work.enter(work.replayed > 0 or self._known[file])
        elif event == "c_call":
            owner = argument.__module__ or getattr(argument.__self__, "__module__", "builtins")
            work.meters["numpy_calls"] += owner.startswith("numpy")
            work.enter(True if owner.startswith("torch") else None)
        else:
            work.leave()

    def told_ms(self) -> dict[str, float]:
        """What each of `TOLD` adds to a thread's own milliseconds: of many calls that do nothing,
        what is counted as its own, less what they take untold."""

        def own() -> None:
            len(())

        def spent(meter: str) -> float:
            told, call = type(self)(), own if meter == "own_events" else torch.is_grad_enabled
            told._known[__file__] = False  # what is called here is the thread's own
            began = time.thread_time()
            for _ in range(_CALLS):
                call()
            untold = 1e3 * (time.thread_time() - began)
            sys.setprofile(told)
            for _ in range(_CALLS):
                call()
            torch.is_grad_enabled()  # what is its own is counted where it ends
            sys.setprofile(None)
            found = told.threads[threading.get_ident()].meters
            untold *= meter == "own_events"  # of a call that is torch's nothing is left
            return (found["own_ms"] - untold) / found[meter]

        return {meter: sorted(spent(meter) for _ in range(5))[2] for meter in TOLD}


class Pace:
    """Holds training between blocks of steps; called in its thread, as each step's forward begins.

    From one such moment to the next is one step, whatever a step is made of.
    """

    def __init__(self, pipe: Connection, calls: Calls | None) -> None:
        self._pipe, self._calls = pipe, calls
        self.taken: dict[str, float] = {}
        """Milliseconds on cores so far, of what `OnlyPlans` tells."""
        self.over = False
        self._lead = self._steps = 0
        self._told_ms = dict.fromkeys(TOLD, 0.0)
        self._marks: list[float] = []
        self._before: dict[str, dict[str, float]] = {}

    def __call__(self) -> None:
        """One more step has begun."""
        last = len(self._marks) == self._lead + self._steps
        if last and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._marks.append(time.perf_counter())
        if last:
            time.sleep(SETTLE_S)
            if self._steps:
                self._report()
            word, *numbers = self._pipe.recv()
            self.over = word == "stop"
            self._lead, self._steps = (0, 1 << 62) if word == "stop" else numbers
            if word == "alone" and self._calls is not None:
                self._calls.over = True
                if not any(self._told_ms.values()):
                    self._told_ms = self._calls.told_ms()
            gc.collect()
            self._before = self._meters()
            self._marks = [time.perf_counter()]

    def _report(self) -> None:
        """Tell the last steps' times, and what each thread did for a step of the whole block."""
        after, steps = self._meters(), self._lead + self._steps
        found: dict[str, Any] = {
            meter: {role: (v - self._before[meter].get(role, 0)) / steps for role, v in of.items()}
            for meter, of in after.items()
        }
        found["told_ms"] = self._told_ms
        found["step_ms"] = (1e3 * np.diff(self._marks[self._lead :])).tolist()
        self._pipe.send(found)

    def _meters(self) -> dict[str, dict[str, float]]:
        """So far, by thread: milliseconds on a core, and calls where they are counted. `process`:
        of all threads, also those of libraries."""
        meters: dict[str, dict[str, float]] = {"cpu_ms": {"process": 1e3 * time.process_time()}}
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        meters |= {"taken_ms": dict(self.taken), "faults": {"process": faults}}
        if self._calls is not None:
            meters |= {meter: {} for meter in METERS}
        for thread in threading.enumerate():
            if thread.ident is None:
                continue
            role, found = role_of(thread), {}
            with contextlib.suppress(OSError):  # it has just ended
                clock = time.pthread_getcpuclockid(thread.ident)
                found["cpu_ms"] = 1e3 * time.clock_gettime(clock)
            if self._calls is not None:
                found |= self._calls.threads[thread.ident].meters
            for meter, value in found.items():
                meters[meter][role] = meters[meter].get(role, 0) + value
        return meters


def role_of(thread: threading.Thread) -> str:
    """What a thread does, by its name: checkouts may call it differently."""
    if thread is threading.main_thread():
        return "training"
    if "part" in thread.name:
        return "parts"  # of a home, which more threads plan
    if "talk" in thread.name:
        return "talking"  # with the planners of other ranks
    if "plan" in thread.name:
        return "planning"
    return "movement" if "move" in thread.name else "other"


class OnlyPlans:
    """Lets the planner's thread go through the stream at `pace`; nothing that it plans is trained.

    Tells `pace` what reading batches and checking their ids takes (`reading`), and what of the
    planner's thread is that, or is shared with other threads, or theirs (`shared`).
    """

    def __init__(self, pace: Pace) -> None:
        self._pace, self._inside, taken = pace, threading.local(), pace.taken
        with contextlib.suppress(AttributeError):
            threads = found_in("Threads", "distcache.planner.threads", "distcache.planner.home")
            threads.each = self._shared(threads.each)
            threads.begin = self._begun(threads.begin)
        check = found_in("BatchCheck", "distcache.data.batch", "distcache.data.check")
        check.__call__ = self._shared(check.__call__, reading=True)
        planner = found_in(
            "StreamPlanner", "distcache.engine.planning", "distcache.pipeline.planning"
        )
        planner.planned = self._planned(planner.planned)
        taken.update(dict.fromkeys(("shared", "reading"), 0.0))

    def _shared(self, call: Callable[..., Any], reading: bool = False) -> Callable[..., Any]:
        """`call`, of which is told what it takes of its thread's core, but for a call inside."""

        def run(*arguments: Any) -> Any:
            outer, self._inside.any = getattr(self._inside, "any", False), True
            began = time.thread_time()
            try:
                return call(*arguments)
            finally:
                ms, self._inside.any = 1e3 * (time.thread_time() - began), outer
                planner = role_of(threading.current_thread()) == "planning"
                self._pace.taken["reading"] += ms * reading
                self._pace.taken["shared"] += ms * (planner and not outer)

        return run

    def _begun(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        return lambda threads, call, *of: begin(threads, self._shared(call), *of)

    def _planned(self, planned: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def read(batches: Iterator[Any]) -> Iterator[Any]:
            following = self._shared(batches.__next__, reading=True)
            with contextlib.suppress(StopIteration):
                while True:
                    yield following()

        def call(planner: Any, batches: Any, *others: Any, **more: Any) -> Iterator[Any]:
            for _ in planned(planner, read(iter(batches)), *others, **more):
                self._pace()
                if self._pace.over:
                    os._exit(0)  # training waits for a step that never comes
            yield from ()

        return call


def as_beside_a_gpu() -> None:
    """Let training look at its steps as it does beside a GPU: of ten one has its stages timed, and
    results are read two steps later. Older checkouts look at each at once."""
    with contextlib.suppress(ImportError, AttributeError):
        streams = importlib.import_module("distcache.streams")
        mode = importlib.import_module("distcache.parallel.cached")
        every, delay, make = streams.TIMED_EVERY, mode._DELAY, mode.CachedParallel.__init__
        given = inspect.signature(make)

        def made(*arguments: Any, **named: Any) -> None:
            call = given.bind(*arguments, **named)
            settings = call.arguments["settings"]
            call.arguments["settings"] = dataclasses.replace(settings, result_delay=delay)
            make(*call.args, **call.kwargs)

        streams.Streams.times = lambda _, step: step % every == 0
        mode.CachedParallel.__init__ = made


def found_in(name: str, *modules: str) -> Any:
    """A class of the package; checkouts may have it elsewhere."""
    for module in modules:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"{name} is in none of {modules}")


def main() -> None:
    """Train until the pipe says stop, then tell the last loss."""
    faulthandler.enable()  # what a crash leaves is the log
    spec = json.loads(sys.argv[1])
    checkout = Path(spec["checkout"]).resolve()
    if not Path(distcache.__file__).resolve().is_relative_to(checkout):
        sys.exit(f"error: distcache comes from {distcache.__file__}, not from {checkout}")
    rank, ranks = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
    pipe = Connection(int(os.environ["RANK_PIPE"]))
    calls = Calls() if spec["count"] else None
    if calls is not None:
        tell_operators()
        threading.setprofile(calls)
        sys.setprofile(calls)
    pace = Pace(pipe, calls)
    if spec["late"]:
        as_beside_a_gpu()
    if spec["plans"]:
        OnlyPlans(pace)
    torch.manual_seed(spec["seed"])
    names = [f"t{index}" for index in range(len(spec["table_rows"]))]
    result = distcache.fit(
        draw(spec, rank, ranks),
        tables=[
            distcache.TableSpec(name, rows=rows, dim=spec["width"], features=(name,))
            for name, rows in zip(names, spec["table_rows"], strict=True)
        ],
        model=Net(spec, pace),
        parallel=spec["parallel"],
        optimizer=spec["optimizer"],
        settings=spec["settings"],
    )
    pipe.send(result.summary["final_loss"])


if __name__ == "__main__":
    main()
