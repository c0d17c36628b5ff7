"""How fast the NICs of a fabric are, from sysfs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdd.topology import sysfs


def bytes_per_second(domains: Sequence[str], root: Path = Path("/")) -> float | None:
    """The line rates of all `domains` (libfabric's names) together; None when one of them is not known, as of `lo`."""
    rates = []
    nics = sysfs.read(root).nics
    for domain in domains:
        # libfabric names an RDMA domain after the device, with a suffix such as "-rdm" on EFA; a tcp one after the netdev.
        found = next((nic for nic in nics if domain == nic.netdev or nic.rdma in (domain, domain.split("-")[0])), None)
        if found is None or found.rate_bits_per_second is None:
            return None
        rates.append(found.rate_bits_per_second / 8)
    return sum(rates) if rates else None
