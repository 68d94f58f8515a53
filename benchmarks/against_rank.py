"""One rank of a checkout's training run, which trains a block of steps whenever it is told to.

`benchmarks.against` starts it as a file of its own, with another checkout first on the path: of
distcache it uses the public door alone (`distcache.fit`), and nothing of this folder. It is told
what to train by JSON, the only argument, and when by a pipe, whose descriptor is `$RANK_PIPE`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import inspect
import itertools
import json
import os
import resource
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import BuiltinFunctionType, FrameType, MethodDescriptorType, WrapperDescriptorType
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
    *("bool", "int", "float", "len"),
)
"""Of tensors."""

CALLS = ("calls", "package_calls", "numpy_calls")
"""What `Calls` tells of each thread."""

_PACKAGE = str(Path(distcache.__file__).parent) + os.sep


class Calls:
    """Each thread's calls of Python functions but this file's, of these the package's, and of
    NumPy's functions, as `sys.setprofile` tells of them, until `over`."""

    def __init__(self) -> None:
        self.threads: dict[int, dict[str, int]] = defaultdict(lambda: dict.fromkeys(CALLS, 0))
        self.over = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """What `sys.setprofile` calls."""
        if self.over:
            sys.setprofile(None)
            return
        counts = self.threads[threading.get_ident()]
        if event == "call" and (file := frame.f_code.co_filename) != __file__:
            counts["calls"] += 1
            counts["package_calls"] += file.startswith(_PACKAGE)
        elif event == "c_call":
            owner = argument.__module__ or getattr(argument.__self__, "__module__", "builtins")
            counts["numpy_calls"] += owner.startswith("numpy")


class Told:
    """Lets functions of this file call torch's, while it does, so that a stack (`benchmarks.looks`)
    tells of calls of C too; and the dense part, which lets go of what it holds as it returns."""

    def __init__(self) -> None:
        self._plain: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        """From now on."""
        names = [f"__{name}__" for name in OPERATORS]
        names += [name for name in dir(torch.Tensor) if not name.startswith("_")]
        every = [(torch.Tensor, name) for name in names]
        for of in (torch, torch.distributed.Work):
            every += [(of, name) for name in vars(of) if not name.startswith("_")]
        kinds = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
        for owner, name in every:
            plain = inspect.getattr_static(owner, name)
            if isinstance(plain, kinds) or type(plain).__name__ == "instancemethod":
                self._tell(owner, name)
        with contextlib.suppress(ImportError, AttributeError):
            mode = importlib.import_module("distcache.parallel.cached")
            self._tell(mode.CachedParallel, "_dense_pass")

    def _tell(self, owner: Any, name: str) -> None:
        plain = getattr(owner, name)
        self._plain.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, told(plain))

    def end(self) -> None:
        """Torch is called as ever."""
        while self._plain:
            owner, name, plain = self._plain.pop()
            delattr(owner, name) if plain is None else setattr(owner, name, plain)


def told(plain: Any) -> Any:
    """A function of this file that calls `plain`."""
    return lambda *given, **named: plain(*given, **named)


class Pace:
    """Holds training between blocks of steps; called in its thread, as each step's forward begins.

    From one such moment to the next is one step, whatever a step is made of.
    """

    def __init__(self, pipe: Connection, calls: Calls | None) -> None:
        self._pipe, self._calls = pipe, calls
        self._told = Told()
        self.taken: dict[str, float] = {}
        """Milliseconds on cores so far, of what `OnlyPlans` tells."""
        self.over = False
        self._lead = self._steps = 0
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
            if self._calls is not None:
                self._calls.over |= word != "run"
            self._told.end()
            if word == "seen":
                self._told.begin()
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
        found["threads"] = {} if self._calls is None else states()
        found["step_ms"] = (1e3 * np.diff(self._marks[self._lead :])).tolist()
        self._pipe.send(found)

    def _meters(self) -> dict[str, dict[str, float]]:
        """So far, by thread: milliseconds on a core, and calls where they are counted. `process`:
        of all threads, also those of libraries."""
        meters: dict[str, dict[str, float]] = {"cpu_ms": {"process": 1e3 * time.process_time()}}
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        meters |= {"taken_ms": dict(self.taken), "faults": {"process": faults}}
        if self._calls is not None:
            meters |= {meter: {} for meter in CALLS}
        for thread in threading.enumerate():
            if thread.ident is None:
                continue
            role, found = role_of(thread), {}
            with contextlib.suppress(OSError):  # it has just ended
                clock = time.pthread_getcpuclockid(thread.ident)
                found["cpu_ms"] = 1e3 * time.clock_gettime(clock)
            if self._calls is not None:
                found |= self._calls.threads[thread.ident]
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


_THREAD_ID, _RUNTIME = 152, 4096
"""Where CPython 3.11 has a thread's `ident` in its state, and up to where its lock among what it
has of all threads, in bytes."""


def states() -> dict[str, tuple[int, int, int]]:
    """What `benchmarks.looks` asks of this process' threads, by role: a thread's number in the
    system, and where the interpreter has its state, and its lock: as CPython 3.11 has them,
    alone."""
    api, at = ctypes.pythonapi, {}
    main, head, following = (
        api.PyInterpreterState_Main,
        api.PyInterpreterState_ThreadHead,
        api.PyThreadState_Next,
    )
    for function in (main, head, following):
        function.restype = ctypes.c_void_p
    state = head(ctypes.c_void_p(main()))
    while state:
        at[ctypes.c_ulong.from_address(state + _THREAD_ID).value] = state
        state = following(ctypes.c_void_p(state))
    threads = [each for each in threading.enumerate() if each.ident in at]
    lock = lock_of(at[threading.get_ident()])
    return {role_of(each): (each.native_id or 0, at[each.ident or 0], lock) for each in threads}


def lock_of(holder: int) -> int:
    """Where the interpreter's lock lies, which the calling thread has, whose state is `holder`."""
    start = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    about = struct.pack("<QQi", round(1e6 * sys.getswitchinterval()), holder, 1)
    return start + ctypes.string_at(start, _RUNTIME).index(about)


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

        streams.Streams.is_timed = lambda _, step: step % every == 0
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
