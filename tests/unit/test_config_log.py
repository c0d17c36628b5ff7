"""Log lines in their three forms, equal lines, secrets; and sd_notify."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from pdd import log, sdnotify


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def lines(form: str, level: str = "info") -> tuple[logging.Logger, io.StringIO]:
    out = io.StringIO()
    log.setup(level, form, out)
    return logging.getLogger("pdd.messenger.peers"), out


def test_text() -> None:
    logger, out = lines("text")
    logger.warning("peer is silent", extra=log.fields(peer="p0", seconds=2))
    logger.debug("not shown")
    text = out.getvalue()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} WARNING ", text)
    assert text.endswith(" WARNING messenger.peers: peer is silent peer=p0 seconds=2\n")
    assert text.count("\n") == 1


def test_journal_priorities_on_every_line() -> None:
    logger, out = lines("journal", "debug")
    for level in ("debug", "info", "warning", "error", "critical"):
        getattr(logger, level)("x")
    assert [line[:3] for line in out.getvalue().splitlines()] == ["<7>", "<6>", "<4>", "<3>", "<2>"]
    try:
        raise ValueError("boom")
    except ValueError:
        logger.exception("failed")
    tail = out.getvalue().splitlines()[5:]
    assert len(tail) > 3
    assert all(line.startswith("<3>") for line in tail)


def test_json() -> None:
    logger, out = lines("json")
    logger.error("wörter %s", "x", extra=log.fields(peer="p0", token=SecretStr("secret")))
    record = json.loads(out.getvalue())
    assert (record["level"], record["component"], record["message"], record["peer"]) == (
        "error",
        "messenger.peers",
        "wörter x",
        "p0",
    )
    assert "secret" not in out.getvalue()


def test_auto_is_journal_only_on_the_very_stream_of_the_journal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with open(tmp_path / "out", "w+") as stream:
        info = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{info.st_dev}:{info.st_ino}")
        assert log.is_journal(stream)
        monkeypatch.setenv("JOURNAL_STREAM", f"{info.st_dev}:{info.st_ino + 1}")
        assert not log.is_journal(stream)
    assert not log.is_journal(io.StringIO())


def record(text: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("pdd.x", level, "", 0, text, (), None)


def test_equal_lines_come_once_a_second_and_are_counted() -> None:
    now = [0.0]
    equal = log.EqualLines(1.0, clock=lambda: now[0])
    passed = []
    for step in range(25):  # 2.5 s of ten lines a second
        now[0] = step / 10
        line = record("same")
        passed.append((equal.filter(line), getattr(line, "pdd_left_out", None)))
    assert [count for let, count in passed if let] == [0, 9, 9]
    assert equal.filter(record("other"))
    assert equal.filter(record("same", logging.ERROR))


def test_equal_lines_remember_a_bounded_number() -> None:
    equal = log.EqualLines(1e9, clock=lambda: 0.0)
    for number in range(10_000):
        assert equal.filter(record(str(number)))
    assert len(equal._seen) <= 1024


def test_the_count_is_in_the_text() -> None:
    logger, out = lines("text")
    filter_ = log.EqualLines(1.0, clock=iter([0.0, 0.1, 5.0]).__next__)
    logging.getLogger().handlers[0].filters[:] = [filter_]
    for _ in range(3):
        logger.info("again")
    assert out.getvalue().splitlines()[1].endswith("again (and 1 equal line)")


# -- sd_notify ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("abstract", [False, True])
def test_notify(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, abstract: bool) -> None:
    name = f"@pdd-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name[1:] if abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        assert sdnotify.notify("READY=1", "STATUS=serving")
        assert receiver.recv(100) == b"READY=1\nSTATUS=serving"


def test_notify_without_systemd_does_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not sdnotify.notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not sdnotify.notify("READY=1")


def test_a_service_manager_that_does_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setattr(sdnotify, "_PATIENCE", 0.01)
        while sdnotify.notify("WATCHDOG=1"):  # it ends when the queue is full
            continue


def test_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    assert sdnotify.watchdog_seconds() is None
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    assert sdnotify.watchdog_seconds() == 30.0
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert sdnotify.watchdog_seconds() is None
