"""Where a thread of another process is, moment by moment of its time on a core: what part of that
is its own work.

A profiler within a process makes calls longer, those of Python most; a handler of signals that
writes stacks crashes now and then. Here another process stops one thread, reads the interpreter's
stack from its memory, as py-spy does (https://github.com/benfred/py-spy), and lets it go on, which
takes about a tenth of a millisecond. When to look it hears from the system, which counts what the
thread has of a core, as perf does: at moments that a clock on the wall tells, threads that share
cores are seen waiting for one, most of all where they have just woken another one up.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from distcache.errors import ConfigError

Frame = tuple[str, str]
"""A file, and a function of it."""

PERIOD_S = 0.7e-3
"""Of a thread's time on a core from one look at it to the next."""

REPLAYED = "_dense_pass"
"""The function of the package that a GPU replays from a graph, whatever that calls."""

_TORCH = str(Path(torch.__file__).parent) + os.sep
_LIBRARIES = tuple(
    str(Path(_TORCH).with_name(name)) + os.sep for name in ("torchrec", "fbgemm_gpu")
)
_MODEL = str(Path(__file__).with_name("against_rank.py"))


def is_own(stack: list[Frame], package: str) -> bool:
    """Whether a thread is at work of its own, by its stack, the innermost call first; `package`:
    the folder of its files, with a slash. Mode `hybrid` works through `_LIBRARIES`.

    Not its own is what torch does, the package's kernels (`ops`, which a device does), the model,
    which is `against_rank.py`'s, and what is `REPLAYED`, but for the package's backward of lookups,
    which comes after that. Compiled loops are a thread's own, and so is what it takes to let go of
    a tensor's memory.
    """
    files = [file for file, _ in stack]
    mine = (package, *_LIBRARIES)
    known = next((f for f in files if f.startswith((*mine, _TORCH)) or f == _MODEL), "")
    ops = package + "ops" + os.sep
    if not known.startswith(mine) or any(file.startswith(ops) for file in files):
        return False
    for file, name in stack:
        if "autograd" in file:
            return True
        if name == REPLAYED:
            return False
    return True


# Where CPython 3.11 has what a stack is read from, in bytes.
_CFRAME = 56  # of a thread's state
_CURRENT = 8  # of a cframe
_CODE, _PREVIOUS, _FRAME = 32, 48, 56  # of a frame, and how much of it is read
_FILE, _NAME = 112, 128  # of a code object
_LENGTH, _KIND, _ASCII, _WIDE = 16, 32, 48, 72  # of a string: its text follows

_LOCK = struct.Struct("<QQi")
"""Of the lock of the interpreter: microseconds that one waits for it, who has had it last, and
whether that one has it."""

_DEPTH, _CHARACTERS = 500, 4096
"""Calls of a stack, and characters of a name, beyond which what was read is none."""

_SEIZE, _INTERRUPT, _CONTINUE, _DETACH = 0x4206, 0x4207, 7, 17
_ALL = 0x40000000  # threads of other processes too
_STOPPED = 128  # the event of a stop that `_INTERRUPT` asked for
_PATIENCE_S, _POLL_MS = 1.0, 10.0

_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}.get(platform.machine(), -1)
_ATTRIBUTES = struct.Struct("<IIQQQQQI76x")
"""Kind, size, event, period, two that are not read, flags, and how many samples wake who polls."""

_SOFTWARE, _TASK_CLOCK = 1, 1


def require_looks() -> None:
    """Raise ConfigError where what threads are at cannot be read."""
    if sys.version_info[:2] != (3, 11) or sys.implementation.name != "cpython":
        raise ConfigError("what threads are at is read as CPython 3.11 has it: set seen=0")
    os.close(clock_of(0))


def clock_of(thread: int) -> int:
    """A descriptor of what a thread has of a core, in the kernel too, to be polled once in
    `PERIOD_S` of it where its memory is mapped; 0: of this one. Raises ConfigError."""
    about = (_SOFTWARE, _ATTRIBUTES.size, _TASK_CLOCK, round(1e9 * PERIOD_S), 0, 0, 0, 1)
    given = ctypes.create_string_buffer(_ATTRIBUTES.pack(*about), _ATTRIBUTES.size)
    clock = ctypes.CDLL(None, use_errno=True).syscall(_PERF_EVENT_OPEN, given, thread, -1, -1, 0)
    if clock < 0:
        raise ConfigError(
            "this system tells no process what a thread has of a core "
            f"({os.strerror(ctypes.get_errno())}): allow perf_event_open, or set seen=0"
        )
    return int(clock)


