"""Recordings of event streams: NDJSON, compressed when the file's name ends in .gz.

    {"schema":"pdd.recording/1","started_at":1796000000.0,"nodes":["d0","p0"]}
    {"at":0.012,"node":"d0","line":{"type":"snapshot",…}}        a line of /v1/events, seconds after the start
    {"at":7.5,"node":"d0","lost":"the daemon … went away"}

Each line is written whole and flushed, so that a recording that was cut off can be played up to there. What
`pdd events` prints is played too. Recordings hold what the screens show: names, ids, log records; never prompts.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from pdd.errors import DaemonNotRunning, UsageError
from pdd.tui.feed import Inbox, News

_MOST_PAUSE_SECONDS = 30.0  # of a player: longer silence is cut


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    at: float  # seconds after the start
    label: str
    line: dict[str, Any] | None
    lost: str = ""

    @property
    def news(self) -> News:
        return News(self.label, self.line, DaemonNotRunning(self.lost) if self.line is None else None)


class Recorder:
    """Writes a new file. Owner: the one who takes the news."""

    def __init__(self, path: Path, labels: list[str]) -> None:
        try:
            raw = path.open("xb")
        except FileExistsError:
            raise UsageError(f"--record: {path} is there already", hint="Choose another name.") from None
        except OSError as error:
            raise UsageError(f"--record: {path} cannot be written: {error.strerror}") from None
        self._file: Any = gzip.GzipFile(fileobj=raw, mode="wb") if path.suffix == ".gz" else raw
        self._raw = raw
        self._began = time.monotonic()
        self._write({"schema": "pdd.recording/1", "started_at": time.time(), "nodes": labels})

    def add(self, news: News) -> None:
        said = {"line": news.line} if news.error is None else {"lost": news.error.message}
        self._write({"at": round(time.monotonic() - self._began, 4), "node": news.label, **said})

    def _write(self, document: dict[str, Any]) -> None:
        self._file.write(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        self._raw.flush()

    def close(self) -> None:
        self._file.close()
        self._raw.close()


def read(path: Path) -> Iterator[Moment]:
    """The moments of a recording, or of what `pdd events` printed. A line that was cut off at the end is left out.

    Raises:
        UsageError: it cannot be read, or holds something else.
    """
    first_ts: float | None = None
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            for number, text in enumerate(_lines(raw, packed), 1):
                try:
                    document = json.loads(text)
                except ValueError:
                    if text.endswith(b"\n"):
                        raise UsageError(f"--replay: {path}:{number} is not JSON") from None
                    return
                if not isinstance(document, dict):
                    raise UsageError(f"--replay: {path}:{number} is no event")
                if "type" in document:
                    first_ts = document.get("ts", 0.0) if first_ts is None else first_ts
                    yield Moment(document.get("ts", 0.0) - first_ts, "", document)
                elif "node" in document and ("line" in document or "lost" in document):
                    yield Moment(document["at"], document["node"], document.get("line"), document.get("lost", ""))
                elif document.get("schema") != "pdd.recording/1":
                    raise UsageError(f"--replay: {path}:{number} is no event of a recording",
                                     hint="`pdd top --record` and `pdd events` write what can be played.")
    except (OSError, zlib.error) as error:
        raise UsageError(f"--replay: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _lines(file: IO[bytes], packed: bool) -> Iterator[bytes]:
    """Also of what was cut off, up to there; only the last line may have no newline."""
    unpacker = zlib.decompressobj(wbits=31)
    rest = b""
    while piece := file.read(1 << 16):
        rest += unpacker.decompress(piece) if packed else piece
        *whole, rest = rest.split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest


def labels(path: Path) -> list[str]:
    """Of the nodes in it, in the order of their first line."""
    return list(dict.fromkeys(moment.label for moment in read(path)))


class Player(threading.Thread):
    """Puts the moments of a recording into an inbox, each at its time; stops at the end.

    `speed` and `paused` may be set at any time.
    """

    def __init__(self, path: Path, inbox: Inbox, speed: float = 1.0, wait: Callable[[float], None] = time.sleep) -> None:
        super().__init__(name="pdd-top-replay", daemon=True)
        self.speed = speed
        self.paused = False
        self.at = 0.0  # seconds that were played
        self.ended = False
        self._path = path
        self._inbox = inbox
        self._wait = wait
        self._halt = threading.Event()

    def stop(self) -> None:
        self._halt.set()

    def run(self) -> None:
        for moment in read(self._path):
            left = min(moment.at - self.at, _MOST_PAUSE_SECONDS)
            while (left > 0 or self.paused) and not self._halt.is_set():
                step = min(left / self.speed, 0.1) if not self.paused else 0.1
                self._wait(step)
                left -= 0.0 if self.paused else step * self.speed
            if self._halt.is_set():
                return
            self.at = moment.at
            self._inbox.put(moment.news)
        self.ended = True
