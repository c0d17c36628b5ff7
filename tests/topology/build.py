"""Builds sysfs trees as the kernel lays them out: devices below their bridges, classes as links."""

from __future__ import annotations

import os
import struct
from pathlib import Path

NVIDIA, AMD, MELLANOX, AMAZON = "0x10de", "0x1002", "0x15b3", "0x1d0f"


class SysTree:
    """`root` holds sys/ and what there is of proc/ and dev/."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, **files: object) -> Path:
        directory = self.root / "sys" / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (directory / name).write_text(f"{value}\n")
        return directory

    def file(self, path: str, text: str) -> None:
        """Any file, by its path from the root."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def link(self, at: str, to: Path) -> None:
        path = self.root / "sys" / at
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(to, path.parent))

    # -- CPUs and limits -----------------------------------------------------------------------------------------------
    def node(self, index: int, cpus: str) -> None:
        self.write(f"devices/system/node/node{index}", cpulist=cpus)

    def cpu(self, index: int, package: int, siblings: str) -> None:
        self.write(f"devices/system/cpu/cpu{index}/topology", physical_package_id=package, thread_siblings_list=siblings)

    def process(self, *, cpus: str, memory_nodes: str = "0-1", memlock: str = "unlimited") -> None:
        self.file("proc/self/status", f"Name:\tpdd\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{memory_nodes}\n")
        self.file("proc/self/limits", f"Limit  Soft Limit  Hard Limit  Units\nMax locked memory  {memlock}  {memlock}  bytes\n")

    # -- PCI -----------------------------------------------------------------------------------------------------------
    def device(self, path: str, numa: int, **files: object) -> Path:
        """`path`: pci0000:00/0000:00:01.0/0000:01:00.0, the last part is the device; those before it become bridges."""
        parts = path.split("/")
        for depth in range(2, len(parts)):
            bridge = "/".join(parts[:depth])
            if not (self.root / "sys/bus/pci/devices" / parts[depth - 1]).is_symlink():
                at = self.write(f"devices/{bridge}", numa_node=numa, **{"class": "0x060400"})
                self.link(f"bus/pci/devices/{at.name}", at)
        directory = self.write(f"devices/{path}", numa_node=numa, **files)
        self.link(f"bus/pci/devices/{directory.name}", directory)
        return directory

    def gpu(self, path: str, numa: int = 0, *, vendor: str = NVIDIA, group: int | None = None) -> str:
        """Returns the PCI address."""
        at = self.device(path, numa, vendor=vendor, device="0x2330", **{"class": "0x030200"})
        if group is not None:
            self.link(f"devices/{path}/iommu_group", self.write(f"kernel/iommu_groups/{group}"))
        return at.name

    def nic(
        self,
        path: str,
        rdma: str,
        netdev: str,
        *,
        numa: int = 0,
        state: str = "4: ACTIVE",
        rate: str = "400 Gb/sec (4X NDR)",
        link: str = "Ethernet",
        vendor: str = MELLANOX,
        device: str = "0x1021",
        group: int | None = None,
    ) -> str:
        """Returns the PCI address."""
        pci = self.device(path, numa, vendor=vendor, device=device,
                          **{"class": "0x020700" if link == "InfiniBand" else "0x020000"})
        base = f"devices/{path}"
        self.write(f"{base}/infiniband/{rdma}/ports/1", state=state, rate=rate, link_layer=link)
        self.link(f"{base}/infiniband/{rdma}/device", pci)
        self.link(f"class/infiniband/{rdma}", self.root / "sys" / base / "infiniband" / rdma)
        if netdev:
            self.write(f"{base}/net/{netdev}", operstate="up", speed=400000)
            self.link(f"{base}/net/{netdev}/device", pci)
            self.link(f"class/net/{netdev}", self.root / "sys" / base / "net" / netdev)
        if group is not None:
            self.link(f"{base}/iommu_group", self.write(f"kernel/iommu_groups/{group}"))
        return pci.name

    def efa(self, path: str, rdma: str, *, numa: int = 0) -> str:
        return self.nic(path, rdma, "", numa=numa, rate="100 Gb/sec", link="Unspecified", vendor=AMAZON, device="0xefa1")

    def netdev(self, path: str, name: str, numa: int = 0, **files: object) -> None:
        """A NIC without RDMA."""
        pci = self.device(path, numa, vendor="0x8086", device="0x1521", **{"class": "0x020000"})
        self.write(f"devices/{path}/net/{name}", operstate="up", **files)
        self.link(f"devices/{path}/net/{name}/device", pci)
        self.link(f"class/net/{name}", self.root / f"sys/devices/{path}/net/{name}")

    def acs(self, bridge: str, *, redirect: bool) -> None:
        """Config space with an Access Control Services capability behind another one. `bridge`: its path."""
        config = bytearray(4096)
        struct.pack_into("<I", config, 0x100, 0x148 << 20 | 1 << 16 | 0x0001)  # advanced error reporting
        struct.pack_into("<IHH", config, 0x148, 1 << 16 | 0x000D, 0x001F, 0x000D if redirect else 0x0001)
        (self.root / "sys/devices" / bridge / "config").write_bytes(config)

    def nvidia(self, address: str, uuid: str, model: str = "NVIDIA H100 80GB HBM3") -> None:
        """What the driver shows of a GPU to this process."""
        self.file(f"proc/driver/nvidia/gpus/{address}/information", f"Model: \t\t {model}\nGPU UUID: \t {uuid}\n")


def switch(root_bus: str, number: int = 1) -> str:
    """Path of a PCI switch below the root bus `root_bus` (hex): root port, then the switch's upstream port."""
    bus = int(root_bus, 16)
    return f"pci0000:{root_bus}/0000:{root_bus}:0{number}.0/0000:{bus + 1:02x}:00.0"


def port(root_bus: str, number: int) -> str:
    """Path of a downstream port of the switch below `root_bus`."""
    return f"{switch(root_bus)}/0000:{int(root_bus, 16) + 2:02x}:0{number}.0"
