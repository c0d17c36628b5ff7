"""Start, shutdown and abuse of the port itself."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from contextlib import suppress
from typing import Any

import httpx
import pytest

from pdd.api import server as server_module
from tests.api.conftest import Eventually, Node, running
from tests.api.fakes import FakeService, forever
from tests.api.test_aborts import request

BODY = {"prompt": "x", "max_tokens": 200}


async def test_draining_refuses_new_work_and_finishes_old(node: Node, eventually: Eventually) -> None:
    """Scenario 120: after the signal every request on an open or a new connection is answered, by a 503."""
    started = asyncio.Event()
    node.service.script = forever(5, started, per_second=500)
    async with node.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as running_stream:
        lines = running_stream.aiter_lines()
        await anext(lines)
        assert (await node.http.get("/v1/models")).status_code == 200  # leaves an idle keep-alive connection
        node.service.draining = True
        for _ in range(3):
            answer = await node.http.post("/v1/completions", json=BODY)
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert answer.headers["connection"] == "close"
        assert (await node.http.get("/health/live")).status_code == 200
        assert (await node.http.get("/health")).status_code == 503
        for _ in range(10):
            await anext(lines)  # the old stream goes on
        assert len(node.service.calls) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_ends_what_still_runs_with_an_error(
    service: FakeService, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is dropped silently, and an open stream does not hold up the shutdown."""
    started = asyncio.Event()
    service.script = forever(5, started, after=0 if stream else -1)
    async with running(service) as node:
        reader, writer = await node.raw(request({**BODY, "stream": stream}))
        await started.wait()
        if stream:
            await reader.readuntil(b"data: ")
        node.server.stop(5)
        rest = await reader.read()
        assert b"shutting down" in rest
        assert b"[DONE]" not in rest
        assert rest.startswith(b"HTTP/1.1 503") == (not stream)
        await node.serving
        writer.close()
        with pytest.raises(httpx.ConnectError):
            await node.http.get("/health")
    assert service.open == 0
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_stop_while_a_prompt_is_tokenized(service: FakeService, caplog: pytest.LogCaptureFixture) -> None:
    async with running(service) as node:
        service.tokenizer.gate.clear()
        reader, writer = await node.raw(request({"prompt": "cat", "user": "x" * 5000}))
        await asyncio.to_thread(service.tokenizer.encoding.wait, 10)
        node.server.stop(5)
        assert (await reader.read()).startswith(b"HTTP/1.1 503")
        await node.serving
        service.tokenizer.gate.set()
        writer.close()
    assert not service.calls
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_stop_drops_a_client_that_does_not_read(service: FakeService, eventually: Eventually) -> None:
    service.script = forever(service.tokenizer.plain("x")[0], asyncio.Event(), per_second=20_000)
    async with running(service) as node:
        body = request({**BODY, "stream": True, "n": 128, "max_tokens": 250, "stop": "\n\n"})
        reader, writer = await node.raw(body, rcvbuf=4096)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        seen = -1
        while seen != sum(call.generated for call in service.calls) or not service.calls:
            seen = sum(call.generated for call in service.calls)
            await asyncio.sleep(0.3)
        node.server.stop(1)
        async with asyncio.timeout(20):
            await node.serving
        writer.close()
    assert service.open == 0


async def test_signals_stay_with_the_daemon(node: Node) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        assert "uvicorn" not in str(signal.getsignal(number))
        assert "handle_exit" not in str(signal.getsignal(number))


