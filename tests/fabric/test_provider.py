"""Which libfabric and which provider are taken, what is refused, and what each really offers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdd.fabric import _native as native
from pdd.fabric.library import search_dirs
from tests.fabric.conftest import NodeFactory, Stack, link


def test_the_newest_library_is_taken_and_the_others_say_why_not() -> None:
    found = native.library()
    taken = [c for c in found["candidates"] if c["why_not"] == ""]
    assert [c["path"] for c in taken] == [found["path"]]

    def number(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split("."))

    assert all(number(c["version"]) <= number(found["version"]) for c in found["candidates"] if c["version"])
    assert native.library() == found, "asking again, with one loaded, must not change the answer"


def test_a_configured_library_is_used_or_refused_but_never_replaced(fabric_stack: Stack, tmp_path: Path) -> None:
    assert native.library(fabric_stack.library)["version"] == fabric_stack.version
    assert native.library(str(Path(fabric_stack.library).parent))["path"] == fabric_stack.library
    with pytest.raises(native.FabricError, match="no usable libfabric"):
        native.library(str(tmp_path / "libfabric.so.1"))
    (tmp_path / "libfabric.so.1").write_bytes(b"not a library")
    with pytest.raises(native.FabricError, match=r"tried:[\s\S]*\(configured\)"):
        native.Fabric(library=str(tmp_path))


def test_the_libfabric_inside_a_pex_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment links a wheel's files to where the wheel was unpacked; the data is there alone."""
    unpacked, site = tmp_path / "unpacked" / "mpich.whl", tmp_path / "site-packages"
    for made in (unpacked / "mpich-5.dist-info", unpacked / ".prefix/data/lib/mpich", site / "mpich-5.dist-info"):
        made.mkdir(parents=True)
    (unpacked / "mpich-5.dist-info/METADATA").touch()
    (unpacked / ".prefix/data/lib/mpich/libfabric.so.1").touch()
    (site / "mpich-5.dist-info/METADATA").symlink_to(unpacked / "mpich-5.dist-info/METADATA")
    monkeypatch.setattr("sysconfig.get_path", {"data": str(tmp_path), "purelib": str(site)}.__getitem__)
    assert search_dirs() == [(str(unpacked / ".prefix/data/lib/mpich"), "mpich-wheel")]


def test_search_dirs_exist() -> None:
    assert all(Path(path, "libfabric.so.1").exists() for path, _ in search_dirs())


@pytest.mark.parametrize(
    ("provider", "reason"),
    [("tcp;ofi_rxm", "crashes"), ("sockets", "starves"), ("udp;ofi_rxd", "errors"), ("lnx", "no remote writes")],
)
def test_bad_providers_are_refused_with_the_reason(fabric_stack: Stack, provider: str, reason: str) -> None:
    with pytest.raises(native.FabricError, match=f"{provider} is refused: .*{reason}"):
        native.probe(fabric_stack.library, provider)
    with pytest.raises(native.FabricError, match="is refused"):
        native.Fabric(library=fabric_stack.library, provider=provider)


def test_an_unknown_provider_or_address_is_an_error_that_names_it(fabric_stack: Stack) -> None:
    with pytest.raises(native.FabricError, match="fi_getinfo \\(nosuch"):
        native.Fabric(library=fabric_stack.library, provider="nosuch")
    with pytest.raises(native.FabricError, match="at 203\\.0\\.113\\.77"):
        native.Fabric(library=fabric_stack.library, bind=["203.0.113.77"])
    with pytest.raises(native.FabricError, match="idle policy 'lazy'"):
        native.Fabric(library=fabric_stack.library, idle="lazy")


def test_what_the_tcp_stacks_offer(fabric_stack: Stack) -> None:
    nics = native.probe(fabric_stack.library, "tcp")
    assert "127.0.0.1" in {nic["address"] for nic in nics}
    assert len({(nic["domain"], nic["address"]) for nic in nics}) == len(nics)
    for nic in nics:
        assert nic["provider"] == fabric_stack.provider
        assert nic["library_version"] == fabric_stack.version
        assert (nic["wire"], nic["addressing"], nic["app_keys"], nic["fence"]) == ("tcp", "offset", True, "endpoint")
        assert nic["imm_bytes"] >= 4
        assert nic["wait_fd"] is True
    assert [native.probe(fabric_stack.library, name)[0]["provider"] for name in ("auto", "net")] == [fabric_stack.provider] * 2


def test_nics_that_other_hosts_reach_come_first(fabric_stack: Stack) -> None:
    addresses = [nic["address"] for nic in native.probe(fabric_stack.library, "tcp")]

    def reach(address: str) -> int:
        if address in ("127.0.0.1", "::1"):
            return 1
        return 2 if address.startswith(("169.254.", "fe80:")) else 3

    assert [reach(a) for a in addresses] == sorted((reach(a) for a in addresses), reverse=True)


def test_shm_says_that_it_has_no_fence(best_fabric_stack: Stack, nodes: NodeFactory) -> None:
    shm = Stack(best_fabric_stack.library, "shm", best_fabric_stack.version)
    reader, writer = nodes.there(shm, 64, []), nodes.here(shm, 64, [])
    assert (writer.caps()["fence"], writer.caps()["addressing"]) == ("none", "virtual")
    writer.fill(1)
    to_reader, from_writer = link(writer, reader)
    key = reader.call("imm_allocate", from_writer)
    reader.call("imm_arm", key, 64)
    dst = list(reversed(range(64)))
    reader.send("whole", key, dst)
    writer.push(to_reader, key, list(range(64)), dst)
    assert reader.receive() == writer.digests(list(range(64)))


def test_importing_the_package_loads_no_native_code_and_no_libfabric() -> None:
    program = (
        "import sys, pdd, pdd.fabric, pdd.fabric.library\n"
        "assert 'pdd.fabric._native' not in sys.modules\n"
        "import pdd.fabric._native\n"
        "assert 'libfabric' not in open('/proc/self/maps').read()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_registering_names_what_is_wrong(fabric_stack: Stack, nodes: NodeFactory) -> None:
    node = nodes.here(fabric_stack, 4, ["127.0.0.1"])
    with pytest.raises(native.FabricError, match="register: 0 bytes"):
        node.fabric.register(node.memory.address, 0)
    with pytest.raises(native.FabricError, match="no region 77"):
        node.fabric.unregister(77)
    with pytest.raises(native.FabricError, match="no region 77"):
        node.fabric.describe(node.open(), [77])
    second = node.fabric.register(node.memory.address, 4096)
    assert second == node.region + 1
    node.fabric.unregister(second)
    assert node.fabric.stats()["regions"] == 1
