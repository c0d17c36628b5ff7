"""One node: builds the parts that its role needs, in order, and takes them down in the opposite order.

    sockets bound -> control up -> ranks load -> fabric, KV registered -> engine -> links -> API takes requests

A taken port is told before anything slow starts; the control socket answers while weights load. This is the only place
that wires parts together, and the only one that looks at the role.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from pdd import config_load
from pdd.address import parse_address
from pdd.api.app import ApiSettings, create_app
from pdd.api.server import ApiServer
from pdd.api.service import Health, Limits
from pdd.config import Config
from pdd.control import paths, schema
from pdd.control.server import ControlServer
from pdd.control.sockets import ControlSockets
from pdd.daemon.documents import Documents
from pdd.daemon.flows import IN, OUT, Flow, Flows
from pdd.daemon.kv_fabric import KvFabric
from pdd.daemon.ledger import Ledger
from pdd.daemon.listen import bind_tcp
from pdd.daemon.service import NodeService
from pdd.engine.executor import RankExecutor
from pdd.engine.limits import SchedulerLimits
from pdd.engine.loop import EngineLoop
from pdd.engine.rank_protocol import RankInit, RankProgress
from pdd.engine.request import EngineEvent
from pdd.engine.scheduler import Scheduler
from pdd.engine.snapshot import EngineSnapshot
from pdd.errors import EngineError, PddError, RefusedInState, RequestCancelled
from pdd.kv.pool import PagePool
from pdd.messenger import wire
from pdd.messenger.decoder import Decoder
from pdd.messenger.prefiller import Prefiller
from pdd.messenger.router import route
from pdd.messenger.settings import DecoderSettings, PrefillLimits
from pdd.messenger.status import AttemptDone, JobDone
from pdd.metrics import Metrics
from pdd.model.tokenizer import Tokenizer
from pdd.version import VERSION

_log = logging.getLogger("pdd")
_CLOSE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """How far the start is."""

    name: str  # bind, load, fabric, serve
    progress: float | None = None  # 0 to 1


class Node:
    """Owner: the main loop. Use: `await start()`, …, `drain()`, `await quiet()`, `await close()`."""

    def __init__(self, config: Config, *, demo: bool = False) -> None:
        self.config = config
        self.version = VERSION
        self.epoch = secrets.randbits(64)
        self.boot_id = secrets.token_hex(8)
        self.started_at = time.monotonic()
        self.phase = Phase("bind")
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.ledger = Ledger(time.monotonic)
        self.decoder: Decoder | None = None
        self.prefiller: Prefiller | None = None
        self._flows = Flows()
        self._demo = demo
        self._model_dir = Path(config.model.path)
        self.model_name = config.model.served_name or ("pdd-demo" if demo else self._model_dir.resolve().name)
        self.metrics = Metrics(
            name=config.node.name, role=config.node.role, model=self.model_name, version=self.version,
            peers=config.peers.static,
        )
        self._documents = Documents(self)
        self.metrics.read_from(self._documents.metrics_snapshot)
        self._service = NodeService(
            model_name=self.model_name, ledger=self.ledger, metrics=self.metrics, max_queue=config.scheduler.max_queue,
            request_timeout=config.scheduler.request_timeout, health=self.health, metrics_text=self.metrics.text,
        )
        self._control: ControlServer | None = None
        self._api: ApiServer | None = None
        self._api_task: asyncio.Task[None] | None = None
        self._peer_socket: socket.socket | None = None
        self._executor: RankExecutor | None = None
        self._engine: EngineLoop | None = None
        self._fabric: KvFabric | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._draining = False
        self._drain_timer: asyncio.TimerHandle | None = None

    # -- start ------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Returns when the node takes requests.

        Raises:
            PddError: it cannot; `close` must still be awaited.
        """
        config = self.config
        _log.info("pdd %s %s %s, model %s", self.version, config.node.role, config.node.name, self.model_name)
        await self._bind()
        await self._load()
        if config.peers.listen or config.node.role == "decode":
            await self._open_fabric()
        self._start_engine()
        await self._link_peers()
        self._open_for_requests()
        _log.info("ready: %s", self.summary())

    async def _bind(self) -> None:
        config = self.config
        keys = config_load.read_credential(config.api.api_keys_credential, "api.api_keys_credential")
        token = config_load.read_credential(config.peers.token_credential, "peers.token_credential")
        self._token = token[0].get_secret_value().encode() if token else None
        run_dir = Path(config.control.dir) if config.control.dir else paths.default_run_dir()
        sockets = ControlSockets.bind(run_dir, config.node.name, config.control.group)
        self._control = ControlServer(self._documents, sockets)
        api_socket = bind_tcp(config.api.listen, "api.listen")
        if config.peers.listen:
            self._peer_socket = bind_tcp(config.peers.listen, "peers.listen")
        stop = asyncio.Event()
        settings = ApiSettings(version=self.version, max_body_bytes=config.api.max_body, 
            api_keys=tuple(key.get_secret_value() for key in keys),
        )
        app = create_app(self._service, settings, stop=stop, serve_generation=config.node.role != "prefill")
        self._api = ApiServer(app, [api_socket], stop)
        self._api_task = asyncio.create_task(self._api.serve(), name="api")
        await self._control.start()
        await self._api.started()

    async def _load(self) -> None:
        config = self.config
        if self._demo:
            from pdd.model.demo import write_demo_model

            self._temporary = tempfile.TemporaryDirectory(prefix="pdd-demo-")
            self._model_dir = Path(self._temporary.name) / "model"
            write_demo_model(self._model_dir)
            _log.warning("demo: a tiny model of random weights; its text means nothing")
        loop = asyncio.get_running_loop()

        def progress(rank: int, made: RankProgress) -> None:
            loop.call_soon_threadsafe(self._show_progress, made)

        self.phase = Phase("load", 0.0)
        init = RankInit(
            str(self._model_dir), dtype=config.model.dtype, page_size=config.kv.page_size, num_pages=config.kv.num_pages,
            memory_fraction=config.kv.memory_fraction, max_context=config.model.max_context,
            max_batch_size=config.engine.max_batch_size, max_batch_tokens=config.engine.max_batch_tokens,
            threads=config.engine.threads,
        )
        self._executor = RankExecutor(init, step_timeout=config.engine.step_timeout, on_progress=progress)
        self._tokenizer = await asyncio.to_thread(Tokenizer, self._model_dir)
        self._ranks = await asyncio.to_thread(self._executor.start)
        self._executor.watch(lambda error: loop.call_soon_threadsafe(self._rank_died, error))

    def _show_progress(self, made: RankProgress) -> None:
        self.phase = Phase(f"load {made.phase}", made.done_bytes / made.total_bytes if made.total_bytes else None)

    async def _open_fabric(self) -> None:
        self.phase = Phase("fabric")
        self._fabric = await asyncio.to_thread(KvFabric, self.config, self._ranks)
        self._fabric.attach(asyncio.get_running_loop())
        self.metrics.kv_transfer.labels("in", self._fabric.provider)

    def _start_engine(self) -> None:
        assert self._executor is not None
        config, rank = self.config, self._ranks[0].ready
        loop = asyncio.get_running_loop()
        self._limits = SchedulerLimits(
            page_size=rank.page_size, max_context=rank.max_context, max_batch_size=config.engine.max_batch_size,
            max_batch_tokens=config.engine.max_batch_tokens, max_queue=config.scheduler.max_queue,
            queue_timeout=config.scheduler.queue_timeout,
        )
        self._engine = EngineLoop(
            Scheduler(PagePool(rank.num_pages), self._limits), self._executor,
            emit=lambda events: loop.call_soon_threadsafe(self._engine_events, events),
            on_failure=lambda error: loop.call_soon_threadsafe(self._fail, error),
        )
        self._engine.start()
        self.ledger.unit_is(self.kv_page_bytes)

    async def _link_peers(self) -> None:
        config, fabric, engine = self.config, self._fabric, self._engine
        if fabric is None:
            return
        assert engine is not None
        context = fabric.link_context(config, self.epoch, self.version, self._token)
        if config.node.role == "decode":
            self.decoder = Decoder(
                context, [parse_address(peer) for peer in config.peers.static], engine, fabric.planner,
                DecoderSettings(
                    prefill_stall_timeout=config.peers.prefill_stall_timeout, max_attempts=config.peers.max_attempts,
                    local_fallback=config.scheduler.local_prefill_fallback,
                ),
                report=self._attempt_done,
            )
            await self.decoder.start()
        if self._peer_socket is not None:
            rank = self._ranks[0].ready
            loop = asyncio.get_running_loop()
            self.prefiller = Prefiller(
                context, self._peer_socket, engine, fabric.planner,
                PrefillLimits(max_tokens=min(rank.max_context, rank.num_pages * rank.page_size)),
                watch=fabric.watch, post=loop.call_soon_threadsafe, load=self._load_of_this_node,
                report=self._job_done,
            )
            if self._draining:  # since before it was there
                self.prefiller.drain()
            await self.prefiller.start()

    def _open_for_requests(self) -> None:
        assert self._engine is not None
        config, rank = self.config, self._ranks[0].ready
        limits = Limits(
            vocab_size=rank.vocab_size, max_context=rank.max_context, pool_tokens=rank.num_pages * rank.page_size
        )
        self._service.loaded(
            self._tokenizer, limits, self._engine,
            lambda num_tokens: route(config.node.role, num_tokens, config.scheduler.local_prefill_tokens),
        )
        self.phase = Phase("serve")
        self._changed()

    # -- what parts tell each other -----------------------------------------------------------------------------------
    def _engine_events(self, events: list[EngineEvent]) -> None:
        for event in events:
            self.ledger.engine_event(event)
            self._service.engine_event(event)
            if self.decoder is not None:
                self.decoder.engine_event(event)
            if self.prefiller is not None:
                self.prefiller.engine_event(event)

    def _attempt_done(self, done: AttemptDone) -> None:
        self.ledger.attempt_done(done)
        if done.whole:
            self._flows.add(done.peer, IN, bytes=done.units * self.kv_page_bytes, units=done.units)
            self.metrics.kv_transfer.labels("in", self.provider).observe(done.finished - (done.asked or done.finished))
        else:
            self._flows.add(done.peer, IN, failed=1)
            self.metrics.kv_transfer_failures.labels(done.reason).inc()

    def _job_done(self, done: JobDone) -> None:
        self.ledger.job_done(done)
        self._flows.add(
            done.peer, OUT, writes=done.writes, bytes=done.bytes, units=done.units, failed=0 if done.whole else 1
        )
        if done.whole and done.started is not None:
            self.metrics.kv_transfer.labels("out", self.provider).observe(done.busy_seconds)

    def _load_of_this_node(self) -> wire.Load:
        snapshot = self.snapshot
        if snapshot is None:
            return wire.Load()
        return wire.Load(
            queued_tokens=snapshot.queued_prefill_tokens, running=snapshot.states["running"],
            free_pages=snapshot.pages.free, steps=snapshot.totals.steps,
        )

    def _rank_died(self, error: EngineError) -> None:
        if self._engine is not None:
            self._engine.fail(error)
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    def _changed(self) -> None:
        if self._control is not None:
            self._control.changed()

    # -- drain and stop -----------------------------------------------------------------------------------------------
    def drain(self, timeout: float | None = None) -> None:
        """No new work from now on; what runs goes on for at most `timeout` seconds (None: drain.timeout).

        Again while draining only moves the deadline.
        """
        self._draining = True
        self._stop_drain_timer()
        seconds = self.config.drain.timeout if timeout is None else timeout
        why = f"its {seconds:g} s to drain are over"
        self._drain_timer = asyncio.get_running_loop().call_later(seconds, self.give_up, why)
        self._service.drain(True)
        if self.prefiller is not None:
            self.prefiller.drain()
        self._changed()

    def resume(self) -> None:
        if not self._draining:
            raise RefusedInState("this node is not draining", hint="`pdd status` shows its state")
        self._draining = False
        self._stop_drain_timer()
        self._service.drain(False)
        if self.prefiller is not None:
            self.prefiller.resume()
        self._changed()

    def open_work(self) -> tuple[int, int]:
        """Requests of clients, and prefills for decoders, that are not over."""
        return self._service.num_open, self.num_jobs

    async def quiet(self) -> None:
        """Returns once there is no open work."""
        while any(self.open_work()):
            await self._service.quiet()
            if self.prefiller is not None:
                await self.prefiller.wait_idle()

    def give_up(self, why: str) -> None:
        """Ends what is still open; clients and decoders are told."""
        if any(self.open_work()):
            _log.warning("%s: %d requests and %d pushes are given up", why, *self.open_work())
        self._service.cancel_all(RequestCancelled(f"this node goes down: {why}", hint="try again; another will answer"))
        if self.prefiller is not None and self._engine is not None:
            for job in self.prefiller.jobs():
                self._engine.abort(job.request_id)

    def _stop_drain_timer(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None

    def cancel(self, request_id: str, error: PddError) -> bool:
        """Ends one request or prefill. False: there is none of that id."""
        if self._service.cancel(request_id, error):
            return True
        snapshot = self.snapshot
        if snapshot is None or self._engine is None or all(r.request_id != request_id for r in snapshot.requests):
            return False
        self._engine.abort(request_id)
        return True

    async def close(self) -> None:
        """Takes everything down. Bounded; idempotent."""
        self._stop_drain_timer()
        if self._api is not None:
            self._api.stop(_CLOSE_SECONDS)
        for part in (self.decoder, self.prefiller):
            if part is not None:
                await part.close(_CLOSE_SECONDS)
        if self.prefiller is None and self._peer_socket is not None:
            self._peer_socket.close()
        if self._engine is not None:
            self._engine.stop()
            await asyncio.to_thread(self._engine.join, _CLOSE_SECONDS)
        if self._fabric is not None:
            await asyncio.to_thread(self._fabric.close)
        if self._executor is not None:
            await asyncio.to_thread(self._executor.close)
        if self._api_task is not None:
            await asyncio.gather(self._api_task, return_exceptions=True)
        if self._control is not None:
            await self._control.stop()
        if self._temporary is not None:
            self._temporary.cleanup()

    # -- what documents read --------------------------------------------------------------------------------------------
    @property
    def snapshot(self) -> EngineSnapshot | None:
        return None if self._engine is None else self._engine.snapshot

    @property
    def provider(self) -> str:
        return "" if self._fabric is None else self._fabric.provider

    @property
    def num_layers(self) -> int:
        return 0 if self._engine is None else self._ranks[0].ready.num_layers

    @property
    def kv_page_bytes(self) -> int:
        """Bytes of one page of one layer on one rank."""
        return 0 if self._engine is None else self._ranks[0].ready.layout.page_bytes

    @property
    def num_attempts(self) -> int:
        return 0 if self.decoder is None else self.decoder.num_open

    @property
    def num_jobs(self) -> int:
        return 0 if self.prefiller is None else self.prefiller.num_jobs

    @property
    def num_failed_transfers(self) -> int:
        return sum(flow.failed for flow in self._flows.all())

    @property
    def num_stalled_attempts(self) -> int:
        return 0 if self.decoder is None else self.decoder.counters.stalls

    def flows(self) -> list[Flow]:
        return self._flows.all()

    def fabric_stats(self) -> dict[str, Any]:
        return {} if self._fabric is None else self._fabric.stats()

    def fabric_info(self) -> schema.FabricInfo:
        return schema.FabricInfo() if self._fabric is None else self._fabric.info()

    def findings(self) -> tuple[schema.Finding, ...]:
        return () if self._fabric is None else self._fabric.findings()

    def engine_stall_seconds(self) -> float:
        """How long the step in hand has been running; 0 between steps."""
        busy = None if self._engine is None else self._engine.busy_since
        return 0.0 if busy is None else time.monotonic() - busy

    def health(self) -> Health:
        live = not self.failed.done() and self.engine_stall_seconds() < self.config.engine.step_timeout
        return Health(live=live, reasons=self._reasons())

    def _reasons(self) -> tuple[str, ...]:
        """Why new work is not taken, or not served, now."""
        if self.phase.name != "serve":
            progress = "" if self.phase.progress is None else f" {self.phase.progress:.0%}"
            return (f"starting: {self.phase.name}{progress}",)
        if self._draining:
            return ("draining",)
        needs_prefiller = self.decoder is not None and not self.config.scheduler.local_prefill_fallback
        if needs_prefiller and self.decoder is not None and not self.decoder.peers.usable_links():
            return (f"no prefiller: {self.decoder.peers.explain()}",)
        return ()

    def state(self) -> tuple[str, tuple[str, ...]]:
        """The word for `pdd status`, and why the node is not ready."""
        reasons = self._reasons()
        if self.phase.name != "serve":
            return ("starting" if self.phase.name == "bind" else "loading"), reasons
        if self._draining:
            return ("draining" if any(self.open_work()) else "drained"), reasons
        return ("ready" if not reasons else "not_ready"), reasons

    def summary(self) -> str:
        """One line for systemd and the log."""
        state, reasons = self.state()
        word = f"{self.config.node.role} {state}"
        return f"{word} ({'; '.join(reasons)})" if reasons else f"{word}, {self.model_name} at {self.config.api.listen}"
