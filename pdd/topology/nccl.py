"""Reads NCCL's topology XML (NCCL_TOPO_DUMP_FILE), RCCL's too, and the ones that clouds ship for NCCL_TOPO_FILE.

In it a PCI switch is one element (NCCL leaves out every other level of bridges), root buses are not recorded, and a
device may be known by its class alone. Attributes that a file lacks are unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pdd.topology import cpus, names
from pdd.topology.types import MAX_LINKS, MAX_NODES, Gpu, GpuLink, Nic, NumaNode, PciDevice, Topology
from pdd.topology.xml_tree import Element

_LINKS = ("nvlink", "xgmi", "c2c")
_SWITCH_CLASS = 0x0680


def read(root: Element, host: str) -> Topology:
    """The topology of a parsed file whose root element is `system`."""
    reader = _Reader(any(True for _ in root.all("net")))
    for element in root.all("cpu"):
        reader.cpu(element)
    reader.gpus.sort(key=lambda gpu: names.pci_order(gpu.pci.address))
    gpus = {gpu.pci.address for gpu in reader.gpus}
    numa = tuple(NumaNode(index, tuple(cpus.bits(mask))) for index, mask in sorted(reader.nodes.items())[: MAX_NODES + 1])
    return Topology(
        host=host,
        source=("nccl",),
        cpus=tuple(sorted({cpu for node in numa for cpu in node.cpus})),
        numa=numa,
        gpus=tuple(dataclasses.replace(gpu, index=index) for index, gpu in enumerate(reader.gpus)),
        nics=tuple(sorted(reader.nics, key=lambda nic: (not nic.is_rdma, names.natural_order(nic.name)))),
        links=tuple(link if link.target not in gpus else dataclasses.replace(link, target_kind="gpu")
                    for link in reader.links),
    )


class _Reader:
    def __init__(self, has_nets: bool) -> None:
        self._has_nets = has_nets
        self.nodes: dict[int, int] = {}
        self.gpus: list[Gpu] = []
        self.nics: list[Nic] = []
        self.links: list[GpuLink] = []
        self._seen: set[tuple[str, str]] = set()  # host and address; files of several hosts repeat addresses

    def cpu(self, element: Element) -> None:
        numa = names.index(element.get("numaid"))
        if numa is not None:
            self.nodes[numa] = self.nodes.get(numa, 0) | cpus.mask_value(element.get("affinity"))
        root = f"cpu{element.get('host_hash')}{element.get('numaid')}"
        waiting: list[tuple[Element, tuple[str, ...]]] = [(child, ()) for child in reversed(element.children)]
        while waiting:
            child, above = waiting.pop()
            if child.tag == "nic":
                self._nets(child, PciDevice("", "", (), numa))
            elif child.tag == "pci":
                device = _device(child, root, above, numa)
                place = (element.get("host_hash"), device.address)
                if not device.address or place not in self._seen:  # named again, it is where it was named first
                    self._pci(child, device)
                self._seen.add(place)
                waiting += [(each, (*above, device.address)) for each in reversed(child.children) if each.tag == "pci"]

    def _pci(self, element: Element, device: PciDevice) -> None:
        gpu = next((child for child in element.children if child.tag == "gpu"), None)
        vendor = names.gpu_vendor(device.class_id, device.vendor_id)
        if vendor is None and (gpu is not None or (names.is_display(device.class_id) and not device.vendor_id)):
            vendor = "unknown"
        if vendor is not None and device.address:
            self.gpus.append(Gpu(0, vendor, device))
            self.links += _gpu_links(device.address, gpu) if gpu else ()
        found = self._nets(element, device) if any(child.tag == "nic" for child in element.children) else 0
        if not found and device.address and (
            names.is_cxi(device.vendor_id, device.device_id)
            or (not self._has_nets and names.is_network(device.class_id))
        ):
            self.nics.append(Nic(device.address, None, None, _kind(device), "unknown", None, device))

    def _nets(self, element: Element, device: PciDevice) -> int:
        nets = {net.get("name"): net for net in element.all("net")}
        for name, net in nets.items():
            shown = names.clean(name.removesuffix("-rdm"))
            speed = names.number(net.get("speed"), 10)  # Mb/s
            rate = speed * 1_000_000 if speed and 0 < speed < 1 << 32 else None
            socket = names.is_netdev_name(shown) or (net.get("port") == "0" and shown.startswith("ib"))
            if socket:
                kind = names.ethernet_kind(shown)
                self.nics.append(Nic(shown, None, shown, kind, "unknown", rate, device))
            else:
                self.nics.append(Nic(shown or device.address, shown or None, None, _kind(device), "unknown", rate, device))
        return len(nets)


def _device(element: Element, root: str, above: tuple[str, ...], numa: int | None) -> PciDevice:
    class_id = names.number(element.get("class"))
    return PciDevice(
        address=names.pci_address(element.get("busid")) or "",
        root=root,
        bridges=above,
        numa=numa,
        class_id=None if class_id is None else class_id >> 8,
        vendor_id=names.number(element.get("vendor"), most=0xFFFF),
        device_id=names.number(element.get("device"), most=0xFFFF),
        whole_switches=True,
    )


def _kind(device: PciDevice) -> str:
    if names.is_efa(device.vendor_id, device.device_id):
        return "efa"
    if names.is_cxi(device.vendor_id, device.device_id):
        return "cxi"
    return names.rdma_kind_of_class(device.class_id)


def _gpu_links(address: str, gpu: Element) -> Iterator[GpuLink]:
    for link in gpu.children:
        if link.tag not in _LINKS:
            continue
        target = names.pci_address(link.get("target"))
        class_id = names.number(link.get("tclass")) or 0
        kind = "cpu" if link.tag == "c2c" or target is None else "switch" if class_id >> 8 == _SWITCH_CLASS else "gpu"
        count = names.number(link.get("count"), 10, MAX_LINKS) or None
        yield GpuLink(address, target if target and kind != "cpu" else "cpu", kind, count)
