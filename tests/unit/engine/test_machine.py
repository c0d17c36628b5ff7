"""Free memory, of machines that are folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdd.engine.machine import free_memory

MIB = 1 << 20


def machine(root: Path, available_mib: int, cgroup: str, groups: dict[str, tuple[str, int, int]]) -> Path:
    """groups: path → (memory.max, MiB in use, MiB of it that are cache)."""
    files = {
        "proc/meminfo": f"MemTotal:       99999999 kB\nMemFree: 7 kB\nMemAvailable:   {available_mib * 1024} kB\n",
        "proc/self/cgroup": cgroup,
    }
    for path, (limit, used, cache) in groups.items():
        at = f"sys/fs/cgroup/{path}".rstrip("/")
        files[f"{at}/memory.max"] = f"{limit}\n"
        files[f"{at}/memory.current"] = f"{used * MIB}\n"
        files[f"{at}/memory.stat"] = f"anon {used * MIB}\ninactive_file {cache * MIB}\nactive_file 5\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("available", "cgroup", "groups", "free"),
    [
        (1000, "0::/\n", {}, 1000),  # no limit anywhere
        (1000, "9:name=systemd:/\n4:memory:/jail\n0::/\n", {}, 1000),  # cgroup v1
        (1000, "0::/\n", {"": (str(600 * MIB), 100, 0)}, 500),  # a container: its own group is the top
        (1000, "0::/a/b.service\n", {"a/b.service": (str(600 * MIB), 200, 150)}, 550),  # cache goes when it must
        (1000, "0::/a/b.service\n", {"a/b.service": ("max", 0, 0), "a": (str(300 * MIB), 100, 0)}, 200),  # a slice
        (1000, "0::/a/b.service\n", {"a/c.service": (str(300 * MIB), 0, 0)}, 1000),  # somebody else's
        (100, "0::/\n", {"": (str(600 * MIB), 100, 0)}, 100),  # the machine has less than the limit allows
        (1000, "0::/\n", {"": (str(100 * MIB), 130, 0)}, 0),  # over its limit
    ],
)
def test_free_memory_is_the_least_of_machine_and_cgroups(
    tmp_path: Path, available: int, cgroup: str, groups: dict[str, tuple[str, int, int]], free: int
) -> None:
    assert free_memory(machine(tmp_path, available, cgroup, groups)) == free * MIB


def test_this_machine_has_memory() -> None:
    assert free_memory() > 0
