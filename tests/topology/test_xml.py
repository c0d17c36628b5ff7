"""XML of hwloc (formats 1 to 3) and of NCCL: the same machine reads the same from each."""

from __future__ import annotations

import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest

from pdd.topology import report, source
from pdd.topology.show import show
from pdd.topology.types import Topology
from tests.topology import machines

# Two sockets. Socket 0: a GPU and a ConnectX on one switch, a network card, a BMC's display. Socket 1: a GPU alone.
_IO_0 = """
<object type="Bridge" bridge_type="0-1" depth="0" bridge_pci="0000:[10-1f]">
 <object type="Bridge" bridge_type="1-1" depth="1" bridge_pci="0000:[11-1f]" pci_busid="0000:10:01.0" pci_type="0604 [8086:2030] [0:0] 00">
  <object type="Bridge" bridge_type="1-1" depth="2" bridge_pci="0000:[12-1f]" pci_busid="0000:11:00.0" pci_type="0604 [10b5:9797] [0:0] 00">
   <object type="Bridge" bridge_type="1-1" depth="3" bridge_pci="0000:[13-13]" pci_busid="0000:12:00.0" pci_type="0604 [10b5:9797] [0:0] 00">
    <object type="PCIDev" gp_index="70" pci_busid="0000:13:00.0" pci_type="0302 [10de:2330] [10de:16c1] a1{prog}">
     <info name="PCIDevice" value="GH100 [H100 SXM5 80GB]"/>
     <object type="OSDev" gp_index="71" name="nvml0" osdev_type="{gpu}"><info name="NVIDIAUUID" value="GPU-0123"/></object>
    </object>
   </object>
   <object type="Bridge" bridge_type="1-1" depth="3" bridge_pci="0000:[14-14]" pci_busid="0000:12:01.0" pci_type="0604 [10b5:9797] [0:0] 00">
    <object type="PCIDev" pci_busid="0000:14:00.0" pci_type="0207 [15b3:1021] [15b3:0041] 00{prog}">
     <object type="OSDev" name="ib0" osdev_type="{net}"/>
     <object type="OSDev" name="mlx5_0" osdev_type="{rdma}">
      <info name="Port1State" value="{state}"/><info name="Port1LID" value="0x2c"/>
     </object>
    </object>
   </object>
  </object>
 </object>
 <object type="PCIDev" pci_busid="0000:10:04.0" pci_type="0200 [8086:1521] [8086:1521] 01{prog}">
  <object type="OSDev" name="enp16s4" osdev_type="{net}"/>
 </object>
 <object type="PCIDev" pci_busid="0000:10:05.0" pci_type="0300 [1a03:2000] [1a03:2000] 41{prog}"/>
</object>"""
_IO_1 = """
<object type="Bridge" bridge_type="0-1" depth="0" bridge_pci="0000:[80-8f]">
 <object type="PCIDev" gp_index="80" pci_busid="0000:81:00.0" pci_type="0302 [10de:2330] [10de:16c1] a1{prog}"/>
</object>"""
_NUMBERS = {1: {"gpu": "1", "net": "2", "rdma": "3", "prog": ""}, 2: {"gpu": "1", "net": "2", "rdma": "3", "prog": ""},
            3: {"gpu": "4", "net": "16", "rdma": "32", "prog": " 00"}}


def hwloc(version: int, *, state: str = "4") -> str:
    """Eight CPUs, of which 3 is offline and 7 reserved."""
    zero, one = (io.format(**_NUMBERS[version], state=state) for io in (_IO_0, _IO_1))
    nodes = []
    for index, (mask, devices) in enumerate((("0x00000007", zero), ("0x000000f0", one))):
        where = f'os_index="{index}" cpuset="{mask}" nodeset="0x0000000{1 << index}"'
        if version == 1:
            nodes.append(f'<object type="NUMANode" {where}><object type="Socket" {where}></object>{devices}</object>')
        else:
            nodes.append(f'<object type="Package" {where}><object type="NUMANode" {where}/>{devices}</object>')
    allowed = 'allowed_cpuset="0x0000007f"' + (' online_cpuset="0x000000f7"' if version == 1 else "")
    head = '<?xml version="1.0"?>\n<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n'
    attribute = "" if version == 1 else f' version="{version}.0"'
    info = '<info name="HostName" value="node-7"/>'
    links = ('<distances2hetero nbobjs="2" kind="25" name="NVLinkBandwidth"><indexes length="20">OSDev:71 PCIDev:80 </indexes>'
             '<u64values length="16">0 50000 </u64values><u64values length="16">50000 0 </u64values></distances2hetero>')
    machine = f'<object type="Machine" os_index="0" cpuset="0x000000f7" {allowed} nodeset="0x00000003">{info}{"".join(nodes)}</object>'
    return f"{head}<topology{attribute}>{machine}{links if version > 1 else ''}</topology>"


