"""Reading sysfs trees that are built here, pairing, and the forms of the result."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pdd.topology import report, sysfs
from pdd.topology.pairing import pair, path_class
from pdd.topology.types import PathClass


class Tree:
    """A sysfs tree as the kernel lays it out: devices below their bridges, classes as links."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, **files: object) -> Path:
        directory = self.root / "sys" / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (directory / name).write_text(f"{value}\n")
        return directory

    def link(self, at: str, to: Path) -> None:
        path = self.root / "sys" / at
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(to, path.parent))

    def node(self, index: int, cpus: str) -> None:
        self.write(f"devices/system/node/node{index}", cpulist=cpus)

    def device(self, path: str, numa: int, **files: object) -> Path:
        """`path`: pci0000:00/0000:00:01.0/0000:01:00.0, the last part is the device."""
        directory = self.write(f"devices/{path}", numa_node=numa, **files)
        self.link(f"bus/pci/devices/{directory.name}", directory)
        return directory

    def gpu(self, path: str, numa: int = 0) -> None:
        self.device(path, numa, vendor="0x10de", **{"class": "0x030200"})

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
        vendor: str = "0x15b3",
        device: str = "0x1021",
    ) -> None:
        pci = self.device(path, numa, vendor=vendor, device=device, **{"class": "0x020000"})
        base = f"devices/{path}"
        self.write(f"{base}/infiniband/{rdma}/ports/1", state=state, rate=rate, link_layer=link)
        self.link(f"{base}/infiniband/{rdma}/device", pci)
        self.link(f"class/infiniband/{rdma}", self.root / "sys" / base / "infiniband" / rdma)
        if netdev:
            self.write(f"{base}/net/{netdev}", operstate="up", speed=400000)
            self.link(f"{base}/net/{netdev}/device", pci)
            self.link(f"class/net/{netdev}", self.root / "sys" / base / "net" / netdev)


SWITCH = "pci0000:10/0000:10:01.0/0000:11:00.0"  # root port, then the switch's upstream port


def server(root: Path, *, near_state: str = "4: ACTIVE") -> dict[str, Any]:
    """Two sockets. GPU0 and mlx5_0 share a switch, GPU1 is on the other root bus of socket 0, GPU2 on socket 1."""
    tree = Tree(root)
    tree.node(0, "0-3")
    tree.node(1, "4-7")
    tree.gpu(f"{SWITCH}/0000:12:00.0/0000:13:00.0")
    tree.nic(f"{SWITCH}/0000:12:01.0/0000:14:00.0", "mlx5_0", "ens1", state=near_state)
    tree.gpu("pci0000:20/0000:20:01.0/0000:21:00.0")
    tree.gpu("pci0000:80/0000:80:01.0/0000:81:00.0", numa=1)
    tree.nic("pci0000:80/0000:80:02.0/0000:82:00.0", "mlx5_1", "", numa=1)
    return report.document(sysfs.read(root, host="node-7"))


def paths(document: dict[str, Any]) -> dict[tuple[int, str], str]:
    return {(each["gpu"], each["nic"]): each["path"] for each in document["pairs"]}


def chosen(document: dict[str, Any]) -> dict[int, str]:
    return {each["gpu"]: each["nic"] for each in document["pairs"] if each["chosen"]}


def test_a_server_is_read_and_paired(tmp_path: Path) -> None:
    document = server(tmp_path)
    assert json.loads(json.dumps(document)) == document
    assert [(gpu["pci"], gpu["numa"]) for gpu in document["gpus"]] == [
        ("0000:13:00.0", 0),
        ("0000:21:00.0", 0),
        ("0000:81:00.0", 1),
    ]
    assert [
        (nic["rdma"], nic["netdev"], nic["kind"], nic["state"], nic["rate_bits_per_second"]) for nic in document["nics"]
    ] == [
        ("mlx5_0", "ens1", "roce", "active", 400_000_000_000),
        ("mlx5_1", None, "roce", "active", 400_000_000_000),
    ]
    assert paths(document) == {
        (0, "mlx5_0"): "PIX", (0, "mlx5_1"): "SYS",
        (1, "mlx5_0"): "NODE", (1, "mlx5_1"): "SYS",
        (2, "mlx5_0"): "SYS", (2, "mlx5_1"): "PHB",
    }  # fmt: skip
    assert chosen(document) == {0: "mlx5_0", 1: "mlx5_0", 2: "mlx5_1"}
    assert document["findings"] == []


