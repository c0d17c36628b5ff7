"""TCP sockets of a node, bound before anything slow starts, so that a taken port is told at once."""

from __future__ import annotations

import errno
import socket
from typing import Any

from pdd.address import parse_address
from pdd.errors import AddressInUse, ConfigError
from pdd.open_files import Listener

_BACKLOG = 512
_FLAGS = {"api.listen": "--listen", "peers.listen": "--peer-listen"}


def bind_tcp(text: str, key: str) -> socket.socket:
    """A listening socket at `text` (HOST:PORT), which the config key `key` named.

    Raises:
        AddressInUse: somebody else has it. ConfigError: this machine has no such address.
    """
    address = parse_address(text, listen=True)
    try:
        family, place = _resolve(address.host, address.port)
    except socket.gaierror as error:
        raise ConfigError(f"{key}: {address.host!r} cannot be resolved: {error.strerror}",
                          hint="write an IP address of this machine, or mend its name service") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. asyncio sets it by itself only where a socket names its protocol; without it a body, or a
        # token, waits up to 40 ms for the client to acknowledge what went before.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address.host == "::" else 1)
        sock.bind(place)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"{key}: {address} is in use; nothing was loaded",
                hint=f"`ss -ltnp 'sport = :{address.port}'` shows who has it; choose another by {key} in the "
                     f"settings, or {_FLAGS[key]} HOST:PORT",
            ) from None
        if error.errno == errno.EACCES:
            raise ConfigError(f"{key}: {address} is not permitted", hint="ports below 1024 need a privilege") from None
        raise ConfigError(f"{key}: cannot listen on {address}: {error.strerror}",
                          hint="`ip address` lists this machine's addresses; 0.0.0.0 and [::] are all of them") from None
    sock.setblocking(False)
    return Listener(sock, key)


def numeric_host(host: str, port: int) -> str:
    """The IP address that `bind_tcp` listens on for `host`: libfabric takes no names.

    Raises:
        OSError: the name cannot be resolved.
    """
    return str(_resolve(host, port)[1][0])


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Family and socket address to bind."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, place = infos[0]
    return family, place


def local_address_towards(host: str, port: int) -> str | None:
    """The address of this machine from which `host` is reached, or None when there is no route. Sends nothing."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return None
