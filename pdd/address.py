"""TCP addresses as people write them, and which of them only this machine can reach. Pure; the only parser there is.

    prefill-2:7000    10.0.0.7:7000    [2001:db8::7]:7000    [::1]:7000

Port 0 means "any free port" and so only makes sense to listen on. Names are resolved at each use, never here, so a
peer that moves is found again.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re

_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_DIGITS_AND_DOTS = re.compile(r"[0-9.]+")
_ZONE = re.compile(r"[A-Za-z0-9_.-]+")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where somebody listens. `host` is a name or an IP address without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def parse_address(text: str, *, listen: bool = False) -> Address:
    """Reads HOST:PORT or [IPv6]:PORT. `listen` allows port 0.

    Raises:
        ValueError: one sentence that quotes the text and says what is wrong with it.
    """
    stripped = text.strip()
    if stripped.startswith("["):
        host, bracket, rest = stripped[1:].partition("]")
        if not bracket or not rest.startswith(":"):
            raise _wrong(text, "write [HOST]:PORT for IPv6")
        port = rest[1:]
        if _ip(host) is None or ":" not in host:
            raise _wrong(text, f'"{host}" is not an IPv6 address')
    else:
        host, colon, port = stripped.rpartition(":")
        if not colon or not host:
            raise _wrong(text, "write HOST:PORT, for example 127.0.0.1:7700")
        if ":" in host:
            raise _wrong(text, f"write IPv6 in brackets: [{host}]:{port}")
        if not _is_host(host):
            raise _wrong(text, f'"{host}" is neither a host name nor an IP address')
    lowest = 0 if listen else 1
    if not (port.isascii() and port.isdigit() and lowest <= int(port) <= 65535):
        raise _wrong(text, f'"{port}" is not a port ({lowest} to 65535)')
    return Address(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost is taken as reachable from elsewhere."""
    if host == "localhost":
        return True
    address = _ip(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return address is not None and (address.is_loopback or (mapped is not None and mapped.is_loopback))


def _wrong(text: str, why: str) -> ValueError:
    return ValueError(f'"{text}" is not an address; {why}')


def _is_host(host: str) -> bool:
    if _DIGITS_AND_DOTS.fullmatch(host):  # 10.0.0.300 is a typing error, not a name
        return _ip(host) is not None
    return len(host) <= 253 and _NAME.fullmatch(host) is not None


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    address, percent, zone = host.partition("%")
    if percent and (":" not in address or not _ZONE.fullmatch(zone)):
        return None
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None