def test_a_nic_that_is_down_is_not_chosen_and_is_told(tmp_path: Path) -> None:
    document = server(tmp_path, near_state="1: DOWN")
    assert chosen(document)[0] == "mlx5_1"
    assert [finding["id"] for finding in document["findings"]] == ["T012", "T013", "T013"]
    assert "! mlx5_0 is down: it is not used  [T012]" in report.tree(document)


def test_unknown_locality_is_unknown(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.node(0, "0-1")
    tree.node(1, "2-3")
    tree.gpu("pci0000:20/0000:20:01.0/0000:21:00.0", numa=-1)
    tree.nic("pci0000:30/0000:30:01.0/0000:31:00.0", "mlx5_0", "", numa=-1)
    document = report.document(sysfs.read(tmp_path, host="x"))
    assert document["gpus"][0]["numa"] is None
    shown = report.tree(document, ascii_only=True).splitlines()
    place = shown.index("NUMA node not known")
    assert [line[:4] for line in shown[place + 1 : place + 3]] == [" |- ", " `- "]
    assert "no NUMA node known" in report.tree({**document, "numa": []})
    assert paths(document) == {(0, "mlx5_0"): "SYS"}


def test_kinds(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.nic("pci0000:10/0000:10:01.0/0000:11:00.0", "rdmap16s0", "", vendor="0x1d0f", device="0xefa2", rate="")
    tree.nic("pci0000:10/0000:10:02.0/0000:12:00.0", "mlx5_9", "ib0", link="InfiniBand", rate="odd", state="garbage")
    virtual = tree.write("devices/virtual/net/lo", operstate="unknown")
    tree.link("class/net/lo", virtual)
    found = {nic.name: (nic.kind, nic.state, nic.rate_bits_per_second) for nic in sysfs.read(tmp_path).nics}
    assert found == {"mlx5_9": ("ib", "unknown", None), "rdmap16s0": ("efa", "active", None)}


def test_switches_deeper_than_one_are_pxb(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu(f"{SWITCH}/0000:12:00.0/0000:13:00.0/0000:14:00.0/0000:15:00.0")
    tree.nic(f"{SWITCH}/0000:12:01.0/0000:16:00.0", "mlx5_0", "")
    topology = sysfs.read(tmp_path)
    assert path_class(topology.gpus[0].pci, topology.nics[0].pci) is PathClass.PXB


def test_gpus_share_nics_evenly(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    for number in range(4):
        tree.gpu(f"pci0000:10/0000:10:0{number + 1}.0/0000:1{number + 1}:00.0")
    for number in range(2):
        tree.nic(f"pci0000:10/0000:10:1{number}.0/0000:2{number}:00.0", f"mlx5_{number}", "")
    pairs, _ = pair(sysfs.read(tmp_path))
    used = [each.nic for each in pairs if each.chosen]
    assert sorted(used) == ["mlx5_0", "mlx5_0", "mlx5_1", "mlx5_1"]


def test_an_empty_or_broken_tree_is_an_empty_machine(tmp_path: Path) -> None:
    document = report.document(sysfs.read(tmp_path / "nothing", host="x"))
    assert (document["gpus"], document["nics"], document["numa"]) == ([], [], [])
    assert report.tree(document).startswith("x  0 NUMA  0 GPU")
    tree = Tree(tmp_path)
    tree.write("bus/pci/devices")
    (tmp_path / "sys/bus/pci/devices/0000:00:01.0").symlink_to("../../../nowhere")
    tree.write("devices/system/node/node0", cpulist="oops")
    assert sysfs.read(tmp_path).numa[0].cpus == ()


def test_this_machine_can_be_read() -> None:
    document = report.document(sysfs.read())
    assert document["schema"] == "pdd.topology/1"
    assert document["cpus"]


def test_cpu_lists_both_ways() -> None:
    assert sysfs.parse_cpu_list("0-2,8\n") == (0, 1, 2, 8)
    assert sysfs.parse_cpu_list("") == ()
    assert report.cpu_ranges((0, 1, 2, 8)) == "0-2,8"
    assert report.cpu_ranges(()) == ""
