"""The addresses of this node that its peers reach it by, as far as the config and the routes tell."""

from __future__ import annotations

import ipaddress

from pdd.address import parse_address
from pdd.config import Config
from pdd.daemon.listen import local_address_towards, numeric_host

_WILDCARDS = ("0.0.0.0", "::")


def addresses_towards(config: Config) -> dict[str, str]:
    """By peer: the address of this node that it is reached from. A prefiller has one, that it listens on; "" is any."""
    if config.peers.listen:
        address = parse_address(config.peers.listen)
        host = numeric_host(address.host, address.port)
        return {config.peers.listen: "" if host in _WILDCARDS else host}
    peers = {peer: parse_address(peer) for peer in config.peers.static}
    found = {peer: local_address_towards(address.host, address.port) for peer, address in peers.items()}
    return {peer: local for peer, local in found.items() if local is not None}


def choose_source(towards: dict[str, str]) -> str:
    """The address for a fabric that has one; "" is any. A peer on this host reaches an outer address too, but a peer
    elsewhere does not reach loopback."""
    outer = [local for local in towards.values() if local and not ipaddress.ip_address(local).is_loopback]
    return next(iter(outer or towards.values()), "")


def mixed_families(towards: dict[str, str]) -> str:
    """What is wrong when peers are reached by IPv4 and IPv6: a tcp endpoint has one family. "" when nothing is."""
    by_version = {ipaddress.ip_address(local).version: peer for peer, local in towards.items() if local}
    if len(by_version) < 2:
        return ""
    return f"peers.static mixes IPv4 ({by_version[4]}) and IPv6 ({by_version[6]}), and the fabric over tcp has one family"
