"""The forms in which a topology is shown: complete, inside the screen, and readable by what they are for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pdd import cli
from pdd.topology import source
from pdd.topology.show import FORMATS, show
from tests.topology import machines
from tests.topology.test_xml import NCCL

MACHINES = [machines.dgx_h100, machines.p5_48xlarge, machines.p4d_24xlarge, machines.two_gpus_one_nic, machines.container,
            machines.laptop]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("form", ["tree", "matrix"])
def test_nothing_is_wider_than_the_screen(tmp_path: Path, machine: Any, form: str) -> None:
    machine(tmp_path)
    topology = source.load(tmp_path)
    text = show(topology, form, width=80)
    assert max(len(line) for line in text.splitlines()) <= 80
    wide = show(topology, form)
    assert re.sub(r"[^\w:]+", "", text) == re.sub(r"[^\w:]+", "", wide) or form == "matrix"


@pytest.mark.parametrize("form", FORMATS)
def test_ascii_is_ascii(tmp_path: Path, form: str) -> None:
    machines.dgx_h100(tmp_path)
    text = show(source.load(tmp_path), form, ascii_only=True)
    assert text.isascii()
    assert "mlx5_0" in text


def test_tree(tmp_path: Path) -> None:
    machines.two_gpus_one_nic(tmp_path / "node-7")
    assert show(source.load(tmp_path / "node-7"), "tree") == """\
node-7  2 NUMA  2 GPU  1 RDMA NIC  0 other NIC  source=sysfs
numa0 cpus 0-7,16-23
 └ switch 0000:11:00.0
   ├ GPU0 nvidia 0000:13:00.0  ══PIX══ mlx5_0
   └ mlx5_0/ens1 roce 400G active 0000:14:00.0
numa1 cpus 8-15,24-31
 └ GPU1 nvidia 0000:83:00.0  ══SYS══ mlx5_0
! GPU1 has no NIC on its NUMA node: mlx5_0 is far, over SYS  [T014]"""


def test_matrix(tmp_path: Path) -> None:
    file = tmp_path / "node-7.xml"
    file.write_text(NCCL)
    assert show(source.load(file), "matrix") == """\
      GPU0  GPU1  NIC0  NUMA  CPUs
GPU0  X     NV2   PIX*  0     0-2
GPU1  NV2   X     SYS*  1     4-6

NIC0: mlx5_0 ib

* chosen  X the same device  PIX one PCI switch  SYS other NUMA nodes, or not known  NV# # NVLinks"""


def test_a_matrix_of_many_nics_goes_on_below(tmp_path: Path) -> None:
    machines.p5_48xlarge(tmp_path)
    lines = show(source.load(tmp_path), "matrix", width=80).splitlines()
    assert sum(line.startswith("GPU7") for line in lines) == 4
    assert "NIC31: rdmap201s0 efa" in lines


def test_dot(tmp_path: Path) -> None:
    machines.two_gpus_one_nic(tmp_path)
    text = show(source.load(tmp_path), "dot")
    assert text.startswith("graph topology {\n")
    assert text.count("{") == text.count("}")
    assert 'gpu1 -- nic0 [style=bold, constraint=false, label="SYS"];' in text
    assert "switch_0000_11_00_0 -- gpu0;" in text


def test_names_cannot_break_out_of_a_form(tmp_path: Path) -> None:
    file = tmp_path / "file.xml"
    file.write_text('<system version="1"><cpu numaid="0" affinity="1"><pci busid="0000:01:00.0" class="0x020700"><nic>'
                    '<net name="&quot;];&lt;x&gt;&#9;\u009b31m" port="1"/></nic></pci></cpu></system>')
    topology = source.load(file)
    for form in FORMATS:
        assert "\x9b" not in show(topology, form)
    assert '"\\"];<x>' in show(topology, "dot")
    assert "&lt;x&gt;" in show(topology, "nccl-xml")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    machines.dgx_h100(tmp_path / "node-7")
    for form in FORMATS:
        assert cli.run(["topology", "--input", str(tmp_path / "node-7"), "--format", form]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert form not in ("tree", "matrix") or max(len(line) for line in lines) <= 60
    export = tmp_path / "node-7.tar.gz"
    assert cli.run(["topology", "--input", str(tmp_path / "node-7"), "--export", str(export)]) == 0
    assert f"read it with `pdd topology --input {export}`" in capsys.readouterr().err
    assert cli.run(["topology", "--input", str(export), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host"] == "node-7"
    assert cli.run(["topology", "--format", "svg"]) == 2
    assert cli.run(["topology", "--format", "dot", "--json"]) == 2
    assert cli.run(["topology", "--format", "dot", "--export", str(export)]) == 2
    assert cli.run(["topology", "--export", str(tmp_path / "no/where.tar.gz")]) == 78
