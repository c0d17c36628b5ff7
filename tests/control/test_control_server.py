"""The control API over real Unix sockets: documents, refusals, events, stop."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdd.control import app, paths, schema, server
from pdd.control.client import Client
from pdd.errors import AccessDenied, DaemonNotRunning, RefusedInState, TimedOut, VersionMismatch
from tests.control import fake_daemon

Daemon = fake_daemon.Running


class Raw(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("pdd", timeout=10)
        self.path = path

    def connect(self) -> None:
        self.sock = paths.connect(self.path, 10)


def ask(path: Path, method: str, url: str, headers: dict[str, str] | None = None, body: Any = None) -> tuple[int, Any]:
    connection = Raw(path)
    connection.request(method, url, body, headers or {})
    response = connection.getresponse()
    raw = response.read()
    connection.close()
    return response.status, json.loads(raw)


@pytest.fixture
def client(daemon: Daemon) -> Client:
    return Client(daemon.directory)


# -- documents ---------------------------------------------------------------------------------------------------------
def test_status_carries_what_the_contract_names(client: Client) -> None:
    status = client.get("/v1/status")
    assert status["schema"] == "pdd.status/1"
    assert {"role", "state", "epoch", "running", "waiting", "waiting_for_kv", "batch_size"} <= status.keys()
    pages = status["pages"]
    assert set(pages) == {"total", "free", "cached", "reserved", "running", "sending", "quarantined"}
    assert pages["total"] == sum(count for state, count in pages.items() if state != "total")
    assert {"writes", "bytes", "units", "active", "failed"} <= status["transfers"].keys()
    assert {"name", "role", "state", "epoch", "via", "load"} <= status["peers"][0].keys()
    msgspec.convert(status, schema.Status)  # what is sent is what the schema says


@pytest.mark.parametrize("topic", ["requests", "peers", "transfers", "topology"])
def test_each_document_names_its_schema(client: Client, topic: str) -> None:
    assert client.get(f"/v1/{topic}")["schema"] == f"pdd.{topic}/1"


def test_version_and_headers(daemon: Daemon, client: Client) -> None:
    found = client.get("/version")
    assert (found["schema"], found["daemon"], found["api"], found["boot_id"]) == ("pdd.version/1", "0.1.0", "1.0", "boot-1")
    assert (found["protocol"], found["libfabric"], found["cuda"]) == ("1", "2.5 (/lib/x)", None)
    connection = Raw(daemon.directory / "status.sock")
    connection.request("GET", "/v1/status")
    headers = connection.getresponse().headers
    assert (headers["Pdd-Api"], headers["Pdd-Version"], headers["Pdd-Boot"]) == ("1.0", "0.1.0", "boot-1")
    connection.close()


def test_metrics_text(client: Client) -> None:
    assert client.text("/v1/metrics") == "pdd_batch_size 1.0\n"


def test_the_status_socket_shows_counts_but_no_request(client: Client) -> None:
    public = client.get("/v1/requests")
    assert public["requests"] is None
    assert public["counts"] == {"wait_kv": 1, "running": 1}
    assert [row["id"] for row in client.get("/v1/requests", private=True)["requests"]] == ["r-1", "r-2"]


def test_rates_come_from_the_totals(daemon: Daemon, client: Client) -> None:
    daemon.source.writes += 1000
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if client.get("/v1/status")["rates"]["10s"]["writes_per_second"] > 0:
            return
        time.sleep(0.05)
    pytest.fail("the rate stayed 0")


# -- what changes something --------------------------------------------------------------------------------------------
def test_cancel_show_and_unknown_id(daemon: Daemon, client: Client) -> None:
    assert client.get("/v1/requests/r-1", private=True)["pages"] == {"have": 44, "need": 57}
    assert client.delete("/v1/requests/r-1") == {"schema": "pdd.cancel/1", "ids": ["r-1"], "cancelled": True}
    assert "r-1" not in daemon.source.live
    assert client.delete("/v1/requests/r-1") == {"schema": "pdd.cancel/1", "ids": ["r-1"], "cancelled": False}
    for method in (client.delete, lambda path: client.get(path, private=True)):
        with pytest.raises(RefusedInState, match="no request r/9") as caught:
            method("/v1/requests/r%2F9")
        assert (caught.value.exit_code, caught.value.id) == (5, "E351")


def test_drain_and_resume(daemon: Daemon, client: Client) -> None:
    assert client.post("/v1/drain", {"timeout_seconds": 7})["state"] == "drained"
    assert client.post("/v1/drain")["state"] == "drained"
    assert daemon.source.drained_with == [7.0, None]
    assert client.post("/v1/resume")["state"] == "ready"
    assert client.post("/v1/resume")["state"] == "ready"  # a write that is sent again does no harm
    daemon.source.refuse_drain = True
    for write in ("drain", "resume"):
        with pytest.raises(RefusedInState) as caught:
            client.post(f"/v1/{write}")
        assert caught.value.hint == "Wait for it."


@pytest.mark.parametrize(
    "body",
    ['{"timeout_seconds": "7"}', '{"timeout_seconds": true}', '{"timeout_seconds": -1}', "[1]", "{",
     '{"timeout_seconds": ' + "9" * 400 + "}", '{"timeout_seconds": 1e300}', "[" * 100_000],
    ids=["text", "bool", "negative", "list", "cut", "endless", "huge", "deep"],
)  # fmt: skip
def test_a_bad_body_is_refused_and_nothing_happens(daemon: Daemon, body: str) -> None:
    status, problem = ask(daemon.directory / "control.sock", "POST", "/v1/drain", {"Pdd-Client": "t"}, body)
    assert status == 400
    assert problem["detail"]
    assert daemon.source.drained_with == []


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("socket", "method", "headers", "status"),
    [
        ("control.sock", "GET", {"Origin": "http://evil"}, 403),
        ("control.sock", "GET", {"Referer": "http://evil/"}, 403),
        ("status.sock", "GET", {"Host": "localhost"}, 403),
        ("control.sock", "POST", {}, 403),  # no Pdd-Client
        ("status.sock", "POST", {"Pdd-Client": "t"}, 403),
        ("status.sock", "DELETE", {"Pdd-Client": "t"}, 403),
        ("status.sock", "HEAD", {}, 405),
        ("control.sock", "PUT", {"Pdd-Client": "t"}, 405),
    ],
)
def test_refused_before_any_route(
    daemon: Daemon, socket: str, method: str, headers: dict[str, str], status: int
) -> None:
    connection = Raw(daemon.directory / socket)
    connection.request(method, "/v1/drain" if method == "POST" else "/v1/requests/r-1", headers=headers)
    response = connection.getresponse()
    assert response.status == status
    assert response.headers["Content-Type"] == "application/problem+json"
    if method != "HEAD":
        assert {"title", "status", "detail", "id"} <= json.loads(response.read()).keys()
    connection.close()
    assert daemon.source.drained_with == []
    assert "r-1" in daemon.source.live


def test_private_paths_are_not_on_the_status_socket(daemon: Daemon) -> None:
    assert ask(daemon.directory / "status.sock", "GET", "/v1/requests/r-1")[0] == 404


def test_an_unknown_major_version_names_the_supported_ones(daemon: Daemon) -> None:
    status, problem = ask(daemon.directory / "status.sock", "GET", "/v2/status")
    assert (status, problem["supported"]) == (404, ["v1"])
    with pytest.raises(VersionMismatch) as caught:
        Client(daemon.directory).get("/v2/status")
    assert caught.value.exit_code == 8


def test_an_oversized_body_is_refused(daemon: Daemon) -> None:
    path = daemon.directory / "control.sock"
    assert ask(path, "POST", "/v1/drain", {"Pdd-Client": "t"}, b" " * ((1 << 20) + 1))[0] == 413
    pieces = (b" " * 65536 for _ in range(32))  # chunked: no length to look at
    status, problem = ask(path, "POST", "/v1/drain", {"Pdd-Client": "t"}, pieces)
    assert (status, problem["id"], "at most" in problem["detail"]) == (413, "E413", True)
    assert daemon.source.drained_with == []


@pytest.mark.parametrize(
    "garbage", [b"\x00\xff" * 50, b"GET / HTTP/1.1\r\n", b"GET /v1/status HTTP/9.9\r\nHost: pdd\r\n\r\n", b""]
)
def test_garbage_costs_nothing(daemon: Daemon, client: Client, garbage: bytes) -> None:
    stream = paths.connect(daemon.directory / "status.sock", 5)
    stream.sendall(garbage)
    stream.close()
    assert client.get("/v1/status")["state"] == "ready"


# -- events ------------------------------------------------------------------------------------------------------------
def test_events_start_with_a_snapshot_then_only_what_changed(daemon: Daemon, client: Client) -> None:
    lines = client.stream("/v1/events?topics=status,peers&interval=100ms", idle_timeout=10)
    first = next(lines)
    assert (first["type"], first["seq"], first["boot_id"]) == ("snapshot", 0, "boot-1")
    assert set(first["docs"]) == {"status", "peers"}
    daemon.source.state = "draining"
    delta = _next_with(lines, "state")
    assert delta["docs"]["status"]["state"] == "draining"
    assert "epoch" not in delta["docs"]["status"]
    assert "peers" not in delta["docs"]
    lines.close()


def test_a_change_of_state_does_not_wait_for_the_interval(daemon: Daemon, client: Client) -> None:
    lines = client.stream("/v1/events?interval=60s", idle_timeout=10)
    next(lines)
    daemon.source.state = "draining"
    daemon.changed()
    assert next(lines)["docs"]["status"]["state"] == "draining"
    lines.close()


def test_sequence_numbers_have_no_gap(daemon: Daemon, client: Client) -> None:
    lines = client.stream("/v1/events?interval=100ms", idle_timeout=10)
    seen = []
    for _ in range(4):
        daemon.source.uptime += 1
        seen.append(next(lines)["seq"])
    assert seen == [0, 1, 2, 3]
    lines.close()


def test_the_status_socket_streams_no_requests(daemon: Daemon, client: Client) -> None:
    assert next(client.stream("/v1/events?topics=requests"))["docs"]["requests"]["requests"] is None
    private = next(client.stream("/v1/events?topics=requests", private=True))
    assert len(private["docs"]["requests"]["requests"]) == 2


def test_a_wrong_topic_or_interval_is_refused(client: Client) -> None:
    for query in ("topics=nonsense", "topics=", "interval=x"):
        with pytest.raises(RefusedInState):
            next(client.stream(f"/v1/events?{query}"))


def test_stop_ends_open_streams_at_once(daemon: Daemon, client: Client) -> None:
    lines = client.stream("/v1/events?interval=60s", idle_timeout=20)
    next(lines)
    stopper = threading.Thread(target=daemon.stop)
    began = time.monotonic()
    stopper.start()
    assert [line["type"] for line in lines] == ["stopping"]
    stopper.join()
    assert time.monotonic() - began < 10  # far from the interval: the stream raced the stop
    assert not (daemon.directory / "status.sock").exists()


def test_a_path_with_a_slash_too_many_is_a_problem_not_a_redirect(daemon: Daemon) -> None:
    status, problem = ask(daemon.directory / "status.sock", "GET", "/v1/status/")
    assert (status, problem["id"]) == (404, "E352")


@pytest.mark.parametrize(("method", "allowed"), [("POST", "GET"), ("DELETE", "GET"), ("PUT", "GET, POST, DELETE")])
def test_a_wrong_method_says_which_are_right(daemon: Daemon, method: str, allowed: str) -> None:
    connection = Raw(daemon.directory / "control.sock")
    connection.request(method, "/v1/status", headers={"Pdd-Client": "t"})
    response = connection.getresponse()
    assert response.status == 405
    assert set(allowed.split(", ")) <= set(response.headers["Allow"].split(", "))
    assert json.loads(response.read())["id"] == "E353"
    connection.close()


# -- bounds ------------------------------------------------------------------------------------------------------------
def test_streams_are_bounded_per_socket(daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_STREAMS", 2)
    lines = [client.stream("/v1/events?interval=60s", idle_timeout=10) for _ in range(3)]
    for each in lines[:2]:
        next(each)
    with pytest.raises(RefusedInState, match="2 event streams are open") as caught:
        next(lines[2])
    assert caught.value.id == "E429"
    assert next(client.stream("/v1/events", private=True))["type"] == "snapshot"  # the other socket counts its own
    lines[0].close()
    daemon.changed()  # the daemon notices that a reader left when it has something to say
    daemon.source.uptime += 1
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            assert next(client.stream("/v1/events", idle_timeout=10))["type"] == "snapshot"
            return
        except RefusedInState:
            time.sleep(0.05)
    pytest.fail("the slot of a reader that left was not given back")


def test_connections_are_bounded_per_socket(daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_CONNECTIONS", 3)
    silent = [paths.connect(daemon.directory / "status.sock", 5) for _ in range(4)]
    assert silent[3].recv(1) == b""  # closed at once
    with pytest.raises(DaemonNotRunning):
        client.get("/v1/status")
    assert client.get("/v1/requests", private=True)["requests"]  # the other socket is not concerned
    for stream in silent:
        stream.close()
    assert _soon(lambda: client.get("/v1/status"))["state"] == "ready"


def test_a_connection_that_says_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEADER_SECONDS", 0.2)
    with fake_daemon.running(tmp_path / "run") as daemon:
        silent = paths.connect(daemon.directory / "status.sock", 10)
        half = paths.connect(daemon.directory / "status.sock", 10)
        half.sendall(b"GET /v1/status HTTP/1.1\r\nHost:")
        assert silent.recv(1) == half.recv(1) == b""
        silent.close()
        half.close()
        lines = Client(daemon.directory).stream("/v1/events?interval=100ms", idle_timeout=10)
        for _ in range(5):  # one that has asked lives on
            daemon.source.uptime += 1
            next(lines)
        lines.close()


def test_a_reader_that_is_stuck_is_dropped_in_the_end(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "STUCK_SECONDS", 0.3)
    stalled = paths.connect(daemon.directory / "control.sock", 5)
    stalled.sendall(b"GET /v1/events?topics=requests&interval=100ms HTTP/1.1\r\nHost: pdd\r\n\r\n")
    daemon.source.live = {f"r-{i}": "running" for i in range(2000)}
    sizes = []

    def dropped() -> bool:
        daemon.source.live[f"r-{len(daemon.source.live)}"] = "running"  # another large delta
        sizes.append(len(daemon.server_connections()))
        return len(sizes) > 5 and sizes[-1] == 0

    _soon(dropped, seconds=30)
    assert max(sizes) == 1
    stalled.close()


def _soon(attempt: Callable[[], Any], seconds: float = 10.0) -> Any:
    """What `attempt` gives once it neither fails nor gives nothing."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(DaemonNotRunning):
            if found := attempt():
                return found
        time.sleep(0.05)
    raise AssertionError("it did not come")