async def test_an_idle_server_is_woken_once_a_second_and_leaves_at_once(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks: dict[Any, list[float]] = {}  # of this test's server, and of the one that the module's other tests share
    plain = server_module._Server.on_tick

    async def on_tick(self: Any, counter: int) -> bool:
        ticks.setdefault(self, []).append(asyncio.get_running_loop().time())
        return await plain(self, counter)

    monkeypatch.setattr(server_module._Server, "on_tick", on_tick)
    async with running(service) as node:
        await asyncio.sleep(1.2)
        now = asyncio.get_running_loop().time()
        assert ticks
        for of_one in ticks.values():
            assert len(of_one) <= 2 + (now - of_one[0])
        assert "date" in (await node.http.get("/health")).headers


async def test_two_servers_in_one_loop(service: FakeService) -> None:
    async with running(service) as first, running(service) as second:
        assert first.port != second.port
        for node in (first, second):
            assert (await node.http.get("/health")).status_code == 200
        first.server.stop(1)
        await first.serving
        assert (await second.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # TLS
        b"\x00" * 5000,
        b"GET / HTTP/9.9\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\nhost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZZ\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * 100_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_garbage_costs_one_line(node: Node, garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Promise 8."""
    caplog.set_level(logging.INFO)
    reader, writer = await node.raw(garbage)
    with suppress(ConnectionError):
        async with asyncio.timeout(10):
            answer = await reader.read()
            assert not answer or answer.split(b" ")[1] in (b"400", b"404")
    writer.close()
    lines = [r for r in caplog.records if r.name.startswith(("uvicorn.error", "pdd")) and r.levelno >= logging.WARNING]
    assert len(lines) <= 1
    assert not [record for record in caplog.records if record.exc_info]
    assert (await node.http.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
async def test_an_offer_to_upgrade_is_ignored(node: Node, protocol: bytes, caplog: pytest.LogCaptureFixture) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: " + protocol
    reader, writer = await node.raw(head + b"\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200")
    writer.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
async def test_a_connection_that_says_nothing_is_closed(
    service: FakeService, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_HEADER_SECONDS", 0.1)
    async with running(service) as node:
        reader, writer = await node.raw(sent)
        async with asyncio.timeout(10):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


async def test_the_header_deadline_spares_running_and_idle_connections(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(server_module, "_HEADER_SECONDS", 0.2)
    service.script = forever(5, asyncio.Event(), per_second=200)
    async with running(service) as node:
        reader, writer = await node.raw(request({**BODY, "stream": True}))
        await asyncio.sleep(0.4)
        await reader.readuntil(b"data: ")
        assert service.open == 1
        writer.close()
        await eventually(lambda: service.open == 0)
        reader, writer = await node.raw(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"}")
        await asyncio.sleep(0.4)
        writer.write(request({**BODY, "stream": True}))
        await reader.readuntil(b"data: ")
        await asyncio.sleep(0.4)
        await reader.readuntil(b"data: ")
        assert service.open == 1
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")  # pipelined: waits its turn
        await asyncio.sleep(0.4)
        await reader.readuntil(b"data: ")
        assert service.open == 1
        writer.close()


async def test_ipv6_and_several_sockets(service: FakeService) -> None:
    from pdd.api.app import create_app
    from tests.api.conftest import SETTINGS

    try:
        sockets = [socket.create_server(("127.0.0.1", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6)]
    except OSError:
        pytest.skip("no IPv6 on this machine")
    stop = asyncio.Event()
    server = server_module.ApiServer(create_app(service, SETTINGS, stop=stop, serve_generation=True), sockets, stop)
    urls = [f"http://127.0.0.1:{sockets[0].getsockname()[1]}", f"http://[::1]:{sockets[1].getsockname()[1]}"]
    serving = asyncio.create_task(server.serve())
    await server.started()
    async with httpx.AsyncClient(trust_env=False) as client:
        for url in urls:
            assert (await client.get(f"{url}/health")).status_code == 200
    server.stop(1)
    await serving


async def test_a_newcomer_ends_the_longest_idle_connection(service: FakeService, caplog: pytest.LogCaptureFixture) -> None:
    """Silent clients, however many, shut nobody out."""
    async with running(service, max_connections=3) as node:
        silent = [await node.raw(b"") for _ in range(3)]
        async with asyncio.timeout(10):
            for _ in range(5):
                reader, writer = await node.raw(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
                writer.close()
            with suppress(ConnectionError):
                assert await silent[0][0].read() == b""
        for _, writer in silent:
            writer.close()
    assert caplog.text.count("E506") == 1


async def test_a_newcomer_among_busy_connections_is_told_so(service: FakeService, eventually: Eventually) -> None:
    """None that has a request in hand is dropped for another; what ends makes room."""
    started = asyncio.Event()
    service.script = forever(5, started)
    async with running(service, max_connections=1) as node:
        reader, busy = await node.raw(request({**BODY, "stream": True}))
        await started.wait()
        await reader.readuntil(b"data: ")
        answer, refused = await node.raw(b"")
        text = await answer.read()
        assert text.startswith(b"HTTP/1.1 503 ")
        assert all(part in text for part in (b'"code":"E506"', b"retry-after: 1"))
        await reader.readuntil(b"data: ")
        busy.close()
        await eventually(lambda: node.server.connections == 0)
        assert (await node.http.get("/version")).status_code == 200
        refused.close()


async def test_a_peer_at_the_http_port_is_named_and_answered(service: FakeService, caplog: pytest.LogCaptureFixture) -> None:
    """`--peer` with the address of another node's API."""
    async with running(service) as node:
        for _ in range(3):
            reader, writer = await node.raw(b"\x00\x00\x00\x20PDD\x00garbage of a handshake\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert head.startswith(b"HTTP/1.1 400 ")
            error = json.loads(body)["error"]
            assert error["code"] == "E400"
            assert "peers.listen" in error["message"]
    [told] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told.startswith("api.listen: 127.0.0.1 sent what is no HTTP request [E400]; is this a peer that dials the API port?")
