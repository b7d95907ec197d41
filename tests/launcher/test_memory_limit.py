"""Memory limits, from trees of files that look like the kernel's."""

from __future__ import annotations

import resource

import pytest

from shoal.launcher.devices import memory_limit

MEMINFO = "MemTotal:       1000 kB\nMemAvailable:    600 kB\nHugePages_Total:       0\n"
GROUP_FILES = {
    2: ("0::/a/b\n", "sys/fs/cgroup/a", "memory.max", "memory.current", "inactive_file"),
    1: (
        "4:cpu,memory:/a/b\n",
        "sys/fs/cgroup/memory/a",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


def write(root, files):
    """Lay out a tree."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_without_groups_the_machine_is_the_limit(tmp_path):
    """meminfo's kibibytes become bytes."""
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"})
    limit = memory_limit(tmp_path)
    assert limit is not None
    assert (limit.total_bytes, limit.available_bytes, limit.limited_by) == (1024_000, 614_400, "the machine")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_around_the_process_counts(tmp_path, version):
    """A limit on an outer group binds the inner one, too; cached file pages are not counted as used."""
    line, folder, limit_name, usage_name, cache = GROUP_FILES[version]
    files = {limit_name: "200000\n", usage_name: "150000\n", "memory.stat": f"anon 1\n{cache} 40000\n"}
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": line})
    write(tmp_path / folder, files)
    limit = memory_limit(tmp_path)
    assert limit is not None
    assert (limit.total_bytes, limit.available_bytes, limit.limited_by) == (200_000, 90_000, "its control group")


def test_a_system_without_the_files_says_nothing(tmp_path):
    """Elsewhere than on Linux there is no answer, and no invented one."""
    assert memory_limit(tmp_path) is None


def test_an_address_space_that_is_nearly_full_counts(tmp_path, monkeypatch):
    """`ulimit -v` bounds what is mapped, whatever the machine has."""
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/statm": "100 50 20 1 0 30 0\n"})
    monkeypatch.setattr(resource, "getrlimit", lambda which: (500_000, 500_000))
    limit = memory_limit(tmp_path)
    assert limit is not None
    assert limit.limited_by == "ulimit -v"
    assert (limit.total_bytes, limit.available_bytes) == (500_000, 500_000 - 100 * resource.getpagesize())
