"""One node: builds the parts that its role needs, in order, and takes them down in the opposite order.

    machine read -> sockets bound -> control up -> placement, fabric -> ranks load -> KV registered -> engine -> links ->
    API takes requests

A taken port or a missing NIC is told before anything slow starts; the control socket answers while weights load. This is
the only place that wires parts together, and the only one that looks at the role. What documents read of it is in
view.py, how it drains in drain.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import secrets
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pdd import config_credentials, open_files
from pdd.address import parse_address
from pdd.api.app import ApiSettings, create_app
from pdd.api.edge import ApiKeys
from pdd.api.server import ApiServer
from pdd.api.service import Limits
from pdd.api.tls import server_context
from pdd.config import Config
from pdd.config_load import Origins
from pdd.control import dump_files, paths
from pdd.control.schema import RateWindows
from pdd.control.server import ControlServer
from pdd.control.sockets import ControlSockets
from pdd.daemon import loading, placing
from pdd.daemon.credentials import Credentials
from pdd.daemon.dispatch import Dispatch
from pdd.daemon.documents import Documents
from pdd.daemon.drain import Drain
from pdd.daemon.dump import Dumps
from pdd.daemon.engines import Engines
from pdd.daemon.group import EngineGroup, group_name
from pdd.daemon.kv_fabric import KvFabric
from pdd.daemon.latency import Latencies
from pdd.daemon.ledger import Ledger
from pdd.daemon.listen import bind_tcp
from pdd.daemon.meter import Meter
from pdd.daemon.reach import addresses_towards, choose_source
from pdd.daemon.readiness import Readiness
from pdd.daemon.reload import Reloader, Reread
from pdd.daemon.service import NodeService
from pdd.daemon.view import NodeView
from pdd.daemon.waterfall import Waterfalls
from pdd.engine.executor import RankExecutor
from pdd.engine.limits import SchedulerLimits
from pdd.engine.machine import free_memory
from pdd.engine.rank_protocol import RankProgress
from pdd.engine.request import KvOutcome, KvReserved
from pdd.errors import EngineError, FabricFailure, PddError
from pdd.history import History
from pdd.messenger import wire
from pdd.messenger.decoder import Decoder
from pdd.messenger.link import LinkContext
from pdd.messenger.prefiller import Prefiller
from pdd.messenger.router import route
from pdd.messenger.settings import DecoderSettings
from pdd.messenger.status import AttemptDone, JobDone
from pdd.messenger.way import LOCAL
from pdd.metrics import Metrics
from pdd.model.tokenizer import Tokenizer
from pdd.states import told
from pdd.topology import machine
from pdd.topology.placement import Placement, plan_placement
from pdd.version import VERSION

_log = logging.getLogger("pdd")
_CLOSE_SECONDS = 5.0
MOST_CHANGES = 4096  # that are remembered of all parts together: about 2 MB, 5 at the very most
_DUMPED = ("stalled", "peer_lost", "overrun")  # reasons of an attempt's end for which the flight recorder is written
_CHANGES_TOLD = 16  # in the log of a node that has failed


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """How far the start is."""

    name: str  # bind, fabric, load, register, serve
    progress: float | None = None  # 0 to 1


class Node:
    """Owner: the main loop. Use: `await start()`, …, `drain.begin()`, `await drain.quiet()`, `await close()`."""

    def __init__(self, config: Config, origins: Origins | None = None, *, demo: bool = False,
                 reread: Reread | None = None) -> None:
        """`origins`: where each setting comes from, for whoever asks. `reread`: for a reload; None: they cannot change."""
        self.config = config
        self.origins = origins or {}
        self.version = VERSION
        self.epoch = secrets.randbits(64)
        self.boot_id = secrets.token_hex(8)
        self.started_at = time.monotonic()
        self.phase = Phase("bind")
        self.failed: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._demo = demo
        self._model_dir = Path(config.model.path)
        self.model_name = config.model.served_name or ("pdd-demo" if demo else self._model_dir.resolve().name)
        self.groups: tuple[EngineGroup, ...] = ()
        self._progress = loading.Progress()
        self.fabric: KvFabric | None = None
        self.placement: Placement | None = None  # once the machine was read, which is once in a life
        self.decoder: Decoder | None = None
        self.prefiller: Prefiller | None = None
        self.link_context: LinkContext | None = None  # of a node that works with others
        self.history = History(MOST_CHANGES, most_bytes=config.debug.flight_memory // 4)
        self.waterfalls = Waterfalls()
        run_dir = Path(config.control.dir) if config.control.dir else paths.default_run_dir()
        self._run_dir = run_dir
        self.dumps = Dumps(dump_files.directory(run_dir / config.node.name), lambda why: self.documents.flight(why))
        self.ledger = Ledger(time.monotonic, keep_prompts=config.debug.show_prompts)
        self.metrics = Metrics(
            name=config.node.name, role=config.node.role, model=self.model_name, version=self.version,
            peers=config.peers.static, compat=config.metrics.compat, groups=config.engine.dp,
        )
        self.latencies = Latencies.new(time.monotonic)
        self.meter = Meter(self.metrics, self.ledger, self.latencies)
        self.view = NodeView(self)
        self.readiness = Readiness(self.view.state, config.node.role, config.api.listen)
        self.reloader = Reloader(self, reread or (lambda: (config, self.origins)))
        self.documents = Documents(self)
        self.metrics.read_from(self.documents.metrics_snapshot)
        self._service = NodeService(
            model_name=self.model_name, ledger=self.ledger, metrics=self.metrics, latencies=self.latencies,
            max_queue=config.scheduler.max_queue, request_timeout=config.scheduler.request_timeout,
            health=self.view.health, metrics_text=self.metrics.text,
            timed_out=lambda request_id, error: self.dumps.late(f"{request_id}: {error}", request_id),
        )
        self.drain = Drain(self._service, config.drain.timeout, self._changed)
        self._dispatch = Dispatch()
        for consumer in (self.ledger.engine_event, self._service.engine_event, self.meter.engine_event):
            self._dispatch.add(consumer)
        self._api_keys = ApiKeys()
        self._control: ControlServer | None = None
        self._api: ApiServer | None = None
        self._api_task: asyncio.Task[None] | None = None
        self._peer_socket: socket.socket | None = None
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    # -- start ------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Returns when the node takes requests.

        Raises:
            PddError: it cannot; `close` must still be awaited.
        """
        config = self.config
        _log.info("pdd %s %s %s, model %s", self.version, config.node.role, config.node.name, self.model_name)
        topology = await asyncio.to_thread(machine.read)
        self.placement = plan_placement(topology, placing.wanted(config))
        await self._bind()
        if config.peers.listen or config.node.role == "decode":
            await self._open_fabric()
        await self._load()
        if self.fabric is not None:
            await self._register_memory(self.fabric)
        self._start_engine()
        await self._link_peers()
        _log.info("loaded %s, HTTP at %s", self.model_name, config.api.listen)
        self._open_for_requests()

    async def _bind(self) -> None:
        config = self.config
        self.credentials = Credentials.read(config)
        self._api_keys.replace(self.credentials.api_keys)
        tls = config_credentials.tls_files(config.api)
        sockets = ControlSockets.bind(self._run_dir, config.node.name, config.control.group)
        self._control = ControlServer(self.documents, sockets)
        api_socket = bind_tcp(config.api.listen, "api.listen")
        if config.peers.listen:
            self._peer_socket = bind_tcp(config.peers.listen, "peers.listen")
        stop = asyncio.Event()
        settings = ApiSettings(
            version=self.version, max_body_bytes=config.api.max_body, api_keys=self._api_keys,
        )
        app = create_app(self._service, settings, stop=stop, serve_generation=config.node.role != "prefill")
        self._api = ApiServer(
            app, [api_socket], stop, server_context(*tls) if tls else None,
            max_connections=open_files.api_connections(config),
        )
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
        self.phase = Phase("load", 0.0)
        self._tokenizer = await asyncio.to_thread(Tokenizer, self._model_dir)
        make = functools.partial(self._new_group, await asyncio.to_thread(free_memory))
        await loading.load(make, config.engine.dp, config.kv.num_pages)
        for group in self.groups:
            group.executor.watch(functools.partial(_soon, loop, self._rank_died, group))

    def _new_group(self, free_bytes: int, index: int, num_pages: int) -> EngineGroup:
        """One that `close` knows of, for whoever loads it."""
        assert self.placement is not None
        config, loop = self.config, asyncio.get_running_loop()
        report = functools.partial(_soon, loop, self._show_progress, index)
        init = loading.rank_init(config, self.placement, index, str(self._model_dir), num_pages, free_bytes)
        executor = RankExecutor(
            init, step_timeout=config.engine.step_timeout, on_progress=report, name=group_name(index, config.engine.dp)
        )
        group = EngineGroup(index, executor, of=config.engine.dp)
        self.groups += (group,)
        return group

    def _show_progress(self, group: int, rank: int, made: RankProgress) -> None:
        phase, share = self._progress.add(group, rank, made)
        self.phase = Phase(f"load {phase}", share)

    async def _open_fabric(self) -> None:
        self.phase = Phase("fabric")
        assert self.placement is not None
        towards = await asyncio.to_thread(addresses_towards, self.config)
        self.placement = await asyncio.to_thread(
            placing.place, self.placement.topology, self.config, choose_source(towards)
        )
        self.fabric = await asyncio.to_thread(KvFabric, self.config, self.placement, towards)
        self.fabric.attach(asyncio.get_running_loop())

    async def _register_memory(self, fabric: KvFabric) -> None:
        self.phase = Phase("register")
        ranks = [rank for group in self.groups for rank in group.ranks]
        await asyncio.to_thread(fabric.take_memory, ranks, len(self.groups))
        self.metrics.sees_way(fabric.provider)
        if fabric.may_be_local:
            self.metrics.sees_way(LOCAL)

    def _start_engine(self) -> None:
        config, rank = self.config, self.groups[0].ranks[0].ready
        loop = asyncio.get_running_loop()
        limits = SchedulerLimits(
            page_size=rank.page_size, max_context=rank.max_context, max_batch_size=config.engine.max_batch_size,
            max_batch_tokens=config.engine.max_batch_tokens, max_queue=config.scheduler.max_queue,
            queue_timeout=config.scheduler.queue_timeout,
        )
        ids = itertools.count()  # the step of a C iterator: every group's thread may take the next
        for group in self.groups:
            group.start(
                limits, ids=ids.__next__, metrics=self.metrics,
                first_step=lambda request_id, at: loop.call_soon_threadsafe(self.ledger.first_step, request_id, at),
                emit=lambda events: loop.call_soon_threadsafe(self._dispatch.take, events),
                on_failure=lambda error: loop.call_soon_threadsafe(self._fail, error), recorder=self.history,
            )
        self._engines = Engines([group.loop for group in self.groups if group.loop is not None], limits, self.ledger.placed)
        self._dispatch.add_first(self._engines.engine_event)

    @property
    def service(self) -> NodeService:
        """Of the API."""
        return self._service

    async def _link_peers(self) -> None:
        config, fabric = self.config, self.fabric
        if fabric is None:
            return
        engine = self._engines
        context = self.link_context = fabric.link_context(
            config, self.epoch, self.version, self.credentials.peer_token, self.history
        )
        if config.node.role == "decode":
            self.decoder = Decoder(
                context, [parse_address(peer) for peer in config.peers.static], engine, fabric.planner,
                self.decoder_settings(), report=self._attempt_done, linked=self._changed,
            )
            self._dispatch.add_fetcher(self.decoder.engine_event, self._not_fetched)
            await self.decoder.start()
        if self._peer_socket is not None:
            loop = asyncio.get_running_loop()
            self.prefiller = Prefiller(
                context, self._peer_socket, engine, fabric.planner,
                watch=fabric.watch, post=loop.call_soon_threadsafe, load=self._load_of_this_node,
                report=self._job_done, flight=fabric.flight,
            )
            self._dispatch.add(self.prefiller.engine_event)
            self.drain.covers(self.prefiller, engine)
            await self.prefiller.start()

    def decoder_settings(self) -> DecoderSettings:
        peers = self.config.peers
        return DecoderSettings(
            prefill_stall_timeout=peers.prefill_stall_timeout, max_attempts=peers.max_attempts,
            local_fallback=self.config.scheduler.local_prefill_fallback,
        )

    def take_credentials(self, new: Credentials) -> None:
        """For whoever asks from now on: open requests and links have shown theirs."""
        self.credentials = new
        self._api_keys.replace(new.api_keys)
        if self.link_context is not None:
            self.link_context.take_token(new.peer_token)

    def take_peers(self) -> None:
        """peers.static has changed: who is dialled, whose metrics are there, and how many clients may be connected."""
        static = self.config.peers.static
        if self.decoder is not None:
            self.decoder.peers.set_members([parse_address(peer) for peer in static])
        self.metrics.set_peers(static)
        if self._api is not None:
            self._api.set_max_connections(open_files.api_connections(self.config))

    def _open_for_requests(self) -> None:
        config, rank = self.config, self.groups[0].ranks[0].ready
        limits = Limits(
            vocab_size=rank.vocab_size, max_context=rank.max_context, pool_tokens=rank.num_pages * rank.page_size
        )
        self._service.loaded(
            self._tokenizer, limits, self._engines,
            lambda num_tokens: route(config.node.role, num_tokens, self.config.scheduler.local_prefill_tokens),
        )
        self.phase = Phase("serve")
        self._changed()

    # -- what parts tell each other -----------------------------------------------------------------------------------
    def _not_fetched(self, event: KvReserved, error: Exception) -> None:
        """The decoder failed at a reservation: its pages go back, and its client is told."""
        assert self.decoder is not None
        failure = FabricFailure(f"the KV of this prompt could not be asked for: {error!r}")
        if all(attempt.attempt != event.attempt for attempt in self.decoder.attempts()):
            self._engines.kv_settled(event.attempt, KvOutcome.RELEASED, error=failure)
        elif not self._service.cancel(event.request_id, failure):
            # It failed half-way and may have asked already: a write may land. The way back is that of an abort.
            self._engines.abort(event.request_id)

    def _attempt_done(self, done: AttemptDone) -> None:
        arrivals = None if done.key is None or self.fabric is None else self.fabric.fabric.read_arrivals(done.key)
        self.ledger.attempt_done(done, arrivals)
        self.meter.attempt_done(done)
        if done.reason in _DUMPED:
            self.dumps.late(f"attempt {done.attempt} of {done.request_id} {done.reason}: {done.why}", done.request_id)

    def _job_done(self, done: JobDone) -> None:
        assert self.prefiller is not None
        self.ledger.job_done(done)
        self.meter.job_done(done)
        self.waterfalls.job_done(done)

    def _load_of_this_node(self) -> wire.Load:
        snapshot = self.view.snapshot
        if snapshot is None:
            return wire.Load()
        return wire.Load(
            queued_tokens=snapshot.queued_prefill_tokens, running=snapshot.states["running"],
            free_pages=snapshot.pages.free, steps=snapshot.totals.steps,
        )

    def _rank_died(self, group: EngineGroup, error: EngineError) -> None:
        group.rank_died(error)
        self._fail(group.named(error))

    def _fail(self, error: Exception) -> None:
        if self.failed.done():
            return
        for change in self.history.latest(_CHANGES_TOLD):
            _log.error("before it failed: %s", told(change))
        self.dumps.write_soon(f"the node has failed: {error}")
        self.failed.set_result(error)

    def _changed(self) -> None:
        if not self.failed.done():
            self.readiness.tell()
        if self._control is not None:
            self._control.changed()

    def rates(self) -> RateWindows:
        """Of the last seconds."""
        return RateWindows() if self._control is None else self._control.rates

    def cancel(self, request_id: str, error: PddError) -> bool:
        """Ends one request, or the prefills that a decoder knows by that id. False: there is none."""
        if self._service.cancel(request_id, error):
            return True
        if self.view.snapshot is None:
            return False
        found = {job.request_id for job in self.view.jobs() if job.client_id == request_id}
        found |= {row.request_id for row in self.view.snapshot.requests if row.request_id == request_id}
        for engine_id in found:
            self._engines.abort(engine_id)
        return bool(found)

    # -- stop ---------------------------------------------------------------------------------------------------------
    async def close(self) -> None:
        """Takes everything down. Bounded; idempotent. A part that fails to close is logged and keeps no other open."""
        await self.dumps.wait()
        self.drain.close()
        if self._api is not None:
            self._api.stop(_CLOSE_SECONDS)
        for name, part in (("decoder", self.decoder), ("prefiller", self.prefiller)):
            if part is not None:
                await _closed(name, part.close(_CLOSE_SECONDS))
        if self.prefiller is None and self._peer_socket is not None:
            self._peer_socket.close()
        stopping = [_closed("engine", asyncio.to_thread(group.stop, _CLOSE_SECONDS)) for group in self.groups]
        ended = await asyncio.gather(*stopping)
        if self.fabric is not None:
            await _closed("fabric", _fabric_closed(self.fabric))
        # Of a group that is not over a step still uses the descriptors; its ranks die with this process.
        over = [group for group, is_over in zip(self.groups, ended, strict=True) if is_over]
        await asyncio.gather(*(_closed("ranks", asyncio.to_thread(group.close)) for group in over))
        if self._api_task is not None:
            await _closed("api", self._api_task)
        if self._control is not None:
            await _closed("control", self._control.stop())
        if self._temporary is not None:
            await _closed("demo model", asyncio.to_thread(self._temporary.cleanup))


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    """From any thread: calls it on the loop."""
    loop.call_soon_threadsafe(call, *arguments)


async def _fabric_closed(fabric: KvFabric) -> None:
    try:
        fabric.detach()
    finally:
        await asyncio.to_thread(fabric.close)


async def _closed(name: str, closing: Awaitable[object]) -> bool:
    """Awaits one part's close; False when that failed, which is logged."""
    try:
        return await closing is not False
    except Exception:
        _log.exception("%s could not be closed", name)
        return False
