"""Where a node's event stream comes from: the sockets of this machine, or `pdd events` on another one over ssh.

A source yields the lines of /v1/events as the daemon made them, and raises a ControlError when it has none. Of the
sockets the private one is tried first: requests and the log are only there. Where it is not for this user, or the
daemon is older than a topic, the stream is asked for what there is, and the screens say what is missing.
"""

from __future__ import annotations

import json
import re
import select
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from pdd.control.client import Client
from pdd.errors import AccessDenied, ControlError, DaemonNotRunning, InvalidRequest, RefusedInState, TimedOut, UsageError
from pdd.units import format_duration

TOPICS = ("status", "transfers", "requests", "topology", "waterfall", "logs")
_KNOWN_TOPICS = ("status", "transfers", "requests", "topology", "logs")  # of daemons without a flight recorder
_PUBLIC_TOPICS = ("status", "transfers", "requests", "topology")
_OLD_TOPICS = ("status", "transfers", "requests")
_SILENCE_SECONDS = 2.0  # beyond the interval, then the connection counts as lost
_SSH_SLACK_SECONDS = 3.0  # that a network may add to it
_SSH_SECONDS = 10.0  # to connect and log in
_HOST = re.compile(r"ssh://((?:[\w.+-]+@)?(?:[\w.-]+|\[[0-9a-fA-F:]+\]))(?::(\d+))?(?:/([\w.@+-]*))?")


class Source(Protocol):
    label: str  # what the operator called the node

    def lines(self, interval: float) -> Iterator[dict[str, Any]]:
        """One stream, from its snapshot on. Raises ControlError; ends when the daemon stops."""

    def act(self, what: str, name: str) -> str:
        """Does `cancel` of a request or `drain` of the node; says in a line what came of it. Raises ControlError."""


class SocketSource:
    """A node of this machine."""

    def __init__(self, label: str, client: Client, topics: tuple[str, ...] | None = None) -> None:
        """`topics`: these and no other; None: as many as there are."""
        self.label = label
        self._client = client
        if topics is None:
            self._ways = [(True, TOPICS), (True, _KNOWN_TOPICS), (False, _PUBLIC_TOPICS), (False, _OLD_TOPICS)]
        else:
            self._ways = [(True, topics), (False, topics)]

    def lines(self, interval: float) -> Iterator[dict[str, Any]]:
        while True:
            private, topics = self._ways[0]
            url = f"/v1/events?topics={','.join(topics)}&interval={format_duration(interval)}"
            try:
                stream = self._client.stream(url, private=private, idle_timeout=interval + _SILENCE_SECONDS)
                first = next(stream)
            except StopIteration:
                return
            except ControlError as error:
                if len(self._ways) == 1 or not _may_ask_for_less(error):
                    raise
                self._ways.pop(0)
                continue
            yield first
            yield from stream
            return

    def act(self, what: str, name: str) -> str:
        if what == "cancel":
            found = self._client.delete(f"/v1/requests/{quote(name, safe='')}")
            return f"{name} is cancelled" if found["cancelled"] else f"{name} had ended before"
        self._client.post("/v1/drain")
        return f"{name} drains"


def _may_ask_for_less(error: ControlError) -> bool:
    return isinstance(error, AccessDenied) or (isinstance(error, RefusedInState) and error.id == InvalidRequest.id)


