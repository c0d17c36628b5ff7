"""Two hosts on one machine: network namespaces joined by rate-limited cables, one per NIC. Needs root and veth.

Rates are held by tbf at the sending ends. Everything is named after this process and gone at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class Unavailable(Exception):
    """args: (reason,). This machine cannot have namespaces, cables or rates."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Host:
    name: str
    addresses: list[str]  # one per NIC

    @property
    def prefix(self) -> list[str]:
        """Goes before a command that is to run there."""
        return ["ip", "netns", "exec", self.name]

    def set_link(self, nic: int, up: bool) -> None:
        _run(*self.prefix, "ip", "link", "set", f"nic{nic}", "up" if up else "down")


@contextmanager
def two_hosts(rates_mbit: Sequence[int]) -> Iterator[tuple[Host, Host]]:
    """One cable per rate.

    Raises:
        Unavailable: no `ip` or `tc`, no right, or a kernel without veth or tbf.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise Unavailable(f"no {tool} here")
    names = [f"pdd-{os.getpid()}-{side}" for side in "ab"]
    hosts = tuple(Host(name, [f"10.77.{nic}.{1 + side}" for nic in range(len(rates_mbit))]) for side, name in enumerate(names))
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.name)
            _run(*host.prefix, "ip", "link", "set", "lo", "up")
        for nic, rate in enumerate(rates_mbit):
            end, other = f"nic{nic}", hosts[1].name
            _run("ip", "link", "add", end, "netns", hosts[0].name, "type", "veth", "peer", "name", end, "netns", other)
            for host in hosts:
                _run(*host.prefix, "ip", "address", "add", f"{host.addresses[nic]}/24", "dev", end)
                _run(*host.prefix, "tc", "qdisc", "add", "dev", end, "root", "tbf", "rate", f"{rate}mbit",
                     "burst", "128kb", "latency", "20ms")  # fmt: skip
                host.set_link(nic, True)
        yield hosts[0], hosts[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