NCCL = """<system version="1">
  <cpu numaid="0" affinity="00000007" arch="x86_64">
    <pci busid="0000:11:00.0" class="0x060400" vendor="0x10b5">0
      <pci busid="0000:13:00.0" class="0x030200" vendor="0x10de" device="0x2330"><gpu dev="0" sm="90">
        <nvlink target="0000:81:00.0" count="2" tclass="0x030200"/></gpu></pci>
      <pci busid="0000:14:00.0" class="0x020700" vendor="0x15b3" device="0x1021">
        <nic><net name="mlx5_0" dev="0" speed="400000" port="1"/></nic></pci>
    </pci>
    <nic><net name="eth0" dev="1" speed="10000" port="0"/></nic>
  </cpu>
  <cpu numaid="1" affinity="00000070" arch="x86_64">
    <pci busid="0000:81:00.0" class="0x030200" vendor="0x10de"><gpu dev="1" sm="90"/></pci>
  </cpu>
</system>"""


def load(tmp_path: Path, text: str) -> Topology:
    file = tmp_path / "node-7.xml"
    file.write_text(text)
    return source.load(file)


def seen(topology: Topology) -> dict[str, Any]:
    document = report.document(topology)
    return {
        "host": document["host"],
        "numa": [(node["node"], node["cpus"]) for node in document["numa"]],
        "gpus": [(gpu["pci"], gpu["numa"], gpu["cpus"]) for gpu in document["gpus"]],
        "nics": [(nic["name"], nic["kind"], nic["pci"], nic["numa"]) for nic in document["nics"] if nic["rdma"]],
        "pairs": [(pair["gpu"], pair["nic"], pair["path"], pair["chosen"]) for pair in document["pairs"]],
        "switches": document["switches"],
    }


EXPECTED = {
    "host": "node-7",
    "numa": [(0, "0-2"), (1, "4-6")],
    "gpus": [("0000:13:00.0", 0, "0-2"), ("0000:81:00.0", 1, "4-6")],
    "nics": [("mlx5_0", "ib", "0000:14:00.0", 0)],
    "pairs": [(0, "mlx5_0", "PIX", True), (1, "mlx5_0", "SYS", True)],
    "switches": [{"pci": "0000:11:00.0", "devices": ["0000:13:00.0", "0000:14:00.0"]}],
}


@pytest.mark.parametrize("text", [hwloc(1), hwloc(2), hwloc(3), NCCL], ids=["hwloc 1", "hwloc 2", "hwloc 3", "NCCL"])
def test_the_same_machine_from_every_format(tmp_path: Path, text: str) -> None:
    assert seen(load(tmp_path, text)) == EXPECTED


@pytest.mark.parametrize("version", [2, 3])
def test_hwloc_says_more(tmp_path: Path, version: int) -> None:
    topology = load(tmp_path, hwloc(version))
    assert (topology.gpus[0].model, topology.gpus[0].uuid) == ("GH100 [H100 SXM5 80GB]", "GPU-0123")
    assert [(nic.name, nic.kind) for nic in topology.nics] == [("mlx5_0", "ib"), ("enp16s4", "ethernet")]
    assert (topology.nics[0].netdev, topology.nics[0].state) == ("ib0", "active")
    assert [node.package for node in topology.numa] == [0, 1]
    assert [(link.gpu, link.target, link.bytes_per_second) for link in topology.links] == [
        ("0000:13:00.0", "0000:81:00.0", 50_000_000_000), ("0000:81:00.0", "0000:13:00.0", 50_000_000_000)
    ]


def test_a_port_that_hwloc_saw_down(tmp_path: Path) -> None:
    document = report.document(load(tmp_path, hwloc(2, state="1")))
    assert not any(pair["chosen"] for pair in document["pairs"])
    assert [finding["id"] for finding in document["findings"]] == ["T012", "T011", "T011"]


def test_memory_of_several_kinds_is_one_place(tmp_path: Path) -> None:
    """HBM beside DRAM, and a GPU's memory: nodes with the same CPUs, which are those of the first."""
    text = hwloc(2).replace('nodeset="0x00000001"/>', 'nodeset="0x00000001"/><object type="NUMANode" subtype="HBM" os_index="2" '
                            'cpuset="0x00000007" nodeset="0x00000004"/>')
    topology = load(tmp_path, text)
    assert [(node.index, node.cpus) for node in topology.numa] == [(0, (0, 1, 2)), (1, (4, 5, 6)), (2, ())]
    assert topology.gpus[0].pci.numa == 0


def test_a_device_between_nodes_is_of_none(tmp_path: Path) -> None:
    text = hwloc(2)
    device = _IO_1.format(**_NUMBERS[2])
    moved = text.replace(device, "").replace("</object><distances2hetero", f"{device}</object><distances2hetero")
    topology = load(tmp_path, moved)
    assert [gpu.pci.numa for gpu in topology.gpus] == [0, None]
    assert [finding["id"] for finding in report.document(topology)["findings"]] == ["T015"]


