"""What the ranks of one node tell each other through memory that they share.

A collective of small messages over gloo takes half a millisecond of a core, most of it torch's
Python, threads of gloo and TCP. Here each rank writes a message once, whoever reads it; the last
one to do so wakes the others up, and all copy what is theirs.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise

import numpy as np

from distcache.comm.link import PLANNING, SLICE_S, CollectiveCounters, Waiting, together
from distcache.comm.rendezvous import describe, has_ended
from distcache.comm.world import World
from distcache.errors import PeerError

# -----------------------------------------------------------------------------
# Descriptors of another process of this machine.

Handle = tuple[str, tuple[int, int]]
"""Path by which other processes find what a descriptor is of, and (device, inode), by which they
know that it is the right one."""


def handle_of(fd: int) -> Handle:
    """The handle of a descriptor of this process, for as long as it is open."""
    info = os.fstat(fd)
    return f"/proc/{os.getpid()}/fd/{fd}", (info.st_dev, info.st_ino)


def open_handle(handle: Handle, flags: int) -> int:
    """A descriptor of what another process handed out; OSError where it cannot be had."""
    path, file = handle
    fd = os.open(path, flags | os.O_CLOEXEC)
    info = os.fstat(fd)
    if (info.st_dev, info.st_ino) != file:
        os.close(fd)
        raise FileNotFoundError(2, "another process has this id here", path)
    return fd


ONE_NAMESPACE = "the ranks of a node must run as one user in one process namespace (one container)"
"""The way out where a descriptor cannot be had."""

# -----------------------------------------------------------------------------
# Messages. Each rank has two boxes and uses them in turn: it has heard the message n + 1 of all
# others before it writes n + 2, so they have copied n. A rank that has written takes a token, of
# which there is one too few for all; who finds none is the last, puts them back for the message
# after the next and lets the others through the gate. So a rank wakes or waits once a message,
# however many they are. Tokens and gates are bytes in pipes, of each two in turn: the pipes order
# what is written before and read behind.

_WIRE = np.dtype(np.int32)
_LEAST = 1 << 26
"""Bytes of a box at first: more than most messages have, for a process's limit on the size of files
may be lowered later. Memory is taken as it is written."""

_NUMBER, _TOTAL, _FIRST = 0, 1, 2
"""Where a box has the number of its message, from 1 on, and how many numbers all are. Then come, of
each rank, of what is for all, and of the end, which piece is the first, and where pieces end."""

Pieces = list[np.ndarray]
"""Arrays of a message, int32 `[n]` each."""


class _Box:
    """A file in memory, as one rank sees it: int32 numbers, as many as were last asked for."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._numbers = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), _WIRE)

    def numbers(self, count: int, grow: bool = False) -> np.ndarray:
        """Its first `count` numbers; `grow`: the file is made as large first."""
        if count > len(self._numbers):
            if grow:
                os.ftruncate(self.fd, 1 << (count * _WIRE.itemsize - 1).bit_length())
            size = os.fstat(self.fd).st_size
            self._numbers = np.frombuffer(mmap.mmap(self.fd, size), _WIRE)
        return self._numbers[:count]


