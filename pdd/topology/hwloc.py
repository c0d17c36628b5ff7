"""Reads hwloc's XML, as `lstopo --of xml` writes it: versions 1, 2 and 3 of the format.

What differs: in version 1 a NUMA node contains its sockets, and a machine without NUMA has none; from version 2 on it
hangs beside them. Version 3 numbers OS devices by bits. CPUs that are offline or not allowed are in no `cpuset`, or not
in `allowed_cpuset`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from pdd.topology import cpus, hwloc_links, names
from pdd.topology.types import MAX_NODES, Gpu, Nic, NumaNode, PciDevice, Topology
from pdd.topology.xml_tree import Element

_NETWORK, _OPENFABRICS = "network", "openfabrics"
_OS_DEVICES = {False: {"2": _NETWORK, "3": _OPENFABRICS}, True: {"16": _NETWORK, "32": _OPENFABRICS}}
_IO = ("Bridge", "PCIDev", "OSDev", "Misc")
_PCI_TYPE = re.compile(r"([0-9a-fA-F]{4}) \[([0-9a-fA-F]{4}):([0-9a-fA-F]{4})\]")
_PCI_RANGE = re.compile(r"([0-9a-fA-F]{1,8}):\[([0-9a-fA-F]{2})-[0-9a-fA-F]{2}\]")
_PORT_STATE = re.compile(r"Port(\d{1,3})State")


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where an element is: the CPUs of the last object around it that has some, its bridges."""

    cpuset: int
    root: str = ""
    bridges: tuple[str, ...] = ()
    in_io: bool = False


def read(root: Element, host: str) -> Topology:
    """The topology of a parsed file whose root element is `topology`. `host`: when the file does not tell."""
    machine = next((child for child in root.children if child.tag == "object"), Element("object", {}))
    usable = _usable(machine)
    packages = _packages(root)
    numa = _numa_nodes(root, machine, usable, packages)
    reader = _Devices(numa, packages, usable, new_numbers=root.get("version").startswith("3"))
    reader.read(machine)
    infos = {info.get("name"): info.get("value") for info in [*root.children, *machine.children] if info.tag == "info"}
    gpus = sorted(reader.gpus, key=lambda gpu: names.pci_order(gpu.pci.address))
    return Topology(
        host=names.clean(infos.get("HostName", "")) or host,
        source=("hwloc",),
        cpus=tuple(cpus.bits(usable)),
        numa=numa,
        gpus=tuple(dataclasses.replace(gpu, index=index) for index, gpu in enumerate(gpus)),
        nics=tuple(sorted(reader.nics, key=lambda nic: (not nic.is_rdma, names.natural_order(nic.name)))),
        cores=_cores(root, usable),
        links=hwloc_links.read(root, {gpu.pci.address for gpu in gpus}),
    )


def _set(element: Element, name: str) -> int:
    return cpus.mask_value(element.get(name, "0x0"))


def _usable(machine: Element) -> int:
    value = _set(machine, "cpuset")
    for limit in ("allowed_cpuset", "online_cpuset"):
        if machine.get(limit):
            value &= _set(machine, limit)
    return value


def _packages(root: Element) -> dict[int, int]:
    """Index of each socket → its CPUs."""
    found: dict[int, int] = {}
    for element in root.all("object"):
        if element.get("type") in ("Package", "Socket"):
            index = names.index(element.get("os_index"))
            found[len(found) if index is None or index in found else index] = _set(element, "cpuset")
    return found


def _package_with(packages: dict[int, int], cpuset: int) -> int | None:
    holding = [index for index, mask in packages.items() if cpuset and cpuset & ~mask == 0]
    return holding[0] if len(holding) == 1 else None


def _numa_nodes(root: Element, machine: Element, usable: int, packages: dict[int, int]) -> tuple[NumaNode, ...]:
    """Nodes with the same CPUs are kinds of memory of one place (HBM, memory of GPUs): the CPUs are those of the first."""
    elements = [element for element in root.all("object") if element.get("type") == "NUMANode"]
    if not elements and _set(machine, "cpuset"):
        return (NumaNode(0, tuple(cpus.bits(usable)), _package_with(packages, usable)),)
    ordered = sorted(elements, key=lambda element: (element.get("subtype") not in ("", "DRAM"),
                                                    names.index(element.get("os_index")) or 0))
    found = {}
    taken: set[int] = set()
    for element in ordered[: MAX_NODES + 1]:
        mask = _set(element, "cpuset")
        index = names.index(element.get("os_index"))
        if index is None or index in found:
            continue
        own = mask & usable if mask not in taken else 0
        found[index] = NumaNode(index, tuple(cpus.bits(own)), _package_with(packages, own))
        taken.add(mask)
    return tuple(found[index] for index in sorted(found))


def _cores(root: Element, usable: int) -> tuple[tuple[int, ...], ...]:
    """A CPU is of one core: of the first that names it."""
    cores = []
    for element in root.all("object"):
        if element.get("type") == "Core" and (mask := _set(element, "cpuset") & usable):
            usable &= ~mask
            cores.append(tuple(cpus.bits(mask)))
    return tuple(sorted(cores))


