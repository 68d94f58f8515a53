"""Host memory: what can still be had, and memory that the ranks of one node share."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from distcache.comm.link import run_on_all_ranks
from distcache.comm.world import World
from distcache.errors import MemoryTooSmallError, PeerError, human_bytes

# -----------------------------------------------------------------------------
# How much host memory can still be had, and the refusal to ask for more.
#
# Allocating to find out does not work: the kernel gives out more memory than there is and kills a
# process when it is touched. So sizes are compared with the control group's limits and with the
# kernel's own estimate before anything is made.


def available_memory(proc: Path = Path("/proc")) -> int:
    """Bytes of host memory that this process can still take.

    The smallest of: MemAvailable of `proc`/meminfo; limit - use of every memory control group
    (v1 and v2) that holds this process, from its own up to the one at the mount point. Page
    cache that the kernel would drop is not counted as use. Swap is not counted.
    """
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", _text(proc / "meminfo"), re.MULTILINE))
    # MemFree where a kernel does not tell the other.
    found = [int(fields.get("MemAvailable", fields.get("MemFree", 0))) * 1024]
    for group in _memory_cgroups(proc):
        found.extend(_cgroup_available(*group))
    return max(0, min(found))


def require_memory(needed: int, what: str, way_out: str) -> None:
    """Refuse, before allocation, what host memory cannot hold.

    `needed`: bytes; `what`: that which needs them; `way_out`: what the user can change (keys).
    Raises MemoryTooSmallError with the bytes needed and found.
    """
    found = available_memory()
    if needed > found:
        raise MemoryTooSmallError(
            f"host memory is too small for {what}: needed {describe_bytes(needed)}, found "
            f"{describe_bytes(found)} (the smaller of the kernel's MemAvailable and the control "
            f"group's limit minus its use); {way_out}"
        )


def describe_bytes(count: int) -> str:
    """A byte count in a human unit and exactly, as `1.50 GiB (1610612736 bytes)`."""
    return f"{count} bytes" if count < 1024 else f"{human_bytes(count, 2)} ({count} bytes)"


def _memory_cgroups(proc: Path) -> Iterator[tuple[Path, int]]:
    """Folders, with their version (1 or 2), of every memory control group above this process."""
    mounts = []  # (root inside the hierarchy, mount point, version)
    for line in _text(proc / "self/mountinfo").splitlines():
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        # Space, tab, newline and backslash are octal escapes.
        root, point = (
            re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
            for field in fields.split(" ")[3:5]
        )
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in re.split(r"[ ,]", options)):
            mounts.append((root, Path(point), 2 if kind == "cgroup2" else 1))
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        version = 2 if not controllers else 1
        if version == 1 and "memory" not in controllers.split(","):
            continue
        group = PurePosixPath(path)
        for root, point, mount_version in mounts:
            if mount_version != version:
                continue
            # In a container it may lie outside what is mounted: one sees the mount point alone.
            outside = ".." in group.parts or not group.is_relative_to(root)
            parts = () if outside else group.relative_to(root).parts
            yield from ((Path(point, *parts[:depth]), version) for depth in range(len(parts) + 1))


def _cgroup_available(folder: Path, version: int) -> Iterator[int]:
    """limit - use of one group, for each limit that it has; nothing where there is none.

    Page cache that the kernel would drop before it kills anyone is no use: all inactive file pages,
    and half of the active ones, for some of those are in use, and the kernel's own MemAvailable
    takes half of them too. Shared memory is in neither.
    """
    limits = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    use = _number(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
    if use is None:
        return
    stat = dict(re.findall(r"^(\w+) (\d+)", _text(folder / "memory.stat"), re.MULTILINE))
    prefix = "" if version == 2 else "total_"
    active = int(stat.get(f"{prefix}active_file", 0)) // 2
    use = max(0, use - int(stat.get(f"{prefix}inactive_file", 0)) - active)
    for name in limits:
        limit = _number(folder / name)
        if limit is not None and limit < 1 << 60:  # v1 writes the largest int64 for none
            yield limit - use


def _number(file: Path) -> int | None:
    """The integer in a control file; None when there is no file, or it says `max`."""
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    """What a file of the kernel says; nothing where there is none."""
    try:
        return file.read_text()
    except OSError:
        return ""


# -----------------------------------------------------------------------------
# Anonymous memory that the ranks of one node share, gone when the last of them is gone.
#
# Local rank 0 makes it with `memfd_create`; the others open it through `/proc/<pid>/fd/<fd>` of
# that rank. It has no name, so nothing is left to clean up even after SIGKILL, and it does not
# count against the size of /dev/shm.

Handle = tuple[str, tuple[int, int]]
"""A file of one process for others to open: its path, and its (device, inode), by which they check
that it is the same file."""

ONE_NAMESPACE = "the ranks of a node must run as one user in one process namespace (one container)"
"""Remedy for a descriptor of another rank that cannot be opened."""

_Made = tuple[Handle, int]
"""The memory that local rank 0 made, and its bytes."""


def handle_of(fd: int) -> Handle:
    """Return the handle of a descriptor of this process, valid while the descriptor is open."""
    info = os.fstat(fd)
    return f"/proc/{os.getpid()}/fd/{fd}", (info.st_dev, info.st_ino)


def open_handle(handle: Handle) -> int:
    """Open the file of another process's handle to read and write. Raises OSError."""
    path, file = handle
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    info = os.fstat(fd)
    if (info.st_dev, info.st_ino) != file:
        os.close(fd)
        raise FileNotFoundError(2, "another process has this id here", path)
    return fd


