"""Available memory from meminfo and control groups of both versions, on made-up /proc trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from distcache.errors import MemoryTooSmallError
from distcache.store import memory as available
from distcache.store.memory import available_memory, describe_bytes, require_memory

KIB, MIB = 1 << 10, 1 << 20


class FakeSystem:
    """A /proc and cgroup folders below `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.proc = root, root / "proc"
        (self.proc / "self").mkdir(parents=True)
        meminfo = f"MemTotal:  99999999999 kB\nMemFree: 17 kB\nMemAvailable: {1 << 30} kB"
        (self.proc / "meminfo").write_text(meminfo + "\nHugePages_Total:       0\n")
        self.cgroup(["0::/"], [])

    def cgroup(self, lines: list[str], mounts: list[tuple[str, str, str]]) -> None:
        """/proc/self/cgroup and the (root, folder, kind with options) of cgroup mounts."""
        (self.proc / "self/cgroup").write_text("".join(f"{line}\n" for line in lines))
        text = "22 1 0:5 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
        for root, folder, kind in mounts:
            point = str(self.root / folder).replace(" ", "\\040")
            text += f"35 22 0:32 {root} {point} rw,nosuid shared:9 - {kind}\n"
        (self.proc / "self/mountinfo").write_text(text)

    def write(self, folder: str, **files: object) -> None:
        where = self.root / folder
        where.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (where / name.replace("__", ".")).write_text(f"{value}\n")

    @property
    def available(self) -> int:
        return available_memory(self.proc)


V2 = [("/", "cg", "cgroup2 cgroup2 rw,nsdelegate")]
V1 = [("/", "cpu", "cgroup cgroup rw,cpu"), ("/", "mem", "cgroup cgroup rw,memory")]
UNLIMITED_V1 = (1 << 63) - 4096


@pytest.fixture
def system(tmp_path: Path) -> FakeSystem:
    return FakeSystem(tmp_path)


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
def test_control_groups(
    system: FakeSystem, lines: list, mounts: list, files: dict, expected_mib: int
) -> None:
    system.cgroup(lines, mounts)
    for folder, own in files.items():
        system.write(folder, **own)
    assert system.available == expected_mib * MIB


def test_without_limits_it_is_mem_available(system: FakeSystem) -> None:
    assert system.available == (1 << 30) * KIB
    (system.proc / "self/cgroup").unlink()
    assert system.available == (1 << 30) * KIB
    (system.proc / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 17 kB\n")  # an old kernel
    assert system.available == 17 * KIB


def test_the_real_system_has_some() -> None:
    assert MIB < available_memory() < 1 << 50


def test_require_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "available_memory", lambda: 3 * MIB)
    require_memory(3 * MIB, "x", "y")
    with pytest.raises(MemoryTooSmallError) as caught:
        require_memory(3 * MIB + 1, "the tables", "use data.table_rows")
    message = str(caught.value)
    for part in ("the tables", "(3145729 bytes)", "3.00 MiB (3145728 bytes)", "data.table_rows"):
        assert part in message


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 KiB (1024 bytes)"),
        (3 * (1 << 29), "1.50 GiB (1610612736 bytes)"),
        (1 << 60, "1024.00 PiB (1152921504606846976 bytes)"),
    ],
)
def test_describe_bytes(count: int, text: str) -> None:
    assert describe_bytes(count) == text
