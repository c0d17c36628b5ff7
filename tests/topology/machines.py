"""Machines after their makers' public descriptions, as sysfs trees.

Addresses and counts of a DGX H100 are those of its user guide, of p5.48xlarge and p4d.24xlarge those that AWS documents;
bus numbers between are made up.
"""

from __future__ import annotations

from pathlib import Path

from tests.topology.build import SysTree, port

DGX_GPUS = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
DGX_NICS = ("18", "40", "4f", "5e", "9a", "c0", "ce", "dc")  # the ConnectX-7 of the compute fabric, one per GPU


def dgx_h100(root: Path) -> SysTree:
    """2 sockets of 56 cores, 8 H100 with a 400G ConnectX-7 each on a switch of their own, two more for storage."""
    tree = SysTree(root)
    _cpus(tree, cores=56)
    roots = ("15", "3d", "4c", "5b", "97", "bd", "cb", "d9")
    for number, (root_bus, gpu, nic) in enumerate(zip(roots, DGX_GPUS, DGX_NICS, strict=True)):
        numa = number // 4
        tree.gpu(f"{port(root_bus, 0)}/0000:{gpu}:00.0", numa)
        tree.nic(f"{port(root_bus, 1)}/0000:{nic}:00.0", f"mlx5_{number if number < 4 else number + 2}", f"ibp{int(nic, 16)}s0",
                 numa=numa, link="InfiniBand")
    for number, function in enumerate("01"):
        tree.nic(f"pci0000:27/0000:27:01.0/0000:29:00.{function}", f"mlx5_{4 + number}", f"ens6f{function}", numa=0,
                 rate="200 Gb/sec (4X HDR)")
    tree.netdev("pci0000:02/0000:02:01.0/0000:03:00.0", "enp3s0", speed=10000)
    tree.device("pci0000:04/0000:04:01.0/0000:05:00.0", 0, vendor="0x1a03", **{"class": "0x030000"})  # the BMC's display
    return tree


def p5_48xlarge(root: Path) -> SysTree:
    """2 sockets, 8 H100, four EFA of 100G on the switch of each: 32."""
    tree = SysTree(root)
    _cpus(tree, cores=48)
    for number, gpu in enumerate(("53", "64", "75", "86", "97", "a8", "b9", "ca")):
        bus = int(gpu, 16)
        for index in range(4):
            nic = bus - 4 + index
            tree.efa(f"{_port(bus, index + 1)}/0000:{nic:02x}:00.0", f"rdmap{nic}s0", numa=number // 4)
        tree.gpu(f"{_port(bus, 0)}/0000:{gpu}:00.0", number // 4)
    return tree


def p4d_24xlarge(root: Path) -> SysTree:
    """2 sockets, 8 A100, 4 EFA: two GPUs and one EFA side by side on each root bus, no switch to be seen."""
    tree = SysTree(root)
    _cpus(tree, cores=24)
    for number, bus in enumerate(("10", "20", "90", "a0")):
        tree.efa(f"pci0000:{bus}/0000:{bus}:1b.0", f"rdmap{int(bus, 16)}s27", numa=number // 2)
        tree.gpu(f"pci0000:{bus}/0000:{bus}:1c.0", number // 2)
        tree.gpu(f"pci0000:{bus}/0000:{bus}:1d.0", number // 2)
    return tree


def two_gpus_one_nic(root: Path) -> SysTree:
    """2 sockets with a GPU each; the only NIC is on the first."""
    tree = SysTree(root)
    _cpus(tree, cores=8)
    tree.gpu(f"{port('10', 0)}/0000:13:00.0", 0)
    tree.nic(f"{port('10', 1)}/0000:14:00.0", "mlx5_0", "ens1", numa=0)
    tree.gpu(f"{port('80', 0)}/0000:83:00.0", 1)
    return tree


def container(root: Path) -> SysTree:
    """A container on a DGX H100 that was given the GPUs 5 and 6, and CPUs of the second socket only."""
    tree = dgx_h100(root)
    for number in (5, 6):
        tree.nvidia(f"0000:{DGX_GPUS[number]}:00.0", f"GPU-{number:08d}-0000")
    tree.process(cpus="56-63,168-175", memory_nodes="0-1")
    return tree


def laptop(root: Path) -> SysTree:
    """Integrated graphics and Wi-Fi."""
    tree = SysTree(root)
    tree.node(0, "0-15")
    tree.device("pci0000:00/0000:00:02.0", -1, vendor="0x8086", **{"class": "0x030000"})
    tree.netdev("pci0000:00/0000:00:14.3", "wlp0s20f3", -1)
    tree.write("devices/pci0000:00/0000:00:14.3/net/wlp0s20f3/phy80211")
    return tree


def _cpus(tree: SysTree, *, cores: int) -> None:
    """2 sockets of `cores`, two threads each, numbered as Linux does: all first threads, then all second ones."""
    for socket in range(2):
        first = socket * cores
        tree.node(socket, f"{first}-{first + cores - 1},{first + 2 * cores}-{first + 3 * cores - 1}")
        for cpu in range(first, first + cores):
            for thread in (cpu, cpu + 2 * cores):
                tree.cpu(thread, socket, f"{cpu},{cpu + 2 * cores}")


def _port(bus: int, number: int) -> str:
    root = f"{bus - 12:02x}"
    return f"pci0000:{root}/0000:{root}:01.0/0000:{bus - 11:02x}:00.0/0000:{bus - 10:02x}:0{number}.0"
