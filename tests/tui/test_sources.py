"""Where streams come from: sockets and their permissions, another machine over a fake ssh, recordings."""

from __future__ import annotations

import gzip
import json
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdd.commands import documents
from pdd.control.client import Client
from pdd.errors import AccessDenied, ControlError, DaemonNotRunning, TimedOut, UsageError
from pdd.tui import feed, recording, sources
from pdd.tui.feed import Inbox, News
from tests.control import fake_daemon
from tests.tui import streams
from tests.tui.frames import PAIR

ROOT = Path(__file__).parents[2]


# -- sockets -----------------------------------------------------------------------------------------------------------
def test_the_private_socket_is_asked_first_then_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_daemon.running(tmp_path / "run") as daemon:
        def first() -> dict[str, Any]:
            lines = sources.SocketSource("d0", Client(daemon.directory)).lines(0.1)
            found = next(lines)
            lines.close()  # type: ignore[attr-defined]
            return found

        assert first()["docs"]["requests"]["requests"]
        asked = Client.stream
        def denied(self: Client, path: str, *, private: bool = False, idle_timeout: float | None = None) -> Any:
            if private:
                raise AccessDenied("not allowed to use control.sock")
            return asked(self, path, private=private, idle_timeout=idle_timeout)

        monkeypatch.setattr(Client, "stream", denied)
        document = first()["docs"]
        assert document["requests"]["requests"] is None
        assert document["topology"]["host"] == "fake"


def test_an_older_daemon_is_asked_for_what_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Client.stream

    def older(self: Client, path: str, *, private: bool = False, idle_timeout: float | None = None) -> Any:
        return asked(self, path.replace("topology", "nonsense"), private=private, idle_timeout=idle_timeout)

    with fake_daemon.running(tmp_path / "run") as daemon:
        monkeypatch.setattr(Client, "stream", older)
        lines = sources.SocketSource("d0", Client(daemon.directory)).lines(0.1)
        assert set(next(lines)["docs"]) == {"status", "transfers", "requests"}
        lines.close()  # type: ignore[attr-defined]


def test_admin_acts_on_the_node(tmp_path: Path) -> None:
    with fake_daemon.running(tmp_path / "run") as daemon:
        source = sources.SocketSource("d0", Client(daemon.directory))
        assert source.act("cancel", "r-1") == "r-1 is cancelled"
        assert source.act("cancel", "r-1") == "r-1 had ended before"
        source.act("drain", "d0")
        assert daemon.source.state == "drained"


def test_labels_are_distinct(tmp_path: Path) -> None:
    found = sources.local_sources([tmp_path / "a"], [tmp_path / "a" / "control.sock", tmp_path / "b" / "status.sock"], 1.0)
    assert [source.label for source in sources.distinct(found)] == ["a", "a#2", "b"]


# -- ssh ---------------------------------------------------------------------------------------------------------------
SSH = """#!/bin/sh
printf '%s\\n' "$@" > {log}
while [ "$1" != -- ]; do shift; done
shift; host=$1; shift
case $host in
  nokey) echo "alice@nokey: Permission denied (publickey)." >&2; exit 255;;
  chatty) echo "Welcome to chatty!"; exec sleep 60;;
  silent) exec sleep 60;;
esac
exec sh -c "$*"
"""
PDD = """#!/bin/sh
exec {python} -m pdd.cli --run-dir {run} "$@"
"""


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine behind a fake ssh, on the PATH of this test: its pdd finds the nodes of tmp_path/run."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("ssh", SSH), ("pdd", PDD)):
        path = programs / name
        path.write_text(text.format(log=tmp_path / "ssh.log", python=sys.executable, run=tmp_path / "run"))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def test_a_node_over_ssh_says_what_its_socket_says(far: Path) -> None:
    with fake_daemon.running(far / "run") as daemon:
        source = sources.SshSource("ssh://alice@far.example:2222/d0")
        assert source.label == "alice@far.example/d0"
        lines = source.lines(0.25)
        first, second = next(lines), next(lines)
        assert first["docs"]["status"]["name"] == "d0"
        assert second["type"] == "logs"
        words = (far / "ssh.log").read_text().splitlines()
        assert words[-2:] == ["alice@far.example", "pdd -i d0 events --json --interval 250ms"]
        assert words[words.index("-p") : words.index("-p") + 2] == ["-p", "2222"]
        assert "BatchMode=yes" in words
        lines.close()  # type: ignore[attr-defined]
        assert "cancelled" in source.act("cancel", "r-1")
        assert daemon.source.ended == {"r-1"}


