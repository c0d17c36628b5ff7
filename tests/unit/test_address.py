"""Addresses: what is read, what is refused and how, and which of them only this machine can reach."""

from __future__ import annotations

import socket

import pytest

from pdd.address import Address, is_loopback, parse_address
from pdd.daemon.listen import bind_tcp
from pdd.errors import AddressInUse


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("prefill-2:7000", "prefill-2", 7000),
        ("prefill_2.rack-a.example.:7000", "prefill_2.rack-a.example.", 7000),
        ("10.0.0.7:1", "10.0.0.7", 1),
        ("[::1]:7000", "::1", 7000),
        ("[2001:db8::7]:65535", "2001:db8::7", 65535),
        ("[fe80::1%eth0]:7000", "fe80::1%eth0", 7000),
        (" localhost:7000 ", "localhost", 7000),
    ],
)
def test_address_forms(text: str, host: str, port: int) -> None:
    address = parse_address(text)
    assert address == Address(host, port)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    ["", "7700", ":7000", "host", "host:", "host:0", "host:65536", "host:-1", "host:7x", "host:٧", "[::1:7000", "[::1]",
     "[::1]7000", "[host]:1", "[10.0.0.7]:1", "a b:7000", "-host:7000", "10.0.0.300:7000", "10.0.1:7000", "::1", "::1:80",
     "[fe80::1%a b]:1", "10.0.0.1%eth0:1", "http://host:7000", "host/path:7000", "1::2::3", "x" * 254 + ":1"],
)
def test_bad_addresses_are_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address") as caught:
        parse_address(text)
    assert f'"{text}"' in str(caught.value)


def test_any_free_port_is_for_listening_only() -> None:
    assert parse_address("127.0.0.1:0", listen=True) == Address("127.0.0.1", 0)
    with pytest.raises(ValueError, match="1 to 65535"):
        parse_address("127.0.0.1:0")
    with bind_tcp("127.0.0.1:0", "api.listen") as sock:
        port = sock.getsockname()[1]
        for key, flag in (("api.listen", "--listen"), ("peers.listen", "--peer-listen")):
            with pytest.raises(AddressInUse, match=f"127.0.0.1:{port} is in use") as caught:
                bind_tcp(f"127.0.0.1:{port}", key)
            assert f"in the settings, or {flag} HOST:PORT" in caught.value.hint
            assert f"`ss -ltnp 'sport = :{port}'`" in caught.value.hint


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_no_connection_waits_for_acknowledgements(host: str) -> None:
    with bind_tcp(f"{host}:0", "api.listen") as sock:
        sock.setblocking(True)
        with socket.create_connection(sock.getsockname()[:2]), sock.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("::ffff:127.0.0.1", True),
     ("::1%lo", True), ("0.0.0.0", False), ("::", False), ("10.0.0.7", False), ("localhost.example", False),
     ("fe80::1%eth0", False), ("::ffff:10.0.0.1", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    assert Address(host, 7000).is_loopback is loopback