class _Devices:
    """One walk over the objects, keeping GPUs and NICs."""

    def __init__(self, numa: tuple[NumaNode, ...], packages: dict[int, int], usable: int, *, new_numbers: bool) -> None:
        self._nodes = [(node.index, sum(1 << cpu for cpu in node.cpus)) for node in numa if node.cpus]
        self._packages = packages
        self._usable = usable
        self._kinds = _OS_DEVICES[new_numbers]
        self.gpus: list[Gpu] = []
        self.nics: list[Nic] = []

    def read(self, machine: Element) -> None:
        waiting = [(machine, _Place(_set(machine, "cpuset")))]
        while waiting:
            element, place = waiting.pop()
            kind = element.get("type")
            if kind == "Bridge":
                place = self._below(element, place)
            elif kind == "PCIDev":
                self._pci(element, place)
                continue  # what it shows as is read with it
            elif kind == "OSDev":
                self._without_pci(element, place)
            elif kind not in _IO and _set(element, "cpuset"):
                place = _Place(_set(element, "cpuset"))
            waiting += [(child, place) for child in reversed(element.children) if child.tag == "object"]

    @staticmethod
    def _below(bridge: Element, place: _Place) -> _Place:
        match = _PCI_RANGE.fullmatch(bridge.get("bridge_pci"))
        if bridge.get("bridge_type").startswith("0-") or not place.in_io:
            root = f"pci{int(match.group(1), 16):04x}:{match.group(2).lower()}" if match else ""
            place = dataclasses.replace(place, root=root, bridges=(), in_io=True)
        address = names.pci_address(bridge.get("pci_busid"))
        if bridge.get("bridge_type").startswith("1-") and address:
            place = dataclasses.replace(place, bridges=(*place.bridges, address))
        return place

    def _numa(self, cpuset: int) -> int | None:
        """The node of an object: the only one that it has CPUs of."""
        holding = [index for index, mask in self._nodes if mask & cpuset]
        return holding[0] if len(holding) == 1 else None

    def _pci(self, element: Element, place: _Place) -> None:
        address, match = names.pci_address(element.get("pci_busid")), _PCI_TYPE.match(element.get("pci_type"))
        if address is None or match is None:
            return
        class_id, vendor_id, device_id = (int(text, 16) for text in match.groups())
        device = PciDevice(address, place.root, place.bridges, self._numa(place.cpuset),
                           _package_with(self._packages, place.cpuset & self._usable), class_id, vendor_id, device_id)
        shown = list(self._os_devices(element))
        vendor = names.gpu_vendor(class_id, vendor_id)
        if vendor is not None:
            infos = _infos([element, *element.all("object")])
            model = infos.get("GPUModel") or infos.get("PCIDevice", "")
            uuid = infos.get("NVIDIAUUID") or infos.get("AMDUUID", "")
            self.gpus.append(Gpu(0, vendor, device, names.clean(model) or None, names.clean(uuid) or None))
        netdev = next((name for name, kind, _ in shown if kind == _NETWORK), None)
        rdma = [(name, infos) for name, kind, infos in shown if kind == _OPENFABRICS]
        for name, infos in rdma:
            self.nics.append(_rdma_nic(name, netdev, device, infos))
        if not rdma and names.is_cxi(vendor_id, device_id):
            self.nics.append(Nic(netdev or address, None, netdev, "cxi", "unknown", None, device))
        elif not rdma and netdev is not None:
            self.nics.append(Nic(netdev, None, netdev, names.ethernet_kind(netdev), "unknown", None, device))

    def _without_pci(self, element: Element, place: _Place) -> None:
        device = PciDevice("", "", (), self._numa(place.cpuset))
        for name, kind, infos in self._os_devices(element):
            if kind == _OPENFABRICS:
                self.nics.append(_rdma_nic(name, None, device, infos))

    def _os_devices(self, element: Element) -> Iterator[tuple[str, str, dict[str, str]]]:
        for each in element.all("object"):
            kind = self._kinds.get(each.get("osdev_type"))
            if each.get("type") == "OSDev" and kind is not None and each.get("name"):
                yield names.clean(each.get("name")), kind, _infos([each])


def _infos(elements: list[Element]) -> dict[str, str]:
    return {info.get("name"): info.get("value") for each in elements for info in each.children if info.tag == "info"}


def _rdma_nic(name: str, netdev: str | None, device: PciDevice, infos: dict[str, str]) -> Nic:
    states = {match.group(1): names.port_state(value)
              for key, value in infos.items() if (match := _PORT_STATE.fullmatch(key))}
    port = names.best_port(states, "1")
    if names.is_efa(device.vendor_id, device.device_id):
        kind = "efa"
    elif names.is_cxi(device.vendor_id, device.device_id):
        kind = "cxi"
    else:
        kind = names.rdma_kind_of_class(device.class_id)
        if device.class_id not in (0x0200, 0x0207) and (names.number(infos.get(f"Port{port}LID", "")) or 0):
            kind = "ib"  # only InfiniBand ports have a local id; older cards have a class of neither kind
    gid = names.clean(infos.get(f"Port{port}GID0", "")) or None
    return Nic(name, name, netdev, kind, states.get(port, "unknown"), None, device, gid, 0 if gid else None)
