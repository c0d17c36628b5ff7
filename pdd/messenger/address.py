"""Addresses of peer links: how people write them, and which ones are safe without a token.

    prefill-2:7000    10.0.0.7:7000    [2001:db8::7]:7000    [::1]:7000

Names are resolved at each dial, never here, so a peer that moves is found again.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Iterable

_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where a peer listens. `host` is a name or an IP address without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True when no other machine can be behind it. A name counts only when it is `localhost`."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return False


def parse_address(text: str, *, default_port: int | None = None) -> Address:
    """Reads `host:port`, `[v6]:port`, and, with `default_port`, a bare host or IPv6 address.

    Raises:
        ValueError: one sentence that quotes the text and says what is wrong.
    """
    stripped = text.strip()
    host, port_text = _split(stripped)
    if port_text is None:
        if default_port is None:
            example = f"[{host}]:PORT" if ":" in host else f"{host or 'host'}:PORT"
            raise ValueError(f"{text!r} names no port: write {example}")
        port = default_port
    else:
        if not (port_text.isascii() and port_text.isdigit() and 0 < int(port_text) < 65536):
            raise ValueError(f"{text!r} has no valid port: {port_text!r} is not a number from 1 to 65535")
        port = int(port_text)
    if not _is_host(host):
        raise ValueError(f"{text!r} has no valid host: {host!r} is neither a name nor an IP address")
    return Address(host, port)


def _split(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")) or ":" not in host:
            raise ValueError(f"{text!r} is not of the form [IPv6]:PORT")
        return host, rest[1:] if rest else None
    if text.count(":") > 1:  # a bare IPv6 address; its last group is never a port
        return text, None
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        digits_and_dots = bool(re.fullmatch(r"[0-9.]+", host))  # 10.0.0.300 is a typing error, not a name
        return len(host) <= 253 and not digits_and_dots and _NAME.fullmatch(host) is not None
    return True


def exposure_errors(listen: Address | None, peers: Iterable[Address], *, has_token: bool) -> list[str]:
    """What forbids a start: every address that other machines can reach while no token is configured."""
    if has_token:
        return []
    errors = []
    if listen is not None and not listen.is_loopback:
        errors.append(f"peers.listen = {listen} is reachable from other machines: set peers.token_credential")
    errors += [
        f"peers.static has {peer}, which is not on this machine: set peers.token_credential"
        for peer in peers
        if not peer.is_loopback
    ]
    return errors
