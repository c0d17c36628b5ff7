"""Reads what a machine has from sysfs below any root, so that a copied tree reads like the machine it came from.

One odd device costs a null, never the whole picture: every file may be missing or empty. No driver library is asked
here; GPU facts that only a driver knows (UUID, memory) are another source's.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pdd.topology.types import Gpu, Nic, NumaNode, PciDevice, Topology

_GPU_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D, other display, accelerator
_EFA_VENDOR, _EFA_DEVICES = "0x1d0f", ("0xefa0", "0xefa1", "0xefa2", "0xefa3")


def read(root: Path = Path("/"), host: str | None = None) -> Topology:
    """The topology below `root`, which holds `sys/`. For another root than / every listed CPU counts as usable."""
    here = root == Path("/")
    numa = _numa_nodes(root)
    listed = tuple(
        sorted({cpu for node in numa for cpu in node.cpus} or set(_cpu_list(root / "sys/devices/system/cpu/online")))
    )
    allowed = tuple(sorted(os.sched_getaffinity(0))) if here else listed
    return Topology(
        host=host or (socket.gethostname() if here else root.name),
        source=("sysfs",),
        cpus=allowed,
        numa=numa,
        gpus=_gpus(root),
        nics=_nics(root),
    )


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """(0, 1, 2, 8) of "0-2,8". Empty for an empty or unreadable list."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if first.isdigit() and (not dash or last.isdigit()):
            cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _cpu_list(path: Path) -> tuple[int, ...]:
    return parse_cpu_list(_text(path))


def _numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    found = []
    for entry in _entries(root / "sys/devices/system/node"):
        if entry.name.startswith("node") and entry.name[4:].isdigit():
            found.append(NumaNode(int(entry.name[4:]), _cpu_list(entry / "cpulist")))
    return tuple(sorted(found, key=lambda node: node.index))


def _pci_device(entry: Path) -> PciDevice:
    """The device behind a link: its real path spells out root bus and bridges."""
    parts = entry.resolve().parts
    top = next((i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part), None)
    chain = parts[top:] if top is not None else (parts[-1],)
    # Below the PCI device itself there may be virtio or usb levels: the last PCI address is the device.
    addresses = [part for part in chain if part.count(":") == 2 and "." in part]
    numa = _text(entry / "numa_node")
    if not numa and addresses:
        numa = _text(Path(*parts[: parts.index(addresses[-1]) + 1]) / "numa_node")
    return PciDevice(
        address=addresses[-1] if addresses else entry.name,
        root=chain[0] if top is not None else "",
        bridges=tuple(addresses[:-1]),
        numa=int(numa) if numa.isdigit() else None,
    )


def _gpus(root: Path) -> tuple[Gpu, ...]:
    found = []
    for entry in _entries(root / "sys/bus/pci/devices"):
        vendor = _GPU_VENDORS.get(_text(entry / "vendor"))
        if vendor and _text(entry / "class")[:6] in _DISPLAY_CLASSES:
            found.append((vendor, _pci_device(entry)))
    found.sort(key=lambda item: item[1].address)
    return tuple(Gpu(index, vendor, pci) for index, (vendor, pci) in enumerate(found))


def _nics(root: Path) -> tuple[Nic, ...]:
    """RDMA devices first, then the netdevs of other PCI devices. Loopback, bridges and tunnels are not NICs."""
    netdevs = {entry.name: entry for entry in _entries(root / "sys/class/net") if (entry / "device").exists()}
    device_of = {name: (entry / "device").resolve() for name, entry in netdevs.items()}
    nics = []
    taken: set[str] = set()
    for entry in _entries(root / "sys/class/infiniband"):
        device = (entry / "device").resolve()
        netdev = next((name for name, at in device_of.items() if at == device), None)
        taken |= {netdev} if netdev else set()
        nics.append(_rdma_nic(entry, netdev))
    for name, entry in netdevs.items():
        if name not in taken:
            pci = _pci_device(entry / "device")
            state = {"up": "active", "down": "down"}.get(_text(entry / "operstate"), "unknown")
            speed = _text(entry / "speed")
            rate = int(speed) * 1_000_000 if speed.isdigit() else None  # sysfs says Mb/s, or -1 when there is no link
            nics.append(Nic(name, None, name, "ethernet", state, rate, pci if pci.root else None))
    return tuple(nics)


def _rdma_nic(entry: Path, netdev: str | None) -> Nic:
    pci = _pci_device(entry / "device")
    port = next(iter(_entries(entry / "ports")), entry / "ports" / "1")
    state = {"4": "active", "1": "down"}.get(_text(port / "state").split(":")[0], "unknown")
    speed = _text(port / "rate").split(" ")[0]  # "400 Gb/sec (4X NDR)"
    rate = int(float(speed) * 1e9) if speed.replace(".", "", 1).isdigit() else None
    device = entry / "device"
    if _text(device / "vendor") == _EFA_VENDOR and _text(device / "device") in _EFA_DEVICES:
        kind = "efa"
    else:
        kind = "ib" if _text(port / "link_layer") == "InfiniBand" else "roce"
    return Nic(entry.name, entry.name, netdev, kind, state, rate, pci if pci.root else None)