class _Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Looks:
    """Looks at one thread of a child process, all by one thread of this one; `own` of `all` saw it
    at work of its own, and `held` of these with the interpreter, which other threads wait for.
    `clock`: can be polled when the next is due."""

    def __init__(self, process: int, thread: tuple[int, int, int], package: str) -> None:
        """`thread`: its number in the system, and where its state and the interpreter's lock lie.
        Raises ConfigError where the system allows no looks."""
        self._process, (self._id, self._state, self._lock) = process, thread
        self._package = package
        self._task = Path(f"/proc/{process}/task/{self._id}")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.argtypes = [ctypes.c_long] * 4
        self._codes: dict[int, Frame] = {}
        self.own = self.all = self.held = 0
        self._samples: mmap.mmap | None = None
        if self._trace(_SEIZE) != 0:
            raise ConfigError(
                f"this system lets no process look at another one "
                f"({os.strerror(ctypes.get_errno())}): allow ptrace, or set seen=0"
            )
        try:
            self.clock = clock_of(self._id)
            # Without this memory the system tells nobody.
            self._samples = mmap.mmap(self.clock, 2 * mmap.PAGESIZE, prot=mmap.PROT_READ)
        except (ConfigError, OSError):
            self.end()
            raise

    def look(self) -> None:
        """One look, if the thread can run, and does not wait to hear of what it waited for."""
        if self._doing() != "R" or not self._stop():
            return
        try:
            stack = self._stack()
            _, holder, locked = _LOCK.unpack(self._read(self._lock, _LOCK.size))
        except (OSError, ValueError):  # it was about to change
            return
        finally:
            self._trace(_CONTINUE)
        waits = stack and stack[0][1] == "wait" and not stack[0][0].startswith(_LIBRARIES)
        if stack and not waits and (_MODEL, "__call__") not in stack:  # of `Pace`
            own = is_own(stack, self._package)
            self.all += 1
            self.own += own
            self.held += own and bool(locked) and holder == self._state

    def pass_on(self) -> None:
        """Let a thread that a signal has stopped have that."""
        if self._doing() == "t":
            self._go_on()

    def _doing(self) -> str:
        """The system's letter for what the thread does: R where it can run."""
        try:
            return (self._task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended
            return ""

    def end(self) -> None:
        """Leave the thread alone, for good."""
        if self._samples is not None:
            self._samples.close()
            os.close(self.clock)
            self._samples = None
        deadline = time.monotonic() + _PATIENCE_S
        while self._trace(_INTERRUPT) == 0 and time.monotonic() < deadline:
            if self._go_on(_DETACH):
                return
            time.sleep(1e-3)

    def _stop(self) -> bool:
        """Stop the thread; False where it stopped for a signal, with which it goes on, or ended."""
        return self._trace(_INTERRUPT) == 0 and self._is_ours(self._stopped(0))

    def _go_on(self, request: int = _CONTINUE) -> bool:
        """Let a thread go on by `request`, if it has stopped; whether it did for `_INTERRUPT`."""
        ours = self._is_ours(self._stopped(os.WNOHANG))
        if ours:
            self._trace(request)
        return ours

    def _stopped(self, how: int) -> int:
        """The status with which the thread has stopped; 0 where it has not, or has ended, of which
        its process's parent still hears then."""
        try:
            seen = os.waitid(os.P_PID, self._id, os.WSTOPPED | os.WEXITED | os.WNOWAIT | _ALL | how)
        except ChildProcessError:
            return 0
        if seen is None or seen.si_code != os.CLD_TRAPPED:
            return 0
        return os.waitpid(self._id, _ALL)[1]

    def _is_ours(self, status: int) -> bool:
        """Whether a thread was stopped by `_INTERRUPT`; where a signal did that, it gets it."""
        if not status:
            return False
        if status >> 16 != _STOPPED:
            self._trace(_CONTINUE, os.WSTOPSIG(status))
            return False
        return True

    def _trace(self, request: int, data: int = 0) -> int:
        return self._libc.ptrace(request, self._id, 0, data)

    def _read(self, start: int, size: int) -> bytes:
        there = ctypes.create_string_buffer(size)
        mine = _Part(ctypes.addressof(there), size)
        its = _Part(start, size)
        parts = ctypes.byref(mine), 1, ctypes.byref(its), 1, 0
        if self._libc.process_vm_readv(self._process, *parts) != size:
            raise OSError(ctypes.get_errno(), "memory that is not there")
        return there.raw

    def _pointer(self, start: int) -> int:
        return struct.unpack("<Q", self._read(start, 8))[0]

    def _text(self, start: int) -> str:
        head = self._read(start, _WIDE)
        (length,), (kind,) = (
            struct.unpack_from(of, head, at) for of, at in (("<q", _LENGTH), ("<I", _KIND))
        )
        if not 0 < length < _CHARACTERS:
            raise OSError("no name")
        ascii_only = kind >> 5 & 3 == 3
        return self._read(start + (_ASCII if ascii_only else _WIDE), length).decode("latin-1")

    def _stack(self) -> list[Frame]:
        """The calls that the thread is in, the innermost first."""
        stack, frame = [], self._pointer(self._pointer(self._state + _CFRAME) + _CURRENT)
        while frame and len(stack) < _DEPTH:
            head = self._read(frame, _FRAME)
            code, frame = (struct.unpack_from("<Q", head, at)[0] for at in (_CODE, _PREVIOUS))
            if code not in self._codes:
                file, name = (self._pointer(code + at) for at in (_FILE, _NAME))
                self._codes[code] = (self._text(file), self._text(name).rpartition(".")[2])
            stack.append(self._codes[code])
        return stack


def look_until(over: Callable[[], bool], looks: list[Looks]) -> None:
    """Look at threads, each time they have had a core for `PERIOD_S`, until it is `over`, and leave
    them alone then. Whether their process has ended is not to be asked meanwhile (`Popen.poll`): a
    stop looks like an end.

    Before other threads where the system allows that: a look that comes late finds a thread where
    it lost its core, which is where it has just woken another one up.
    """
    due = select.poll()
    for each in looks:
        due.register(each.clock, select.POLLIN)
    of = {each.clock: each for each in looks}
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        while not over():
            told = due.poll(_POLL_MS)
            for clock, event in told:
                if event & select.POLLIN:
                    of[clock].look()
                else:  # the thread has ended
                    due.unregister(clock)
            for each in () if told else looks:  # whom a signal stops has no core, as who waits
                each.pass_on()
    finally:
        for each in looks:
            each.end()
        with suppress(OSError):
            os.sched_setscheduler(0, *before)
