"""One rank of a checkout's training run, which trains a block of steps whenever it is told to.

`benchmarks.against` starts it as a file of its own, with another checkout first on the path: of
distcache it uses the public door alone (`distcache.fit`), and nothing of this folder. It is told
what to train by JSON, the only argument, and when by a pipe, whose descriptor is `$RANK_PIPE`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import sys
import threading
import time
from collections import defaultdict
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


class Calls:
    """Calls of Python functions by thread: all but this file's, and those of the package's."""

    def __init__(self) -> None:
        self.all: dict[int, int] = defaultdict(int)
        self.package: dict[int, int] = defaultdict(int)
        self._folder = str(Path(distcache.__file__).parent) + os.sep

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """What `sys.setprofile` calls."""
        if event != "call":
            return
        file = frame.f_code.co_filename
        if file != __file__:
            self.all[threading.get_ident()] += 1
            if file.startswith(self._folder):
                self.package[threading.get_ident()] += 1


class Pace:
    """Holds training between blocks of steps; called in its thread, as each step's forward begins.

    From one such moment to the next is one step, whatever a step is made of.
    """

    def __init__(self, pipe: Connection, calls: Calls | None) -> None:
        self._pipe, self._calls = pipe, calls
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
            self._lead, self._steps = numbers if word == "run" else (0, 1 << 62)
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
        found["step_ms"] = (1e3 * np.diff(self._marks[self._lead :])).tolist()
        self._pipe.send(found)

    def _meters(self) -> dict[str, dict[str, float]]:
        """So far, by thread: milliseconds on a core, and calls where they are counted. `process`:
        of all threads, also those of libraries."""
        meters: dict[str, dict[str, float]] = {"cpu_ms": {"process": 1e3 * time.process_time()}}
        if self._calls is not None:
            meters |= {"calls": {}, "package_calls": {}}
        for thread in threading.enumerate():
            if thread.ident is None:
                continue
            role, found = role_of(thread), {}
            with contextlib.suppress(OSError):  # it has just ended
                clock = time.pthread_getcpuclockid(thread.ident)
                found["cpu_ms"] = 1e3 * time.clock_gettime(clock)
            if self._calls is not None:
                found["calls"] = self._calls.all[thread.ident]
                found["package_calls"] = self._calls.package[thread.ident]
            for meter, value in found.items():
                meters[meter][role] = meters[meter].get(role, 0) + value
        return meters


def role_of(thread: threading.Thread) -> str:
    """What a thread does, by its name: checkouts may call it differently."""
    if thread is threading.main_thread():
        return "training"
    if "plan" in thread.name:
        return "planning"
    return "movement" if "move" in thread.name else "other"


def main() -> None:
    """Train until the pipe says stop, then tell the last loss."""
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
    torch.manual_seed(spec["seed"])
    names = [f"t{index}" for index in range(len(spec["table_rows"]))]
    result = distcache.fit(
        draw(spec, rank, ranks),
        tables=[
            distcache.TableSpec(name, rows=rows, dim=spec["width"], features=(name,))
            for name, rows in zip(names, spec["table_rows"], strict=True)
        ],
        model=Net(spec, Pace(pipe, calls)),
        parallel=spec["parallel"],
        optimizer=spec["optimizer"],
        settings=spec["settings"],
    )
    pipe.send(result.summary["final_loss"])


if __name__ == "__main__":
    main()
