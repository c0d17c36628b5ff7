"""The NICs of a sysfs tree: RDMA devices first, then the network interfaces of other hardware.

Loopback, bridges and tunnels are not NICs. A device may have several ports: it is as usable as its best one.
"""

from __future__ import annotations

import ipaddress

from pdd.topology import names
from pdd.topology.files import Tree
from pdd.topology.sysfs_pci import PciBus
from pdd.topology.types import Nic

_RDMA = "sys/class/infiniband"
_NET = "sys/class/net"
_VERBS = "sys/class/infiniband_verbs"
_MAX_GIDS = 64  # per port; the kernel has up to 256 slots and fills them from the start


def read(tree: Tree, bus: PciBus) -> tuple[Nic, ...]:
    netdevs = {name: f"{_NET}/{name}/device" for name in tree.names(_NET) if tree.exists(f"{_NET}/{name}/device")}
    at = {name: bus.of(path) for name, path in netdevs.items()}
    address_of = {name: device.address for name, device in at.items() if device is not None}
    nodes = _verbs_nodes(tree)
    nics = [_rdma_nic(tree, bus, top, address_of, nodes) for top in _rdma_devices(tree, bus)]
    taken = {nic.pci.address for nic in nics if nic.pci is not None} | {nic.netdev for nic in nics}
    nics += [_slingshot(tree, bus, address, address_of) for address in bus.addresses()
             if address not in taken and names.is_cxi(bus.device(address).vendor_id, bus.device(address).device_id)]
    taken |= {nic.pci.address for nic in nics if nic.pci is not None}
    nics.sort(key=lambda nic: names.natural_order(nic.name))
    for name in sorted(netdevs, key=names.natural_order):
        if name not in taken and (name not in address_of or address_of[name] not in taken):
            kind = "wifi" if tree.exists(f"{_NET}/{name}/phy80211") else names.ethernet_kind(name)
            nics.append(Nic(names.clean(name), None, names.clean(name), kind, _link_state(tree, name),
                            _link_rate(tree, name), at[name]))
    return tuple(nics)


def _rdma_devices(tree: Tree, bus: PciBus) -> list[str]:
    """Paths of RDMA devices, by the class directory; else where the devices are, for copies that lack it."""
    classed = [f"{_RDMA}/{name}" for name in tree.names(_RDMA)]
    return classed or [f"{bus.path(address)}/infiniband/{name}" for address in bus.addresses()
                       for name in tree.names(f"{bus.path(address)}/infiniband")]


def _rdma_nic(tree: Tree, bus: PciBus, top: str, address_of: dict[str, str], nodes: dict[str, bool]) -> Nic:
    name = top.rpartition("/")[2]
    pci = bus.of(f"{top}/device")
    ports = [f"{top}/ports/{port}" for port in tree.names(f"{top}/ports")]
    states = {port: names.port_state(tree.text(f"{port}/state")) for port in ports}
    port = names.best_port(states, f"{top}/ports/1")
    layer = tree.text(f"{port}/link_layer")
    kind = "ib" if layer == "InfiniBand" else "roce"
    if tree.text(f"{top}/node_type").startswith("2"):  # RNIC
        kind = "iwarp"
    if pci is not None and names.is_efa(pci.vendor_id, pci.device_id):
        kind = "efa"
    elif not layer and pci is not None:
        kind = names.rdma_kind_of_class(pci.class_id)
    gid, gid_index = _gid(tree, port, kind)
    return Nic(
        name=names.clean(name),
        rdma=names.clean(name),
        netdev=_netdev(tree, port, pci.address if pci else None, address_of),
        kind=kind,
        state=states.get(port, "unknown"),
        rate_bits_per_second=_port_rate(tree, port),
        pci=pci,
        gid=gid,
        gid_index=gid_index,
        physical_function=None if pci is None else bus.physical_function(pci.address),
        reachable=nodes.get(name, True),
    )


def _slingshot(tree: Tree, bus: PciBus, address: str, address_of: dict[str, str]) -> Nic:
    """HPE's driver has a class of its own."""
    pci = bus.device(address)
    device = next((name for name in tree.names("sys/class/cxi") if bus.of(f"sys/class/cxi/{name}") == pci), None)
    netdev = next((name for name, at in address_of.items() if at == address), None)
    state = _link_state(tree, netdev) if netdev else "unknown"
    rate = _link_rate(tree, netdev) if netdev else None
    return Nic(names.clean(device or netdev or address), device, netdev, "cxi", state, rate, pci)


def _verbs_nodes(tree: Tree) -> dict[str, bool]:
    """RDMA device → whether its /dev/infiniband/uverbsN is there. A container sees all devices in sysfs, but has only
    the nodes it was given. Empty when /dev is not part of the tree."""
    if not tree.is_dir("dev"):
        return {}
    found = {}
    for name in tree.names(_VERBS):
        device = tree.text(f"{_VERBS}/{name}/ibdev")
        if device:
            found[device] = tree.has_node(f"dev/infiniband/{name}")
    return found


def _netdev(tree: Tree, port: str, address: str | None, address_of: dict[str, str]) -> str | None:
    """The port's own network interface, else the first of its PCI device."""
    own = next((name for index in tree.names(f"{port}/gid_attrs/ndevs")
                if (name := tree.text(f"{port}/gid_attrs/ndevs/{index}"))), None)
    if own is not None:
        return names.clean(own)
    return next((name for name in sorted(address_of, key=names.natural_order) if address_of[name] == address), None)


def _port_rate(tree: Tree, port: str) -> int | None:
    speed = tree.text(f"{port}/rate").split(" ")[0]  # "400 Gb/sec (4X NDR)"
    return int(float(speed) * 1e9) if speed.replace(".", "", 1).isdigit() and len(speed) < 8 else None


def _link_state(tree: Tree, name: str) -> str:
    return {"up": "active", "down": "down"}.get(tree.text(f"{_NET}/{name}/operstate"), "unknown")


def _link_rate(tree: Tree, name: str) -> int | None:
    speed = tree.text(f"{_NET}/{name}/speed")  # Mb/s; -1 or 2^32 - 1 when there is no link
    return int(speed) * 1_000_000 if speed.isdigit() and 0 < int(speed[:12]) < (1 << 32) - 1 else None


def _gid(tree: Tree, port: str, kind: str) -> tuple[str | None, int | None]:
    """(GID, its index) that a program should use: the first one, but on Ethernet RoCE v2 over a routable address."""
    best: tuple[int, str, int] | None = None
    for index in range(_MAX_GIDS):
        text = tree.text(f"{port}/gids/{index}")
        if not text:
            break
        try:
            gid = ipaddress.IPv6Address(text)
        except ValueError:
            continue
        if int(gid) & (1 << 64) - 1 == 0 and int(gid) >> 64 in (0, 0xFE80 << 48):
            continue  # an empty slot
        worth = 0
        if kind == "roce":
            v2 = tree.text(f"{port}/gid_attrs/types/{index}") == "RoCE v2"
            worth = 4 * v2 + 2 * (not gid.is_link_local) + (gid.ipv4_mapped is not None)
        if best is None or worth > best[0]:
            best = (worth, str(gid.ipv4_mapped or gid), index)
    return (None, None) if best is None else (best[1], best[2])
