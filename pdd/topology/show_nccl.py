"""A topology as NCCL's XML, for NCCL_TOPO_FILE or for this program on another machine. Pure text.

As NCCL does, every other level of bridges is left out, so that a switch is one element. What is not known is not
written, but for the NUMA node of a device: NCCL's word for it is -1.
"""

from __future__ import annotations

import dataclasses
from xml.sax.saxutils import quoteattr

from pdd.topology import cpus
from pdd.topology.names import AMD, NVIDIA
from pdd.topology.types import Gpu, GpuLink, Nic, PciDevice, Topology

_BRIDGE = "0x060400"
_NETWORK = {"ib": 0x0207}
_LINK_CLASSES = {"gpu": "0x030200", "switch": "0x068000", "cpu": "0x060000"}
_VENDORS = {"nvidia": NVIDIA, "amd": AMD}


@dataclasses.dataclass(slots=True)
class _Pci:
    """An element to be: a switch with others below it, or a device."""

    address: str
    below: dict[str, _Pci] = dataclasses.field(default_factory=dict)
    device: PciDevice | None = None
    gpu: Gpu | None = None
    nics: list[tuple[int, Nic]] = dataclasses.field(default_factory=list)


def nccl_xml(topology: Topology) -> str:
    tops: dict[int, _Pci] = {node.index: _Pci("") for node in topology.numa}
    for gpu in topology.gpus:
        _place(tops, gpu.pci).gpu = gpu
    for number, nic in enumerate(topology.rdma_nics):
        device = nic.pci or PciDevice("", "", (), None)
        _place(tops, device).nics.append((number, nic))
    lines = ['<system version="1">']
    for index, top in tops.items():
        node = topology.node(index)
        lines.append(f'  <cpu numaid="{index}" affinity="{cpus.as_mask(node.cpus if node else ())}">')
        for element in top.below.values():
            lines += [f"    {line}" for line in _element(topology, element)]
        lines.append("  </cpu>")
    return "\n".join([*lines, "</system>"])


def _place(tops: dict[int, _Pci], device: PciDevice) -> _Pci:
    at = tops.setdefault(-1 if device.numa is None else device.numa, _Pci(""))
    switches = device.bridges if device.whole_switches else device.bridges[-2::-2][::-1]
    for address in (*switches, device.address):
        at = at.below.setdefault(address, _Pci(address))
    at.device = device
    return at


def _element(topology: Topology, element: _Pci) -> list[str]:
    inside = [line for each in element.below.values() for line in _element(topology, each)]
    if element.gpu is not None:
        inside += _gpu(element.gpu, [link for link in topology.links if link.gpu == element.address])
    if element.nics:
        inside += ["<nic>", *(f"  {_net(number, nic)}" for number, nic in element.nics), "</nic>"]
    if not element.address:
        return inside
    opening = f"<pci busid={quoteattr(element.address)}{_identity(element)}"
    return [f"{opening}>", *(f"  {line}" for line in inside), "</pci>"] if inside else [f"{opening}/>"]


def _identity(element: _Pci) -> str:
    device = element.device
    if device is None:
        return f' class="{_BRIDGE}"'
    class_id, vendor = device.class_id, device.vendor_id
    if class_id is None:
        class_id = 0x0302 if element.gpu else _NETWORK.get(element.nics[0][1].kind, 0x0200)
    if vendor is None and element.gpu is not None:
        vendor = _VENDORS.get(element.gpu.vendor)
    text = f' class="0x{class_id << 8:06x}"'
    text += f' vendor="0x{vendor:04x}"' if vendor is not None else ""
    return text + (f' device="0x{device.device_id:04x}"' if device.device_id is not None else "")


def _gpu(gpu: Gpu, links: list[GpuLink]) -> list[str]:
    opening = f'<gpu dev="{gpu.index}"'
    tag = "xgmi" if gpu.vendor == "amd" else "nvlink"
    inside = [
        f'  <{tag} target={quoteattr(link.target)} count="{link.count}" tclass="{_LINK_CLASSES[link.target_kind]}"/>'
        for link in links if link.count is not None
    ]
    return [f"{opening}>", *inside, "</gpu>"] if inside else [f"{opening}/>"]


def _net(number: int, nic: Nic) -> str:
    rate = f' speed="{nic.rate_bits_per_second // 1_000_000}"' if nic.rate_bits_per_second else ""
    return f'<net name={quoteattr(nic.rdma or nic.name)} dev="{number}"{rate} port="1"/>'
