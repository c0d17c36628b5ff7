"""Listeners when files run out, and what a node needs of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from pdd import open_files
from pdd.config import Config
from pdd.errors import LimitError
from pdd.open_files import Listener

_SMALL = {"node": {"role": "both"}, "engine": {"tp": 2}}


@pytest.fixture
def limit() -> Iterator[int]:
    """A soft limit of open files that is soon reached."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _listener(reserved: int) -> Listener:
    sock = socket.create_server(("127.0.0.1", 0), backlog=64)
    sock.setblocking(False)
    return Listener(sock, "api.listen", reserved)


async def _answered(address: tuple[str, int]) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()  # its descriptor is free again


async def test_newcomers_leave_the_reserve_to_others(limit: int, caplog: pytest.LogCaptureFixture) -> None:
    """A connection that would take a reserved descriptor is closed at once; when others have gone, one is served again."""
    listener = _listener(40)

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x")
        writer.close()

    server = await asyncio.start_server(serve, sock=listener)
    address = listener.getsockname()
    assert await _answered(address) == b"x"
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(80)]
    with caplog.at_level(logging.ERROR):
        assert [await _answered(address) for _ in range(20)] == [b""] * 20
    assert [record.name for record in caplog.records] == ["pdd.open_files"]  # one line, and none of asyncio's
    assert "E770" in caplog.text
    assert "api.listen" in caplog.text
    for fd in held:
        os.close(fd)
    assert await _answered(address) == b"x"
    server.close()


async def test_without_any_descriptor_a_client_is_turned_away_and_the_loop_sleeps(
    limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that is kept aside serves again and again, for a listener that leaves nothing to others too."""
    listener = _listener(0)
    clients = [socket.socket() for _ in range(3)]
    held: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    for client in clients:
        client.connect(listener.getsockname())
    with caplog.at_level(logging.ERROR), pytest.raises(BlockingIOError):
        listener.accept()
    for client in clients:
        client.settimeout(10)
        assert client.recv(1) == b""
    assert len(caplog.records) == 1
    for each in held:
        os.close(each)
    fresh = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    for sock in (*clients, fresh, accepted, listener):
        sock.close()


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"dp": 2}], ids=str)
def test_a_node_says_how_many_files_its_settings_need(monkeypatch: pytest.MonkeyPatch, ranks: dict[str, int]) -> None:
    config = Config.model_validate({**_SMALL, "engine": ranks, "api": {"max_connections": 5000}})
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    with pytest.raises(LimitError, match="1024 open files are too few: these settings need 5144, 5000 of them"):
        open_files.raise_limit(config)


def test_ranks_of_all_groups_have_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(**engine: int) -> int:
        return open_files.api_connections(Config.model_validate({**_SMALL, "engine": engine}))

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    assert left(tp=4) == left(tp=2, dp=2) == left(dp=4) < left(tp=2)


def test_clients_of_the_api_leave_room_for_peers_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(**peers: object) -> int:
        return open_files.api_connections(Config.model_validate({**_SMALL, "peers": peers}))

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    alone = left()
    assert left(static=["10.0.0.1:7700"]) == alone - 8
    assert left(listen="127.0.0.1:7700") == alone - 8 * 32  # decoders that will call


def test_the_soft_limit_is_raised_and_the_api_gets_what_is_left(limit: int) -> None:
    config = Config.model_validate(_SMALL)
    assert open_files.raise_limit(config) > limit
    assert open_files.soft_limit() > limit
    assert open_files.api_connections(config) <= 8192


def test_unlimited_is_plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: told.append(limits))
    open_files.raise_limit(Config.model_validate(_SMALL))
    assert told == [(1 << 20, resource.RLIM_INFINITY)]