def test_a_reader_that_does_not_read_queues_nothing(daemon: Daemon, client: Client) -> None:
    stalled = paths.connect(daemon.directory / "status.sock", 5)
    stalled.sendall(b"GET /v1/events?interval=100ms HTTP/1.1\r\nHost: pdd\r\n\r\n")
    lines = client.stream("/v1/events?interval=100ms", idle_timeout=10)
    for _ in range(5):
        daemon.source.uptime += 1
        next(lines)  # others go on
    lines.close()
    stalled.close()


def _next_with(lines: Iterator[dict[str, Any]], member: str) -> dict[str, Any]:
    for line in lines:
        if member in line.get("docs", {}).get("status", {}):
            return line
    raise AssertionError("the stream ended")


# -- the client's failures ---------------------------------------------------------------------------------------------
def test_no_daemon_names_the_others(daemon: Daemon) -> None:
    with pytest.raises(DaemonNotRunning, match="no daemon at") as caught:
        Client(daemon.run_dir / "nope").get("/v1/status")
    assert "Other instances: d0" in caught.value.hint
    assert caught.value.exit_code == 3


def test_a_stale_socket_is_no_daemon(tmp_path: Path, spawn: Any) -> None:
    process = spawn("d1")
    process.kill()
    process.wait()
    with pytest.raises(DaemonNotRunning, match="left over"):
        Client(tmp_path / "run" / "d1").get("/v1/status")


def test_a_daemon_that_does_not_answer_is_a_timeout(tmp_path: Path) -> None:
    import socket

    (tmp_path / "d2").mkdir()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "d2" / "status.sock"))
        silent.listen(1)
        with pytest.raises(TimedOut) as caught:
            Client(tmp_path / "d2", timeout=0.2).get("/v1/status")
    assert caught.value.exit_code == 6


def test_a_stranger_on_the_socket_is_not_taken_for_a_daemon(tmp_path: Path) -> None:
    import socket

    (tmp_path / "d3").mkdir()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(tmp_path / "d3" / "status.sock"))
        stranger.listen(1)

        def answer() -> None:
            peer, _ = stranger.accept()
            peer.recv(4096)
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            peer.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(VersionMismatch, match="not a pdd daemon"):
            Client(tmp_path / "d3").get("/v1/status")
        thread.join()


def test_permission_denied_says_who_may(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, timeout: float | None) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(paths, "connect", refuse)  # root may do everything: the kernel cannot be asked in this suite
    with pytest.raises(AccessDenied, match="0660") as caught:
        Client(daemon.directory).get("/v1/requests", private=True)
    assert "Your groups" in caught.value.hint
    assert caught.value.exit_code == 4
