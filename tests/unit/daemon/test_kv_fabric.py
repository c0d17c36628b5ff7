"""The address of this node's fabric, when peers are reached from several."""

from __future__ import annotations

import pytest

from pdd.config_load import load
from pdd.daemon import kv_fabric
from pdd.daemon.kv_fabric import KvFabric, choose_source, mixed_families
from pdd.errors import ConfigError


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


def test_peers_of_two_families_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    local = {"127.0.0.1": "127.0.0.1", "::1": "::1"}
    monkeypatch.setattr(kv_fabric, "local_address_towards", lambda host, port: local[host])
    sets = ["node.role=decode", "model.path=/m", "peers.static=127.0.0.1:7701,[::1]:7702", "fabric.provider=tcp"]
    config, _ = load(env={}, assignments=sets, search=False)
    with pytest.raises(ConfigError, match=r"IPv4 \(127.0.0.1:7701\) and IPv6 \(\[::1\]:7702\)") as refused:
        KvFabric(config)
    assert "fabric.bind" in refused.value.hint
    bound, _ = load(env={}, assignments=[*sets, "fabric.bind=127.0.0.1"], search=False)
    fabric = KvFabric(bound)  # the operator has decided
    assert fabric.provider == "tcp"
    fabric.close()
