"""Runs the control API on the bound sockets of an instance.

Everything that is served comes from a StatusSource on the main loop; kept here are only the samples that rates are
made from. No signal handlers: the daemon's own stop calls `stop`. What clients of one socket can take from the daemon is
bounded, each for itself: connections, streams, and how long one may say nothing or read nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from pdd.control import app, events
from pdd.control.rates import RateWindow
from pdd.control.schema import RateWindows, Requests, Status
from pdd.control.sockets import ControlSockets
from pdd.control.source import StatusSource

_log = logging.getLogger(__name__)

_SAMPLE_SECONDS = 1.0
_STOP_SECONDS = 2.0
_MAX_CONNECTIONS = 256  # of one socket; one more is closed at once
_HEADER_SECONDS = 10.0  # from the connection, or from the answer before, to the end of a request's headers


class ControlServer:
    """Serves `sockets` from `source`. Owner: the main loop.

    Use: `ControlSockets.bind(...)` early, then `await start()`, …, `await stop()`, which also closes and removes the
    sockets.
    """

    def __init__(self, source: StatusSource, sockets: ControlSockets) -> None:
        self._source = source
        self._sockets = sockets
        self._bell = events.Bell()
        self._window = RateWindow()
        self._servers: list[QuietServer] = []
        self._serving: list[asyncio.Task[None]] = []
        self._sampler: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when both sockets answer."""
        for stream, private in ((self._sockets.control, True), (self._sockets.status, False)):
            asgi = app.build(self._source, self._documents(private), self._bell, private=private)
            server = QuietServer(asgi)
            self._servers.append(server)
            self._serving.append(asyncio.create_task(server.serve(sockets=[stream])))
            await server.up.wait()
        self._sampler = asyncio.create_task(self._sample())

    def changed(self) -> None:
        """The state of the node changed: event streams say so now instead of at their next interval."""
        self._bell.ring()

    async def stop(self) -> None:
        """Ends event streams with their last line, finishes what is in hand, closes and removes the sockets."""
        self._bell.stop()
        for server in self._servers:
            server.down.set()
        if self._sampler is not None:
            self._sampler.cancel()
        if self._serving:
            await asyncio.wait(self._serving, timeout=_STOP_SECONDS)
        tasks = [task for task in (*self._serving, self._sampler) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sockets.close()

    @property
    def rates(self) -> RateWindows:
        """What all clients are told."""
        return self._window.rates()

    def _documents(self, private: bool) -> dict[str, Callable[[], Any]]:
        requests = self._source.requests if private else self._counts
        return {
            "status": self._status,
            "peers": self._source.peers,
            "transfers": self._source.transfers,
            "topology": self._source.topology,
            "requests": requests,
            **({"waterfall": self._source.waterfall} if private else {}),
        }

    def _status(self) -> Status:
        return msgspec.structs.replace(self._source.status(), rates=self.rates)

    def _counts(self) -> Requests:
        return msgspec.structs.replace(self._source.requests(), requests=None)

    async def _sample(self) -> None:
        while True:
            try:
                self._window.add(time.monotonic(), self._source.status())
            except Exception:
                _log.exception("status cannot be sampled for rates")
            await asyncio.sleep(_SAMPLE_SECONDS)


class _Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, with a bound on how many there are and how long one may say nothing."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, app.ABORT: transport.abort}
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.abort()
        self._deadline = self.loop.call_later(_HEADER_SECONDS, transport.abort)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and self._deadline is not None:  # from here on uvicorn's own keep-alive timer counts
            self._deadline.cancel()
            self._deadline = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)


class QuietServer(uvicorn.Server):
    """uvicorn on sockets of ours, without its signal handlers, its log lines and its clock tick.

    `up` is set once it accepts; setting `down` stops it. An idle node is not woken ten times a second.
    """

    def __init__(self, asgi: Any) -> None:
        super().__init__(
            uvicorn.Config(
                asgi,
                http=_Connection,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self.up = asyncio.Event()
        self.down = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        self.up.set()
        await self.down.wait()