def share_memory(size: int, world: World, what: str, way_out: str) -> mmap.mmap:
    """`size` bytes, zero at first, made on local rank 0 and mapped by all local ranks of a node.

    Called by all ranks; `what` and `way_out`: for the error message, as in `require_memory`.
    The mapping goes with the last tensor over it. Never unmap it by force: torch holds no buffer
    lock, so `mmap.close` would pull it from under living tensors. Raises MemoryTooSmallError on
    every rank when some node cannot hold it, PeerError when a local rank cannot open it.
    """
    made: list[int] = []

    def make() -> _Made | None:
        if world.local_rank:
            return None
        require_memory(size, what, way_out)
        try:  # no page of it exists before it is touched
            made.append(os.memfd_create("distcache"))
            os.ftruncate(made[0], size)
        except OSError as error:
            raise MemoryTooSmallError(
                f"the system refused {describe_bytes(size)} of shared memory for {what}: "
                f"{error.strerror}; {way_out}"
            ) from error
        return handle_of(made[0]), size

    try:
        handles = run_on_all_ranks(world, make)
        mapping: list[mmap.mmap] = []
        run_on_all_ranks(
            world, lambda: mapping.append(_map(handles[world.first_local], size, world))
        )
    finally:
        for fd in made:
            os.close(fd)  # every mapping keeps a descriptor of its own
    return mapping[0]


def tensor_in(memory: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of `shape` over the bytes from `offset` on; it shares the memory."""
    flat = torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=offset)
    return flat.view(shape)


def _map(made: _Made | None, size: int, world: World) -> mmap.mmap:
    """Map the creator's file into this process, read and write."""
    handle, nbytes = made or (("", (0, 0)), None)
    if nbytes != size:
        raise PeerError(
            f"rank {world.rank} wants {size} bytes of shared memory, but rank {world.first_local}, "
            f"local rank 0 of its node, made {nbytes or 'none'}; LOCAL_RANK and LOCAL_WORLD_SIZE "
            "must be as torchrun sets them, and all ranks must run the same configuration"
        )
    fd = -1
    try:
        fd = open_handle(handle)
        mapping = mmap.mmap(fd, size)
    except (OSError, ValueError, OverflowError) as error:
        raise PeerError(
            f"rank {world.rank} cannot map the node's shared memory at {handle[0]}: {error}; "
            f"{ONE_NAMESPACE}, with an address space limit (ulimit -v) above {describe_bytes(size)}"
        ) from error
    finally:
        if fd >= 0:
            os.close(fd)
    with contextlib.suppress(OSError, AttributeError):  # huge pages where the kernel allows them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping
