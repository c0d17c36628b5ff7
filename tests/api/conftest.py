"""The real server on a real socket, in the test's own event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import httpx
import openai
import pytest
import pytest_asyncio

from pdd.api.app import ApiSettings, create_app
from pdd.api.server import ApiServer
from pdd.daemon.listen import bind_tcp
from tests.api.fakes import FakeService, SmallTokenizer

Eventually = Callable[[Callable[[], bool]], Awaitable[None]]
SETTINGS = ApiSettings(version="0.1.0", max_body_bytes=64 << 10, body_budget_bytes=256 << 10)


@dataclasses.dataclass
class Node:
    """A running API and its clients."""

    service: FakeService
    server: ApiServer
    serving: asyncio.Task[None]
    port: int
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI

    async def raw(self, data: bytes, *, rcvbuf: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of its own, with `data` written."""
        sock = socket.socket()
        if rcvbuf:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        writer.write(data)
        await writer.drain()
        return reader, writer


@asynccontextmanager
async def running(
    service: FakeService, settings: ApiSettings = SETTINGS, *, serve_generation: bool = True, key: str = "none",
    tls: ssl.SSLContext | None = None, max_connections: int = 64,
) -> AsyncIterator[Node]:
    sock = bind_tcp("127.0.0.1:0", "api.listen")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # its connections inherit it; soon full if nobody reads
    stop = asyncio.Event()
    app = create_app(service, settings, stop=stop, serve_generation=serve_generation)
    server = ApiServer(app, [sock], stop, tls, max_connections=max_connections)
    port = sock.getsockname()[1]
    serving = asyncio.create_task(server.serve())
    await server.started()
    base = f"http://127.0.0.1:{port}"
    async with (
        httpx.AsyncClient(base_url=base, timeout=20, trust_env=False) as http,
        httpx.AsyncClient(timeout=20, trust_env=False) as own,
    ):
        client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0, http_client=own)
        try:
            yield Node(service, server, serving, port, http, client)
        finally:
            server.stop(1)
            await serving


@pytest.fixture(scope="session")
def trained() -> SmallTokenizer:
    return SmallTokenizer()


@pytest.fixture
def tokenizer(trained: SmallTokenizer) -> SmallTokenizer:
    trained.gate.set()
    trained.encoding.clear()
    return trained


@pytest.fixture
def service(tokenizer: SmallTokenizer) -> FakeService:
    return FakeService(tokenizer)


class Stage:
    """The service of the one server that most tests share: whatever service the test has put on it."""

    def __init__(self) -> None:
        self.service: FakeService | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.service, name)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared() -> AsyncIterator[Node]:
    async with running(cast(FakeService, Stage())) as node:
        yield node


@pytest_asyncio.fixture(loop_scope="session")
async def node(shared: Node, service: FakeService, eventually: Eventually) -> AsyncIterator[Node]:
    """For tests that leave the server as they found it. Each has a service of its own, idle at the end."""
    cast(Stage, shared.service).service = service
    yield dataclasses.replace(shared, service=service)
    await eventually(lambda: service.open == 0)


@pytest.fixture
def eventually() -> Eventually:
    """Waits until a condition holds; the bound is generous, the point is that it is finite."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while not condition():
                await asyncio.sleep(0.005)

    return wait


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One event loop for all tests here, as they share a server."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
