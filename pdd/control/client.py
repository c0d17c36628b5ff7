"""Speaks to a running daemon over its sockets. Sync, stdlib only: `pdd status` must start fast.

Every failure is a ControlError that says what was tried and what to do next. Documents come back as plain dicts: a
client prints what it gets and ignores what it does not know.
"""

from __future__ import annotations

import grp
import http.client
import json
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdd.control import paths
from pdd.errors import (
    BY_ID,
    EXIT_CONFIG,
    AccessDenied,
    ControlError,
    DaemonNotRunning,
    PddError,
    RefusedInState,
    TimedOut,
    VersionMismatch,
)

_API_MAJOR = "1"


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float | None) -> None:
        super().__init__("pdd", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = paths.connect(self._path, self.timeout)


class Client:
    """The daemon behind one instance directory (or one explicit socket).

    Args:
        directory: RUN_DIR/NAME; reads go to status.sock, the rest to control.sock.
        socket: this socket for everything, instead.
        timeout: seconds without an answer, then TimedOut. None: for ever.
    """

    def __init__(self, directory: Path, *, socket: Path | None = None, timeout: float | None = 2.0) -> None:
        self._directory = directory
        self._socket = socket
        self.timeout = timeout

    def get(self, path: str, *, private: bool = False) -> Any:
        return json.loads(self._exchange("GET", path, private=private))

    def text(self, path: str) -> str:
        return self._exchange("GET", path, private=False).decode()

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._change("POST", path, body or {})

    def delete(self, path: str) -> Any:
        return self._change("DELETE", path, None)

    def _change(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            return json.loads(self._exchange(method, path, private=True, body=body))
        except TimedOut as error:
            raise TimedOut(
                f"{error.message}; it may still do what it was told",
                hint=f"{error.hint} `pdd status` says what it does when it answers again.",
            ) from None

    def stream(
        self, path: str, *, private: bool = False, idle_timeout: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """The lines of an event stream, until the daemon ends it. `idle_timeout`: longest silence between two lines."""
        connection, response, socket = self._open("GET", path, private, None)
        try:
            if connection.sock is not None:
                connection.sock.settimeout(idle_timeout)
            while line := response.readline():
                yield json.loads(line)
        except TimeoutError:
            raise self._timed_out(socket, idle_timeout) from None
        except (OSError, http.client.HTTPException):
            raise _went_away(socket) from None
        finally:
            connection.close()

    # -- one exchange --------------------------------------------------------------------------------------------------
    def _exchange(self, method: str, path: str, *, private: bool, body: dict[str, Any] | None = None) -> bytes:
        connection, response, socket = self._open(method, path, private, body)
        try:
            return response.read()
        except TimeoutError:
            raise self._timed_out(socket, self.timeout) from None
        except (OSError, http.client.HTTPException):
            raise _went_away(socket) from None
        finally:
            connection.close()

    def _open(
        self, method: str, path: str, private: bool, body: dict[str, Any] | None
    ) -> tuple[_Connection, http.client.HTTPResponse, Path]:
        socket = self._socket or self._directory / (paths.CONTROL if private else paths.STATUS)
        connection = _Connection(socket, self.timeout)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Pdd-Client": "pdd", "Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status >= 400:
                raise _from_problem(response.status, response.read())
        except PddError:
            connection.close()
            raise
        except TimeoutError:
            connection.close()
            raise self._timed_out(socket, self.timeout) from None
        except PermissionError:
            connection.close()
            raise _denied(socket) from None
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._not_running(socket, error) from None
        api = response.headers.get("Pdd-Api", "")
        if api.split(".")[0] != _API_MAJOR:
            connection.close()
            what = f"speaks API {api}" if api else "is not a pdd daemon, or a very old one"
            raise VersionMismatch(f"the program at {socket} {what}; this client speaks {_API_MAJOR}",
                                  hint="Use the pdd that the daemon was installed with.")
        return connection, response, socket

    def _timed_out(self, socket: Path, seconds: float | None) -> TimedOut:
        return TimedOut(
            f"the daemon at {socket} did not answer within {seconds:g} s",
            hint="It is stopped or overloaded: look at its process and log.",
        )

    def _not_running(self, socket: Path, error: Exception) -> DaemonNotRunning:
        name = socket.parent.name
        others = [other for other in paths.instances(socket.parent.parent) if other != name]
        more = f" Other instances: {', '.join(others)} (choose with -i NAME)." if others else ""
        if isinstance(error, FileNotFoundError):
            return DaemonNotRunning(f"no daemon at {socket}", hint=f"It is not running: {_to_start(socket.parent)}.{more}")
        if isinstance(error, ConnectionRefusedError):
            return DaemonNotRunning(
                f"no daemon at {socket}: the socket is left over", hint=f"It died: see its log.{more}"
            )
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return DaemonNotRunning(f"the daemon at {socket} cannot be asked: {reason}", hint=more.strip())


def _to_start(directory: Path) -> str:
    """What looks at, or starts, the node whose sockets would lie there."""
    name, run_dir = directory.name, directory.parent
    if run_dir == paths.SYSTEM_RUN_DIR:
        return f"`systemctl status pdd@{name}`, `pdd serve --name {name}`"
    where = "" if run_dir == paths.default_run_dir() else f" --run-dir {run_dir}"
    return f"`pdd serve --name {name}{where}` starts it"


def _went_away(socket: Path) -> DaemonNotRunning:
    return DaemonNotRunning(f"the daemon at {socket} went away", hint="It stopped or died: see its log.")


def _denied(socket: Path) -> AccessDenied:
    """Who may use the socket, who we are, and what still works."""
    try:
        info = os.stat(socket)
        owner = f" ({_name(info.st_uid, user=True)}:{_name(info.st_gid, user=False)} {stat.S_IMODE(info.st_mode):04o})"
        group = _name(info.st_gid, user=False)
        join = f" Join {group}, then log in again." if info.st_gid else " Run as root, or set control.group for that node."
    except OSError:
        owner = join = ""
    groups = ", ".join(_name(gid, user=False) for gid in os.getgroups()) or "none"
    return AccessDenied(
        f"not allowed to use {socket}{owner}", hint=f"Your groups: {groups}.{join} `pdd status` works without that."
    )


def _name(number: int, *, user: bool) -> str:
    try:
        return pwd.getpwuid(number).pw_name if user else grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _from_problem(status: int, raw: bytes) -> PddError:
    """The daemon's own refusal, with its id and hint kept."""
    try:
        problem = json.loads(raw)
        detail, hint, error_id = problem["detail"], problem.get("hint", ""), problem["id"]
    except (ValueError, KeyError, TypeError):
        return VersionMismatch(f"the daemon answered {status} in a form that this client does not know",
                               hint="Use the pdd that the daemon was installed with.")
    kind = BY_ID.get(error_id)
    if kind is not None and kind.exit_code == EXIT_CONFIG:
        return kind(detail, hint=hint)
    error: ControlError
    if status in (401, 403):
        error = AccessDenied(detail, hint=hint)
    elif error_id == VersionMismatch.id:
        error = VersionMismatch(detail, hint=hint)
    elif status == 504:
        error = TimedOut(detail, hint=hint)
    elif status < 500 or status == 503:
        error = RefusedInState(detail, hint=hint)
    else:
        error = ControlError(f"the daemon failed: {detail}", hint=hint)
        error.exit_code = 1
    error.id = error_id
    return error