def test_hwloc_1_without_numa_nodes(tmp_path: Path) -> None:
    text = ('<topology><object type="Machine" cpuset="0x0000000f" allowed_cpuset="0x0000000f">'
            '<object type="Socket" os_index="0" cpuset="0x0000000f"/></object></topology>')
    assert [(node.index, node.cpus) for node in load(tmp_path, text).numa] == [(0, (0, 1, 2, 3))]


def test_nccl_without_names(tmp_path: Path) -> None:
    """As clouds ship it: devices by their class alone, no NIC has a name."""
    text = """<system version="1"><cpu numaid="0" affinity="0000ffff">
      <pci busid="ffff:ff:01.0" class="0x060400"><pci busid="0001:00:00.0" class="0x030200"/>
        <pci busid="0101:00:00.0" class="0x020700"/></pci></cpu></system>"""
    document = report.document(load(tmp_path, text))
    assert [(gpu["pci"], gpu["vendor"]) for gpu in document["gpus"]] == [("0001:00:00.0", "unknown")]
    assert [(nic["name"], nic["rdma"], nic["kind"]) for nic in document["nics"]] == [("0101:00:00.0", None, "ib")]
    assert [(pair["path"], pair["chosen"]) for pair in document["pairs"]] == [("PIX", True)]


def test_nccl_counts_a_device_once_per_host(tmp_path: Path) -> None:
    """One that is named twice is where it was named first; files of several hosts have the same addresses for other devices.
    What is below a switch that is named twice counts."""
    gpu, nic = '<pci busid="0001:00:00.0" class="0x030200"/>', '<pci busid="0101:00:00.0" class="0x020700"/>'
    switch = '<pci busid="0000:01:00.0" class="0x060400">{}</pci>'
    text = f"""<system version="1">
      <cpu host_hash="0xa" numaid="0" affinity="0000000f">{switch.format(gpu + nic + gpu)}</cpu>
      <cpu host_hash="0xa" numaid="1" affinity="000000f0">{switch.format(nic + gpu.replace("0001:", "0002:"))}</cpu>
      <cpu host_hash="0xb" numaid="0" affinity="0000000f">{gpu}</cpu></system>"""
    machine = load(tmp_path, text)
    assert [(gpu.pci.address, gpu.pci.root) for gpu in machine.gpus] == [
        ("0001:00:00.0", "cpu0xa0"), ("0001:00:00.0", "cpu0xb0"), ("0002:00:00.0", "cpu0xa1")]
    assert [nic.pci.numa for nic in machine.nics if nic.pci] == [0]


def test_nccl_hops_break_ties_below_one_bridge(tmp_path: Path) -> None:
    """Both NICs are PXB to both GPUs; one is nearer to GPU1, so the other is left to GPU0."""
    nic = '<pci busid="0000:{0}:00.0" class="0x020700"><nic><net name="{1}" port="1" speed="200000"/></nic></pci>'
    text = f"""<system version="1"><cpu numaid="0" affinity="0000ffff"><pci busid="0000:01:00.0" class="0x060400">
      <pci busid="0000:03:00.0" class="0x060400"><pci busid="0000:07:00.0" class="0x030200"><gpu dev="0"/></pci></pci>
      <pci busid="0000:0a:00.0" class="0x060400">{nic.format("0c", "mlx5_0")}
        <pci busid="0000:0d:00.0" class="0x060400"><pci busid="0000:0f:00.0" class="0x030200"><gpu dev="1"/></pci></pci></pci>
      <pci busid="0000:10:00.0" class="0x060400">{nic.format("12", "mlx5_1")}</pci></pci></cpu></system>"""
    document = report.document(load(tmp_path, text))
    assert {pair["path"] for pair in document["pairs"]} == {"PXB"}
    assert {rail["gpu"]: rail["nics"] for rail in document["rails"]} == {0: ["mlx5_1"], 1: ["mlx5_0"]}


@pytest.mark.parametrize("machine", [machines.dgx_h100, machines.p5_48xlarge, machines.p4d_24xlarge, machines.two_gpus_one_nic])
def test_nccl_xml_out_reads_as_the_same_pairing(tmp_path: Path, machine: Any) -> None:
    machine(tmp_path / "machine")
    whole = source.load(tmp_path / "machine")
    text = show(whole, "nccl-xml")
    xml.dom.minidom.parseString(text)
    again = load(tmp_path, text)
    assert [gpu.pci.address for gpu in again.gpus] == [gpu.pci.address for gpu in whole.gpus]
    one, other = (report.document(topology)["rails"] for topology in (whole, again))
    assert [(rail["nics"], rail["path"], rail["cpus"]) for rail in one] == [
        (rail["nics"], rail["path"], rail["cpus"]) for rail in other
    ]
