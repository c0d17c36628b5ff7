"""Runs the app with uvicorn on sockets that the daemon bound, under the daemon's signals.

Differences from uvicorn's own ways: it takes no signal, adds no log handler, and writes no access line for probes and
scrapes. A connection must say something within a time, is checked for a dead peer, can be dropped with what it has
not sent, and serves no pipelined request. `stop` ends it: listeners first, so a later client is refused, then idle
connections, then what still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from pdd.api.connection import ABORT
from pdd.api.room import Room
from pdd.api.strangers import Strangers, refusal

_QUIET = ("/health", "/metrics")  # no access lines
_HEADER_SECONDS = 30.0  # from the connection, or from the first byte of a request, to the end of its headers
_KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that they are the ones to close
_DATE_SECONDS = 1.0
_DEAD_PEER_SECONDS = 60  # unacknowledged data or silence to keep-alive probes for so long ends a connection


class ApiServer:
    """One server; `serve` runs once. Owner: main loop."""

    def __init__(
        self, app: ASGIApp, sockets: Sequence[socket.socket], stop: asyncio.Event, tls: ssl.SSLContext | None = None,
        *, max_connections: int = 1024,
    ) -> None:
        """`sockets`: bound, listening or not; the server closes them. `stop`: the same event that the app got. `tls`: HTTPS."""
        self._sockets = list(sockets)
        self._stop = stop
        self._room = Room(max_connections)
        config = uvicorn.Config(
            app,
            http=functools.partial(_Connection, room=self._room, strangers=Strangers()),  # type: ignore[arg-type]  # it is called
            ws="none",
            lifespan="off",
            log_config=None,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=0,  # replaced by stop()
            ssl_context_factory=None if tls is None else lambda config, default: tls,
        )
        self._server = _Server(config)
        logging.getLogger("uvicorn.access").addFilter(_not_a_probe)
        told = logging.getLogger("uvicorn.error")
        told.setLevel(logging.WARNING)  # its tale of starting and stopping is ours to tell
        told.addFilter(_not_of_a_stranger)

    def set_max_connections(self, most: int) -> None:
        self._room.set_most(most)

    async def serve(self) -> None:
        """Returns after `stop`.

        Raises:
            OSError: a socket cannot listen.
        """
        await self._server.serve(self._sockets)
        # uvicorn cancels what outlasts the grace period and leaves; what it left must be over when this returns.
        state = self._server.server_state
        await asyncio.gather(*state.tasks, return_exceptions=True)
        for connection in list(state.connections):
            connection.transport.abort()

    async def started(self) -> None:
        """Returns once every socket accepts."""
        await self._server.accepting.wait()

    @property
    def connections(self) -> int:
        """Open connections, idle ones included."""
        return len(self._server.server_state.connections)

    def stop(self, grace_seconds: float) -> None:
        """Ends `serve`. What runs gets an error event or 503 now, and `grace_seconds` to send it; then it is dropped."""
        self._stop.set()
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_seconds))
        self._server.leave()


class _Server(uvicorn.Server):
    """uvicorn's, which an idle node's loop does not wake for ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # writes the date that answers carry
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_SECONDS):
                    await self._leaving.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the daemon's


class _Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, with a deadline for headers and a way to drop it."""

    _deadline: asyncio.TimerHandle | None = None
    _deaf = False  # nothing more is read as a request

    def __init__(self, *args: Any, room: Room, strangers: Strangers, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._room = room
        self._strangers = strangers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._room.enter(transport):
            self._deaf = True
            return
        self.app_state = {**self.app_state, ABORT: transport.abort}
        _detect_dead_peer(transport.get_extra_info("socket"))
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_deadline()
            self._room.is_busy(self.transport)
        elif self._deadline is None:
            self._expect_headers()

    def handle_events(self) -> None:
        """uvicorn stops reading while a pipelined request waits, and so does not see its client leave. Here the first
        request is answered, the connection is closed after it, and what the client had sent ahead is its to repeat."""
        super().handle_events()
        waits = self.cycle is not None and not self.cycle.response_complete and self.conn.trailing_data[0]
        if waits and self.conn.their_state is h11.DONE:
            self._deaf = True
            self.cycle.keep_alive = False
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """What the client sent is no HTTP."""
        self._strangers.tell(self.client[0] if self.client else "a client")
        self.transport.write(refusal(self.conn))
        self.transport.close()

    def on_response_complete(self) -> None:
        self._cancel_deadline()
        self._room.is_idle(self.transport)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.leave(self.transport)
        self._cancel_deadline()
        super().connection_lost(exc)

    def _should_upgrade(self) -> bool:
        return False  # there is nothing to upgrade to; HTTP/1.1 goes on

    def _expect_headers(self) -> None:
        self._deadline = self.loop.call_later(_HEADER_SECONDS, self.transport.abort)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _detect_dead_peer(connection: Any) -> None:
    """Without traffic a vanished client is never noticed; without this, neither is one that stops acknowledging."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_PEER_SECONDS // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_PEER_SECONDS // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PEER_SECONDS * 1000)


def _not_a_probe(record: logging.LogRecord) -> bool:
    """False for the access line of a probe or scrape. uvicorn's arguments: client, method, path, version, status."""
    args = record.args
    return not (isinstance(args, tuple) and len(args) == 5 and str(args[2]).startswith(_QUIET))


def _not_of_a_stranger(record: logging.LogRecord) -> bool:
    """False for the line that names nobody; ours does."""
    return not record.getMessage().startswith("Invalid HTTP request received")
