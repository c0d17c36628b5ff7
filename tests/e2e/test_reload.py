"""A real node takes changed settings over while it runs, or nothing of them."""

from __future__ import annotations

import pathlib
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from pdd.control.client import Client
from pdd.errors import ConfigError
from tests.cluster import Node, free_port

SETS = ["kv.num_pages=64", "engine.threads=1", "model.dtype=float32", "scheduler.local_prefill_fallback=true"]


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Systemd:
    """The service manager's end of the notify socket."""

    def __init__(self, receiver: socket.socket) -> None:
        self._receiver = receiver
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while data := self._receiver.recv(4096):
            self._lines.append(data.decode())

    def heard(self) -> str:
        """Since the last call."""
        lines, self._lines = self._lines, []
        return "\n".join(lines)

    def stop(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", self._receiver.getsockname())
        self._thread.join(5)


@pytest.fixture
def systemd(run_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Systemd]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(run_dir / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(run_dir / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "3000000")
        manager = Systemd(receiver)
        yield manager
        manager.stop()


def test_a_reload_applies_what_can_be_and_refuses_a_wrong_file_as_a_whole(
    tiny_model: pathlib.Path, run_dir: pathlib.Path, systemd: Systemd
) -> None:
    file = run_dir / "pdd.toml"
    one, two = free_port(), free_port()
    text = f'[peers]\nstatic = ["127.0.0.1:{one}"]\n'
    file.write_text(text)
    node = Node("d0", "decode", tiny_model, run_dir, sets=SETS)
    node.argv += ["--config", str(file)]
    try:
        node.start().wait_ready()
        client = Client(node.run_dir / node.name, timeout=30.0)

        def live(key: str) -> object:
            return client.get("/v1/config", private=True)["settings"][key]["value"]

        ready = []
        until(lambda: ready.append(systemd.heard()) or any("READY=1" in each for each in ready))
        file.write_text(text.replace(str(one), str(two)) + 'max_attempts = 7\n[log]\nlevel = "debug"\n[kv]\npage_size = 32\n'
                        "[scheduler]\nmax_queue = 3\n[debug]\nallow_stacks = false\n")
        assert "MainThread" in {each["name"] for each in client.get("/v1/debug/stacks", private=True)["threads"]}
        tried = client.post("/v1/reload", {"dry_run": True})
        assert live("log.level") == "info"
        done = client.post("/v1/reload")
        assert {**done, "dry_run": True} == tried
        assert {each["key"] for each in done["applied"]} == {
            "peers.static", "peers.max_attempts", "log.level", "scheduler.max_queue", "debug.allow_stacks",
        }
        assert [each["key"] for each in done["needs_restart"]] == ["kv.page_size"]
        assert (live("log.level"), live("kv.page_size"), live("scheduler.max_queue")) == ("debug", 16, 3)
        assert [peer["address"] for peer in client.get("/v1/peers")["peers"]] == [f"127.0.0.1:{two}"]
        with pytest.raises(Exception, match="allow_stacks"):
            client.get("/v1/debug/stacks", private=True)
        told = systemd.heard()
        assert told.count("RELOADING=1") == told.count("READY=1") == 1
        assert "MONOTONIC_USEC=" in told.split("READY=1")[0]

        file.write_text('[log]\nlevel = "loud"\n[kv]\npage_sise = 3\n')
        with pytest.raises(ConfigError) as refused:
            client.post("/v1/reload")
        assert 'log.level: "loud"' in refused.value.message
        assert "did you mean kv.page_size" in refused.value.message
        assert live("log.level") == "debug"
        node.signal(signal.SIGHUP)
        until(lambda: node.log.count("reload refused, nothing has changed") >= 2)
        file.write_text(text)
        node.signal(signal.SIGHUP)
        until(lambda: live("log.level") == "info")
        assert node.status()["state"] == "ready"
        systemd.heard()
        until(lambda: "WATCHDOG=1" in systemd.heard())
        assert node.stop() == 0
    finally:
        node.kill()


def test_keys_and_token_are_read_again_and_a_file_that_cannot_be_read_changes_nothing(
    tiny_model: pathlib.Path, run_dir: pathlib.Path
) -> None:
    keys, token = run_dir / "keys", run_dir / "token"
    for file, text in ((keys, "old-key\n"), (token, "old-token\n")):
        file.touch(0o600)
        file.write_text(text)
    sets = [*SETS, f"api.api_keys_credential={keys}", f"peers.token_credential={token}", "peers.connect_timeout=1s"]
    p0 = Node("p0", "prefill", tiny_model, run_dir, sets=sets)
    d0 = Node("d0", "decode", tiny_model, run_dir, peers=[p0.peer_address], sets=sets)
    client = Client(run_dir / "d0", timeout=30.0)

    def status_with(key: str) -> int:
        request = urllib.request.Request(f"{d0.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def link() -> str:
        return str(d0.status()["peers"][0]["state"])

    try:
        p0.start()
        d0.start().wait_ready()
        until(lambda: link() == "up")
        assert (status_with("old-key"), status_with("new-key")) == (200, 401)
        assert client.post("/v1/reload")["reread"] == []

        keys.write_text("new-key\nolder-key\n")
        assert client.post("/v1/reload", {"dry_run": True})["reread"] == ["api.api_keys_credential"]
        assert (status_with("old-key"), status_with("new-key")) == (200, 401)
        done = client.post("/v1/reload")
        assert (done["reread"], done["applied"], done["needs_restart"]) == (["api.api_keys_credential"], [], [])
        assert (status_with("old-key"), status_with("new-key"), status_with("older-key")) == (401, 200, 200)
        assert "new-key" not in str(done) + d0.log

        token.write_text("new-token\n")  # both nodes have this file; a link that is up stays, a new one needs the new token
        assert client.post("/v1/reload", {"dry_run": True})["reread"] == ["peers.token_credential"]
        assert p0.stop() == 0
        p0.start()
        until(lambda: link() == "auth", 30)
        d0.signal(signal.SIGHUP)
        until(lambda: link() == "up", 30)
        assert "read again: the file of peers.token_credential" in d0.log

        keys.write_text("\n")
        token.write_text("third\n")
        with pytest.raises(ConfigError, match="is empty"):
            client.post("/v1/reload")
        assert status_with("new-key") == 200
        keys.write_text("new-key\nolder-key\n")
        assert client.post("/v1/reload")["reread"] == ["peers.token_credential"]
        assert link() == "up"
    finally:
        d0.kill()
        p0.kill()


def test_more_prefillers_than_open_files_allow_are_refused(tiny_model: pathlib.Path, run_dir: pathlib.Path) -> None:
    file = run_dir / "pdd.toml"
    peers = [f"127.0.0.1:{port}" for port in range(20000, 20060)]
    file.write_text(f"[peers]\nstatic = {peers[:2]}\n".replace("'", '"'))
    node = Node("d0", "decode", tiny_model, run_dir, sets=SETS)
    node.argv = ["prlimit", "--nofile=400:400", *node.argv, "--config", str(file)]
    try:
        node.start().wait_ready()
        client = Client(run_dir / "d0", timeout=30.0)
        file.write_text(f"[peers]\nstatic = {peers}\n".replace("'", '"'))
        with pytest.raises(ConfigError, match=r"peers\.static: 400 open files are too few: these settings need 648"):
            client.post("/v1/reload")
        assert len(node.status()["peers"]) == 2
        file.write_text(f"[peers]\nstatic = {peers[1:3]}\n".replace("'", '"'))
        assert [each["key"] for each in client.post("/v1/reload")["applied"]] == ["peers.static"]
        text = client.text("/v1/metrics")
        assert [f'pdd_peer_up{{peer="{peer}"}}' in text for peer in peers[:4]] == [False, True, True, False]
    finally:
        node.kill()
