"""`pdd bench kv` as a user runs it: over loopback, and between two ends that find each other by TCP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("pdd.fabric._native")

from pdd.bench import run, wire
from pdd.bench.cells import Cell
from pdd.bench.node import FabricOptions
from pdd.bench.result import Report
from pdd.errors import BenchPeerLost, FabricFailure, PddError, WrongContents
from pdd.messenger.wire import pack_u32

QUICK = ("--sizes", "16KiB", "--pages", "8", "--seconds", "50ms", "--repeats", "2")
CELL = Cell(16384, 8, "scattered")


class Started:
    """One `pdd bench kv`, running."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ended(self, code: int, timeout: float = 30) -> str:
        """Its stderr; it must have ended with `code`."""
        _, err = self.process.communicate(timeout=timeout)
        assert self.process.returncode == code, err
        return err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    running: list[subprocess.Popen[str]] = []

    def begin(*words: str) -> Started:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PDD_")}
        command = [sys.executable, "-m", "pdd", "bench", "kv", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   env={**env, "HOME": str(tmp_path)}, start_new_session=True)  # fmt: skip
        running.append(process)
        return Started(process)

    yield begin
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def listening(start: Callable[..., Started], *words: str) -> tuple[Started, str]:
    """A writing end, and its address."""
    started = start("--listen", "127.0.0.1:0", *words)
    assert started.process.stderr is not None
    said, _, address = started.process.stderr.readline().strip().rpartition(" ")
    assert said == "listening on"
    return started, address


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# -- loopback ----------------------------------------------------------------------------------------------------------
def test_loopback_prints_a_table(start: Callable[..., Started]) -> None:
    started = start("--loopback", *QUICK)
    out, err = started.process.communicate(timeout=60)
    assert started.process.returncode == 0
    assert err.endswith("; two nodes of one machine exchange KV through its memory, which --provider local measures\n")
    lines = out.splitlines()
    assert lines[0].startswith("writer  tcp of libfabric ") or lines[0].startswith("writer  net of libfabric ")
    assert lines[0].endswith("line rate not known")  # lo has none
    assert lines[2].split()[:4] == ["PAGE", "PAGES", "LAYOUT", "GB/s"]
    assert [line.split()[:3] for line in lines[3:]] == [["16KiB", "8", "scattered"], ["16KiB", "8", "adjacent"]]
    assert all(line.split()[4] == "-" for line in lines[3:])


def test_json_has_exactly_the_members_and_they_agree(start: Callable[..., Started]) -> None:
    started = start("--loopback", *QUICK, "--inflight", "2", "--json")
    out, err = started.process.communicate(timeout=60)
    assert (started.process.returncode, err) == (0, "")
    document = json.loads(out)
    report = msgspec.convert(document, Report)
    assert json.loads(msgspec.json.encode(report)) == document
    assert [row.layout for row in report.rows] == ["scattered", "adjacent"]
    for row in report.rows:
        assert (row.page_bytes, row.pages, row.inflight, row.repeats, row.line_ratio) == (16384, 8, 2, 2, None)
        assert row.seconds >= 0.1
        assert row.requests >= 4
        # a pool of 16,384 pages a repeat: what was requested is verified, once
        assert row.verified_pages <= row.requests * 8
        assert row.verified_pages >= min(row.requests * 8, 16384) // 2
        assert 0 < row.p50_seconds <= row.p99_seconds
        assert 0 < row.bytes_per_second <= row.best_bytes_per_second
        assert row.pages_per_second == pytest.approx(row.bytes_per_second / 16384)
        assert row.writer_cores > 0
        assert row.reader_cores > 0
    scattered, adjacent = report.rows
    assert scattered.writes_per_second / scattered.pages_per_second > 0.2  # at most four pages share a write
    assert adjacent.writes_per_second / adjacent.pages_per_second < 0.2  # eight neighbours are one


@pytest.mark.parametrize("provider", ["tcp", "local"])
def test_wrong_bytes_are_seen(provider: str) -> None:
    with run.loopback(FabricOptions(provider=provider), [CELL], 10.0) as reader:
        assert reader.writer.nics == reader.node.nics
        reader.take(CELL)
        assert reader.measure(0.02).verified_pages > 0
        reader._checksums = reader._checksums.copy()
        reader._checksums[3] ^= 1
        with pytest.raises(WrongContents, match=r"1 of \d+ pages of 16KiB x 8 scattered are not what was sent"):
            reader.measure(0.02)
        reader._checksums[3] ^= 1
        reader.measure(0.02)


