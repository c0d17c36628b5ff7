"""`pdd check` as it is run: forms, exit codes, the files it finds, and the command that looks from inside of a unit."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pdd.commands.check import unit_command
from tests.control.conftest import pdd as pdd
from tests.tree.imports import ROOT

Pdd = Callable[..., object]


def rows(pdd: Pdd, *words: str, code: int = 0) -> dict[str, dict]:
    result = pdd("--json", *words)
    assert result.returncode == code, result.stdout + result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == "pdd.check/1"
    return {row["id"]: row for row in document["checks"]}


def test_a_taken_port_fails_with_who_holds_it(pdd: Pdd, tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "pdd.toml"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        file.write_text(f'[node]\nrole = "both"\n[model]\npath = "{tiny_model}"\n[api]\nlisten = "127.0.0.1:{port}"\n')
        found = rows(pdd, "-c", str(file), "check", "--only", "node,D010,D012", code=7)
        assert set(found) == {"D010", "D012", "D050", "D051"}
        assert found["D050"]["level"] == "fail"
        assert f"in use by pid {os.getpid()} (" in found["D050"]["message"]
        text = pdd("-c", str(file), "check", "--only", "D050")
        assert text.stdout.startswith("FAIL D050 ports: api.listen: ")
        assert "\n     D050 fix: " in text.stdout
        assert text.stderr == "1 fail, 0 warn, 0 pass, 0 skip\n"
    assert rows(pdd, "-c", str(file), "check", "--only", "node,D010,D012")["D050"]["level"] == "pass"


def test_wrong_settings_and_strictness(pdd: Pdd, tmp_path: Path, tiny_model: Path) -> None:
    assert rows(pdd, "check", "--only", "D010", "--set", "node.role=decod", code=7)["D010"]["level"] == "fail"
    assert rows(pdd, "check", "--only", "config,node")["D010"]["level"] == "skip"  # nothing to look at
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o644)
    words = ("check", "--only", "D011", "--set", "node.role=both", "--set", f"model.path={tiny_model}",
             "--set", f"api.api_keys_credential={keys}")
    assert rows(pdd, *words)["D011"]["level"] == "warn"
    assert rows(pdd, *words, "--strict", code=7)["D011"]["fix"] == [f"`chmod 600 {keys}`"]
    assert pdd("check", "--only", "nonsense").returncode == 2


def test_a_peer_that_is_not_there(pdd: Pdd) -> None:
    found = rows(pdd, "check", "--only", "peer", "--peer", "127.0.0.1:1", code=7)
    assert list(found) == ["D070"]
    assert found["D070"]["message"] == "127.0.0.1:1: does not answer: Connection refused"
    assert all(found["D070"]["fix"])
    assert pdd("check", "--peer", "nonsense").returncode == 2


def test_the_unit_says_how_to_look_from_inside_of_it() -> None:
    unit = (ROOT / "systemd/pdd@.service").read_text() + "\n[Service]\nIPAddressDeny=any\n[Install]\nAlias=x\n"
    command = unit_command(unit, ["pdd", "check"])
    assert command[0] == "systemd-run"
    assert command[-2:] == ["pdd", "check"]
    given = {command[i + 1] for i, word in enumerate(command) if word == "-p"}
    assert {"LimitMEMLOCK=infinity", "ProtectSystem=strict", "IPAddressDeny=any", "RuntimeDirectoryPreserve=yes"} <= given
    names = {each.partition("=")[0] for each in given}
    assert not names & {"Type", "ExecStart", "ExecStartPre", "ExecReload", "WatchdogSec", "Restart", "Alias", "WantedBy"}


def test_without_systemd_that_is_said(pdd: Pdd) -> None:
    if Path("/run/systemd/system").is_dir():
        pytest.skip("systemd runs this machine")
    result = pdd("-i", "n", "check", "--under-unit")
    assert result.returncode == 2
    assert "systemd does not run this machine" in result.stderr