class Mail:
    """Messages of all ranks of a world on one node to each other, for one thread at a time.

    Made by all ranks, in the main thread; `name` tells errors which talk it is, `counters` count
    what others are told as planning bytes. Raises PeerError where a rank cannot reach another one,
    and where one cannot have the memory; that one raises OSError.
    """

    def __init__(self, world: World, counters: CollectiveCounters, name: str) -> None:
        self._world, self._counters, self._name = world, counters, name
        self._others = [rank for rank in range(world.size) if rank != world.rank]
        self._sent, self._failure = 0, ""
        self._all_others = bytes(len(self._others))
        fds: list[int] = []
        self._busy = threading.Lock()
        self._close = weakref.finalize(self, _close_all, fds)
        self._close.atexit = False  # a daemon's thread may still be at a message then

        def make() -> list[Handle]:
            for _ in range(2):
                fds.append(os.memfd_create("distcache-mail"))
                os.ftruncate(fds[-1], _LEAST)
            if world.is_first:
                fds.extend(_pipe() for _ in range(4))
                for tokens in fds[2:4]:
                    os.write(tokens, self._all_others)
            return [handle_of(fd) for fd in fds]

        handles = together(world, make)
        opened: list[list[int]] = []

        def reach() -> None:
            opened.extend(self._opened(rank, own, fds) for rank, own in enumerate(handles))
            self._boxes = [[_Box(fd) for fd in of_rank[:2]] for of_rank in opened]

        together(world, reach)
        self._tokens, self._gates = opened[0][2:4], opened[0][4:]
        self._polls = [select.poll(), select.poll()]
        for poll, gate in zip(self._polls, self._gates, strict=True):
            poll.register(gate, select.POLLIN)

    def _opened(self, rank: int, handles: Sequence[Handle], fds: list[int]) -> list[int]:
        """Descriptors of all that a rank has told of, which come to `fds`."""
        try:
            for handle in handles:
                fds.append(open_handle(handle, os.O_RDWR | os.O_NONBLOCK))
        except OSError as error:
            raise PeerError(
                f"rank {self._world.rank} cannot open what rank {rank} tells others: {error}; "
                f"{ONE_NAMESPACE}"
            ) from error
        return fds[-len(handles) :]

    def close(self) -> None:
        """Let go of pipes and memory: now, or where a thread is still at a message, when that is
        over; a rank that waits for this one's word goes on waiting."""
        self._failure = self._failure or f"{self._name} is closed on rank {self._world.rank}"
        if self._busy.acquire(blocking=False):
            self._boxes = []
            self._close()
            self._busy.release()

    def swap(
        self, parts: Sequence[Sequence[np.ndarray]], common: Sequence[np.ndarray], what: str
    ) -> list[tuple[Pieces, Pieces]]:
        """Give each rank its `parts` (pieces, int32 `[...]`), and all of them what is `common`; by
        rank the pieces that each gave this one, and all. This rank's own are what it gave.

        Called by all ranks in the same order; `what`: for errors. Raises PeerError that names the
        rank that failed, ended or did not come.
        """
        try:
            with self._busy:
                return self._swap(parts, common, what)
        finally:
            if self._failure:  # or it was closed meanwhile
                self.close()

    def _swap(
        self, parts: Sequence[Sequence[np.ndarray]], common: Sequence[np.ndarray], what: str
    ) -> list[tuple[Pieces, Pieces]]:
        """`swap`; once it has failed, or the mail is closed, for no other message."""
        if self._failure:
            raise PeerError(self._failure)
        turn, mine = self._sent % 2, self._world.rank
        try:
            self._tell(parts, common, turn)
            self._meet(turn, what)
            self._sent += 1
            own = [*parts[mine]], [*common]
            ranks = range(self._world.size)
            return [own if rank == mine else self._read(rank, turn) for rank in ranks]
        except BaseException as error:  # what comes next would be taken for this
            left = f"rank {mine} left {self._name}: {what}: {describe(error)}"
            self._failure = self._failure or left
            raise

    def _tell(
        self, parts: Sequence[Sequence[np.ndarray]], common: Sequence[np.ndarray], turn: int
    ) -> None:
        """Write this rank's message."""
        mine, first, told = self._world.rank, [0], list[np.ndarray]()
        for rank, own in enumerate(parts):
            told += () if rank == mine else own
            first.append(len(told))
        lengths = [len(piece) for piece in (*told, *common)]
        alone, shared = sum(lengths[: len(told)]), sum(lengths[len(told) :])
        nbytes = _WIRE.itemsize * (alone + shared * len(self._others))
        self._counters.count(PLANNING, nbytes)
        head = [*first, len(lengths), *accumulate(lengths, initial=0)]
        start = _FIRST + len(head)
        total = start + alone + shared
        box = self._boxes[mine][turn].numbers(total, grow=True)
        box[_TOTAL:start] = [total, *head]
        if total > start:
            np.concatenate([*told, *common], out=box[start:], casting="same_kind")
        box[_NUMBER] = self._sent + 1

    def _read(self, rank: int, turn: int) -> tuple[Pieces, Pieces]:
        """What `rank` told this one, and all."""
        box, size = self._boxes[rank][turn], self._world.size
        head = box.numbers(_FIRST + size + 2).tolist()
        first, start = head[_FIRST:], len(head) + head[-1] + 1
        numbers = box.numbers(head[_TOTAL])
        ends = numbers[len(head) : start].tolist()

        def pieces(which: int) -> Pieces:
            at = ends[first[which] : first[which + 1] + 1]
            copied = numbers[start + at[0] : start + at[-1]].copy()
            return [copied[begin - at[0] : end - at[0]] for begin, end in pairwise(at)]

        return pieces(self._world.rank), pieces(size)

    def _meet(self, turn: int, what: str) -> None:
        """Wait until all ranks have written; the last of them lets the others through."""
        tokens, gate, poll = self._tokens[turn], self._gates[turn], self._polls[turn]
        if not _taken(tokens):
            os.write(tokens, self._all_others)
            os.write(gate, self._all_others)
            return
        waiting: Waiting | None = None
        began = time.monotonic()
        while not (poll.poll(1e3 * SLICE_S) and _taken(gate)):
            waiting = waiting or Waiting(self._world, self._name, what)
            try:
                waiting.announce()
                self._require(turn, time.monotonic() - began)
            except (OSError, RuntimeError) as error:
                raise waiting.explain(error) from error
        if waiting is not None:
            waiting.over()

    def _require(self, turn: int, waited: float) -> None:
        """OSError once a rank that has not written has ended, or, where all have, any that may be
        the last; or after the world's timeout."""
        now = self._sent + 1
        missing = [r for r in self._others if self._boxes[r][turn].numbers(1)[_NUMBER] != now]
        ended = any([has_ended(self._world.store, rank) for rank in missing or self._others])
        if ended and not self._polls[turn].poll(0):  # it may have opened the gate meanwhile
            raise ConnectionError("its process has ended")
        if waited > self._world.timeout_s:
            raise TimeoutError("no word came")


def _pipe() -> int:
    """A descriptor of a pipe of its own, to write and to read without a wait."""
    ends = os.pipe()
    try:
        return os.open(f"/proc/self/fd/{ends[0]}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        _close_all(ends)


def _taken(pipe: int) -> bool:
    """Take one byte; whether there is one."""
    try:
        return bool(os.read(pipe, 1))
    except BlockingIOError:
        return False


def _close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
