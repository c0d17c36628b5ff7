"""What the log says of a node's readiness: a line a change, none for what tells of itself."""

from __future__ import annotations

import logging

import pytest

from pdd.daemon.readiness import Readiness

_GONE = ("no prefiller: 10.0.0.1:7700 is down",)


def test_a_line_at_each_change_and_none_between(caplog: pytest.LogCaptureFixture) -> None:
    states: list[tuple[str, tuple[str, ...]]] = [
        ("loading", ("starting",)), ("not_ready", ("no prefiller: 10.0.0.1:7700 is connecting",)), ("not_ready", _GONE),
        ("ready", ()), ("ready", ()), ("draining", ("draining",)), ("ready", ()), ("not_ready", _GONE), ("ready", ()),
    ]
    coming = iter(states)
    readiness = Readiness(lambda: next(coming), "decode", "127.0.0.1:8000")
    caplog.set_level(logging.INFO, "pdd")
    for _ in states:
        readiness.tell()
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "decode not ready: no prefiller: 10.0.0.1:7700 is connecting"),
        ("INFO", "decode ready at 127.0.0.1:8000"),
        ("WARNING", "decode not ready: no prefiller: 10.0.0.1:7700 is down"),
        ("INFO", "decode ready at 127.0.0.1:8000"),
    ]
