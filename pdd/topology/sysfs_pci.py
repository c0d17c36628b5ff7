"""The PCI devices of a sysfs tree: where each hangs, and which bridges send peer-to-peer traffic through the CPU.

A device's real path spells out root bus and bridges. Some copies of a tree lost the links or the directories that they
point to; the other half is enough.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

from pdd.topology import cpus, names
from pdd.topology.files import Tree
from pdd.topology.types import NumaNode, PciDevice

_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_BRIDGE_CLASS = 0x0604

# PCI Express extended capabilities: a list that starts at 0x100; id in bits 0..15 of its header, next in 20..31.
_FIRST_EXTENDED = 0x100
_ACS_ID = 0x000D
_ACS_CONTROL = 6  # offset of the control word
_ACS_REDIRECTS = 0x0004 | 0x0008  # P2P Request Redirect, P2P Completion Redirect
_MAX_CAPABILITIES = 64


class PciBus:
    """All PCI devices of a tree, found once."""

    def __init__(self, tree: Tree, numa: Sequence[NumaNode]) -> None:
        self._tree = tree
        self._numa = [node for node in numa if node.cpus]
        self._paths: dict[str, str] = {}
        self._devices: dict[str, PciDevice] = {}
        for name in tree.names("sys/bus/pci/devices"):
            if _ADDRESS.fullmatch(name):
                self._paths[name] = tree.resolve(f"sys/bus/pci/devices/{name}")
        for name in tree.names("sys/devices"):
            if _ROOT.fullmatch(name):
                self._walk(f"sys/devices/{name}")

    def _walk(self, top: str) -> None:
        waiting = [top]
        while waiting:
            path = waiting.pop()
            for name in self._tree.names(path):
                if _ADDRESS.fullmatch(name):
                    self._paths[name] = f"{path}/{name}"
                    waiting.append(f"{path}/{name}")
                elif _ROOT.fullmatch(name):  # a bus below a device, as Intel's VMD has
                    waiting.append(f"{path}/{name}")

    def addresses(self) -> list[str]:
        """In the order of PCI addresses."""
        return sorted(self._paths, key=names.pci_order)

    def path(self, address: str) -> str:
        return self._paths[address]

    def of(self, path: str) -> PciDevice | None:
        """The PCI device that a path leads to or through: below a device there may be virtio or USB levels."""
        parts = [part for part in self._tree.resolve(path).split("/") if _ADDRESS.fullmatch(part)]
        if parts:
            return self.device(parts[-1])
        slot = re.search(r"^PCI_SLOT_NAME=(\S+)$", self._tree.text(f"{path}/uevent"), re.M)  # a copy without links
        return self.device(slot.group(1)) if slot and _ADDRESS.fullmatch(slot.group(1)) else None

    def device(self, address: str) -> PciDevice:
        if address not in self._devices:
            self._devices[address] = self._read(address)
        return self._devices[address]

    def physical_function(self, address: str) -> str | None:
        """Of a virtual function: the card's own."""
        path = self._paths.get(address)
        return None if path is None else names.pci_address(self._tree.resolve(f"{path}/physfn").rpartition("/")[2])

    def _read(self, address: str) -> PciDevice:
        path = self._paths.get(address, f"sys/bus/pci/devices/{address}")
        parts = path.split("/")
        top = max((i for i, part in enumerate(parts) if _ROOT.fullmatch(part)), default=None)
        text = self._tree.text
        class_id = names.number(text(f"{path}/class"))
        group = self._tree.resolve(f"{path}/iommu_group").rpartition("/")[2]
        return PciDevice(
            address=address,
            root="" if top is None else parts[top],
            bridges=() if top is None else tuple(part for part in parts[top:-1] if _ADDRESS.fullmatch(part)),
            numa=self._node_of(path),
            class_id=None if class_id is None else class_id >> 8,
            vendor_id=names.number(text(f"{path}/vendor")),
            device_id=names.number(text(f"{path}/device")),
            iommu_group=group if group.isdigit() else None,
        )

    def _node_of(self, path: str) -> int | None:
        """What the kernel says, else the only node that has the device's CPUs. -1 is the kernel's word for unknown."""
        parts = path.split("/")
        for depth in range(len(parts), 0, -1):
            if not _ADDRESS.fullmatch(parts[depth - 1]):
                break
            here = "/".join(parts[:depth])
            node = self._tree.text(f"{here}/numa_node")
            if node.isdigit():
                return int(node)
            near = set(cpus.parse_list(self._tree.text(f"{here}/local_cpulist"))
                       or cpus.parse_mask(self._tree.text(f"{here}/local_cpus")))
            holding = [each.index for each in self._numa if near and near.issubset(each.cpus)]
            if len(holding) == 1 and len(self._numa) > 1:
                return holding[0]
            if node:
                return None
        return None

    def acs_redirects(self) -> frozenset[str]:
        """Bridges whose Access Control Services send what one device writes to another up to the root, and back.
        Config space beyond 64 bytes is for root: without it nothing is known, and nothing said."""
        found = set()
        for address, path in self._paths.items():
            class_id = names.number(self._tree.text(f"{path}/class"))
            if class_id is not None and class_id >> 8 == _BRIDGE_CLASS and _redirects(self._tree.data(f"{path}/config")):
                found.add(address)
        return frozenset(found)


def acs_only(config: bytes) -> bytes:
    """Config space that tells of Access Control Services what `config` does, and nothing else: no serial number."""
    if not _redirects(config):
        return b""
    return bytes(_FIRST_EXTENDED) + struct.pack("<IHH", 1 << 16 | _ACS_ID, 0, _ACS_REDIRECTS)


def _redirects(config: bytes) -> bool:
    at = _FIRST_EXTENDED
    for _ in range(_MAX_CAPABILITIES):
        if at < _FIRST_EXTENDED or at + 8 > len(config):
            return False
        (header,) = struct.unpack_from("<I", config, at)
        if header & 0xFFFF == _ACS_ID:
            (control,) = struct.unpack_from("<H", config, at + _ACS_CONTROL)
            return bool(control & _ACS_REDIRECTS)
        at = header >> 20
    return False
