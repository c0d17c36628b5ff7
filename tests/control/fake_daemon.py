"""A daemon that serves canned documents on real control sockets:

`python fake_daemon.py RUN_DIR NAME`, or in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pdd import config_load, config_sources
from pdd.config_load import ConfigProblems
from pdd.control import schema, schema_check, stories
from pdd.control.server import ControlServer
from pdd.control.sockets import ControlSockets
from pdd.errors import NoSuchPeer, NoSuchRequest, RefusedInState

PEER = schema.Peer(
    name="p0", role="prefill", state="up", epoch="00000000000000ab", via="tcp", address="127.0.0.1:7700",
    load=schema.PeerLoad(queued_tokens=512, running=1, free_pages=40), rtt_seconds=0.0009,
)


class FakeSource:
    """Counts what it is asked; `state`, `writes` and `live` are set by tests."""

    def __init__(self, name: str = "d0") -> None:
        self.name = name
        self.state = "ready"
        self.writes = 100
        self.live = {"r-1": "wait_kv", "r-2": "running"}
        self.ended: set[str] = set()
        self.drained_with: list[float | None] = []
        self.refuse_drain = False
        self.wrong_config = False
        self.uptime = 12.0
        self.records = [
            schema.LogRecord(seq=1, ts=1796000000.25, level="info", component="daemon.node", message="loaded", fields={"pages": 64}),
            schema.LogRecord(seq=2, ts=1796000001.5, level="warning", component="messenger.link", message="peer is silent",
                             fields={"peer": "p0"}),
        ]
        self.phase: str | None = "load"
        self.progress: float | None = 0.42
        self.drain_seconds_left: float | None = None
        self.fences = schema.Fences()
        self.groups: tuple[schema.EngineGroup, ...] = ()
        self.group_of: dict[str, int] = {}  # request → group

    def version(self) -> schema.Version:
        return schema.Version(daemon="0.1.0", name=self.name, boot_id="boot-1", protocol="1", libfabric="2.5 (/lib/x)", torch="2.9")

    def status(self) -> schema.Status:
        return schema.Status(
            name=self.name, role="decode", state=self.state, epoch=schema.epoch_text(0xE), boot_id="boot-1",
            version="0.1.0", model="tiny", uptime_seconds=self.uptime, running=1, waiting=2,
            waiting_for_kv=1, batch_size=1, max_batch_size=64,
            phase=self.phase, progress=self.progress, drain_seconds_left=self.drain_seconds_left,
            reasons=() if self.state == "ready" else (f"it is {self.state}",),
            pages=schema.Pages(total=64, free=50, reserved=10, running=4),
            fences=self.fences, transfers=schema.Transfers(writes=self.writes, bytes=self.writes * 4096, units=self.writes),
            peers=(PEER,), fabric=schema.FabricInfo(provider="tcp", library_version="2.5"), groups=self.groups,
        )

    def requests(self) -> schema.Requests:
        rows = tuple(
            schema.Request(id=request_id, state=state, age_seconds=3.1, peer="p0", prompt_tokens=900, output_tokens=4,
                           pages=schema.PageNeed(have=44, need=57), why="13 pages from p0", group=self.group_of.get(request_id))
            for request_id, state in self.live.items()
        )
        return schema.Requests(counts={"wait_kv": 1, "running": 1}, requests=rows)

    def request(self, wanted: str) -> schema.Request:
        row = next((row for row in self.requests().requests or () if row.id == wanted), None)
        if row is None:
            raise NoSuchRequest(f"no request {wanted}", hint="`pdd requests` lists them.")
        moved = schema.RequestTransfer(pages=57, units=228, writes=1, bytes=930_000, via="tcp")
        more = {"prefill_seconds": 0.12034567891234, "hidden_ratio": 0.9412345, "prompt": (1, 2, 3), "transfer": moved}
        return msgspec.structs.replace(row, **more)

    async def explain(self, wanted: str) -> stories.Explain:
        row = self.request(wanted)
        lack = stories.ExplainLack(what="in flight", chunk=0, first_layer=3, last_layer=4, from_rank=0, to_rank=1,
                                  nic="10.0.0.1", units=2, seconds=1.5)
        push = stories.ExplainPush(state="pushing", state_seconds=2.0, queue_seconds=0.001, tokens=899, computed_tokens=512,
                                  units=228, ok_units=120, chunks=2, lacks=(lack,))
        attempt = stories.ExplainAttempt(
            attempt=7, peer="p0", key=18, state="requested", state_seconds=3.0, expected_units=228, arrived_units=118,
            first_unit_at_seconds=0.2, last_unit_at_seconds=0.9, last_unit_seconds=2.2, push=push,
            arrivals=(stories.ExplainMark(units=16, at_seconds=0.3),),
        )
        step = stories.ExplainStep(at_seconds=0.0012, kind="attempt", of="r-1/7", before="armed", state="requested", why="p0",
                                  peer="p0", attempt=7, key=18, units=0)
        return stories.Explain(
            id=row.id, node=self.name, role="decode", kind="generate", state=row.state, over=False,
            verdict="waits for KV from p0", age_seconds=row.age_seconds, prompt_tokens=900, tries=1,
            client_request_id="mail-from-alice", ttft=stories.ExplainTtft(queue_seconds=0.0011, reserve_seconds=0.0002),
            attempts=(attempt,), steps=(step,),
            pages=(stories.ExplainPages(holder="request", state="wait_kv", pages=57, seconds=3.0),),
        )

    def waterfall(self) -> schema.Waterfall:
        return schema.Waterfall(id="")

    async def flight(self) -> stories.Flight:
        change = stories.FlightChange(at=1.5, kind="attempt", of="r-1/7", before="armed", state="requested", why="p0")
        stack = schema.ThreadStack(name="MainThread", frames=("/pdd/daemon/main.py:1 run",))
        return stories.Flight(
            name=self.name, role="decode", boot_id="boot-1", version="0.1.0", why="it was asked for", ts=1796000000.0,
            ts_mono=12.0, changes=(change,), stacks=schema.Stacks(pid=1, threads=(stack,)),
        )

    def peers(self) -> schema.Peers:
        return schema.Peers(peers=(PEER,))

    def transfers(self) -> schema.TransferList:
        row = schema.Transfer(peer="p0", direction="in", via="tcp", nic="eth0", state="up", bytes=4096, writes=1, units=1)
        return schema.TransferList(totals=self.status().transfers, transfers=(row,))

    def topology(self) -> dict[str, Any]:
        return {
            "schema": "pdd.topology/1",
            "host": "fake",
            "numa": [],
            "gpus": [],
            "nics": [],
            "pairs": [],
            "placement": [{"device": None, "ranks": [0], "provider": "verbs", "nics": ["mlx5_gone"], "bind": ["mlx5_gone"],
                           "rate_bits_per_second": None, "numa": None, "memory": "anywhere", "worker_cpus": None,
                           "rank_cpus": None, "threads": 2, "why": ["fake"],
                           "places": [{"rank": 0, "numa": None, "cpus": None, "threads": 2}]}],
            "findings": [],
        }

    def config(self) -> dict[str, Any]:
        loaded, origins = config_load.load(assignments=["kv.page_size=32"], demo=True, search=False, env={})
        return config_load.explained(loaded, origins)

    def logs(self, since: int) -> schema.Logs:
        return schema.Logs(boot_id="boot-1", records=tuple(each for each in self.records if each.seq > since))

    def metrics_text(self) -> str:
        return "pdd_batch_size 1.0\n"

    async def reload(self, dry_run: bool) -> schema_check.Reload:
        if self.wrong_config:
            raise ConfigProblems([config_sources.Problem("f:1:1", "log.level", '"loud" is not a level')])
        changed = schema_check.ChangedSetting(key="log.level", old="info", new="debug")
        return schema_check.Reload(dry_run=dry_run, applied=(changed,),
                             needs_restart=(schema_check.ChangedSetting(key="kv.page_size", old=16, new=32),))

    async def ping(self, peer: str, count: int) -> schema_check.Ping:
        if peer not in ("p0", PEER.address):
            raise NoSuchPeer(f"no peer {peer}", hint="`pdd peers` lists them.")
        return schema_check.Ping(peer="p0", address="127.0.0.1:7700", via="tcp", round_trips_seconds=(0.0009,) * count)

    async def compare(self, peer: str) -> schema_check.Comparison:
        fields = (schema_check.ComparedField(field="page_size", ours="32", theirs="16", matters=False),
                  schema_check.ComparedField(field="dtype", ours="bfloat16", theirs="float32", matters=True))
        return schema_check.Comparison(peer="p0", address="127.0.0.1:7700", compatible=False, fields=fields)

    async def check(self) -> schema_check.CheckReport:
        found = schema_check.CheckResult(id="D020", group="limits", title="locked memory", level="fail", message="8 MB", observed=8,
                                   expected=9, fix=("raise it",))
        return schema_check.CheckReport(checks=(found,))

    def stacks(self) -> schema.Stacks:
        return schema.Stacks(pid=1, threads=(schema.ThreadStack(name="MainThread", frames=()),))

    def drain(self, timeout: float | None) -> None:
        if self.refuse_drain:
            raise RefusedInState("the node is stopping", hint="Wait for it.")
        self.drained_with.append(timeout)
        self.state = "drained"

    def resume(self) -> None:
        if self.refuse_drain:
            raise RefusedInState("the node is stopping", hint="Wait for it.")
        self.state = "ready"

    def cancel(self, wanted: str) -> schema.Cancelled:
        self.request(wanted) if wanted not in self.ended else None
        known = self.live.pop(wanted, None) is not None
        self.ended.add(wanted)
        return schema.Cancelled(ids=(wanted,), cancelled=known)


class Running:
    """A fake daemon in a thread of this process; `source` may be changed while it runs."""

    def __init__(self, run_dir: Path, source: FakeSource) -> None:
        self.run_dir = run_dir
        self.source = source
        self.directory = run_dir / source.name
        self._loop = asyncio.new_event_loop()
        self._server: ControlServer
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        sockets = ControlSockets.bind(self.run_dir, self.source.name)
        self._thread.start()
        self._server = self.call(self._make(sockets))

    async def _make(self, sockets: ControlSockets) -> ControlServer:
        server = ControlServer(self.source, sockets)
        await server.start()
        return server

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def server_connections(self) -> set[Any]:
        """Of both sockets."""
        return {each for server in self._server._servers for each in server.server_state.connections}

    def changed(self) -> None:
        self._loop.call_soon_threadsafe(self._server.changed)

    def stop(self) -> None:
        if not self._loop.is_closed():
            self.call(self._server.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()


@contextlib.contextmanager
def running(run_dir: Path, source: FakeSource | None = None) -> Iterator[Running]:
    daemon = Running(run_dir, source or FakeSource())
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


async def _serve(run_dir: Path, name: str) -> None:
    server = ControlServer(FakeSource(name), ControlSockets.bind(run_dir, name))
    await server.start()
    print("up", flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await server.stop()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), sys.argv[2]))
