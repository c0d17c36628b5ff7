"""The limit of open files of a process: raised at the start, told when it is too small, and kept by every listener.

asyncio answers an accept that fails for want of a descriptor with an error line for each place of the backlog, and again
and again. A `Listener` never lets it come to that: what comes in beyond its share of the limit is accepted and closed at
once, and where no descriptor is left at all, one that is kept aside for this is used. A client is turned away rather than
left waiting; the loop goes to sleep again; the log has one line a minute. The share is told by the number of the new
descriptor alone: the kernel gives the lowest free one, so a number of N means that N are open.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
import socket
import time
from typing import Any

from pdd.config import Config
from pdd.errors import LimitError
from pdd.units import counted

_log = logging.getLogger(__name__)
RESERVED = 64  # of the limit, that clients and peers leave: control sockets, dumps, credentials read again
_MOST_CONNECTIONS = 8192  # of the API unless a setting says more: an idle one costs about 30 KB
_LEAST_CONNECTIONS = 32
_PLENTY = 1 << 20  # some programs look at every number below the limit
_OWN = 64  # listeners, fabric, libraries, files of a node without ranks and peers
_OF_A_RANK = 8
_OF_A_PEER = 8  # its link and the connections of its fabric
_CALLERS = 32  # decoders that a prefiller keeps room for beside clients of its API; more may come while there is room
_SHED_AT_ONCE = 64
_TOLD_SECONDS = 60.0
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def soft_limit() -> int:
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_limit(config: Config) -> int:
    """Raises the soft limit of this process, and of what it starts, to the hard one or to plenty; what it is then.

    Raises:
        LimitError: even so it is below what the settings need.
    """
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = min(_number(most), _PLENTY)
    if _number(soft) < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, most))
    hard = max(hard, soft_limit())
    require(config, hard)
    return hard


def require(config: Config, limit: int) -> None:
    """Returns when these settings can do with `limit` open files. Raises LimitError."""
    least = needed(config)
    if limit < least:
        raise LimitError(
            f"{limit} open files are too few: these settings need {least}, {least - _held(config)} of them for connections of "
            "the API",
            hint=f"set LimitNOFILE={least} or more in the unit, or `ulimit -n {least}` in the shell, or a smaller "
            "api.max_connections",
        )


def needed(config: Config) -> int:
    """Open files below which a node with these settings does not start."""
    return _held(config) + (config.api.max_connections or _LEAST_CONNECTIONS)


def api_connections(config: Config) -> int:
    """Connections that the API port may hold open: as the settings say, else what the limit leaves."""
    return config.api.max_connections or max(_LEAST_CONNECTIONS, min(_MOST_CONNECTIONS, soft_limit() - _held(config)))


def _number(limit: int) -> int:
    return 1 << 62 if limit == resource.RLIM_INFINITY else limit


def _held(config: Config) -> int:
    """Descriptors that are no connections of API clients."""
    num_peers = len(config.peers.static) + (_CALLERS if config.peers.listen else 0)
    return RESERVED + _OWN + _OF_A_RANK * config.engine.num_ranks + _OF_A_PEER * num_peers


class Listener(socket.socket):
    """A listening socket whose `accept` turns newcomers away when files run out. Owner: the main loop."""

    def __init__(self, sock: socket.socket, name: str, reserved: int = RESERVED) -> None:
        """Takes `sock` over. `name`: for the log. `reserved`: descriptors that its connections leave to others."""
        timeout = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.settimeout(timeout)
        self._name = name
        self._reserved = reserved
        self._spare = _any_descriptor()
        self._told_at = -math.inf
        self._num_shed = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection that there is room for.

        Raises:
            BlockingIOError: there is none now. OSError: no descriptor could be had, not even to turn a client away.
        """
        ceiling = soft_limit() - self._reserved
        for _ in range(_SHED_AT_ONCE):
            try:
                connection, address = super().accept()
            except OSError as error:
                if error.errno not in _EXHAUSTED or not self._give_up_spare():
                    raise
                self._shed(self._accept_with_spare())
                continue
            if connection.fileno() < ceiling:
                return connection, address
            self._shed(connection)
        raise BlockingIOError(errno.EAGAIN, "more wait, but others have their turn")

    def close(self) -> None:
        self._give_up_spare()
        super().close()

    def _accept_with_spare(self) -> socket.socket:
        try:
            return super().accept()[0]
        except OSError:
            self._spare = _any_descriptor()
            raise

    def _shed(self, connection: socket.socket) -> None:
        connection.close()
        if self._spare < 0:
            self._spare = _any_descriptor()
        self._num_shed += 1
        now = time.monotonic()
        if now - self._told_at >= _TOLD_SECONDS:
            _log.error(
                "%s: %s turned away: nearly all %d files that this process may open are open [%s]; set a larger LimitNOFILE "
                "(`ulimit -n`), or a smaller api.max_connections",
                self._name, counted(self._num_shed, "connection"), soft_limit(), LimitError.id,
            )
            self._told_at, self._num_shed = now, 0

    def _give_up_spare(self) -> bool:
        """False: there was none."""
        if self._spare < 0:
            return False
        os.close(self._spare)
        self._spare = -1
        return True


def _any_descriptor() -> int:
    """One that is open for no other reason than to be closed when it is needed, or -1."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
