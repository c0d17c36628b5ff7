"""Which of a machine's NICs libfabric means by a domain, and by which name libfabric is asked for a NIC. Pure.

libfabric numbers NICs by provider: verbs calls the domain after the RDMA device (mlx5_0), efa adds a suffix
(rdmap79s0-rdm), tcp calls it after the network interface (ens1) and is asked by an address of it.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Iterable, Sequence

from pdd.topology.types import Nic, Topology

RDMA_PROVIDERS = ("efa", "verbs")


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A NIC as libfabric offers it, and as `fabric.bind` names it."""

    kind: str  # of the provider: efa, verbs, tcp
    domain: str
    address: str  # numeric; "" where the provider shows none


def nic_of(topology: Topology, domain: str) -> Nic | None:
    """The NIC behind a domain of any provider; None for loopback, a bridge, a tunnel."""
    return next((nic for nic in topology.nics if _is_rdma_name(domain, nic) or domain == nic.netdev), None)


def nic_named(topology: Topology, name: str, offers: Iterable[Offer]) -> Nic | None:
    """The NIC that an entry of `fabric.bind` names: by a domain, a device, an interface or an address."""
    domain = next((offer.domain for offer in offers if offer.address == name), name)
    return nic_of(topology, domain)


def _is_rdma_name(domain: str, nic: Nic) -> bool:
    return nic.rdma is not None and (domain == nic.rdma or domain.startswith(f"{nic.rdma}-"))


def line_rate(nics: Sequence[Nic | None]) -> float | None:
    """Bytes per second of all these together; None when one is not known, as of loopback."""
    rates = [None if nic is None else nic.rate_bits_per_second for nic in nics]
    return sum(rate / 8 for rate in rates if rate) if rates and all(rates) else None


def best_kind(offers: Sequence[Offer], require: str = "") -> str:
    """The provider that native code takes of these, which come best first; "" when none fits."""
    return next((offer.kind for offer in offers if require in ("", offer.kind)), "")


def mark_offered(topology: Topology, offers: Sequence[Offer], kind: str) -> Topology:
    """The topology with each RDMA NIC that provider `kind` does not offer marked so. Over tcp RDMA NICs are not used as
    such, and nothing is marked."""
    if kind not in RDMA_PROVIDERS:
        return topology
    domains = [offer.domain for offer in offers if offer.kind == kind]
    nics = tuple(
        nic if not nic.is_rdma or any(_is_rdma_name(domain, nic) for domain in domains)
        else dataclasses.replace(nic, offered=False)
        for nic in topology.nics
    )
    return dataclasses.replace(topology, nics=nics)


def bind_names(nics: Sequence[Nic], offers: Sequence[Offer], kind: str, source: str) -> tuple[str, ...]:
    """What `Fabric` is to bind to, so that it drives just these NICs; empty: libfabric or `source` decides.

    Over tcp a NIC is an address, and only one that peers reach will do: when they reach this node by an address (`source`)
    that is on none of these NICs, as over loopback, that address it is.
    """
    if kind in RDMA_PROVIDERS:
        domains = [offer.domain for offer in offers if offer.kind == kind]
        found = [next((domain for domain in domains if _is_rdma_name(domain, nic)), "") for nic in nics]
        return tuple(found) if found and all(found) else ()
    family = ipaddress.ip_address(source).version if source else 0
    addresses = []
    for nic in nics:
        mine = [offer.address for offer in offers if offer.kind == kind and offer.domain == nic.netdev and offer.address]
        usable = [address for address in mine if _routable(address, family)]
        if usable:
            addresses.append(source if source in mine else usable[0])
            family = ipaddress.ip_address(addresses[0]).version  # an endpoint has one
    return tuple(addresses) if not source or source in addresses else ()


def _routable(address: str, family: int) -> bool:
    at = ipaddress.ip_address(address)
    return not (at.is_link_local or at.is_loopback) and family in (0, at.version)
