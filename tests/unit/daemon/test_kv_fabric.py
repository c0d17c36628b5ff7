"""The fabric of a node: its address, when peers are reached from several, and the NICs that the placement chose."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import pytest

from pdd.config import Config
from pdd.config_load import load
from pdd.daemon import placing, reach
from pdd.daemon.kv_fabric import KvFabric
from pdd.daemon.reach import addresses_towards, choose_source, mixed_families
from pdd.errors import ConfigError
from pdd.topology import sysfs
from pdd.topology.domains import line_rate
from pdd.topology.placement import plan_placement
from pdd.topology.types import Nic, Topology
from tests.topology.build import SysTree, port


@pytest.mark.parametrize(
    ("towards", "source"),
    [
        ({}, ""),
        ({"0.0.0.0:1": ""}, ""),
        ({"a:1": "127.0.0.1"}, "127.0.0.1"),
        ({"a:1": "127.0.0.1", "b:1": "10.0.0.2", "c:1": "10.1.0.2"}, "10.0.0.2"),
        ({"a:1": "::1", "b:1": "fd00::2"}, "fd00::2"),
    ],
)
def test_an_outer_address_serves_peers_on_this_host_too(towards: dict[str, str], source: str) -> None:
    assert choose_source(towards) == source
    assert mixed_families(towards) == ""


def configured(*sets: str) -> Config:
    config, _ = load(env={}, assignments=["node.role=decode", "model.path=/m", "fabric.provider=tcp", *sets], search=False)
    return config


def opened(config: Config, topology: Topology, towards: dict[str, str] | None = None) -> KvFabric:
    """As a node does it."""
    towards = addresses_towards(config) if towards is None else towards
    return KvFabric(config, placing.place(topology, config, choose_source(towards)), towards)


def test_peers_of_two_families_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    local = {"127.0.0.1": "127.0.0.1", "::1": "::1"}
    monkeypatch.setattr(reach, "local_address_towards", lambda host, port: local[host])
    peers = "peers.static=127.0.0.1:7701,[::1]:7702"
    with pytest.raises(ConfigError, match=r"IPv4 \(127.0.0.1:7701\) and IPv6 \(\[::1\]:7702\)") as refused:
        opened(configured(peers), sysfs.read())
    assert "fabric.bind" in refused.value.hint
    _, outer = interface()
    fabric = opened(configured(peers, "fabric.bind=127.0.0.1"), sysfs.read(), {"p": outer, "q": "::1"})  # decided
    assert fabric.provider == "tcp"
    assert [nic.address for nic in fabric.info().nics] == ["127.0.0.1"]
    fabric.close()


@pytest.mark.parametrize(("local", "where"), [("auto", "KV to and from other hosts travels over tcp"), ("off", "KV travels over tcp")])
def test_what_has_no_rdma_nic_says_what_goes_over_tcp(local: str, where: str) -> None:
    fabric = opened(configured("peers.static=127.0.0.1:1", f"fabric.local={local}"), sysfs.read())
    try:
        assert [each.message for each in fabric.findings() if each.id == "F010"] in ([f"{where}: this host has no RDMA NIC"], [])
    finally:
        fabric.close()


def two_nodes(root: Path, netdev: str) -> Topology:
    """A machine of two NUMA nodes with an RDMA NIC behind the interface `netdev` on the second."""
    cpus = sorted(os.sched_getaffinity(0))
    tree = SysTree(root)
    tree.node(0, "8000")  # that nobody may run on
    tree.node(1, ",".join(map(str, cpus)))
    tree.nic(f"{port('80', 1)}/0000:84:00.0", "mlx5_0", netdev, numa=1)
    return sysfs.read(root)


def interface() -> tuple[str, str]:
    """(name, IPv4 address) of an interface of this machine that other hosts reach."""
    for offer in placing._offers(configured("peers.static=127.0.0.1:1")):
        if offer.domain != "lo" and "." in offer.address:
            return offer.domain, offer.address
    pytest.skip("this machine has no interface but loopback")


def test_the_chosen_nic_is_opened_by_the_name_that_libfabric_gives_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, address = interface()
    config = configured("peers.static=127.0.0.1:1")
    with caplog.at_level(logging.INFO):
        fabric = opened(config, two_nodes(tmp_path, name), {"p": address})
    try:
        info = fabric.info()
        assert info.domains == (name,)
        [nic] = info.nics
        assert (nic.domain, nic.address, nic.nic, nic.rate_bits_per_second) == (name, address, "mlx5_0", 400_000_000_000)
        assert info.line_rate_bytes_per_second == 50e9
        assert [each.id for each in fabric.findings()] == ["F011"]  # tcp, though there is an RDMA NIC
        assert "the ranks on CPUs: mlx5_0, on NUMA node 1" in caplog.text
    finally:
        fabric.close()


def test_a_worker_that_cannot_be_pinned_is_a_finding_and_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, address = interface()
    topology = two_nodes(tmp_path, name)
    config = configured("peers.static=127.0.0.1:1")
    placement = plan_placement(topology, placing.wanted(config, address), placing._offers(config))
    elsewhere = dataclasses.replace(placement.groups[0], worker_cpus=(1000, 1001))
    fabric = KvFabric(config, dataclasses.replace(placement, groups=(elsewhere,)), {"p": address})
    try:
        assert [each.id for each in fabric.findings()] == ["F011", "T023"]
        assert "none of the CPUs from 1000 to 1001 is for this process: a worker stays where it may run [T023]" in caplog.text
    finally:
        fabric.close()


def test_on_one_numa_node_without_rdma_libfabric_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def never(config: Config) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(placing, "_offers", never)
    SysTree(tmp_path).node(0, "0-1")
    [group] = placing.place(sysfs.read(tmp_path), configured("peers.static=127.0.0.1:1"), "127.0.0.1").groups
    assert (group.bind, group.worker_cpus, group.numa, group.places[0].threads) == ((), (), None, 2)


def test_a_line_rate_is_of_all_nics_or_unknown() -> None:
    def nic(rate: int | None) -> Nic:
        return Nic("n", "n", None, "roce", "active", rate, None)

    assert line_rate([nic(100_000_000_000), nic(400_000_000_000)]) == 62.5e9
    assert [line_rate(nics) for nics in ([nic(1), nic(None)], [nic(1), None], [])] == [None] * 3