@pytest.mark.parametrize(
    ("url", "kind", "said"),
    [
        ("ssh://nokey", DaemonNotRunning, "nokey: ssh failed: alice@nokey: Permission denied (publickey)."),
        ("ssh://chatty", DaemonNotRunning, "chatty: this is no event: 'Welcome to chatty!'"),
        ("ssh://silent", TimedOut, "silent: no line within"),
        ("ssh://far/d9", DaemonNotRunning, "no daemon at"),
    ],
)
def test_what_goes_wrong_over_ssh_is_said(
    far: Path, url: str, kind: type[ControlError], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_SSH_SECONDS", 0.2 if "silent" in url else 20.0)
    monkeypatch.setattr(sources, "_SILENCE_SECONDS", 0.2)
    with pytest.raises(kind) as caught:
        next(sources.SshSource(url).lines(0.25))
    assert said in caught.value.message


@pytest.mark.parametrize("url", ["http://x", "ssh://", "ssh://-oProxyCommand=x", "ssh://a b", "ssh://h/x;y", "far", "ssh://h:port"])
def test_a_host_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--host"):
        sources.SshSource(url)


# -- feeds -------------------------------------------------------------------------------------------------------------
def heard(inbox: Inbox, wanted: Callable[[News], bool], seconds: float = 20.0) -> News:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for news in inbox.wait(0.2):
            if wanted(news):
                return news
    raise AssertionError("it did not come")


def test_a_feed_follows_a_daemon_through_its_lives(tmp_path: Path) -> None:
    inbox = Inbox()
    first = fake_daemon.Running(tmp_path / "run", fake_daemon.FakeSource())
    first.start()
    [follower] = feed.start([sources.SocketSource("d0", Client(tmp_path / "run" / "d0"))], 0.1, inbox)
    heard(inbox, lambda news: news.line is not None and news.line["type"] == "snapshot")
    first.stop()
    assert heard(inbox, lambda news: news.error is not None).error is not None
    with fake_daemon.running(tmp_path / "run"):
        heard(inbox, lambda news: news.line is not None and news.line["type"] == "snapshot")
        follower.interval = 0.3  # asks anew
        heard(inbox, lambda news: news.line is not None and news.line["type"] == "snapshot")
        follower.stop()
        follower.join(10)
        assert not follower.is_alive()


# -- recordings --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["r.ndjson", "r.ndjson.gz"])
def test_what_was_recorded_is_played(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    recorder = recording.Recorder(path, ["d0", "d1"])
    lines = list(streams.lines(3))
    for line in lines:
        recorder.add(News("d0", line))
    recorder.add(News("d1", error=DaemonNotRunning("it went away")))
    cut = path.read_bytes()  # as it is when the program is killed here
    recorder.close()
    if name.endswith(".gz"):
        assert gzip.decompress(path.read_bytes()).startswith(b'{"schema":"pdd.recording/1"')
    else:
        first, *others = map(json.loads, path.read_text().splitlines())
        msgspec.convert(first, documents.Recording)
        assert [msgspec.convert(other, documents.Recorded).node for other in others][-1] == "d1"
    for content in (path.read_bytes(), cut, cut[:-20]):
        path.write_bytes(content)
        moments = list(recording.read(path))
        assert [moment.line for moment in moments][:4] == json.loads(json.dumps(lines[:4]))
    path.write_bytes(cut)
    assert list(recording.read(path))[-1].lost == "it went away"
    assert recording.labels(path) == ["d0", "d1"]
    with pytest.raises(UsageError, match="is there already"):
        recording.Recorder(path, [])


def test_what_pdd_events_printed_is_played(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text("".join(json.dumps(line) + "\n" for line in streams.lines(3, with_logs=False)))
    assert [moment.at for moment in recording.read(path)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("content", ["[1]\n", "nonsense\n{}\n", '{"schema":"pdd.status/1"}\n'])
def test_what_is_no_recording_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r"
    path.write_text(content)
    with pytest.raises(UsageError, match="--replay"):
        list(recording.read(path))
    with pytest.raises(UsageError, match="cannot be read"):
        list(recording.read(tmp_path / "absent"))


def test_a_player_keeps_the_time_stops_and_goes_on() -> None:
    inbox = Inbox()
    waited: list[float] = []
    player = recording.Player(PAIR, inbox, speed=10.0, wait=waited.append)
    player.run()
    moments = list(recording.read(PAIR))
    assert len(inbox.take()) == len(moments)
    assert sum(waited) * 10 == pytest.approx(moments[-1].at)
    assert player.ended
    stopped = recording.Player(PAIR, inbox, wait=lambda seconds: stopped.stop())
    stopped.run()
    assert not stopped.ended
