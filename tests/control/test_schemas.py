"""The JSON Schemas in docs/api are those of the code, and what is really sent and printed has exactly their members."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdd.commands import documents as printed
from pdd.control import schema, schema_check, schema_events
from pdd.control.client import Client
from pdd.topology import report, source
from tests.control import fake_daemon
from tests.topology import machines
from tests.tree.imports import ROOT, modules
from tools import schemas

API = ROOT / "docs" / "api"


def holds(document: Any, kind: Any) -> None:
    assert json.loads(msgspec.json.encode(msgspec.convert(document, kind))) == document


@pytest.mark.parametrize("name", schemas.DOCUMENTS)
def test_a_file_is_what_the_code_says(name: str) -> None:
    assert (API / f"{name}.json").read_text() == schemas.schema_text(name), "run tools/schemas.py"


@pytest.mark.parametrize("machine", [
    machines.dgx_h100, machines.p5_48xlarge, machines.p4d_24xlarge, machines.two_gpus_one_nic,
])  # fmt: skip
def test_a_topology_has_exactly_the_members(tmp_path: Path, machine: Any) -> None:
    machine(tmp_path)
    holds(json.loads(json.dumps(report.document(source.load(tmp_path)))), printed.Topology)


def test_a_topology_from_xml_and_of_this_machine_too(pdd: Any, tmp_path: Path) -> None:
    file = tmp_path / "nccl.xml"
    link = '<nvlink target="0000:02:00.0" count="18" tclass="0x030200"/>'
    pci = '<pci busid="0000:0{0}:00.0" class="0x030200" vendor="0x10de" device="0x2330"><gpu>{1}</gpu></pci>'
    file.write_text(f'<system version="1"><cpu numaid="0" affinity="1">{pci.format(1, link)}{pci.format(2, "")}</cpu></system>')
    document = json.loads(pdd("--json", "topology", "--input", str(file)).stdout)
    assert document["links"]
    assert document["findings"]
    holds(document, printed.Topology)
    holds(json.loads(pdd("--json", "topology").stdout), printed.Topology)


def test_there_is_one_for_every_document_and_no_other() -> None:
    named = {name for text in modules().values() for name in re.findall(r'"pdd\.([a-z_]+)/1"', text)}
    assert named <= set(schemas.DOCUMENTS)
    assert {path.stem for path in API.iterdir()} == set(schemas.DOCUMENTS)


def test_what_is_sent_has_exactly_the_members(daemon: fake_daemon.Running) -> None:
    client = Client(daemon.directory)
    for topic, kind in (("status", schema.Status), ("requests", schema.Requests), ("peers", schema.Peers),
                        ("transfers", schema.TransferList), ("requests/r-1", schema.OneRequest), ("logs", schema.Logs),
                        ("debug/stacks", schema.Stacks)):
        holds(client.get(f"/v1/{topic}", private=True), kind)
    holds(client.get("/v1/config", private=True), printed.Settings)
    holds(client.get("/version"), schema.Version)
    holds(client.delete("/v1/requests/r-1"), schema.Cancelled)
    holds(client.post("/v1/reload"), schema_check.Reload)
    holds(client.get("/v1/check", private=True), schema_check.CheckReport)
    holds(client.post("/v1/peers/p0/ping", {"count": 2}), schema_check.Ping)
    holds(client.get("/v1/peers/127.0.0.1:7700/compare", private=True), schema_check.Comparison)
    lines = client.stream("/v1/events?topics=status,requests&interval=100ms", idle_timeout=10)
    holds(next(lines), schema_events.EventLine)
    daemon.source.uptime += 1
    delta = next(lines)
    holds(delta, schema_events.EventLine)
    assert delta["type"] == "delta"
    lines.close()


def test_a_surplus_or_missing_member_is_seen(daemon: fake_daemon.Running) -> None:
    document = Client(daemon.directory).get("/v1/peers")
    with pytest.raises(AssertionError):
        holds({**document, "more": 1}, schema.Peers)
    document["peers"][0].pop("name")
    with pytest.raises(msgspec.ValidationError):
        holds(document, schema.Peers)


def test_what_is_printed_has_exactly_the_members(pdd: Any, daemon: fake_daemon.Running, tmp_path: Path) -> None:
    def out(*words: str) -> Any:
        return json.loads(pdd("--json", *words).stdout)

    wrong = tmp_path / "pdd.toml"
    wrong.write_text('[node]\nrole = "decod"\n')
    holds(out("version"), printed.Versions)
    holds(out("-i", "nobody", "version"), printed.Versions)
    holds(out("config", "show", "--set", "node.role=both", "--set", "model.path=/m"), printed.Settings)
    holds(out("config", "env", "--set", "node.role=both", "--set", "model.path=/m"), printed.Variables)
    holds(out("check"), schema_check.CheckReport)
    check = out("config", "check", str(wrong))
    holds(check, printed.ConfigCheck)
    assert check["problems"][0]["line"] == 2
    assert check["problems"][0].keys() == set(printed.ConfigProblem.__struct_fields__)
    holds(json.loads(pdd("--json", "-i", "nobody", "status").stderr), printed.Error)
