"""The host's bench at a small size: what it leaves, and what counts as a thread's own work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmark_checks import of, read_report
from launching import CHECKOUT

from benchmarks import against_rank, host, looks
from benchmarks.against import SEEN
from distcache.cost.cluster import HOST
from distcache.cost.predict import BINDS
from distcache.errors import ConfigError
from distcache.parallel.cached import CachedParallel


def why_no_looks() -> str:
    """Why threads cannot be looked at here, if they cannot."""
    try:
        looks.require_looks()
    except ConfigError as error:
        return str(error)
    return ""


needs_looks = pytest.mark.skipif(bool(why_no_looks()), reason=why_no_looks())

SMALL = ["size=small", "batch=64", "ratio=0.1", "steps=2", "repetitions=2", "warmup=12"]
SMALL += ["seen=20"]


@needs_looks
@pytest.mark.slow
@pytest.mark.parametrize("given", [["ranks=1,2"], ["ranks=1", f"against={CHECKOUT}"]])
def test_threads_are_measured_and_steps_predicted_from_them(tmp_path, monkeypatch, given):
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "host.md"
    words = ["optimizers=sgd", "optim.embedding_lr=0.1", "planner_threads=3", f"out={out}"]
    assert host.main([*SMALL, *words, *given]) == 0
    _, records = read_report(out, host.BENCH)
    threads = of(records, "thread")
    sides = {"this", "other"} if "against" in given[-1] else {"this"}
    assert {record["side"] for record in threads} == sides
    hybrid = [record for record in threads if record["mode"] == "hybrid"]
    assert {record["thread"] for record in hybrid} == {host.TRAINING}
    cached = [record for record in threads if record not in hybrid]
    assert {record["thread"] for record in cached if record["ranks"] > 1} in (
        set(),
        {*SEEN},
    )
    assert {r["thread"] for r in cached if r["ranks"] == 1} == {*SEEN} - {"talking"}
    assert {record["batch"] for record in threads} == {64, 16, 1}
    for record in threads:
        assert 0 < record["package_calls"] < record["calls"]
        some = record["thread"] not in ("movement", "talking")  # nothing moves
        some &= record["mode"] != "hybrid"
        assert record["numpy_calls"] > 0 or not some
        assert record["core_ms"]["median"] > 0 and record["core_ms"]["count"] == 2
        assert "own_ms" in record or record["thread"] != "training"  # which is always at work
        assert record["thread"] in host.PARTLY_OWN or "own_ms" not in record
        for key in ("own_ms", "held_ms"):
            if own := record.get(key):
                assert own["looks"] > 0
                assert 0 < own["least"] <= own["ms"] <= record["core_ms"]["median"]
        planner = record["thread"] == "planning" and record["side"] == "this"
        assert planner == ("predicted_ms" in record) and record.get("predicted_ms", 1.0) > 0
    values = {record["key"]: record["value"] for record in of(records, "constant")}
    assert values["planner_threads"] == 3 and values["launch_s"] == 7e-6
    assert min(values.values()) >= 0 < max(values[name] for name in host.PLANNER)
    steps = of(records, "step")
    shapes = product(host.WIDTHS, (16, 64), host.WORLDS)
    shown = [(step["width"], step["batch"], step["ranks"]) for step in steps[::5]]
    assert shown == list(shapes)
    for step in steps:
        parts = [step[of] for of in ("gpu", "link", "launch", "planner", "talker", "mover")]
        parts.append(step["interpreter"])
        assert step["step"] == pytest.approx(max(parts)) and step["binds"] in BINDS
        same = [s for s in steps if (s["width"], s["batch"], s["ranks"]) ==
                (step["width"], step["batch"], step["ranks"])]  # fmt: skip
        (resident,) = (s["step"] for s in same if s["who"] == "resident")
        assert step["to_resident"] == pytest.approx(step["step"] / resident)
        fused = step["who"] in ("fused tables", "hybrid")
        assert (step["planner"] == 0) == (step["mover"] == 0) == fused
    assert not list(Path("/dev/shm").glob("*against*"))


def test_steps_are_predicted_from_the_table_alone(tmp_path):
    out = tmp_path / "host.md"
    words = ["measured=false", "planner_threads=14", f"out={out}"]
    assert host.main([*SMALL, *words]) == 0
    _, records = read_report(out, host.BENCH)
    values = {record["key"]: record["value"] for record in of(records, "constant")}
    assert values.pop("planner_threads") == 14 and not of(records, "thread")
    assert all(value == getattr(HOST, key) for key, value in values.items())
    assert len(of(records, "step")) == 5 * len(host.WIDTHS) * len(host.SHARES) * len(host.WORLDS)


PACKAGE = Path(against_rank.distcache.__file__).parent
TORCH = Path(torch.__file__).parent
MODEL = (against_rank.__file__, "forward")
OWN = {
    "the package's": (True, ("engine/tables.py", "open")),
    "what it calls of NumPy or the library": (True, (os.__file__, "f"), ("planner/home.py", "f")),
    "a backward of lookups, which follows a graph": (
        True,
        ("engine/gradients.py", "backward"),
        (f"{TORCH}/autograd/function.py", "apply"),
        ("parallel/cached.py", looks.REPLAYED),
    ),
    "kernels": (False, (np.__file__, "f"), ("ops/reference.py", "put"), ("cache.py", "fill")),
    "torch, called by the package": (False, MODEL, ("cache.py", "gather")),
    "TorchRec's": (True, (os.__file__, "f"), (f"{TORCH.parent}/torchrec/x.py", "f")),
    "torch, called by TorchRec": (False, MODEL, (f"{TORCH.parent}/torchrec/x.py", "f")),
    "torch, in Python": (False, (f"{TORCH}/optim/sgd.py", "step"), ("optim.py", "masked_step")),
    "the library, called by torch": (False, (os.__file__, "f"), (f"{TORCH}/x.py", "f")),
    "the model": (False, MODEL, ("parallel/base.py", "predict")),
    "replayed": (False, ("parallel/base.py", "predict"), ("x.py", looks.REPLAYED)),
    "nobody's": (False, (os.__file__, "f")),
}
"""Whether it is a thread's own work, and its stack, the innermost call first; of the package, where
no folder is named."""


@pytest.mark.parametrize("what", OWN)
def test_torch_kernels_and_model_are_not_a_threads_own_work(what):
    own, *calls = OWN[what]
    stack = [(str(PACKAGE / file), name) for file, name in calls]
    assert looks.is_own(stack, f"{PACKAGE}/") == own
    assert callable(getattr(CachedParallel, looks.REPLAYED))


SPINS = """
import os, sys, threading
import torch
from benchmarks import against_rank
from distcache import layout