def test_pages_that_never_came_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that says "whole" over memory that nothing was written to is no success, not even in a later repeat."""
    with run.loopback(FabricOptions(), [CELL], 10.0) as reader:
        reader.take(CELL)
        reader.measure(0.02)
        clear, checksums = reader.node.clear, reader.node.checksums
        untouched: list[Any] = []

        def clear_and_look(nbytes: int) -> None:
            clear(nbytes)
            untouched[:] = [reader.node.view.copy()]

        def after_a_loss(page_bytes: int, pages: Any) -> Any:
            page = slice(int(pages[0]) * page_bytes, (int(pages[0]) + 1) * page_bytes)
            reader.node.view[page] = untouched[0][page]
            return checksums(page_bytes, pages)

        monkeypatch.setattr(reader.node, "clear", clear_and_look)
        monkeypatch.setattr(reader.node, "checksums", after_a_loss)
        with pytest.raises(WrongContents):
            reader.measure(0.02)


def test_a_writer_that_dies_is_told(start: Callable[..., Started]) -> None:
    started = start("--loopback", "--sizes", "64KiB", "--seconds", "60s")
    deadline = time.monotonic() + 20
    while not (found := children(started.process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)
    os.kill(found[0], signal.SIGKILL)
    assert "[E302]" in started.ended(3) or "[E520]" in started.ended(69)


def test_a_provider_or_nic_that_is_not_there_is_told(start: Callable[..., Started]) -> None:
    for words in (("--provider", "sockets"), ("--nics", "192.0.2.1")):
        err = start("--loopback", *QUICK, *words).ended(69)
        assert words[1] in err
        assert "[E520]" in err
        assert "Traceback" not in err


def test_interrupted_both_processes_end(start: Callable[..., Started]) -> None:
    started = start("--loopback", "--sizes", "64KiB", "--seconds", "60s")
    deadline = time.monotonic() + 20
    while not (found := children(started.process.pid)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)
    os.killpg(started.process.pid, signal.SIGINT)  # as a terminal does: both get it
    assert started.ended(130) == ""
    assert not Path(f"/proc/{found[0]}").exists()


# -- two ends ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("token", ["", "correct horse battery staple"])
def test_two_ends_find_each_other(start: Callable[..., Started], tmp_path: Path, token: str) -> None:
    words: tuple[str, ...] = ()
    if token:
        (tmp_path / "token").write_text(token + "\n")
        words = ("--token-file", str(tmp_path / "token"))
    writer, address = listening(start, *words)
    reader = start("--peer", address, *QUICK, *words, "--json")
    out, err = reader.process.communicate(timeout=60)
    assert (reader.process.returncode, err) == (0, "")
    assert len(json.loads(out)["rows"]) == 2
    assert "writing for 127.0.0.1:" in writer.ended(0)


def test_without_the_token_nobody_is_served_and_the_next_one_is(start: Callable[..., Started], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("correct horse battery staple\n")
    (tmp_path / "other").write_text("another\n")
    writer, address = listening(start, "--token-file", str(tmp_path / "token"))
    assert "requires a shared token" in start("--peer", address, *QUICK).ended(4)
    assert "does not hold the same token" in start("--peer", address, *QUICK, "--token-file", str(tmp_path / "other")).ended(3)
    assert start("--peer", address, *QUICK, "--token-file", str(tmp_path / "token")).ended(0) == ""
    assert writer.ended(0).count("turned away") == 2


def test_off_loopback_a_token_is_required(start: Callable[..., Started]) -> None:
    for words in (("--listen", "0.0.0.0:0"), ("--peer", "192.0.2.1:7000")):
        assert "is not loopback: both ends must prove a shared token [E200]" in start(*words).ended(2)


def test_an_interrupt_at_either_end_ends_both(start: Callable[..., Started]) -> None:
    for interrupted in ("writer", "reader"):
        writer, address = listening(start)
        reader = start("--peer", address, "--sizes", "64KiB", "--seconds", "60s")
        assert writer.process.stderr is not None
        assert writer.process.stderr.readline().startswith("writing for")
        time.sleep(1.5)
        first, other = (writer, reader) if interrupted == "writer" else (reader, writer)
        first.process.send_signal(signal.SIGINT)
        assert first.ended(130) == ""
        assert "it was interrupted [E302]" in other.ended(3)


def test_nobody_there_is_told_both_ways(start: Callable[..., Started]) -> None:
    writer, address = listening(start, "--timeout", "300ms")
    assert "nobody came to" in writer.ended(3)
    err = start("--peer", address, *QUICK).ended(3)
    assert f"{address} does not answer" in err
    assert "pdd bench kv --listen" in err


def test_an_address_in_use_is_told(start: Callable[..., Started]) -> None:
    _, address = listening(start)
    assert "[E731]" in start("--listen", address).ended(73)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "one of --loopback, --listen and --peer"),
        (("--loopback", "--peer", "127.0.0.1:1"), "one of --loopback, --listen and --peer"),
        (("--listen", "127.0.0.1:0", "--sizes", "4KiB"), "--sizes belongs to the end that measures"),
        (("--peer", "127.0.0.1"), "--peer"),
        (("--loopback", "--layout", "diagonal"), "--layout"),
        (("--loopback", "--seconds", "soon"), "--seconds"),
    ],
)
def test_a_wrong_command_line_is_one_line(start: Callable[..., Started], words: tuple[str, ...], why: str) -> None:
    err = start(*words).ended(2)
    assert why in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("target", "slot", "kind", "why"),
    [
        (CELL.pool_bytes // CELL.page_bytes, 0, FabricFailure, "outside remote region"),
        (0, 1, BenchPeerLost, "its pool of 1 does not hold"),
    ],
)
def test_what_a_writer_is_told_is_checked(target: int, slot: int, kind: type[PddError], why: str) -> None:
    """A reader that names a page or a request beyond its pool hears of it; nothing is written there."""

    def ask() -> None:
        with run.loopback(FabricOptions(), [CELL], 5.0) as reader:
            reader._channel.send(wire.Cell(CELL.page_bytes, 1, pack_u32([0]), pack_u32([target])))
            reader._channel.expect(wire.Filled)
            reader._channel.send(wire.Ask((slot,), (reader.node.fabric.imm_allocate(reader.node.endpoint),)))
            reader._channel.receive()

    with pytest.raises(kind, match=why):
        ask()
