"""Free memory of the host and CPUs of the process, in made-up systems."""

import os
import resource
from pathlib import Path

import pytest

from pylongctx import _arguments
from pylongctx._free import available_cores, available_cpus, free_bytes

pytestmark = pytest.mark.check

MIB = 2**20


@pytest.fixture
def system(tmp_path):
    """Return a function that writes files, by path, into a system with 900 MiB available."""

    def system(cgroup: str = "", files: dict[str, object] | None = None) -> Path:
        texts = {"proc/meminfo": f"MemTotal: 1000 kB\nMemAvailable: {900 * 1024} kB\n", "proc/self/cgroup": cgroup}
        for name, text in (texts | (files or {})).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}")
        return tmp_path

    return system


def group(folder: str, limit: object, used: int, cached: int = 0) -> dict[str, object]:
    stat = f"anon 5\ninactive_file {cached}\nactive_file 1\n"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": used, f"{folder}/memory.stat": stat}


def old_group(folder: str, limit: int, used: int) -> dict[str, object]:
    stat = f"inactive_file 7\ntotal_inactive_file {MIB}\ntotal_active_file 0\n"
    return {
        f"{folder}/memory.limit_in_bytes": limit, f"{folder}/memory.usage_in_bytes": used, f"{folder}/memory.stat": stat
    }  # fmt: skip


def test_a_system_without_groups(system):
    root = system()
    (root / "proc/self/cgroup").unlink()
    assert free_bytes(root) == 900 * MIB


def test_the_limit_of_the_group(system):
    files = group("sys/fs/cgroup/a/b", 300 * MIB, 100 * MIB, cached=50 * MIB - 1)
    assert free_bytes(system("0::/a/b\n", files)) == 250 * MIB


def test_the_limit_of_a_group_around_it(system):
    files = group("sys/fs/cgroup/a/b", "max", 100 * MIB) | group("sys/fs/cgroup/a", 200 * MIB, 150 * MIB - 1)
    assert free_bytes(system("0::/a/b\n", files)) == 50 * MIB + 2


def test_a_container_sees_its_group_as_the_root(system):
    files = group("sys/fs/cgroup", 200 * MIB, 150 * MIB - 1)
    assert free_bytes(system("0::/of/the/host\n", files)) == 50 * MIB + 2


def test_groups_of_version_1(system):
    files = old_group("sys/fs/cgroup/memory/a", 40 * MIB, 10 * MIB)
    assert free_bytes(system("5:cpu,cpuacct:/\n4:memory:/a\n0::/\n", files)) == 31 * MIB


def test_no_limit_of_version_1(system):
    files = old_group("sys/fs/cgroup/memory", 2**63 - 4096, 10 * MIB)
    assert free_bytes(system("4:memory:/\n", files)) == 900 * MIB


def test_more_than_allowed_is_used(system):
    assert free_bytes(system("0::/\n", group("sys/fs/cgroup", MIB, 3 * MIB))) == 0


def test_the_limit_of_the_process(system, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda which: (resource.getpagesize() * 100, -1))
    assert free_bytes(system("0::/\n", {"proc/self/statm": "70 50 3 1 0 2 0\n"})) == resource.getpagesize() * 30


def test_this_system():
    assert 0 < free_bytes() < 2**50
    assert 1 <= available_cpus() <= os.cpu_count()


# ---- CPUs ----


@pytest.fixture
def cores(monkeypatch):
    """Let the process run on 12 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4, 16)), raising=False)


CFS = "sys/fs/cgroup/cpu/{}cpu.cfs_{}_us"


@pytest.mark.parametrize(
    ("cgroup", "files", "n"),
    [
        ("", {}, 12),
        ("0::/a/b\n", {}, 12),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "400000 100000\n"}, 4),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/a/cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"sys/fs/cgroup/a/b/cpu.max": "200000 100000\n", "sys/fs/cgroup/a/cpu.max": "9900 1000\n"}, 2),
        ("0::/of/the/host\n", {"sys/fs/cgroup/cpu.max": "500000 100000\n"}, 5),
        ("0::/a\n", {"sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2),
        ("0::/a\n", {"sys/fs/cgroup/a/cpu.max": "10000 100000\n"}, 1),
        ("0::/a\n", {"sys/fs/cgroup/a/cpu.max": "6400000 100000\n"}, 12),
        ("0::/a\n", {"sys/fs/cgroup/a/cpu.max": "nonsense\n"}, 12),
        ("5:cpu,cpuacct:/a\n", {CFS.format("a/", "quota"): "600000\n", CFS.format("a/", "period"): "100000\n"}, 6),
        ("5:cpuacct,cpu:/a\n", {CFS.format("", "quota"): "700000\n", CFS.format("", "period"): "100000\n"}, 7),
        ("5:cpu:/\n", {CFS.format("", "quota"): "-1\n", CFS.format("", "period"): "100000\n"}, 12),
        ("5:memory:/\n", {CFS.format("", "quota"): "700000\n", CFS.format("", "period"): "100000\n"}, 12),
    ],
)
def test_cpus_that_this_process_may_use(system, cores, cgroup, files, n):
    assert available_cpus(system(cgroup, files)) == n


def test_cpus_without_an_affinity(system, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert available_cpus(system()) == 3


def test_threads_are_the_cores_and_all_cpus(monkeypatch):
    for n, few in ((1, 1), (2, 1), (5, 2), (12, 6)):
        monkeypatch.setattr(_arguments, "available_cpus", lambda n=n: n)
        monkeypatch.setattr(_arguments, "available_cores", lambda few=few: few)
        assert _arguments.thread_counts(None, None) == (few, n)
    assert _arguments.thread_counts(3, None) == (3, 12)


SIBLINGS = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@pytest.mark.parametrize(
    ("siblings", "quota", "n"),
    [
        ({cpu: f"{cpu}\n" for cpu in range(16)}, "max", 12),  # no threads share a core
        ({cpu: f"{cpu % 8},{cpu % 8 + 8}\n" for cpu in range(16)}, "max", 8),
        ({cpu: f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n" for cpu in range(16)}, "max", 6),
        ({cpu: f"{cpu}\n" for cpu in range(16)}, "300000", 3),
        ({cpu: f"{cpu}\n" for cpu in range(4)}, "max", 6),  # some are not listed: half of the CPUs
        ({}, "100000", 1),
    ],
)
def test_cores_that_this_process_may_use(system, cores, siblings, quota, n):
    files = {SIBLINGS.format(cpu): text for cpu, text in siblings.items()}
    assert available_cores(system("0::/a\n", files | {"sys/fs/cgroup/a/cpu.max": f"{quota} 100000\n"})) == n
