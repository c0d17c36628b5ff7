"""Where ranks on CPUs and the fabric's worker live, and what happens when the system refuses."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pdd.topology import pinning, sysfs
from pdd.topology.pairing import host_rail_group
from pdd.topology.types import NumaNode, Topology
from tests.topology import machines


@pytest.mark.parametrize(
    ("allowed", "nodes", "near"),
    [
        ((0, 1, 2, 3), {}, (0, 1, 2, 3)),  # nothing known
        ((0, 1, 2, 3), {0: (0, 1, 2, 3)}, (0, 1, 2, 3)),
        ((0, 1, 2, 3), {0: (0, 2), 1: (1, 3)}, (0, 2)),
        ((3, 5, 7), {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}, (3,)),
        ((5, 7), {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}, (5, 7)),
        ((9,), {0: (0, 1)}, (9,)),  # a CPU that no node lists
    ],
)
def test_without_rdma_the_first_cpu_decides(
    allowed: tuple[int, ...], nodes: dict[int, tuple[int, ...]], near: tuple[int, ...]
) -> None:
    numa = tuple(NumaNode(index, cpus) for index, cpus in nodes.items())
    assert host_rail_group(Topology("x", (), allowed, numa, (), ())).cpus == near


def test_with_rdma_the_node_of_most_nics_decides(tmp_path: Path) -> None:
    tree = machines.laptop(tmp_path)
    tree.node(1, "16-31")
    for number in range(2):
        tree.nic(f"pci0000:80/0000:80:0{number + 1}.0/0000:8{number + 1}:00.0", f"mlx5_{number}", "", numa=1)
    tree.nic("pci0000:40/0000:40:01.0/0000:41:00.0", "mlx5_2", "", numa=0)
    tree.process(cpus="0-19")
    rail = host_rail_group(sysfs.read(tmp_path))
    assert (rail.numa, rail.nics, rail.cpus) == (1, ("mlx5_0", "mlx5_1"), (16, 17, 18, 19))
    assert rail.why == "NUMA node 1 of mlx5_0"


def test_a_thread_is_pinned_within_its_cpuset() -> None:
    code = ("import os; from pdd.topology import pinning; first = min(os.sched_getaffinity(0));"
            "assert pinning.pin_thread((first, 9999)) is None; assert os.sched_getaffinity(0) == {first};"
            "print(pinning.pin_thread((9998, 9999))); assert os.sched_getaffinity(0) == {first}")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "none of the CPUs 9998-9999 is for this process" in result.stdout


def test_a_refusal_to_pin_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cpus: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    warning = pinning.pin_thread(os.sched_getaffinity(0))
    assert warning is not None
    assert "Operation not permitted" in warning


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="a kernel without NUMA")
def test_memory_is_placed() -> None:
    memory = mmap.mmap(-1, 1 << 20)
    try:
        assert pinning.place_memory(memory, None) is None
        assert pinning.place_memory(memory, 0) is None
        memory[:4] = b"pdd!"
        maps = Path("/proc/self/numa_maps")
        if maps.exists():
            assert any("prefer" in line and ":0" in line for line in maps.read_text().splitlines())
        warning = pinning.place_memory(memory, 1000)
        assert warning is not None
        assert "NUMA node 1000: Invalid argument" in warning
    finally:
        memory.close()


def test_an_unknown_machine_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    with mmap.mmap(-1, 4096) as memory:
        assert "system calls of vax" in str(pinning.place_memory(memory, 0))
