"""PCI switches, as far as they matter here: the deepest bridge above a device that is above another card too. Pure."""

from __future__ import annotations

from collections import Counter

from pdd.topology.types import PciDevice, Topology


def switch_of(topology: Topology) -> dict[str, str]:
    """PCI address of each GPU and RDMA NIC that has one → address of its switch."""
    devices = {device.address: device for device in _devices(topology)}.values()
    cards = {(device.root, device.bridges, device.address.rpartition(".")[0]) for device in devices}
    above = Counter((root, bridges[: depth + 1]) for root, bridges, _ in cards for depth in range(len(bridges)))
    found = {}
    for device in devices:
        for depth in reversed(range(len(device.bridges))):
            if above[device.root, device.bridges[: depth + 1]] > 1:
                found[device.address] = device.bridges[depth]
                break
    return found


def _devices(topology: Topology) -> list[PciDevice]:
    gpus = [gpu.pci for gpu in topology.gpus]
    return [*gpus, *(nic.pci for nic in topology.rdma_nics if nic.pci is not None and nic.pci.address)]
