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

    def __init__(self, root: Path, mem_available_kib: int = 1 << 30) -> None:
        self.root, self.proc = root, root / "proc"
        (self.proc / "self").mkdir(parents=True)
        meminfo = f"MemTotal:  99999999999 kB\nMemFree: 17 kB\nMemAvailable: {mem_available_kib} kB"
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


def test_without_limits_it_is_mem_available(tmp_path: Path) -> None:
    assert FakeSystem(tmp_path, mem_available_kib=12345).available == 12345 * KIB


def test_no_cgroup_files_at_all(system: FakeSystem) -> None:
    (system.proc / "self/cgroup").unlink()
    assert system.available == (1 << 30) * KIB


def test_old_kernel_without_mem_available(system: FakeSystem) -> None:
    (system.proc / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 17 kB\n")
    assert system.available == 17 * KIB


def test_v2_own_group(system: FakeSystem) -> None:
    system.cgroup(["0::/job/rank"], V2)
    system.write("cg/job/rank", memory__max=100 * MIB, memory__current=30 * MIB)
    assert system.available == 70 * MIB


def test_v2_a_parent_is_tighter(system: FakeSystem) -> None:
    system.cgroup(["0::/job/rank"], V2)
    system.write("cg/job/rank", memory__max="max", memory__current=30 * MIB)
    system.write("cg/job", memory__max=100 * MIB, memory__current=90 * MIB)
    assert system.available == 10 * MIB


def test_v2_high_throttles_before_max(system: FakeSystem) -> None:
    system.cgroup(["0::/job"], V2)
    limits = {"memory__max": 100 * MIB, "memory__high": 80 * MIB, "memory__current": 30 * MIB}
    system.write("cg/job", **limits)
    assert system.available == 50 * MIB


def test_v2_reclaimable_page_cache_is_not_use(system: FakeSystem) -> None:
    system.cgroup(["0::/job"], V2)
    stat = f"anon {5 * MIB}\ninactive_file {20 * MIB}\nactive_file {8 * MIB}\nshmem {3 * MIB}"
    limits = {"memory__max": 100 * MIB, "memory__current": 60 * MIB, "memory__stat": stat}
    system.write("cg/job", **limits)
    assert system.available == (100 - (60 - 20 - 4)) * MIB


def test_v2_use_above_the_limit_leaves_nothing(system: FakeSystem) -> None:
    system.cgroup(["0::/job"], V2)
    system.write("cg/job", memory__max=10 * MIB, memory__current=11 * MIB)
    assert system.available == 0


def test_v1_nested(system: FakeSystem) -> None:
    system.cgroup(["9:cpu:/other", "4:cpuset,memory:/slurm/job", "0::/"], V1)
    stat = f"inactive_file 1\ntotal_inactive_file {10 * MIB}\ntotal_active_file 0"
    own = {"memory__limit_in_bytes": UNLIMITED_V1, "memory__usage_in_bytes": 50 * MIB}
    system.write("mem/slurm/job", **own, memory__stat=stat)
    parent = {"memory__limit_in_bytes": 100 * MIB, "memory__usage_in_bytes": 60 * MIB}
    system.write("mem/slurm", **parent, memory__stat=stat)
    assert system.available == 50 * MIB


def test_v1_unlimited_everywhere(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path, mem_available_kib=77)
    system.cgroup(["4:memory:/a"], V1)
    for folder in ("mem", "mem/a"):
        none = {"memory__limit_in_bytes": UNLIMITED_V1, "memory__usage_in_bytes": 1 << 40}
        system.write(folder, **none)
    assert system.available == 77 * KIB


@pytest.mark.parametrize("path", ["/docker/abc", "/../../elsewhere", "/docker", "/kube/pod"])
def test_container_sees_its_own_group_at_the_mount_point(system: FakeSystem, path: str) -> None:
    """The mount's root is the container's group, wherever the process says that it is."""
    system.cgroup([f"4:memory:{path}"], [("/docker/abc", "mem", "cgroup cgroup rw,memory")])
    limit = {"memory__limit_in_bytes": 100 * MIB, "memory__usage_in_bytes": 40 * MIB}
    system.write("mem", **limit)
    assert system.available == 60 * MIB


def test_mount_root_prefix_is_by_component(system: FakeSystem) -> None:
    system.cgroup(["0::/docker/abc/inner"], [("/docker/abc", "cg", "cgroup2 none rw")])
    system.write("cg/inner", memory__max=5 * MIB, memory__current=0)
    assert system.available == 5 * MIB


def test_mount_point_with_a_space(system: FakeSystem) -> None:
    system.cgroup(["0::/job"], [("/", "c g", "cgroup2 none rw")])
    system.write("c g/job", memory__max=5 * MIB, memory__current=1 * MIB)
    assert system.available == 4 * MIB


def test_both_versions_at_once(system: FakeSystem) -> None:
    system.cgroup(["4:memory:/a", "0::/b"], V1 + V2)
    limit = {"memory__limit_in_bytes": 50 * MIB, "memory__usage_in_bytes": 1 * MIB}
    system.write("mem/a", **limit)
    system.write("cg/b", memory__max=40 * MIB, memory__current=1 * MIB)
    assert system.available == 39 * MIB


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
