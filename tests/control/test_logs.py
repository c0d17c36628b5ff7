"""The ring of log records, and how the private socket and the event stream hand it out."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from pydantic import SecretStr

from pdd import log, log_ring
from pdd.control import schema
from pdd.control.client import Client
from pdd.errors import RefusedInState
from tests.control import fake_daemon


@pytest.fixture
def logger() -> Iterator[tuple[logging.Logger, log_ring.Ring]]:
    ring = log_ring.Ring(kept=5)
    made = logging.Logger("pdd.messenger.link")
    made.addHandler(ring)
    yield made, ring
    ring.close()


def test_the_ring_keeps_the_last_and_says_how_many_were_missed(logger: tuple[logging.Logger, log_ring.Ring]) -> None:
    write, ring = logger
    for number in range(12):
        write.info("line %d", number, extra=log.fields(number=number))
    kept, missed = ring.since(0)
    assert [each.seq for each in kept] == [8, 9, 10, 11, 12]
    assert [each.fields["number"] for each in kept] == [7, 8, 9, 10, 11]
    assert missed == 7  # of twelve, five are kept
    assert (kept[0].component, kept[0].level, kept[0].message) == ("messenger.link", "info", "line 7")
    assert [each.seq for each in ring.since(10)[0]] == [11, 12]
    assert ring.since(12) == ((), 0)
    assert len(ring.since(999)[0]) == 5  # a number of another life of the daemon


def test_equal_lines_are_kept_once_and_text_is_bounded(logger: tuple[logging.Logger, log_ring.Ring]) -> None:
    write, ring = logger
    for _ in range(3):
        write.info("again")
    write.info("x" * 100_000, extra=log.fields(long="y" * 100_000))
    kept, _ = ring.since(0)
    assert kept[0].message == "again"
    assert len(kept) == 2
    assert len(kept[1].message) == len(str(kept[1].fields["long"])) == log_ring.MAX_TEXT


def test_secrets_are_stars_in_messages_and_fields(logger: tuple[logging.Logger, log_ring.Ring]) -> None:
    write, ring = logger
    secret = SecretStr("hunter2")
    write.warning("token %s", secret, extra=log.fields(token=secret, both=[secret, 1]))
    try:
        held = secret  # a trace shows lines of code, never values
        raise ValueError(f"bad token {held}")
    except ValueError:
        write.exception("it failed")
    kept, _ = ring.since(0)
    assert "hunter2" not in repr(kept)
    assert kept[0].message == "token **********"
    assert kept[1].trace
    assert "ValueError" in kept[1].trace


def test_the_ring_is_found_and_set_up_anew_without_doubling(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        log.setup()
        assert log_ring.attached() is None
        ring = log_ring.attach()
        assert log_ring.attached() is ring
        logging.getLogger("pdd.x").info("hello")
        assert [each.message for each in ring.since(0)[0]] == ["hello"]
        log.setup()
        assert log_ring.attached() is None
    finally:
        root.handlers[:] = before
        root.setLevel(level)


def test_logs_are_on_the_private_socket_only(daemon: fake_daemon.Running) -> None:
    client = Client(daemon.directory)
    document = client.get("/v1/logs", private=True)
    assert document["schema"] == "pdd.logs/1"
    assert [each["message"] for each in document["records"]] == ["loaded", "peer is silent"]
    assert [each["seq"] for each in client.get("/v1/logs?since=1", private=True)["records"]] == [2]
    for wrong in ("-1", "x", "%D9%A3", "9" * 30):
        with pytest.raises(RefusedInState, match="since"):
            client.get(f"/v1/logs?since={wrong}", private=True)
    with pytest.raises(RefusedInState):
        client.get("/v1/logs")
    with pytest.raises(RefusedInState, match="no such topic: logs"):
        next(client.stream("/v1/events?topics=logs"))


def test_records_come_in_the_event_stream_each_once(daemon: fake_daemon.Running) -> None:
    lines = Client(daemon.directory).stream("/v1/events?topics=status,logs&interval=100ms&since=1", private=True, idle_timeout=10)
    first, second = next(lines), next(lines)
    assert first["type"] == "snapshot"
    assert list(first["docs"]) == ["status"]
    assert (second["type"], [each["seq"] for each in second["records"]]) == ("logs", [2])
    daemon.source.records.append(schema.LogRecord(seq=3, ts=1.0, level="error", component="x", message="late"))
    third = next(line for line in lines if line["type"] == "logs")
    assert [each["message"] for each in third["records"]] == ["late"]
    assert third["missed"] == 0
    lines.close()


def test_the_topology_is_a_topic_of_both_sockets(daemon: fake_daemon.Running) -> None:
    for private in (False, True):
        lines = Client(daemon.directory).stream("/v1/events?topics=topology", private=private, idle_timeout=10)
        assert next(lines)["docs"]["topology"]["host"] == "fake"
        lines.close()
