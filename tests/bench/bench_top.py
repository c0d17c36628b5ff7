"""What `pdd top` costs: the share of a core at 128 rows and 1 Hz on every screen, memory over an hour, the time to start.

The soak runs the real program on a pseudo terminal against a daemon in another process; its CPU time comes from /proc. The
hour is 3,600 seconds of events taken in and drawn as fast as they can be; memory at its end against after its first tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import pathlib
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from tests.bench.common import arguments, cpu_seconds, report, resident_bytes
from tests.tui import streams

ROOT = pathlib.Path(__file__).resolve().parents[2]


# -- the daemon --------------------------------------------------------------------------------------------------------
async def serve(run_dir: str, num_rows: int) -> None:
    """A daemon of which every row changes every second."""
    import msgspec

    from pdd.control import schema
    from pdd.control.server import ControlServer
    from pdd.control.sockets import ControlSockets
    from tests.control.fake_daemon import FakeSource

    began = time.monotonic()
    machine = streams.topology()

    class Busy(FakeSource):
        def _second(self) -> int:
            return int(time.monotonic() - began)

        def status(self) -> schema.Status:
            return msgspec.convert(streams.status(self._second(), "d0", num_rows), schema.Status)

        def requests(self) -> schema.Requests:
            return msgspec.convert(streams.requests(self._second(), num_rows), schema.Requests)

        def transfers(self) -> schema.TransferList:
            return msgspec.convert({**streams.transfers(self._second(), num_rows), "totals": {}}, schema.TransferList)

        def topology(self) -> dict[str, Any]:
            return machine

        def logs(self, since: int) -> schema.Logs:
            told = [record for second in range(self._second() + 1) for record in streams.records(second, "d0")]
            records = [msgspec.convert(record, schema.LogRecord) for record in told if record["seq"] > since]
            return schema.Logs(boot_id="boot-1", records=tuple(records))

    server = ControlServer(Busy("d0"), ControlSockets.bind(pathlib.Path(run_dir), "d0"))
    await server.start()
    print("up", flush=True)
    await asyncio.Event().wait()


# -- the program -------------------------------------------------------------------------------------------------------
class Program:
    """`pdd top` on a pseudo terminal of 200x60."""

    def __init__(self, run_dir: str, tab: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 200, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color", "PYTHONUTF8": "1", "PYTHONPATH": str(ROOT)}
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdd", "--run-dir", run_dir, "-i", "d0", "top", "--tab", tab], stdin=slave, stdout=slave,
            stderr=slave, env=env, start_new_session=True,
        )
        os.close(slave)
        self.written = 0

    def read(self, seconds: float, until: bytes = b"") -> bool:
        deadline, seen = time.monotonic() + seconds, b""
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self.master], [], [], left)[0]:
                piece = os.read(self.master, 1 << 16)
                self.written += len(piece)
                seen = (seen + piece)[-4096:]
                if until and until in seen:
                    return True
        return False

    def close(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self.master)


def soak(run_dir: str, tab: str, seconds: float) -> dict[str, Any]:
    program = Program(run_dir, tab)
    try:
        if not program.read(60, until=b"READY"):
            raise RuntimeError("pdd top shows nothing")
        started = time.monotonic() - program.began
        program.read(5)  # imports, first pictures
        cpu, begin, written = cpu_seconds(program.process.pid), time.monotonic(), program.written
        program.read(seconds)
        spent = (cpu_seconds(program.process.pid) - cpu) / (time.monotonic() - begin)
        bytes_per_second = (program.written - written) / (time.monotonic() - begin)
    finally:
        program.close()
    return {"what": tab, "cpu_share": spent, "terminal_kb_per_second": bytes_per_second / 1e3, "first_picture_s": started}


# -- an hour -----------------------------------------------------------------------------------------------------------
async def hour(num_rows: int, seconds: int) -> dict[str, Any]:
    from pdd.tui.app import PddTop
    from pdd.tui.feed import Inbox, News
    from pdd.tui.session import Session

    inbox = Inbox()
    app = PddTop(Session([""]), inbox)
    after_a_tenth = 0
    async with app.run_test(size=(200, 60)) as pilot:
        for second, line in enumerate(streams.lines(seconds, num_requests=num_rows, num_peers=num_rows)):
            inbox.put(News("", json.loads(json.dumps(line))))
            await asyncio.sleep(0)
            if second % (seconds // 20) == 0:
                await pilot.press(str(second % 5 + 1))
            if second == seconds // 5:  # two lines a second
                after_a_tenth = resident_bytes()
        at_the_end = resident_bytes()
    return {"what": f"{seconds} s of events", "mb_after_a_tenth": after_a_tenth / 1e6, "mb_at_the_end": at_the_end / 1e6,
            "growth": at_the_end / after_a_tenth}


def main() -> int:
    parser = arguments(__doc__ or "", model=False)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each screen")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--hour", type=int, default=3600, help="seconds of events")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.serve, args.rows))
        return 0
    rows: list[dict[str, Any]] = []
    bounds: list[tuple[str, float, str, float]] = []
    with tempfile.TemporaryDirectory(prefix="pdd-bench-") as run_dir:
        daemon = subprocess.Popen([sys.executable, __file__, "--serve", run_dir, "--rows", str(args.rows)], stdout=subprocess.PIPE)
        try:
            assert daemon.stdout is not None
            daemon.stdout.readline()
            for tab in ("overview", "transfers", "requests", "topology", "logs"):
                rows.append(soak(run_dir, tab, args.seconds))
                bounds.append((f"{tab}, share of a core", rows[-1]["cpu_share"], "<=", 0.10))
        finally:
            daemon.kill()
            daemon.wait()
    rows.append(asyncio.run(hour(args.rows, args.hour)))
    bounds.append(("memory at the end of an hour of that after six minutes", rows[-1]["growth"], "<=", 1.1))
    return report("top", rows, bounds, args.json)


if __name__ == "__main__":
    sys.exit(main())
