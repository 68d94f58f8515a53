"""Shared memory between ranks: errors reach every rank, and SIGKILL leaves nothing behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from distcache.comm.world import close_world, open_world
from distcache.errors import DistcacheError, MemoryTooSmallError, PeerError
from distcache.store import memory
from distcache.store import memory as available
from distcache.store.memory import SharedMemory

MIB = 1 << 20


def failures(rank: int, size: int) -> list[str]:
    """One rank fails at a time; every rank gets an error, and the next attempt works."""
    world = open_world("cpu", timeout_s=60)
    seen: list[str] = []

    def attempt(bytes_wanted: int = 8192) -> None:
        try:
            shared = SharedMemory.create(bytes_wanted, world, "the tables", "use less")
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
        else:
            seen.append("ok")
            shared.close()

    real = available.available_memory
    available.available_memory = lambda: 100 if rank == 0 else real()
    attempt()
    available.available_memory = real
    create = os.memfd_create
    if rank == 0:
        os.memfd_create = lambda name: os.open("/nowhere/at/all", os.O_RDWR)
    attempt()
    os.memfd_create = create
    if rank == size - 1:
        memory._map.__globals__["mmap"] = None  # an error that is no OSError
    attempt()
    memory._map.__globals__["mmap"] = __import__("mmap")
    attempt(8192 + rank)
    attempt()
    descriptors = [os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors()]
    seen.append(str(sum("memfd:distcache" in link for link in descriptors)))
    close_world(world)
    return seen


def _descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


def test_an_error_on_one_rank_reaches_all() -> None:
    first, second, third = run_ranks(failures, 3)
    assert first[0].startswith("MemoryTooSmallError: host memory is too small for the tables")
    for other in (second, third):
        assert other[0] == first[0].replace(": host", ": rank 0: host")
    assert first[1].startswith("MemoryTooSmallError: the system refused 8.00 KiB")
    assert second[1].startswith("MemoryTooSmallError: rank 0: the system refused")
    assert third[2].startswith("AttributeError")
    assert [ranks[2] for ranks in (first, second)] == [f"PeerError: rank 2: {third[2]}"] * 2
    assert first[3].startswith("PeerError: rank 1: rank 1 wants 8193 bytes")
    assert "rank 2 wants 8194 bytes" in third[3]
    assert [ranks[4] for ranks in (first, second, third)] == ["ok"] * 3
    assert [ranks[5] for ranks in (first, second, third)] == ["0"] * 3


def wrong_file(rank: int, size: int) -> str:
    """The creator's descriptor names another file here: no foreign file is mapped."""
    world = open_world("cpu", timeout_s=60)
    other = os.memfd_create("other")
    os.ftruncate(other, 8192)
    make = memory._make
    memory._make = lambda *args: dataclasses.replace(make(*args), fd=other)
    try:
        SharedMemory.create(8192, world, "the tables", "use less")
        return "ok"
    except PeerError as error:
        return str(error)
    finally:
        memory._make = make
        close_world(world)


def test_a_foreign_file_is_noticed() -> None:
    for message in run_ranks(wrong_file, 2):
        assert "cannot map the node's shared memory" in message
        assert "one process namespace" in message


def shmem() -> int:
    """Shared memory of the whole machine, in bytes."""
    text = Path("/proc/meminfo").read_text()
    return (
        int(next(line for line in text.splitlines() if line.startswith("Shmem:")).split()[1]) << 10
    )


def users(inode: str) -> list[str]:
    """Processes that map, or hold open, the anonymous file with this inode."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text().splitlines()
            files = list((process / "fd").iterdir())
        except OSError:
            continue
        mapped = any("memfd:distcache" in x and x.split()[4] == inode for x in lines)
        if mapped or any(_is_memory(file, inode) for file in files):
            found.append(process.name)
    return found


def _is_memory(file: Path, inode: str) -> bool:
    """Whether this link in /proc/<pid>/fd leads to the anonymous file with this inode."""
    try:
        return "memfd:distcache" in os.readlink(file) and str(os.stat(file).st_ino) == inode
    except OSError:
        return False


def killed(rank: int, size: int, folder: str) -> None:
    """Fill shared memory, note what is there, and die without a chance to clean up."""
    world = open_world("cpu", timeout_s=60)
    shared = SharedMemory.create(256 * MIB, world, "the tables", "use less")
    tensor = shared.tensor(0, (size, 256 * MIB // size // 8), torch.float64)
    tensor[rank] = 1.0
    dist.barrier(group=world.host_group)
    line = next(x for x in Path("/proc/self/maps").read_text().splitlines() if "memfd:dist" in x)
    inode = line.split()[4]
    Path(folder, str(rank)).write_text(f"{inode} {shmem()} {len(users(inode))}")
    dist.barrier(group=world.host_group)
    os.kill(os.getpid(), signal.SIGKILL)


def test_sigkill_leaves_nothing(tmp_path: Path) -> None:
    files = set(os.listdir("/dev/shm"))
    with pytest.raises(RuntimeError, match="exit code -9"):
        run_ranks(killed, 2, str(tmp_path))
    notes = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    inode, alive = notes[0][0], int(notes[0][1])
    assert notes[1][0] == inode
    assert [note[2] for note in notes] == ["2", "2"]
    assert users(inode) == []
    deadline = time.monotonic() + 20
    while shmem() > alive - 200 * MIB and time.monotonic() < deadline:
        time.sleep(0.05)
    assert shmem() <= alive - 200 * MIB
    assert not [name for name in set(os.listdir("/dev/shm")) - files if "distcache" in name]


def test_tensor_after_close_is_refused() -> None:
    world = open_world("cpu")
    try:
        shared = SharedMemory.create(4096, world, "x", "y")
        tensor = shared.tensor(1024, (2, 3), torch.float32)
        assert tensor.shape == (2, 3) and tensor.is_contiguous() and tensor.sum() == 0
        shared.close()
        with pytest.raises(DistcacheError, match="closed"):
            shared.tensor(0, (1,), torch.float32)
        with pytest.raises(MemoryTooSmallError):
            SharedMemory.create(1 << 60, world, "x", "y")
    finally:
        close_world(world)