text = "def own():\\n    for _ in range(50_000): pass\\ndef adds(): return many.add(1)"
names = {"many": torch.ones(100_000)}
exec(compile(text, layout.__file__, "exec"), names)
print(*against_rank.states()["training"], flush=True)
if sys.argv[1] == "kernel":
    names["own"] = lambda: os.urandom(1 << 20)
told = threading.Thread(target=sys.stdin.readline)
told.start()
while told.is_alive():
    names["own"]()
if sys.argv[1] == "told":
    against_rank.Told().begin()
print("adds", flush=True)
while True:
    names["adds"]()
"""


@contextmanager
def spinning(told: str) -> Iterator[tuple[subprocess.Popen[str], Callable[[], looks.Looks]]]:
    """A process that runs `SPINS`, and what makes one look at its training thread."""
    child = subprocess.Popen(
        [sys.executable, "-c", SPINS, told],
        cwd=CHECKOUT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        thread = tuple(map(int, child.stdout.readline().split()))
        yield child, lambda: looks.Looks(child.pid, thread, f"{PACKAGE}/")
    finally:
        child.kill()
        child.communicate()


@needs_looks
@pytest.mark.parametrize("told", ["told", "untold"])
def test_a_thread_of_another_process_is_seen_where_it_is(told: str) -> None:
    """Which spins in a function of the package's file, and then in torch, which it calls: that is
    seen where torch's calls are told, and else that it lets go of the interpreter."""
    with spinning(told) as (child, looking):

        def seen() -> tuple[float, float]:
            """The shares of a hundred looks that saw the package's own, and the interpreter with
            that."""
            look, late = looking(), time.monotonic() + 60
            looks.look_until(lambda: look.all >= 100 or time.monotonic() > late, [look])
            assert look.all >= 100
            return look.own / look.all, look.held / look.all

        assert min(seen()) > 0.9  # else it is between two calls, in the words of `-c`
        child.stdin.write("go on\n")
        child.stdin.flush()
        assert child.stdout.readline() == "adds\n"
        own, held = seen()
        assert (own > 0.5) == (told == "untold") and held < 0.5
        child.send_signal(signal.SIGTERM)  # and nobody holds it any more
        assert child.wait(20) == -signal.SIGTERM


@needs_looks
@pytest.mark.parametrize("told", ["untold", "kernel"])
def test_a_thread_is_looked_at_as_often_as_it_has_a_core(told: str) -> None:
    """Also in the kernel; not while it waits for one, which another process has most of the
    time."""
    with spinning(told) as (child, looking), spinning("untold") as (greedy, _):
        core = min(os.sched_getaffinity(child.pid))
        for process in (child, greedy):
            os.sched_setaffinity(process.pid, {core})
        os.setpriority(os.PRIO_PROCESS, child.pid, 19)

        def taken() -> float:
            """Seconds that the thread has had of a core."""
            of = Path(f"/proc/{child.pid}/task/{child.pid}/schedstat")
            return int(of.read_text().split()[0]) / 1e9

        look, had, began = looking(), taken(), time.monotonic()
        looks.look_until(lambda: look.all >= 20 or time.monotonic() > began + 60, [look])
        had, lasted = taken() - had, time.monotonic() - began
        assert look.all >= 20 and had / 4 <= look.all * looks.PERIOD_S <= had + 0.01 < lasted / 2


@needs_looks
def test_a_signal_reaches_a_thread_that_is_looked_at() -> None:
    """The process ends of it, and who looks sees no more."""
    with spinning("untold") as (child, looking):
        look, late = looking(), time.monotonic() + 60
        stat = Path(f"/proc/{child.pid}/task/{child.pid}/stat")
        sent: list[int] = []

        def over() -> bool:
            if look.all > 9 and not sent:
                sent.append(look.all)
                os.kill(child.pid, signal.SIGTERM)
            there = stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "Z"
            return (bool(sent) and there == "Z") or time.monotonic() > late

        looks.look_until(over, [look])
        assert sent and time.monotonic() < late and child.wait(20) == -signal.SIGTERM


def test_torch_is_called_as_ever_once_nobody_looks() -> None:
    plain = torch.ones, torch.Tensor.add, set(vars(torch.Tensor)), torch.Tensor.__len__
    told = against_rank.Told()
    told.begin()
    try:
        assert torch.ones is not plain[0] and torch.Tensor.add is not plain[1]
        assert torch.ones(2).add(1).sum() == 4 and len(torch.ones(2)) == 2
    finally:
        told.end()
    assert (torch.ones, torch.Tensor.add) == plain[:2] and torch.Tensor.__len__ is plain[3]
    assert set(vars(torch.Tensor)) == plain[2]


def test_calls_are_counted_by_whose_they_are() -> None:
    calls = against_rank.Calls()

    def frame(file: object) -> object:
        """One of a function in that file."""
        names = {"sys": sys}
        exec(compile("def own():\n    return sys._getframe()", str(file), "exec"), names)
        return names["own"]()

    for file in (PACKAGE / "cache.py", os.__file__, against_rank.__file__):
        calls(frame(file), "call", None)
        calls(frame(file), "return", None)
    calls(frame("x.py"), "c_call", np.copyto)
    calls(frame("x.py"), "c_call", torch.add)
    (counts,) = calls.threads.values()
    assert counts == {"calls": 2, "package_calls": 1, "numpy_calls": 1}
    calls.over = True
    calls(frame(os.__file__), "call", None)
    assert counts["calls"] == 2


def test_times_are_fitted_and_none_is_negative() -> None:
    counts = [[1.0, 1e5, 3e4], [1.0, 4e5, 7e4], [1.0, 1e5, 5e4], [1.0, 2e5, 9e4]]
    true = [1e-4, 2e-8, 3e-8]
    seconds = [sum(a * b for a, b in zip(row, true, strict=True)) for row in counts]
    assert host.fit(counts, seconds) == pytest.approx(true)
    falling = [2e-3, 5e-4, 1.9e-3, 1.2e-3]  # the more ids, the less
    found = host.fit(counts, falling)
    assert min(found) == 0 < max(found)
