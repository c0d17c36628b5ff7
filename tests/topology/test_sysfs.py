"""Reading sysfs trees: what is odd, missing or hidden in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdd.topology import report, source, sysfs
from pdd.topology.show_tree import tree as show_tree
from pdd.topology.types import Topology
from tests.topology import machines
from tests.topology.build import AMD, SysTree, port


def server(root: Path, *, near_state: str = "4: ACTIVE") -> dict[str, Any]:
    """Two sockets. GPU0 and mlx5_0 share a switch, GPU1 is on the other root bus of socket 0, GPU2 on socket 1."""
    tree = SysTree(root)
    tree.node(0, "0-3")
    tree.node(1, "4-7")
    tree.gpu(f"{port('10', 0)}/0000:13:00.0")
    tree.nic(f"{port('10', 1)}/0000:14:00.0", "mlx5_0", "ens1", state=near_state)
    tree.gpu("pci0000:20/0000:20:01.0/0000:21:00.0")
    tree.gpu("pci0000:80/0000:80:01.0/0000:81:00.0", numa=1)
    tree.nic("pci0000:80/0000:80:02.0/0000:82:00.0", "mlx5_1", "", numa=1)
    return report.document(sysfs.read(root, host="node-7"))


def paths(document: dict[str, Any]) -> dict[tuple[int, str], str]:
    return {(each["gpu"], each["nic"]): each["path"] for each in document["pairs"]}


def chosen(document: dict[str, Any]) -> dict[int, str]:
    return {each["gpu"]: each["nic"] for each in document["pairs"] if each["chosen"]}


def ids(topology: Topology) -> list[str]:
    return [finding["id"] for finding in report.document(topology)["findings"]]


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
    assert document["switches"] == [{"pci": "0000:11:00.0", "devices": ["0000:13:00.0", "0000:14:00.0"]}]
    assert paths(document) == {
        (0, "mlx5_0"): "PIX", (0, "mlx5_1"): "SYS",
        (1, "mlx5_0"): "NODE", (1, "mlx5_1"): "SYS",
        (2, "mlx5_0"): "SYS", (2, "mlx5_1"): "PHB",
    }
    assert chosen(document) == {0: "mlx5_0", 1: "mlx5_0", 2: "mlx5_1"}
    assert document["findings"] == []


def test_a_nic_that_is_down_is_not_chosen_and_is_told(tmp_path: Path) -> None:
    document = server(tmp_path, near_state="1: DOWN")
    assert chosen(document)[0] == "mlx5_1"
    assert [finding["id"] for finding in document["findings"]] == ["T012", "T013", "T013"]
    assert "! mlx5_0 is down: it is not used  [T012]" in show_tree(document)
    assert "GPU0 falls back to mlx5_1 over SYS: mlx5_0 would be nearer" in show_tree(document)


def test_a_port_without_a_subnet_manager_is_not_used(tmp_path: Path) -> None:
    document = server(tmp_path, near_state="2: INIT")
    assert chosen(document)[0] == "mlx5_1"
    assert document["findings"][0]["message"] == (
        "mlx5_0 has a link but is not configured (no subnet manager?): it is not used"
    )


def test_without_a_usable_nic_nothing_is_chosen(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    tree.node(0, "0-3")
    tree.gpu(f"{port('10', 0)}/0000:13:00.0")
    tree.nic(f"{port('10', 1)}/0000:14:00.0", "mlx5_0", "", state="1: DOWN")
    topology = sysfs.read(tmp_path)
    assert chosen(report.document(topology)) == {}
    assert ids(topology) == ["T012", "T011"]


def test_one_good_port_of_two_is_enough(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    path = "pci0000:10/0000:10:01.0/0000:11:00.0"
    tree.nic(path, "mlx4_0", "", state="1: DOWN", rate="10 Gb/sec", link="Ethernet")
    tree.write(f"devices/{path}/infiniband/mlx4_0/ports/2", state="4: ACTIVE", rate="56 Gb/sec", link_layer="InfiniBand")
    (nic,) = sysfs.read(tmp_path).nics
    assert (nic.state, nic.kind, nic.rate_bits_per_second) == ("active", "ib", 56_000_000_000)


def test_unknown_locality_is_unknown(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    tree.node(0, "0-1")
    tree.node(1, "2-3")
    tree.gpu("pci0000:20/0000:20:01.0/0000:21:00.0", numa=-1)
    tree.nic("pci0000:30/0000:30:01.0/0000:31:00.0", "mlx5_0", "", numa=-1)
    document = report.document(sysfs.read(tmp_path, host="x"))
    assert document["gpus"][0]["numa"] is None
    shown = show_tree(document, ascii_only=True).splitlines()
    place = shown.index("NUMA node not known")
    assert [line[:4] for line in shown[place + 1 : place + 3]] == [" |- ", " `- "]
    assert "no NUMA node known" in show_tree({**document, "numa": []})
    assert paths(document) == {(0, "mlx5_0"): "SYS"}
    assert document["pairs"][0]["why"] == "nothing tells which NIC is near: shared out evenly"
    assert document["rails"][0]["numa"] is None
    assert [finding["id"] for finding in document["findings"]] == ["T015"]


def test_on_a_machine_of_one_node_all_that_is_not_nearer_is_on_that_node(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    tree.node(0, "0-3")
    tree.gpu("pci0000:20/0000:20:01.0/0000:21:00.0", numa=-1)
    tree.nic("pci0000:30/0000:30:01.0/0000:31:00.0", "mlx5_0", "", numa=-1)
    document = report.document(sysfs.read(tmp_path))
    assert paths(document) == {(0, "mlx5_0"): "NODE"}
    assert document["gpus"][0]["numa"] is None
    assert (document["rails"][0]["numa"], document["rails"][0]["cpus"]) == (0, "0-3")
    assert document["findings"] == []


def test_a_node_of_memory_alone_is_no_second_node(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    tree.node(0, "0-71")
    tree.node(1, "")
    tree.gpu("pci0009:00/0009:00:00.0/0009:01:00.0", numa=0)
    tree.nic("pci0000:00/0000:00:00.0/0000:01:00.0", "mlx5_0", "", numa=-1)
    document = report.document(sysfs.read(tmp_path))
    assert paths(document) == {(0, "mlx5_0"): "NODE"}
    assert [node["cpus"] for node in document["numa"]] == ["0-71", ""]


def test_the_cpus_near_a_device_tell_its_node_when_the_kernel_does_not(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    tree.node(0, "0-1")
    tree.node(1, "2-3")
    near = tree.device("pci0000:20/0000:20:01.0", -1, vendor="0x10de", local_cpulist="2-3", **{"class": "0x030200"})
    far = tree.device("pci0000:20/0000:20:02.0", -1, vendor="0x10de", local_cpulist="0-3", **{"class": "0x030200"})
    assert [(gpu.pci.address, gpu.pci.numa) for gpu in sysfs.read(tmp_path).gpus] == [(near.name, 1), (far.name, None)]


def test_offline_cpus_are_not_counted(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    tree.node(0, "0-3")
    tree.write("devices/system/cpu", online="0,2-3")
    assert sysfs.read(tmp_path).cpus == (0, 2, 3)
    (tmp_path / "sys/devices/system/cpu/online").unlink()
    for cpu in range(4):
        tree.write(f"devices/system/cpu/cpu{cpu}", **({"online": int(cpu != 3)} if cpu else {}))
    assert sysfs.read(tmp_path).numa[0].cpus == (0, 1, 2)


def test_kinds(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    tree.nic("pci0000:10/0000:10:01.0/0000:11:00.0", "rdmap16s0", "", vendor="0x1d0f", device="0xefa2", rate="")
    tree.nic("pci0000:10/0000:10:02.0/0000:12:00.0", "mlx5_9", "ib0", link="InfiniBand", rate="odd", state="garbage")
    tree.device("pci0000:10/0000:10:03.0/0000:13:00.0", 0, vendor="0x17db", device="0x0501", **{"class": "0x020000"})
    virtual = tree.write("devices/virtual/net/lo", operstate="unknown")
    tree.link("class/net/lo", virtual)
    found = {nic.name: (nic.kind, nic.state, nic.rate_bits_per_second) for nic in sysfs.read(tmp_path).nics}
    assert found == {"mlx5_9": ("ib", "unknown", None), "rdmap16s0": ("efa", "active", None),
                     "0000:13:00.0": ("cxi", "unknown", None)}


def test_amd_gpus(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    tree.gpu("pci0000:10/0000:10:01.0/0000:11:00.0", vendor=AMD)
    tree.write("devices/pci0000:10/0000:10:01.0/0000:11:00.0", product_name="Instinct MI250X", unique_id="0xabc",
               **{"class": "0x120000"})
    (gpu,) = sysfs.read(tmp_path).gpus
    assert (gpu.vendor, gpu.model, gpu.uuid) == ("amd", "Instinct MI250X", "GPU-0xabc")


def test_a_roce_nic_shows_the_gid_to_use(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    path = "pci0000:10/0000:10:01.0/0000:11:00.0"
    tree.nic(path, "mlx5_0", "ens1")
    gids = [
        ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "IB/RoCE v1"),
        ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2"),
        ("0000:0000:0000:0000:0000:ffff:0a01:0007", "IB/RoCE v1"),
        ("0000:0000:0000:0000:0000:ffff:0a01:0007", "RoCE v2"),
        ("0000:0000:0000:0000:0000:0000:0000:0000", ""),
    ]
    base = f"devices/{path}/infiniband/mlx5_0/ports/1"
    tree.write(f"{base}/gids", **{str(index): gid for index, (gid, _) in enumerate(gids)})
    tree.write(f"{base}/gid_attrs/types", **{str(index): kind for index, (_, kind) in enumerate(gids)})
    (nic,) = sysfs.read(tmp_path).nics
    assert (nic.gid, nic.gid_index) == ("10.1.0.7", 3)


def test_a_container_uses_the_nics_it_has_device_nodes_for(tmp_path: Path) -> None:
    tree = machines.dgx_h100(tmp_path)
    for number in range(10):
        tree.write(f"class/infiniband_verbs/uverbs{number}", ibdev=f"mlx5_{number}")
        if number != 1:
            tree.file(f"dev/infiniband/uverbs{number}", "")
    topology = sysfs.read(tmp_path)
    assert chosen(report.document(topology))[1] != "mlx5_1"
    assert ids(topology) == ["T012", "T013"]


def test_copies_that_lost_links_or_directories(tmp_path: Path) -> None:
    whole = server(tmp_path / "whole")
    without_links = tmp_path / "dirs"
    server(without_links)
    for link in (without_links / "sys/bus/pci/devices").iterdir():
        link.unlink()
    assert report.document(sysfs.read(without_links, host="node-7")) == whole
    dangling = tmp_path / "links"
    server(dangling)
    (dangling / "sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0").rename(dangling / "gone")
    gpu = sysfs.read(dangling).nics[-1]
    assert (gpu.name, gpu.pci and gpu.pci.root) == ("mlx5_1", "pci0000:80")


def test_a_link_never_leads_out_of_the_tree(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0-4095")
    tree = SysTree(tmp_path / "copy")
    tree.write("devices/system/node/node0")
    (tmp_path / "copy/sys/devices/system/node/node0/cpulist").symlink_to("../../../../../../secret")
    (tmp_path / "copy/sys/devices/system/node/node0/cpumap").symlink_to(tmp_path / "secret")
    assert sysfs.read(tmp_path / "copy").numa[0].cpus == ()


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    tree = SysTree(tmp_path)
    tree.node(0, "0")
    (tmp_path / "sys/bus/pci").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices").symlink_to("devices")
    assert sysfs.read(tmp_path).gpus == ()


def test_an_empty_or_broken_tree_is_an_empty_machine(tmp_path: Path) -> None:
    document = report.document(sysfs.read(tmp_path / "nothing", host="x"))
    assert (document["gpus"], document["nics"], document["numa"]) == ([], [], [])
    assert show_tree(document).startswith("x  0 NUMA  0 GPU")
    tree = SysTree(tmp_path)
    tree.write("bus/pci/devices")
    (tmp_path / "sys/bus/pci/devices/0000:00:01.0").symlink_to("../../../nowhere")
    tree.write("devices/system/node/node0", cpulist="oops")
    tree.write("devices/system/node/node1", cpulist="0-99999999999")
    assert [node.cpus for node in sysfs.read(tmp_path).numa] == [(), ()]


def test_this_machine_can_be_read_and_exported(tmp_path: Path) -> None:
    document = report.document(source.load())
    assert document["schema"] == "pdd.topology/1"
    assert document["cpus"]
    source.export(tmp_path / "here.tar.gz")
    again = report.document(source.load(tmp_path / "here.tar.gz"))
    assert {key: again[key] for key in ("host", "cpus", "numa", "gpus", "nics", "rails")} == {
        key: document[key] for key in ("host", "cpus", "numa", "gpus", "nics", "rails")
    }
