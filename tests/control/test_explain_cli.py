"""`pdd explain` and `pdd bundle` as a user runs them, against a daemon on real sockets and against a dead one."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdd.commands import documents as printed
from pdd.commands.redact import HIDDEN, Redactor
from pdd.control import dump_files, schema, stories
from pdd.control.client import Client
from pdd.daemon import dump
from pdd.errors import AccessDenied, RefusedInState
from tests.control import fake_daemon
from tests.control.test_schemas import holds

Pdd = Callable[..., "subprocess.CompletedProcess[str]"]
Daemon = fake_daemon.Running


def clean(result: subprocess.CompletedProcess[str], code: int) -> subprocess.CompletedProcess[str]:
    assert result.returncode == code, result.stderr + result.stdout
    assert "Traceback" not in result.stderr + result.stdout
    return result


# -- explain -----------------------------------------------------------------------------------------------------------
def test_a_story_in_a_few_lines(pdd: Pdd, daemon: Daemon) -> None:
    assert clean(pdd("explain", "r-1"), 0).stdout.splitlines() == [
        "r-1 (mail-from-alice)  generate wait_kv on d0 (decode)  3.1s  900 tokens in, 0 out",
        "waits for KV from p0",
        "ttft    queue 1.1ms + reserve 200us",
        "attempt 7 p0 key 0x000012  requested (3.0s); 118/228 units, first +200ms, last +900ms",
        "        p0: pushing for 2.0s, 512/899 tokens in 2 chunks, 120/228 units written; queue 1ms",
        "        in flight    chunk 0 layers 3-4 rank 0->1 NIC 10.0.0.1: 2 units, 1.5s",
        "holds   57 pages: request, wait_kv for 3.0s",
        "   +1.2ms attempt 7 armed -> requested (peer p0, units 0)",
    ]


def test_it_is_json_too_and_only_on_the_private_socket(pdd: Pdd, daemon: Daemon) -> None:
    document = json.loads(clean(pdd("explain", "r-1", "--json"), 0).stdout)
    assert document["schema"] == "pdd.explain/1"
    holds(document, stories.Explain)
    client = Client(daemon.directory)
    holds(client.get("/v1/flight", private=True), stories.Flight)
    for path in ("/v1/requests/r-1/explain", "/v1/flight", "/v1/waterfall"):
        with pytest.raises((RefusedInState, AccessDenied)):
            client.get(path)


def test_an_unknown_request_is_refused_with_what_to_do(pdd: Pdd, daemon: Daemon) -> None:
    told = clean(pdd("explain", "r-9"), 5).stderr
    assert "no request r-9 [E351]" in told
    assert "pdd requests" in told
    assert clean(pdd("explain"), 2).stderr


# -- bundle ------------------------------------------------------------------------------------------------------------
def unpack(path: Path) -> dict[str, Any]:
    """Names without the folder → documents and texts."""
    found: dict[str, Any] = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            text = file.read().decode()
            found[member.name.partition("/")[2]] = json.loads(text) if member.name.endswith(".json") else text
    return found


def picture(name: str = "d0", ts: float = 1796000000.5) -> stories.Flight:
    return stories.Flight(name=name, role="decode", boot_id="b", version="0", why="a step did not end", ts=ts, ts_mono=1.0)


def test_a_bundle_has_everything_and_says_so(pdd: Pdd, daemon: Daemon, tmp_path: Path) -> None:
    daemon.source.records.append(schema.LogRecord(
        seq=3, ts=1.0, level="info", component="api", message="mail-from-alice sent Bearer abc.def-123", fields={"k": "sk-verysecret1"}))
    dump.write(daemon.directory, picture())
    settings = tmp_path / "pdd.toml"
    settings.write_text('[api]\napi_keys_credential = "/etc/keys"\n[node]\nrole = "decode"\n')
    out = tmp_path / "b.tar.gz"
    result = clean(pdd("bundle", "--out", str(out), "-c", str(settings)), 0)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    found = unpack(out)
    documents = {f"{name}.json" for name in ("version", "status", "peers", "transfers", "topology", "requests", "config", "logs",
                                            "waterfall", "flight", "explain/r-1", "explain/r-2", "manifest",
                                            "dumps/flight-d0-20261130T005320500Z")}
    assert set(found) - {"journal.txt"} == documents | {"metrics.txt", "settings/pdd.toml"}
    assert found["flight.json"]["stacks"]["threads"][0]["name"] == "MainThread"
    assert found["status.json"]["name"] == "d0"
    [dumped] = [name for name in found if name.startswith("dumps/")]
    assert found[dumped]["why"] == "a step did not end"
    everything = json.dumps(found)
    for secret in ("mail-from-alice", "abc.def-123", "sk-verysecret1", "/etc/keys"):
        assert secret not in everything, secret
    assert "client-id-1" in found["explain/r-1.json"]["client_request_id"]
    assert f'api_keys_credential = "{HIDDEN}"' in found["settings/pdd.toml"]
    manifest = found["manifest.json"]
    assert {entry["name"] for entry in manifest["entries"]} == set(found) - {"manifest.json"}
    assert manifest["redactions"]["client's request id"] >= 3
    assert all(f"  {entry['name']}" in result.stdout for entry in manifest["entries"])
    assert "hidden:" in result.stdout
    assert "journal.txt" in result.stdout  # there, or why it is not


def test_a_dead_daemon_leaves_what_is_on_disk(pdd: Pdd, tmp_path: Path) -> None:
    (tmp_path / "run" / "d0").mkdir(parents=True)
    dump.write(tmp_path / "run" / "d0", picture())
    (tmp_path / "run" / "d0" / "flight-d0-20260101T000000000Z.json.gz").write_bytes(b"\x1f\x8bcut")
    out = tmp_path / "b.tar.gz"
    document = json.loads(clean(pdd("-i", "d0", "bundle", "--out", str(out), "--json"), 0).stdout)
    holds(document, printed.Bundle)
    assert [entry["name"] for entry in document["entries"] if entry["name"].startswith("dumps/")] == [
        "dumps/flight-d0-20261130T005320500Z.json"]
    missing = {entry["name"]: entry["why"] for entry in document["missing"]}
    assert "E301" in missing["status.json"]
    assert "cannot be read" in missing["dumps/flight-d0-20260101T000000000Z.json.gz"]
    assert out.stat().st_size == document["bytes"]


def test_a_bundle_overwrites_nothing_and_leaves_nothing_behind(pdd: Pdd, daemon: Daemon, tmp_path: Path) -> None:
    out = tmp_path / "b.tar.gz"
    out.write_text("mine")
    assert "is there already" in clean(pdd("bundle", "--out", str(out)), 2).stderr
    assert out.read_text() == "mine"
    assert "cannot be written" in clean(pdd("bundle", "--out", str(tmp_path / "no" / "b.tar.gz")), 2).stderr
    assert not list(tmp_path.glob(".*part"))


# -- what is hidden: pure ----------------------------------------------------------------------------------------------
def test_prompts_go_whatever_is_asked_for() -> None:
    for everything in (True, False):
        redactor = Redactor(everything=everything)
        assert redactor.clean({"prompt": [1, 2], "prompt_tokens": 2, "rows": [{"prompt": None}]}) == {
            "prompt": HIDDEN, "prompt_tokens": 2, "rows": [{"prompt": None}]}
        assert redactor.counts == {"prompt": 1}


def test_the_rest_is_hidden_unless_it_is_not_wanted() -> None:
    document = {"gpus": [{"uuid": "GPU-1", "index": 0}], "peers.token_credential": {"value": "/t", "origin": "default"},
                "message": "key hf_abcdefgh1", "client_request_id": "alice", "why": "alice left", "tokens": 7}
    redactor = Redactor(everything=True)
    redactor.meet(document)
    cleaned = redactor.clean(document)
    assert cleaned["gpus"] == [{"uuid": HIDDEN, "index": 0}]
    assert cleaned["peers.token_credential"] == {"value": HIDDEN, "origin": "default"}
    assert cleaned["message"] == f"key {HIDDEN}"
    assert (cleaned["client_request_id"], cleaned["why"]) == ("client-id-1", "client-id-1 left")
    assert cleaned["tokens"] == 7
    assert Redactor(everything=False).clean(document) == document


# -- dumps -------------------------------------------------------------------------------------------------------------
def test_only_the_latest_dumps_of_a_node_are_kept(tmp_path: Path) -> None:
    other = dump.write(tmp_path, picture("d0-b", 1.0))
    paths = [dump.write(tmp_path, picture(ts=1796000000.0 + number)) for number in range(12)]
    assert dump_files.kept(tmp_path, "d0") == paths[-dump.MOST_FILES:]
    assert other.exists()
    assert stat.S_IMODE(paths[-1].stat().st_mode) & 0o137 == 0


def test_a_dump_of_a_node_with_dots_does_not_push_out_another_ones(tmp_path: Path) -> None:
    others = [dump.write(tmp_path, picture("d-0", 1796000000.0 + number)) for number in range(2)]
    for number in range(dump.MOST_FILES):
        dump.write(tmp_path, picture("d.0", 1796000000.0 + number))
    assert dump_files.kept(tmp_path, "d-0") == others
    assert len(dump_files.kept(tmp_path)) == dump.MOST_FILES + 2


@pytest.mark.parametrize("env", [{}, {"LOGS_DIRECTORY": "/logs/d0:/logs/more"}])
def test_a_client_looks_where_the_daemon_writes(env: dict[str, str]) -> None:
    run = Path("/run/pdd/d0")
    looked = dump_files.directories(run, env)
    assert dump_files.directory(run, env) in looked
    assert {run, Path("/var/log/pdd/d0")} <= {*looked}
    assert len({*looked}) == len(looked)


def test_deadlines_in_a_row_are_one_dump_and_a_full_disk_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def unasked(why: str) -> stories.Flight:
        raise AssertionError(why)

    dumps = dump.Dumps(tmp_path / "gone", unasked)
    assert [dumps.may_write(at) for at in (100.0, 101.0, 159.0, 160.0)] == [True, False, False, True]
    assert asyncio.run(dumps.write(picture(), "r")) is None
    assert dumps.about("r") is None
    assert "could not be written" in caplog.text
    good = dump.Dumps(tmp_path, unasked)
    path = asyncio.run(good.write(picture(ts=time.time()), "r"))
    assert good.about("r") == str(path)
    assert str(path) in caplog.text