class SshSource:
    """A node of another machine: `ssh HOST pdd events` says there what a socket says here."""

    def __init__(self, url: str) -> None:
        """`url`: ssh://[USER@]HOST[:PORT][/INSTANCE]. Raises UsageError."""
        found = _HOST.fullmatch(url)
        if found is None or found[1].startswith("-"):
            raise UsageError(f'--host: "{url}" is not ssh://[USER@]HOST[:PORT][/INSTANCE]')
        host, port, instance = found[1].translate({ord("["): "", ord("]"): ""}), found[2], found[3]
        self.label = f"{host}/{instance}" if instance else host
        # BatchMode: a question for a password would wait under the full screen for ever.
        timeout = f"ConnectTimeout={_SSH_SECONDS:g}"
        self._ssh = ["ssh", "-T", "-o", "BatchMode=yes", "-o", timeout, *(["-p", port] if port else []), "--", host]
        self._pdd = ["pdd", *(["-i", instance] if instance else [])]

    def _command(self, *words: str) -> list[str]:
        return [*self._ssh, shlex.join([*self._pdd, *words])]

    def lines(self, interval: float) -> Iterator[dict[str, Any]]:
        with tempfile.TemporaryFile() as said:
            command = self._command("events", "--json", "--interval", format_duration(interval))
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said,
                                           start_new_session=True)
            except OSError as error:
                raise DaemonNotRunning(f"ssh cannot be run: {error.strerror}", hint="Install OpenSSH's client.") from None
            try:
                yield from self._read(process, interval)
                code = process.wait()
                if code != 0:
                    raise self._failed(code, _last_line(said))
            finally:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()

    def _read(self, process: subprocess.Popen[bytes], interval: float) -> Iterator[dict[str, Any]]:
        assert process.stdout is not None
        patience = _SSH_SECONDS + interval + _SILENCE_SECONDS
        rest = b""
        while True:
            ready, _, _ = select.select([process.stdout], [], [], patience)
            if not ready:
                raise TimedOut(f"{self.label}: no line within {patience:g} s", hint="The way or the daemon is stopped.")
            piece = process.stdout.read1(1 << 20)  # type: ignore[attr-defined]
            if not piece:
                return
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                patience = interval + _SILENCE_SECONDS + _SSH_SLACK_SECONDS
                yield self._parsed(line)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            parsed = json.loads(line)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict) or "type" not in parsed:
            shown = line[:60].decode(errors="replace")
            raise DaemonNotRunning(f"{self.label}: this is no event: {shown!r}", hint="Does a login script there print it?")
        return parsed

    def _failed(self, code: int, said: str) -> ControlError:
        if code == 255:
            return DaemonNotRunning(f"{self.label}: ssh failed: {said or 'no reason given'}",
                                    hint="It must work without a question: try `ssh -o BatchMode=yes` there.")
        if code == 127:
            return DaemonNotRunning(f"{self.label}: there is no pdd there: {said}", hint="Put pdd on the PATH of that account.")
        return DaemonNotRunning(f"{self.label}: {said.removeprefix('pdd: ') or f'pdd there exited {code}'}")

    def act(self, what: str, name: str) -> str:
        words = ("requests", "cancel", "--", name) if what == "cancel" else ("drain", "--no-wait")
        result = subprocess.run(self._command(*words), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                timeout=60, check=False)
        said = (result.stderr.strip() or result.stdout.strip()).rpartition("\n")[2]
        if result.returncode:
            raise self._failed(result.returncode, said)
        return said or f"{what} of {name}: done"


def _last_line(file: Any) -> str:
    file.seek(0)
    lines = file.read()[-4000:].decode(errors="replace").strip().splitlines()
    return str(lines[-1]) if lines else ""


def local_sources(directories: Sequence[Path], sockets: Sequence[Path], timeout: float) -> list[Source]:
    """Of instance directories and of single sockets, each under a name of its own."""
    found: list[Source] = []
    for path in directories:
        found.append(SocketSource(path.name, Client(path, timeout=timeout)))
    for path in sockets:
        found.append(SocketSource(path.parent.name or str(path), Client(path.parent, socket=path, timeout=timeout)))
    return found


def distinct(sources: Sequence[Source]) -> list[Source]:
    """The same, with a number behind a label that was there before."""
    seen: dict[str, int] = {}
    for source in sources:
        seen[source.label] = seen.get(source.label, 0) + 1
        if seen[source.label] > 1:
            source.label = f"{source.label}#{seen[source.label]}"
    return list(sources)
