"""`pdd top`, `pdd events` and `pdd logs` as commands: pictures and NDJSON on stdout, several nodes, recordings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdd.control import schema
from tests.control import fake_daemon
from tests.tui import streams
from tests.tui.frames import PAIR

Pdd = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    with fake_daemon.running(tmp_path / "run"), fake_daemon.running(tmp_path / "run", fake_daemon.FakeSource("p0")):
        yield tmp_path / "run"


def command(run_dir: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "pdd.cli", "--run-dir", str(run_dir), *words]


def pdd(run_dir: Path, *words: str, code: int = 0) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PDD_")}
    env |= {"COLUMNS": "120", "TZ": "UTC", "PYTHONUTF8": "1"}
    result = subprocess.run(command(run_dir, "--timeout", "30s", *words), capture_output=True, text=True, timeout=60, check=False, env=env)
    assert result.returncode == code, result.stderr
    return result.stdout if code == 0 else result.stderr


def test_top_shows_all_nodes_that_answer_or_those_that_are_named(run_dir: Path) -> None:
    for words in ((), ("-i", "d0", "-i", "p0"), ("--socket", f"{run_dir}/d0/status.sock", "-i", "p0")):
        assert "2 nodes  2 READY" in pdd(run_dir, *words, "top", "--once")
    assert "pdd top  d0 decode READY" in pdd(run_dir, "-i", "d0", "top", "--once")
    assert "1 READY 1 LOST" in pdd(run_dir, "-i", "d0", "-i", "d7", "top", "--once")
    assert "[E301]" in pdd(run_dir, "-i", "d7", "-i", "d8", "top", "--once", code=3)


def test_other_commands_want_one_node(run_dir: Path) -> None:
    assert "-i is given 2 times" in pdd(run_dir, "-i", "d0", "-i", "p0", "status", code=2)
    assert "--socket is given 2 times" in pdd(run_dir, "--socket", "a", "--socket", "b", "status", code=2)


def test_a_screen_and_a_filter_may_be_chosen(run_dir: Path) -> None:
    out = pdd(run_dir, "-i", "d0", "top", "--once", "--tab", "requests", "--filter", "state~wait")
    assert "r-1" in out
    assert "r-2" not in out
    assert "peer is silent peer=p0" in pdd(run_dir, "-i", "d0", "top", "--once", "--tab", "logs")
    assert "--tab" in pdd(run_dir, "top", "--tab", "nonsense", code=2)


def test_json_is_a_status_a_node_and_picture(run_dir: Path) -> None:
    out = [json.loads(line) for line in pdd(run_dir, "top", "--json", "--count", "2", "--interval", "250ms").splitlines()]
    assert [each["name"] for each in out] == ["d0", "p0", "d0", "p0"]
    assert {each["schema"] for each in out} == {"pdd.status/1"}


def test_a_recording_is_written_and_shown(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.ndjson.gz"
    pdd(run_dir, "top", "--once", "--record", str(path))
    nowhere = tmp_path / "nowhere"
    assert "2 nodes" in pdd(nowhere, "top", "--once", "--replay", str(path))
    assert "3 nodes  3 READY" in pdd(nowhere, "top", "--once", "--replay", str(PAIR))
    statuses = pdd(nowhere, "top", "--json", "--replay", str(PAIR)).splitlines()
    assert len(statuses) > 10
    assert "it goes with no" in pdd(nowhere, "top", "--replay", str(PAIR), "--record", "x", code=2)
    assert "cannot be read" in pdd(nowhere, "top", "--replay", str(tmp_path / "absent"), code=2)
    assert "holds no moment [E200]" in pdd(nowhere, "top", "--once", "--replay", "/dev/null", code=2)


def test_events_are_lines_that_top_can_replay(run_dir: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(command(run_dir, "-i", "d0", "events", "--interval", "100ms"), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert [json.loads(line)["type"] for line in lines] == ["snapshot", "logs"]
    path = tmp_path / "events"
    path.write_text("".join(lines))
    assert "d0 decode READY" in pdd(tmp_path, "top", "--once", "--replay", str(path))


def test_events_of_a_topic(run_dir: Path) -> None:
    process = subprocess.Popen(command(run_dir, "-i", "d0", "events", "--topic", "peers"), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert list(json.loads(process.stdout.readline())["docs"]) == ["peers"]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert "no such topic: nonsense" in pdd(run_dir, "-i", "d0", "events", "--topic", "nonsense", code=5)


def test_logs(run_dir: Path) -> None:
    out = pdd(run_dir, "-i", "d0", "logs").splitlines()
    assert out == ["2026-11-30 00:53:20.250 INFO daemon.node: loaded pages=64",
                   "2026-11-30 00:53:21.500 WARNING messenger.link: peer is silent peer=p0"]
    assert pdd(run_dir, "-i", "d0", "logs", "--level", "warning").splitlines() == out[1:]
    assert pdd(run_dir, "-i", "d0", "logs", "--grep", "pages=6").splitlines() == out[:1]
    assert pdd(run_dir, "-i", "d0", "logs", "--since", "1").splitlines() == out[1:]
    document = json.loads(pdd(run_dir, "-i", "d0", "logs", "--json", "--level", "warning"))
    assert [each["seq"] for each in document["records"]] == [2]
    assert document["schema"] == "pdd.logs/1"
    for words in (("--level", "loud"), ("--grep", "["), ("--since", "-1")):
        assert "[E200]" in pdd(run_dir, "-i", "d0", "logs", *words, code=2)


def test_logs_are_followed(tmp_path: Path) -> None:
    source = fake_daemon.FakeSource()
    with fake_daemon.running(tmp_path / "run", source):
        process = subprocess.Popen(command(tmp_path / "run", "logs", "-f", "--since", "1"), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert "peer is silent" in process.stdout.readline()
        source.records.append(schema.LogRecord(seq=3, ts=1.0, level="error", component="x", message="late", trace="T\n"))
        assert "ERROR x: late" in process.stdout.readline()
        assert process.stdout.readline() == "T\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def test_the_invented_streams_are_what_the_schema_says() -> None:
    import msgspec

    documents: Any = next(streams.lines(1, num_requests=7, num_peers=7))["docs"]
    for name, kind in (("status", schema.Status), ("requests", schema.Requests), ("transfers", schema.TransferList)):
        msgspec.convert({**documents[name], "totals": {}}, kind)
