"""The last log lines of a process, kept for whoever asks over the control socket.

A ring of bounded memory beside the lines on stderr: at most `KEPT` records, each cut to `MAX_TEXT` characters of
message and of trace. Every record has a number, so that a reader asks for what came after the last one it saw and is
told how many it missed. Facts are kept as JSON values; whatever else they are is kept as its text, so a SecretStr is
stars here too. It does not write anything.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import traceback
from typing import Any

from pdd import log

KEPT = 2000
MAX_TEXT = 4000
_PLAIN = (str, int, float, bool, type(None))


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """One record."""

    seq: int  # 1, 2, 3, ... in the life of the process
    ts: float  # seconds since 1970
    level: str  # debug, info, warning, error, critical
    component: str
    message: str
    fields: dict[str, str | int | float | bool | None]
    trace: str | None = None


class Ring(logging.Handler):
    """Any thread logs into it, any thread reads."""

    def __init__(self, kept: int = KEPT) -> None:
        super().__init__()
        self.addFilter(log.EqualLines())
        self._records: collections.deque[Kept] = collections.deque(maxlen=kept)
        self._last = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._last += 1
            self._records.append(_kept(self._last, record))
        except Exception:
            self.handleError(record)

    def since(self, seq: int) -> tuple[tuple[Kept, ...], int]:
        """The records after number `seq`, the oldest first, and how many of those are not kept any more.

        A number that was not given out yet (of another life of the process) counts as 0.
        """
        self.acquire()
        try:
            if seq > self._last:
                seq = 0
            wanted = self._last - max(seq, 0)
            first = max(len(self._records) - wanted, 0)
            found = tuple(itertools.islice(self._records, first, None))
            return found, wanted - len(found)
        finally:
            self.release()


def attach() -> Ring:
    """Puts a ring beside the handlers of the root logger; after `log.setup`, which removes it again."""
    ring = Ring()
    logging.getLogger().addHandler(ring)
    return ring


def attached() -> Ring | None:
    """The ring of this process, if it has one."""
    return next((each for each in logging.getLogger().handlers if isinstance(each, Ring)), None)


def _kept(seq: int, record: logging.LogRecord) -> Kept:
    trace = None
    if record.exc_info and record.exc_info[0] is not None:
        trace = "".join(traceback.format_exception(*record.exc_info))[-MAX_TEXT:]
    return Kept(
        seq=seq, ts=record.created, level=record.levelname.lower(), component=log.component(record),
        message=log.message(record)[:MAX_TEXT], fields={name: _value(v) for name, v in log.facts(record).items()},
        trace=trace,
    )


def _value(value: Any) -> str | int | float | bool | None:
    return value if isinstance(value, _PLAIN) and not isinstance(value, str) else str(value)[:MAX_TEXT]
