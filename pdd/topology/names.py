"""Vendors, kinds and names as PCI ids and other people's files spell them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_INDEX = 999_999
NVIDIA, AMD, AMAZON, HPE = 0x10DE, 0x1002, 0x1D0F, 0x17DB
_CXI = (HPE, 0x0501)  # Slingshot
_DISPLAY_CLASSES = (0x0300, 0x0302, 0x0380)  # VGA, 3D, other display
_ACCELERATOR = 0x1200
_PORT_STATES = {"1": "down", "2": "init", "3": "init", "4": "active", "5": "active"}
_BEST_FIRST = ("active", "init", "unknown", "down")
_PCI_ADDRESS = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})\.([0-7])")
# Names that the kernel and udev give to network interfaces, as opposed to RDMA devices.
_NETDEV = re.compile(r"(eth|en[opsxuidbaPv]|wl|ww|sl|bond|team|br|veth|docker|virbr|tun|tap|hsn|lo$|ib\d+$|usb|vlan|macvlan)")


def gpu_vendor(class_id: int | None, vendor: int | None) -> str | None:
    """nvidia or amd, for a PCI device that computes; None for others: what a BMC or a laptop shows pictures with."""
    if class_id not in (*_DISPLAY_CLASSES, _ACCELERATOR):
        return None
    return {NVIDIA: "nvidia", AMD: "amd"}.get(vendor or 0)


def is_display(class_id: int | None) -> bool:
    return class_id in _DISPLAY_CLASSES


def is_efa(vendor: int | None, device: int | None) -> bool:
    return vendor == AMAZON and device is not None and device >> 4 == 0xEFA


def is_cxi(vendor: int | None, device: int | None) -> bool:
    return (vendor, device) == _CXI


def is_network(class_id: int | None) -> bool:
    return class_id is not None and class_id >> 8 == 0x02


def rdma_kind_of_class(class_id: int | None) -> str:
    """ib or roce, where only the PCI class tells: 0207 is InfiniBand, 0208 a fabric such as Omni-Path, 0c06 the
    InfiniBand of old."""
    return "ib" if class_id in (0x0207, 0x0208, 0x0C06) else "roce"


def ethernet_kind(name: str) -> str:
    return "wifi" if name.startswith(("wl", "ath")) else "ethernet"


def port_state(text: str) -> str:
    """Of an RDMA port, in the words of types.Nic; `text` begins with the kernel's number, as in "4: ACTIVE"."""
    return _PORT_STATES.get(text.split(":")[0].strip(), "unknown")


def best_port(states: Mapping[str, str], default: str) -> str:
    """Of a device's ports the one to use, by their states; `default` when there is none."""
    return min(states, key=lambda port: _BEST_FIRST.index(states[port]), default=default)


def is_netdev_name(name: str) -> bool:
    return _NETDEV.match(name) is not None


def pci_address(text: str) -> str | None:
    """dddd:bb:dd.f in lower case, with the domain that sysfs would show. None for what is no PCI address."""
    match = _PCI_ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function}"


def pci_order(address: str) -> tuple[int, ...]:
    return tuple(int(part, 16) for part in re.split("[:.]", address)) if address else (1 << 32,)


def natural_order(name: str) -> tuple[tuple[int, str], ...]:
    """mlx5_2 before mlx5_10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d{1,18})", name))


def number(text: str, base: int = 16, most: int = 0xFFFFFFFF) -> int | None:
    """None for what is no number from 0 to `most`: an id that a file spells oddly is an unknown one."""
    if not text.isascii() or "_" in text:  # which Python reads as digits and between them
        return None
    try:
        value = int(text.strip(), base)
    except ValueError:
        return None
    return value if 0 <= value <= most else None


def index(text: str) -> int | None:
    """Of a NUMA node or a socket; None for what the kernel could not have numbered so."""
    return number(text, 10, MAX_INDEX) if text.isdigit() else None


def clean(text: str, most: int = 64) -> str:
    """A name that may be printed: no control characters, no endless lines."""
    return "".join(char if char.isprintable() else "?" for char in text.strip())[:most]


def short_model(model: str) -> str:
    """H100 of "NVIDIA H100 80GB HBM3", A100 of "GA100 [A100 SXM4 40GB]"."""
    inner = re.search(r"\[([^\]]+)\]", model)
    words = (inner.group(1) if inner else model).replace("-", " ").split()
    words = [word for word in words if word.lower() not in ("nvidia", "amd", "tesla", "instinct", "graphics")]
    return words[0] if words else model
