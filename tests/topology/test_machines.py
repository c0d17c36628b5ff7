"""Well-known machines: every GPU gets the NICs, the CPUs and the path that its maker meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdd.topology import report, source
from tests.topology import machines


def read(root: Path) -> dict[str, Any]:
    return report.document(source.load(root))


def rails(document: dict[str, Any]) -> dict[int | None, list[str]]:
    return {rail["gpu"]: rail["nics"] for rail in document["rails"]}


def classes(document: dict[str, Any]) -> dict[tuple[int, str], str]:
    return {(pair["gpu"], pair["nic"]): pair["path"] for pair in document["pairs"]}


def ids(document: dict[str, Any]) -> list[str]:
    return [finding["id"] for finding in document["findings"]]


def test_dgx_h100(tmp_path: Path) -> None:
    machines.dgx_h100(tmp_path)
    document = read(tmp_path)
    assert [gpu["pci"] for gpu in document["gpus"]] == [f"0000:{bus}:00.0" for bus in machines.DGX_GPUS]
    assert rails(document) == {gpu: [f"mlx5_{gpu if gpu < 4 else gpu + 2}"] for gpu in range(8)}
    paths = classes(document)
    assert [paths[0, f"mlx5_{nic}"] for nic in (0, 1, 4, 6)] == ["PIX", "NODE", "NODE", "SYS"]
    assert {rail["numa"] for rail in document["rails"][4:]} == {1}
    assert document["gpus"][0]["cpus"] == "0-55,112-167"
    assert ids(document) == []


def test_workers_of_a_socket_split_its_cores_and_keep_siblings_together(tmp_path: Path) -> None:
    machines.dgx_h100(tmp_path)
    shares = [rail["worker_cpus"] for rail in read(tmp_path)["rails"]]
    assert shares[:2] == ["0-13,112-125", "14-27,126-139"]
    assert shares[7] == "98-111,210-223"


def test_p5_48xlarge(tmp_path: Path) -> None:
    machines.p5_48xlarge(tmp_path)
    document = read(tmp_path)
    assert len(document["nics"]) == 32
    assert {nic["kind"] for nic in document["nics"]} == {"efa"}
    assert rails(document)[0] == ["rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0"]
    assert [len(nics) for nics in rails(document).values()] == [4] * 8
    assert {rail["path"] for rail in document["rails"]} == {"PIX"}


def test_p4d_24xlarge(tmp_path: Path) -> None:
    machines.p4d_24xlarge(tmp_path)
    document = read(tmp_path)
    assert [nics for nics in rails(document).values()] == [
        [f"rdmap{bus}s27"] for bus in (16, 16, 32, 32, 144, 144, 160, 160)
    ]
    assert {rail["path"] for rail in document["rails"]} == {"PHB"}
    why = next(pair["why"] for pair in document["pairs"] if pair["gpu"] == 0 and pair["chosen"])
    assert why == "the nearest; shared with GPU1"


def test_two_gpus_one_nic(tmp_path: Path) -> None:
    machines.two_gpus_one_nic(tmp_path)
    document = read(tmp_path)
    assert rails(document) == {0: ["mlx5_0"], 1: ["mlx5_0"]}
    assert [rail["path"] for rail in document["rails"]] == ["PIX", "SYS"]
    assert [rail["numa"] for rail in document["rails"]] == [0, 0]  # the worker of GPU1 goes to its NIC
    assert ids(document) == ["T014"]


def test_a_container_counts_its_own_gpus_and_gets_their_nics(tmp_path: Path) -> None:
    machines.container(tmp_path)
    document = read(tmp_path)
    assert [(gpu["index"], gpu["uuid"]) for gpu in document["gpus"]] == [(0, "GPU-00000005-0000"), (1, "GPU-00000006-0000")]
    assert rails(document) == {0: ["mlx5_7"], 1: ["mlx5_8"]}
    assert [rail["worker_cpus"] for rail in document["rails"]] == ["56-59,168-171", "60-63,172-175"]
    assert ids(document) == ["T018", "T020"]


def test_laptop(tmp_path: Path) -> None:
    machines.laptop(tmp_path)
    document = read(tmp_path)
    assert document["gpus"] == []
    assert [(nic["name"], nic["kind"]) for nic in document["nics"]] == [("wlp0s20f3", "wifi")]
    assert [(rail["gpu"], rail["nics"], rail["cpus"]) for rail in document["rails"]] == [(None, [], "0-15")]
    assert ids(document) == ["T010"]


@pytest.mark.parametrize(
    "machine",
    [machines.dgx_h100, machines.p5_48xlarge, machines.p4d_24xlarge, machines.two_gpus_one_nic, machines.container,
     machines.laptop],
)
def test_an_export_reads_as_the_machine_itself(tmp_path: Path, machine: Any) -> None:
    machine(tmp_path / "node-7")
    (tmp_path / "node-7/proc/sys/kernel").mkdir(parents=True, exist_ok=True)
    (tmp_path / "node-7/proc/sys/kernel/hostname").write_text("node-7\n")
    export = tmp_path / "export.tar.gz"
    assert source.export(export, tmp_path / "node-7") > 20
    assert source.load(export) == source.load(tmp_path / "node-7")
    again = tmp_path / "again.tar.gz"
    source.export(again, export)
    assert again.read_bytes() == export.read_bytes()
