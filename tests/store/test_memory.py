"""Host memory: what is available, on made-up /proc trees; shared memory that leaves nothing."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from distcache.comm.world import close_world, open_world
from distcache.errors import MemoryTooSmallError
from distcache.store import memory

KIB, MIB = 1 << 10, 1 << 20
V2 = [("/", "cg", "cgroup2 cgroup2 rw,nsdelegate")]
V1 = [("/", "cpu", "cgroup cgroup rw,cpu"), ("/", "mem", "cgroup cgroup rw,memory")]
UNLIMITED_V1 = (1 << 63) - 4096
MEMINFO = f"MemTotal:  99999999999 kB\nMemFree: 17 kB\nMemAvailable: {1 << 30} kB\nHugePages: 0\n"


def limits(most: object, use: int, version: int = 2, **more: object) -> dict[str, object]:
    """The files of a control group."""
    names = ("memory__max", "memory__current")
    if version == 1:
        names = ("memory__limit_in_bytes", "memory__usage_in_bytes")
    return dict(zip(names, (most, use), strict=True)) | more


STAT_V2 = f"anon {5 * MIB}\ninactive_file {20 * MIB}\nactive_file {8 * MIB}\nshmem {3 * MIB}"
STAT_V1 = f"inactive_file 1\ntotal_inactive_file {10 * MIB}\ntotal_active_file 0"
DOCKER_V1 = [("/docker/abc", "mem", "cgroup cgroup rw,memory")]
DOCKER_V2 = [("/docker/abc", "cg", "cgroup2 none rw")]


@pytest.mark.parametrize(
    ("lines", "mounts", "files", "expected_mib"),
    [
        (["0::/"], [], {}, 1 << 20),  # without limits it is MemAvailable
        (None, [], {}, 1 << 20),
        (["0::/job/rank"], V2, {"cg/job/rank": limits(100 * MIB, 30 * MIB)}, 70),
        (  # a parent is tighter
            ["0::/job/rank"],
            V2,
            {"cg/job/rank": limits("max", 30 * MIB), "cg/job": limits(100 * MIB, 90 * MIB)},
            10,
        ),
        (["0::/job"], V2, {"cg/job": limits(100 * MIB, 30 * MIB, memory__high=80 * MIB)}, 50),
        (  # page cache that can be had back is not use
            ["0::/job"],
            V2,
            {"cg/job": limits(100 * MIB, 60 * MIB, memory__stat=STAT_V2)},
            100 - (60 - 20 - 4),
        ),
        (["0::/job"], V2, {"cg/job": limits(10 * MIB, 11 * MIB)}, 0),
        (
            ["9:cpu:/other", "4:cpuset,memory:/slurm/job", "0::/"],
            V1,
            {
                "mem/slurm/job": limits(UNLIMITED_V1, 50 * MIB, 1, memory__stat=STAT_V1),
                "mem/slurm": limits(100 * MIB, 60 * MIB, 1, memory__stat=STAT_V1),
            },
            50,
        ),
        *(  # a container's own group is at the mount point, wherever the process says that it is
            ([f"4:memory:{path}"], DOCKER_V1, {"mem": limits(100 * MIB, 40 * MIB, 1)}, 60)
            for path in ("/docker/abc", "/../../elsewhere", "/docker", "/kube/pod")
        ),
        (["0::/docker/abc/inner"], DOCKER_V2, {"cg/inner": limits(5 * MIB, 0)}, 5),
        (["0::/job"], [("/", "c g", V2[0][2])], {"c g/job": limits(5 * MIB, MIB)}, 4),
        (
            ["4:memory:/a", "0::/b"],
            V1 + V2,
            {"mem/a": limits(50 * MIB, MIB, 1), "cg/b": limits(40 * MIB, MIB)},
            39,
        ),
        (["4:memory:/a"], V1, {"mem/a": limits(UNLIMITED_V1, 1 << 40, 1)}, 1 << 20),
    ],
)
def test_available_memory_is_the_tightest_limit(
    tmp_path: Path, lines: list | None, mounts: list, files: dict, expected_mib: int
) -> None:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    if lines is not None:
        (proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))
    text = "22 1 0:5 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
    for root, folder, kind in mounts:
        point = str(tmp_path / folder).replace(" ", "\\040")
        text += f"35 22 0:32 {root} {point} rw,nosuid shared:9 - {kind}\n"
    (proc / "self/mountinfo").write_text(text)
    for folder, own in files.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, value in own.items():
            (tmp_path / folder / name.replace("__", ".")).write_text(f"{value}\n")
    assert memory.available_memory(proc) == expected_mib * MIB


def test_an_old_kernel_tells_free_memory_and_the_real_one_has_some(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 17 kB\n")
    assert memory.available_memory(tmp_path) == 17 * KIB
    assert MIB < memory.available_memory() < 1 << 50


def test_what_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 3 * MIB)
    memory.require_memory(3 * MIB, "x", "y")
    says = (
        r"for the tables: needed 3.00 MiB \(3145729 bytes\), found 3.00 MiB \(3145728 bytes\) .*; "
        "use data.table_rows"
    )
    with pytest.raises(MemoryTooSmallError, match=says):
        memory.require_memory(3 * MIB + 1, "the tables", "use data.table_rows")
    for count, text in (
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB (1024 bytes)"),
        (3 * (1 << 29), "1.50 GiB (1610612736 bytes)"),
        (1 << 60, "1024.00 PiB (1152921504606846976 bytes)"),
    ):
        assert memory.describe_bytes(count) == text


def failures(rank: int, size: int) -> list[str]:
    """One rank fails at a time; every rank gets an error, and the next attempt works."""
    world = open_world("cpu", timeout_s=60)
    seen: list[str] = []

    def attempt(bytes_wanted: int = 8192, **changed: object) -> None:
        """With other functions, here alone, of the module or of `os`."""
        places = {name: os if hasattr(os, name) else memory for name in changed}
        real = {name: getattr(place, name) for name, place in places.items()}
        for name, place in places.items():
            setattr(place, name, changed[name])
        try:
            memory.share_memory(bytes_wanted, world, "the tables", "use less")
            seen.append("ok")
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
        for name, place in places.items():
            setattr(place, name, real[name])

    def nowhere(name: str) -> int:
        return os.open("/nowhere/at/all", os.O_RDWR)

    first = rank == 0
    attempt(**({"available_memory": lambda: 100} if first else {}))
    attempt(**({"memfd_create": nowhere} if first else {}))
    attempt(**({"mmap": None} if rank == size - 1 else {}))  # an error that is no OSError
    attempt(8192 + rank)
    other = os.stat("/proc/self/exe")  # the creator's descriptor names another file elsewhere
    attempt(**({"fstat": lambda fd: other} if first else {}))
    attempt()
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    seen.append(str(sum("memfd:distcache" in link for link in links)))
    close_world(world)
    return seen


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
    for ranks in (first, second, third):
        assert "cannot map the node's shared memory" in ranks[4]
        assert "one process namespace" in ranks[4]
        assert ranks[5:] == ["ok", "0"]


def users(inode: str) -> list[str]:
    """Processes that map the anonymous file with this inode; its makers have closed it by then."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            lines = (process / "maps").read_text().splitlines()
            if any("memfd:distcache" in x and x.split()[4] == inode for x in lines):
                found.append(process.name)
    return found


def killed(rank: int, size: int, folder: str) -> None:
    """Fill shared memory, note who has it, and die without a chance to clean up."""
    world = open_world("cpu", timeout_s=60)
    shared = memory.share_memory(16 * MIB, world, "the tables", "use less")
    memory.tensor_in(shared, 0, (size, 16 * MIB // size // 8), torch.float64)[rank] = 1.0
    dist.barrier(group=world.host_group)
    line = next(x for x in Path("/proc/self/maps").read_text().splitlines() if "memfd:dist" in x)
    inode = line.split()[4]
    Path(folder, str(rank)).write_text(f"{inode} {len(users(inode))}")
    dist.barrier(group=world.host_group)
    os.kill(os.getpid(), signal.SIGKILL)


def test_sigkill_leaves_nothing(tmp_path: Path) -> None:
    """Memory that no process maps is the kernel's again: it has no name."""
    files = set(os.listdir("/dev/shm"))
    with pytest.raises(RuntimeError, match="exit code -9"):
        run_ranks(killed, 2, str(tmp_path))
    notes = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    inode = notes[0][0]
    assert notes == [[inode, "2"]] * 2
    assert users(inode) == []
    assert not [name for name in set(os.listdir("/dev/shm")) - files if "distcache" in name]
