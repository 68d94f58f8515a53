"""One rank of a checkout's training run, which trains a block of steps on request.

`benchmarks.against` starts this file with another checkout first on the path. It uses only the
public `distcache.fit` of that checkout and nothing of this folder. The specification of the run
comes as JSON in the only argument, requests through a pipe with the file descriptor `$RANK_PIPE`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import json
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import distcache

DENSE_FEATURES = 13

SETTLE_S = 0.25
"""Pause at both ends of a block, in which the threads beside training do the work that they can do
ahead. They then work for exactly as many steps as training between the two readings of clocks."""

Item = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]


def draw(spec: dict[str, Any], rank: int, ranks: int) -> list[Item]:
    """Draw this rank's batches (dense, (ids, offsets), labels); ids follow Zipf's law."""
    batch = spec["batch"]
    rows = np.array(spec["table_rows"], dtype=np.int64)[:, None]
    samples = (rank + 1) * batch // ranks - rank * batch // ranks
    power = 1.0 - (spec["zipf"] if spec["zipf"] != 1 else 1 + 1e-6)
    items = []
    for step in range(spec["batches"]):
        rng = np.random.default_rng([spec["seed"], rank, step])
        # Invert the distribution function, with its sum taken as an integral.
        values = 1.0 + rng.random((len(rows), samples)) * ((rows + 1.0) ** power - 1.0)
        popularity_ranks = np.minimum((values ** (1.0 / power)).astype(np.int64) - 1, rows - 1)
        # A prime multiplier scatters popular ids over their table.
        ids = popularity_ranks * 2_654_435_761 % rows
        offsets = torch.arange(ids.size + 1)
        dense = torch.from_numpy(rng.standard_normal((samples, DENSE_FEATURES), dtype=np.float32))
        labels = torch.from_numpy((rng.random(samples) < 0.25).astype(np.float32))
        items.append((dense, (torch.from_numpy(ids.reshape(-1)), offsets), labels))
    return items


class Net(nn.Module):
    """DLRM, or (`embeddings`) one number times the mean; calls `pace` when a step begins."""

    def __init__(self, spec: dict[str, Any], pace: Pace) -> None:
        super().__init__()
        self._pace = pace
        self._width = spec["width"]
        self._bottom: nn.Module | None = None
        if spec["embeddings"]:
            self._scale = nn.Parameter(torch.ones(()))
            return
        vectors = len(spec["table_rows"]) + 1
        self._pairs = torch.tril_indices(vectors, vectors, -1)
        self._bottom = layers([DENSE_FEATURES, *spec["bottom"]])
        top = layers([self._width + self._pairs.shape[1], *spec["top"]])
        self._top = top[:-1]  # the logit has no ReLU

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Map `(dense [b, F], pooled [b, T D])` to logits `[b]`."""
        self._pace()
        if self._bottom is None:
            return self._scale * pooled.mean(dim=1)
        first = self._bottom(dense)
        vectors = torch.cat([first, pooled], dim=1).view(len(dense), -1, self._width)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self._pairs[0], self._pairs[1]]
        return self._top(torch.cat([first, products], dim=1)).squeeze(1)


def layers(widths: list[int]) -> nn.Sequential:
    """Build linear layers with a ReLU behind each."""
    modules: list[nn.Module] = []
    for below, above in itertools.pairwise(widths):
        modules += [nn.Linear(below, above), nn.ReLU()]
    return nn.Sequential(*modules)


class Pace:
    """Holds training between blocks of steps; called in its thread as each step's forward begins.

    A step lasts from one such call to the next.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lead = 0
        self._steps = 0
        self._times: list[float] = []
        self._cpu_before: dict[str, float] = {}

    def __call__(self) -> None:
        """Note that a step has begun; at the end of a block, report it and wait for the next."""
        at_end = len(self._times) == self._lead + self._steps
        if at_end and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._times.append(time.perf_counter())
        if not at_end:
            return
        time.sleep(SETTLE_S)
        if self._steps:
            self._report()
        request = self._pipe.recv()
        # None: train the rest of the stream without reports.
        self._lead, self._steps = request or (0, 1 << 62)
        gc.collect()
        self._cpu_before = cpu_times()
        self._times = [time.perf_counter()]

    def _report(self) -> None:
        """Send the timed steps' milliseconds, and each thread's CPU time per step of the block."""
        steps = self._lead + self._steps
        cpu_ms = {
            role: (ms - self._cpu_before.get(role, 0.0)) / steps for role, ms in cpu_times().items()
        }
        step_ms = (1e3 * np.diff(self._times[self._lead :])).tolist()
        self._pipe.send({"step_ms": step_ms, "cpu_ms": cpu_ms})


def cpu_times() -> dict[str, float]:
    """Return milliseconds on a core so far by thread; `process`: with the libraries' threads."""
    times = {"process": 1e3 * time.process_time()}
    for thread in threading.enumerate():
        if thread.ident is None:  # not started yet
            continue
        # A thread that has just ended has no clock any more.
        with contextlib.suppress(OSError):
            clock = time.pthread_getcpuclockid(thread.ident)
            role = role_of(thread)
            times[role] = times.get(role, 0.0) + 1e3 * time.clock_gettime(clock)
    return times


def role_of(thread: threading.Thread) -> str:
    """Return a thread's role by its name, which may differ between checkouts."""
    if thread is threading.main_thread():
        return "training"
    # In this order: threads that plan parts, or exchange plans, may also be named for planning.
    words = {"part": "planning", "talk": "planning", "plan": "planning", "move": "movement"}
    return next((role for word, role in words.items() if word in thread.name), "other")


def main() -> None:
    """Train until the stream ends, then send the last loss."""
    faulthandler.enable()  # the parent reads the log of a rank that crashed
    spec = json.loads(sys.argv[1])
    checkout = Path(spec["checkout"]).resolve()
    if not Path(distcache.__file__).resolve().is_relative_to(checkout):
        sys.exit(f"error: distcache comes from {distcache.__file__}, not from {checkout}")
    rank = int(os.environ.get("RANK", 0))
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    pipe = Connection(int(os.environ["RANK_PIPE"]))
    torch.manual_seed(spec["seed"])
    names = [f"t{index}" for index in range(len(spec["table_rows"]))]
    result = distcache.fit(
        draw(spec, rank, ranks),
        tables=[
            distcache.TableSpec(name, rows=rows, dim=spec["width"], features=(name,))
            for name, rows in zip(names, spec["table_rows"], strict=True)
        ],
        model=Net(spec, Pace(pipe)),
        parallel=spec["parallel"],
        optimizer=spec["optimizer"],
        settings=spec["settings"],
    )
    pipe.send(result.summary["final_loss"])


if __name__ == "__main__":
    main()
