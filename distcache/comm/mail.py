"""What the ranks of one node tell each other through memory that they share.

A collective of small messages over gloo takes half a millisecond of a core, most of it torch's
Python, threads of gloo and TCP. Here each rank writes a message once, whoever reads it, and a word
into a pipe of every other rank; these copy what is theirs.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress

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
# others before it writes n + 2, so they have copied n. A word is written after its message, and
# read before it: the pipe orders both.

_WIRE, _WORD = np.dtype(np.int32), np.dtype(np.int64)
_LEAST = 1 << 26
"""Bytes of a box at first: more than most messages have, for a process's limit on the size of files
may be lowered later. Memory is taken as it is written."""

_NONE = np.empty(0, _WIRE)


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
        self._heard = [deque[int]() for _ in range(world.size)]
        """Lengths of messages that ranks have sent and this one has not read."""
        fds: list[int] = []
        self._busy = threading.Lock()
        self._close = weakref.finalize(self, _close_all, fds)
        self._close.atexit = False  # a daemon's thread may still be at a message then

        def make() -> list[Handle]:
            fds.extend(os.pipe())  # whose own end for words stays open, so that it never ends
            for _ in range(2):
                fds.append(os.memfd_create("distcache-mail"))
                os.ftruncate(fds[-1], _LEAST)
            return [handle_of(fd) for fd in fds[1:]]

        handles = together(world, make)
        self._inbox = fds[0]
        self._pipes: list[int] = []
        self._boxes: list[list[_Box]] = [[] for _ in range(world.size)]

        def reach() -> None:
            self._boxes[world.rank] = [_Box(fd) for fd in fds[2:]]
            for rank in self._others:
                pipe, *boxes = handles[rank]
                try:
                    fds.append(open_handle(pipe, os.O_WRONLY | os.O_NONBLOCK))  # it is never full
                    self._pipes.append(fds[-1])
                    for box in boxes:
                        fds.append(open_handle(box, os.O_RDWR))
                        self._boxes[rank].append(_Box(fds[-1]))
                except OSError as error:
                    raise PeerError(
                        f"rank {world.rank} cannot open what rank {rank} tells others: {error}; "
                        f"{ONE_NAMESPACE}"
                    ) from error

        together(world, reach)
        self._poll = select.poll()
        self._poll.register(self._inbox, select.POLLIN)

    def close(self) -> None:
        """Let go of pipes and memory: now, or where a thread is still at a message, when that is
        over; a rank that waits for this one's word goes on waiting."""
        self._failure = self._failure or f"{self._name} is closed on rank {self._world.rank}"
        if self._busy.acquire(blocking=False):
            self._boxes = []
            self._close()
            self._busy.release()

    def swap(
        self,
        parts: Sequence[Sequence[np.ndarray]],
        common: Sequence[np.ndarray],
        what: str,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Give each rank its `parts` (int32 `[...]`), and all of them what is `common`; by rank
        what each gave this one, int32 `[n]`, and all.

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
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """`swap`; once it has failed, or the mail is closed, for no other message."""
        if self._failure:
            raise PeerError(self._failure)
        turn, mine = self._sent % 2, self._world.rank
        try:
            self._tell(parts, common, turn)
            self._wait(what)
            self._sent += 1
            alone, to_all = (
                np.concatenate([_NONE, *own], dtype=_WIRE) for own in (parts[mine], common)
            )
            return [
                (alone, to_all) if rank == mine else self._read(rank, turn)
                for rank in range(self._world.size)
            ]
        except BaseException as error:  # what comes next would be taken for this
            left = f"rank {mine} left {self._name}: {what}: {describe(error)}"
            self._failure = self._failure or left
            raise

    def _tell(
        self, parts: Sequence[Sequence[np.ndarray]], common: Sequence[np.ndarray], turn: int
    ) -> None:
        """Write this rank's message, and a word to all others: who wrote, and how many numbers."""
        size, mine = self._world.size, self._world.rank
        ends, flat = [size + 1], list[np.ndarray]()
        for rank, own in enumerate(parts):
            told = () if rank == mine else own
            flat += told
            ends.append(ends[-1] + sum(map(len, told)))
        shared = sum(map(len, common))
        total = ends[-1] + shared
        box = self._boxes[mine][turn].numbers(total, grow=True)
        box[: size + 1] = ends
        if total > size + 1:
            np.concatenate([*flat, *common], out=box[size + 1 :], casting="same_kind")
        there = (ends[-1] - size - 1) + shared * len(self._others)
        self._counters.count(PLANNING, there * _WIRE.itemsize)
        word = np.array((mine, total), _WORD).tobytes()
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it has ended, which this rank learns as it waits
                os.write(pipe, word)

    def _read(self, rank: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """What `rank` told this one, and all."""
        size, mine = self._world.size, self._world.rank
        numbers = self._boxes[rank][turn].numbers(self._heard[rank].popleft())
        start, stop, last = numbers[[mine, mine + 1, size]].tolist()
        return numbers[start:stop].copy(), numbers[last:].copy()

    def _wait(self, what: str) -> None:
        """Wait for the word of every other rank."""
        waiting: Waiting | None = None
        began = time.monotonic()
        while missing := [rank for rank in self._others if not self._heard[rank]]:
            if self._poll.poll(1e3 * SLICE_S):
                words = np.frombuffer(os.read(self._inbox, 4096), _WORD).reshape(-1, 2)
                for rank, total in words.tolist():
                    self._heard[rank].append(total)
                continue
            waiting = waiting or Waiting(self._world, self._name, what)
            try:
                waiting.announce()
                self._require(missing, time.monotonic() - began)
            except (OSError, RuntimeError) as error:
                raise waiting.explain(error) from error
        if waiting is not None:
            waiting.over()

    def _require(self, missing: Iterable[int], waited: float) -> None:
        """OSError once one of the `missing` ranks has ended without a word, or after the world's
        timeout."""
        ended = any([has_ended(self._world.store, rank) for rank in missing])
        if ended and not self._poll.poll(0):  # what it said last may have come meanwhile
            raise ConnectionError("its process has ended")
        if waited > self._world.timeout_s:
            raise TimeoutError("no word came")


def _close_all(fds: Iterable[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
