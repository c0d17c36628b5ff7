"""What an operator is told, and when nothing is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdd.topology import report, sysfs
from tests.topology import machines
from tests.topology.build import SysTree, port


def found(root: Path) -> dict[str, str]:
    return {each["id"]: each["message"] for each in report.document(sysfs.read(root))["findings"]}


def test_a_cpuset_that_hides_the_near_cpus(tmp_path: Path) -> None:
    machines.two_gpus_one_nic(tmp_path).process(cpus="8-15,24-31", memory_nodes="1")
    assert list(found(tmp_path)) == ["T014", "T020", "T021", "T022"]
    rail = report.document(sysfs.read(tmp_path))["rails"][0]
    assert (rail["numa"], rail["cpus"]) == (0, "8-15,24-31")
    assert rail["why"] == "all CPUs: NUMA node 0 of mlx5_0 has no CPU that this process may use"


@pytest.mark.parametrize(
    ("memlock", "told"),
    [("unlimited", False), ("8388608", True), (str(2048 << 30), False)],
)
def test_a_limit_of_locked_memory(tmp_path: Path, memlock: str, told: bool) -> None:
    tree = machines.two_gpus_one_nic(tmp_path)
    tree.process(cpus="0-31", memlock=memlock)
    tree.file("proc/meminfo", "MemTotal:       1056766912 kB\n")
    assert ("T030" in found(tmp_path)) is told
    if told:
        assert "8.39 MB" in found(tmp_path)["T030"]


@pytest.mark.parametrize(
    ("version", "kernel", "peermem", "told"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1", "6.8.0-40-generic", False, False),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.1", "5.4.0-200", False, True),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.1", "6.8.0", False, True),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.1", "6.8.0", True, False),
        ("", "6.8.0", False, False),
    ],
)
def test_no_way_for_a_nic_to_read_gpu_memory(tmp_path: Path, version: str, kernel: str, peermem: bool, told: bool) -> None:
    tree = machines.two_gpus_one_nic(tmp_path)
    tree.file("proc/driver/nvidia/version", version)
    tree.file("proc/sys/kernel/osrelease", kernel)
    if peermem:
        tree.write("module/nvidia_peermem")
    assert ("T031" in found(tmp_path)) is told


@pytest.mark.parametrize("redirect", [True, False])
def test_acs_in_config_space(tmp_path: Path, redirect: bool) -> None:
    tree = machines.two_gpus_one_nic(tmp_path)
    tree.acs(port("10", 0), redirect=redirect)
    assert ("T032" in found(tmp_path)) is redirect
    if redirect:
        assert "ACS is on in 0000:12:00.0" in found(tmp_path)["T032"]


def test_acs_by_iommu_groups(tmp_path: Path) -> None:
    for name, groups in (("apart", (7, 8)), ("together", (7, 7))):
        tree = SysTree(tmp_path / name)
        tree.node(0, "0-3")
        tree.gpu(f"{port('10', 0)}/0000:13:00.0", group=groups[0])
        tree.nic(f"{port('10', 1)}/0000:14:00.0", "mlx5_0", "", group=groups[1])
    assert "IOMMU groups (7, 8)" in found(tmp_path / "apart")["T032"]
    assert found(tmp_path / "together") == {}


def test_a_gpu_with_fewer_nics_than_the_others(tmp_path: Path) -> None:
    machines.p5_48xlarge(tmp_path)
    state = next((tmp_path / "sys/devices").glob("**/rdmap79s0/ports/1/state"))
    state.write_text("1: DOWN\n")
    assert found(tmp_path) == {
        "T012": "rdmap79s0 is down: it is not used",
        "T016": "GPU0 has 3 NICs where others have 4: it is the slowest",
    }
