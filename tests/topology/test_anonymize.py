"""An export or a picture without identities: nothing of the machine's owner is left, and it reads as the same machine."""

from __future__ import annotations

import dataclasses
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from pdd.topology import report, source, sysfs
from pdd.topology.anonymize import Anonymizer
from pdd.topology.types import Topology
from tests.topology import machines
from tests.topology.build import port

HOST, UUID, SERIAL, MAC, GID, IPV4, LINK_LOCAL, MODULE = (
    "rack7-node3", "GPU-3f1c88ab-1111-2222-3333-444455556666", "1650823012345", "enx0a1b2c3d4e5f",
    "2001:0aaa:0000:0000:0000:0000:0000:0042", "10.77.3.9", "fe80:0000:0000:0000:0a1b:2cff:fe3d:4e5f", "root@rack7-node3",
)
SECRETS = (HOST, "3f1c88ab", SERIAL, "0a1b2c3d4e5f", "0aaa", "10.77.3.9", "0a4d:0309", "2cff", MODULE)


def machine(root: Path) -> Path:
    tree = machines.container(root)
    path = f"{port('e0', 1)}/0000:e4:00.0"
    tree.nic(path, "mlx5_77", MAC, numa=1)
    for slot, gid in enumerate((LINK_LOCAL, LINK_LOCAL, "0000:0000:0000:0000:0000:ffff:0a4d:0309", GID)):
        tree.write(f"devices/{path}/infiniband/mlx5_77/ports/1/gids", **{str(slot): gid})
        tree.write(f"devices/{path}/infiniband/mlx5_77/ports/1/gid_attrs/types", **{str(slot): "RoCE v2"})
    tree.acs("pci0000:4c/0000:4c:01.0", redirect=True)
    config = root / "sys/devices/pci0000:4c/0000:4c:01.0/config"
    content = bytearray(config.read_bytes())
    content[0x200:0x20D] = SERIAL.encode()
    config.write_bytes(content)
    address = f"0000:{machines.DGX_GPUS[5]}:00.0"
    tree.nvidia(address, UUID)
    information = root / f"proc/driver/nvidia/gpus/{address}/information"
    information.write_text(information.read_text() + f"Serial: {SERIAL}\n")
    tree.file("proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX Open Kernel Module  595.71  ({MODULE})\n")
    tree.file("proc/sys/kernel/hostname", f"{HOST}\n")
    tree.file("proc/sys/kernel/osrelease", "6.1.0\n")
    return root


def without_identities(topology: Topology) -> Topology:
    return dataclasses.replace(
        topology, host="", nics=tuple(dataclasses.replace(nic, gid=None) for nic in topology.nics),
        gpus=tuple(dataclasses.replace(gpu, uuid=None) for gpu in topology.gpus),
    )


def test_an_export_has_no_identity_and_reads_as_the_same_machine(tmp_path: Path) -> None:
    root = machine(tmp_path / "m")
    plain, masked = tmp_path / "plain.tar.gz", tmp_path / "masked.tar.gz"
    assert source.export(masked, root, anonymous=True) == source.export(plain, root)
    with tarfile.open(masked) as archive:
        text = " ".join(
            f"{each.name} {each.linkname} " + (archive.extractfile(each).read().decode("latin-1") if each.isfile() else "")  # type: ignore[union-attr]
            for each in archive
        )
    assert [secret for secret in SECRETS if secret in text] == []
    before, after = source.load(plain), source.load(masked)
    renamed = [nic for nic in after.nics if nic.netdev and nic.netdev.startswith("enx")]
    assert [(nic.name, nic.netdev) for nic in renamed] == [("mlx5_77", "enx020000000001")]
    nics = tuple(dataclasses.replace(nic, netdev=MAC) if nic in renamed else nic for nic in after.nics)
    assert without_identities(dataclasses.replace(after, nics=nics)) == without_identities(before)
    assert before.acs_redirects == after.acs_redirects == {"0000:4c:01.0"}
    assert (after.host, after.gpus[0].uuid) == ("host-1", "GPU-00000001-0000-0000-0000-000000000000")


def test_the_gid_that_a_program_would_choose_is_still_that_one(tmp_path: Path) -> None:
    root = machine(tmp_path / "m")
    source.export(tmp_path / "masked.tar.gz", root, anonymous=True)
    chosen = {nic.name: nic for nic in source.load(tmp_path / "masked.tar.gz").nics}["mlx5_77"]
    assert (chosen.gid, chosen.gid_index) == ("198.18.0.2", 2)
    assert {nic.name: nic for nic in sysfs.read(root).nics}["mlx5_77"].gid == IPV4


def test_what_is_shown_has_no_identity_either(tmp_path: Path) -> None:
    masked = Anonymizer().topology(sysfs.read(machine(tmp_path / "m")))
    text = json.dumps(report.document(masked))
    assert [secret for secret in SECRETS if secret in text] == []
    assert masked.host == "host-1"
    assert {nic.name for nic in masked.nics} >= {"mlx5_0", "mlx5_77"}


@pytest.mark.parametrize(
    ("gid", "kind"),
    [(LINK_LOCAL, "fe80"), (GID, "2001:0db8"), ("::ffff:10.0.0.1", "::ffff:198.18."), ("10.0.0.1", "198.18.")],
)
def test_a_gid_keeps_its_kind_and_the_same_one_stays_the_same(gid: str, kind: str) -> None:
    mask: Any = Anonymizer()
    first = mask._gid(gid)
    assert first.startswith(kind)
    assert mask._gid("fe80::9") != first
    assert mask._gid(gid) == first != gid
    assert mask._gid("fe80:0000:0000:0000:0000:0000:0000:0000") == "fe80:0000:0000:0000:0000:0000:0000:0000"  # an empty slot
