"""Anonymous memory that the ranks of one node share, gone when the last of them is gone.

Local rank 0 makes it with `memfd_create`; the others open it through `/proc/<pid>/fd/<fd>` of
that rank. It has no name, so nothing is left to clean up even after SIGKILL, and it does not
count against the size of /dev/shm.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from distcache.comm.agree import together
from distcache.comm.world import World
from distcache.errors import DistcacheError, MemoryTooSmallError, PeerError
from distcache.store.available import available_memory, describe_bytes, require_memory

__all__ = ["SharedMemory", "available_memory", "describe_bytes", "require_memory"]


@dataclass(frozen=True)
class _Handle:
    """Where the other local ranks find the memory, and how they know that it is the right one."""

    pid: int
    fd: int
    device: int
    inode: int
    size: int


class SharedMemory:
    """`size` bytes, zero at first, mapped by every local rank of a node."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping: mmap.mmap | None = mapping
        self.size = len(mapping)

    @classmethod
    def create(cls, size: int, world: World, what: str, way_out: str) -> SharedMemory:
        """Make the memory on local rank 0 and map it on all local ranks; called by all ranks.

        `size`: bytes; `what` and `way_out`: for the error message, as in `require_memory`.
        Raises MemoryTooSmallError on every rank when some node cannot hold it, PeerError when a
        local rank cannot open it.
        """
        made: list[_Handle] = []

        def make() -> _Handle | None:
            if world.local_rank:
                return None
            require_memory(size, what, way_out)
            made.append(_make(size, what, way_out))
            return made[0]

        try:
            handles = together(world, make)
            creator = world.rank - world.local_rank  # torchrun numbers the ranks of a node in a row
            mapping: list[mmap.mmap] = []
            together(world, lambda: mapping.append(_map(handles[creator], size, world)))
        finally:
            for handle in made:
                os.close(handle.fd)  # every mapping keeps a descriptor of its own
        return cls(mapping[0])

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of `shape` over the bytes from `offset` on; it shares the memory."""
        if self._mapping is None:
            raise DistcacheError("the shared memory is closed: make its tensors before `close`")
        count = prod(shape)
        flat = torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset)
        return flat.view(shape)

    def close(self) -> None:
        """Let go of the mapping; safe to call twice.

        The mapping itself goes with the last tensor over it. It is never unmapped by force:
        torch holds no buffer lock, so `mmap.close` would pull it from under living tensors.
        """
        self._mapping = None


def _make(size: int, what: str, way_out: str) -> _Handle:
    """A new anonymous file of `size` bytes; no page of it exists before it is touched."""
    fd = -1
    try:
        fd = os.memfd_create("distcache")
        os.ftruncate(fd, size)
        info = os.fstat(fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise MemoryTooSmallError(
            f"the system refused {describe_bytes(size)} of shared memory for {what}: "
            f"{error.strerror}; {way_out}"
        ) from error
    return _Handle(os.getpid(), fd, info.st_dev, info.st_ino, size)


def _map(handle: _Handle | None, size: int, world: World) -> mmap.mmap:
    """Map the creator's file into this process, read and write."""
    if handle is None or handle.size != size:
        raise PeerError(
            f"rank {world.rank} wants {size} bytes of shared memory, but rank "
            f"{world.rank - world.local_rank}, local rank 0 of its node, made "
            f"{'none' if handle is None else handle.size}; LOCAL_RANK and LOCAL_WORLD_SIZE must "
            "be as torchrun sets them, and all ranks must run the same configuration"
        )
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        info = os.fstat(fd)
        if (info.st_dev, info.st_ino) != (handle.device, handle.inode):
            raise FileNotFoundError(2, "another process has this id here", path)
        mapping = mmap.mmap(fd, size)
    except (OSError, ValueError, OverflowError) as error:
        raise PeerError(
            f"rank {world.rank} cannot map the node's shared memory at {path}: {error}; the ranks "
            "of a node must run as one user in one process namespace (one container), with an "
            f"address space limit (ulimit -v) above {describe_bytes(size)}"
        ) from error
    finally:
        if fd >= 0:
            os.close(fd)
    with contextlib.suppress(OSError, AttributeError):  # huge pages where the kernel allows them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
