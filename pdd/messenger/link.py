"""One link: one TCP connection and one fabric endpoint, to one life of one peer.

    HANDSHAKE -> UP <-> SUSPECT -> CLOSING -> CLOSED

The endpoint is opened for this link alone and closed when the link ends, whatever ends it: end of stream, silence, a
protocol error, a write whose fate is unknown. ENDPOINT_CLOSED then proves that nothing of this peer lands any more,
and only that event makes a link CLOSED. A link never comes back; whoever wants the peer again makes a new one.

Whatever goes wrong here or in the handler, `run` ends in the fence: no link is left up that nobody reads, and a fence
that cannot be had is told in `fence_error` for as long as it is missing.

Silence is counted in time that this process really ran: a node that was stopped for a minute reads what waits in its
socket before it judges anybody. Any byte counts as life. The link knows nothing about attempts or requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol

from pdd.errors import FabricFailure, PddError, PeerIncompatible, PeerLost, PeerProtocol
from pdd.messenger import handshake, wire
from pdd.messenger.awake import AwakeTime
from pdd.messenger.events import FabricEvents
from pdd.messenger.fencing import Fencing
from pdd.messenger.frames import FrameStream
from pdd.messenger.goodbye import InOrder, goodbye, said
from pdd.messenger.handshake import Compare, LocalNode, Offer
from pdd.messenger.ports import FabricPort
from pdd.messenger.round_trips import RoundTrips
from pdd.messenger.settings import LinkSettings
from pdd.messenger.way import LinkWay, Unreachable, WayContext
from pdd.states import Clock, Facts, Recorder, State

_log = logging.getLogger(__name__)
_TICKS_PER_HEARTBEAT = 2  # so that a tick which comes late counts for less than suspect_after


class LinkState(enum.Enum):
    HANDSHAKE = "handshake"
    UP = "up"
    SUSPECT = "suspect"  # silent for a while: no new work, nothing is given up
    CLOSING = "closing"  # the fence is on its way
    CLOSED = "closed"  # nothing of this peer lands any more


_TABLE = {
    LinkState.HANDSHAKE: frozenset({LinkState.UP, LinkState.CLOSING}),
    LinkState.UP: frozenset({LinkState.SUSPECT, LinkState.CLOSING}),
    LinkState.SUSPECT: frozenset({LinkState.UP, LinkState.CLOSING}),
    LinkState.CLOSING: frozenset({LinkState.CLOSED}),
    LinkState.CLOSED: frozenset(),
}


class LinkHandler(Protocol):
    """What one role does with its links (Decoder for those it dials, Prefiller for those it accepts).

    A call that raises ends the link.
    """

    def link_up(self, link: PeerLink) -> None:
        """The link can be used: after the handshake, and again after each suspicion."""

    def link_message(self, link: PeerLink, message: wire.Message) -> None:
        """A message other than greeting, proof, hello, goodbye. May raise PeerProtocol to end the link."""

    def link_down(self, link: PeerLink) -> None:
        """No more messages either way; `link.error` says why. The fence is not up yet."""

    def link_closed(self, link: PeerLink) -> None:
        """The fence is up: no write through this link's endpoint lands or leaves any more."""

    def pulse(self, link: PeerLink) -> Pulse:
        """What the next heartbeat says."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pulse:
    load: wire.Load = wire.Load()  # noqa: RUF009  frozen
    draining: bool = False
    progress: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(slots=True)
class LinkContext:
    """What all links of a node share. Only `take_token` changes it."""

    node: LocalNode
    fabric: FabricPort
    events: FabricEvents
    settings: LinkSettings
    compare: Compare
    clock: Clock
    recorder: Recorder
    fencing: Fencing[PeerLink] = dataclasses.field(default_factory=lambda: Fencing())
    threads: Executor = dataclasses.field(  # for fabric calls that may take long; ends with the last link
        default_factory=lambda: ThreadPoolExecutor(4, thread_name_prefix="fabric-call")
    )

    def take_token(self, token: bytes | None) -> None:
        """For handshakes from now on; a link that is up has proved the one of its time, and stays."""
        self.node = dataclasses.replace(self.node, token=token)


class PeerLink:
    """Owner: the main loop. Make it with a fresh connection, then await `run`."""

    def __init__(
        self, context: LinkContext, stream: FrameStream, handler: LinkHandler, *, initiator: bool, label: str,
        admit: Callable[[PeerLink], None] | None = None, allow_local: bool = True,
    ) -> None:
        self.label = label  # the address dialled, or the one that called: for logs
        self.error: PddError | None = None  # why the link ended
        self.hello: wire.Hello | None = None
        self.version = 0  # of the protocol, that both ends speak; once the greetings were exchanged
        self.load = wire.Load()
        self.peer_draining = False
        self.fence_error = ""  # why the fence is not up, while it is not
        self._context = context
        self._way = LinkWay(
            WayContext(context.node, context.fabric, context.events, context.threads), self, allow_local=allow_local
        )
        self._stream = stream
        self._handler = handler
        self._initiator = initiator
        self._admit = admit  # a last word before the link is up; raises to refuse
        self.was_up = False
        self.has_carried = False  # KV of a prompt has come whole over it; told by the decoder
        self.ended_at: float | None = None
        self._ended = asyncio.Event()
        self._closed = asyncio.Event()
        self._trips = RoundTrips()
        self._silence = 0.0
        self._next_beat_at = 0.0
        self._state = State(
            "link", label, LinkState.HANDSHAKE, _TABLE, clock=context.clock, recorder=context.recorder
        )
        self._state.facts = lambda: Facts(peer=self.name)

    # -- asking ---------------------------------------------------------------------------------------------------
    @property
    def state(self) -> LinkState:
        return self._state.value

    @property
    def since(self) -> float:
        return self._state.since

    @property
    def is_up(self) -> bool:
        """Messages can be sent and arrive; true while suspect too."""
        return self.state in (LinkState.UP, LinkState.SUSPECT)

    @property
    def silence(self) -> float:
        """Seconds of this process's time since the peer's last byte, as of the last tick."""
        return self._silence

    @property
    def rtt_seconds(self) -> float | None:
        """Of the latest heartbeat that was answered."""
        return self._trips.latest

    @property
    def lingers(self) -> bool:
        """The link has ended, and its connection is only kept for the peer to hear of it."""
        return self._stream.lingers

    @property
    def endpoint(self) -> int | None:
        """The fabric's number of this link's endpoint, once it is open."""
        return self._way.ident

    @property
    def via(self) -> str:
        """What carries the KV of this link: a provider's name, or "local"."""
        return self._way.via

    @property
    def local_refusal(self) -> str:
        """Why this link goes over the fabric though the peer is on this host; "" when there is nothing to say."""
        return self._way.refusal

    @property
    def peer(self) -> wire.Hello:
        """The peer's hello; only a link that was up has one."""
        assert self.hello is not None
        return self.hello

    @property
    def name(self) -> str:
        return self.hello.name if self.hello is not None else self.label

    # -- life -----------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Handshake, then messages until the link ends; `error` says why it did. The fence may still be on its way, and
        the connection may linger: await `wait_hung_up`, too.

        Cancelling the task ends the link.
        """
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._shake_hands()
            if self.is_up:
                tasks = [asyncio.create_task(self._guard(work)) for work in (self._receive, self._beat)]
                await self._ended.wait()
        except asyncio.CancelledError:
            self.fence(InOrder())
            raise
        except Exception as error:
            self._give_up(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def fence(self, error: PddError) -> None:
        """Ends the link now, for `error`. Idempotent: the first cause stays."""
        if self.state in (LinkState.CLOSING, LinkState.CLOSED):
            return
        self.error = error
        self.ended_at = self._context.clock()
        self._state.move(LinkState.CLOSING, str(error))
        self._context.fencing.begin(self)
        try:
            self._stream.send(goodbye(error))
            self._stream.close()
        except Exception:  # it cannot be told, for whatever reason; the reset tells it
            self._stream.abort()
        self._way.close()
        self._ended.set()
        if self.was_up:
            self._tell(self._handler.link_down)

    def drop(self, error: PddError) -> None:
        """Ends the link as `fence` does, and its connection at once: the peer may not hear why."""
        self.fence(error)
        self._stream.abort()

    async def wait_closed(self) -> None:
        """Returns once the fence is up."""
        await self._closed.wait()

    async def wait_hung_up(self) -> None:
        """Returns once the connection of a link that has ended is gone: at the latest a moment after its end."""
        await self._stream.wait_closed()

    def send(self, message: wire.Message) -> bool:
        """Queues a message; False when the link has ended or just ended because the peer does not read."""
        if not self.is_up:
            return False
        try:
            self._stream.send(message)
        except PddError as error:
            self.fence(error)
            return False
        return True

    def beat_now(self) -> None:
        """Sends a heartbeat at once: something that peers should know has changed."""
        if not self.is_up:
            return
        now = self._context.clock()
        mark = self._trips.leave(now)
        try:
            pulse = self._handler.pulse(self)
        except Exception as error:
            self._give_up(error)
            return
        self._next_beat_at = now + self._context.settings.heartbeat
        self.send(
            wire.Heartbeat(
                seq=mark.seq, load=pulse.load, draining=pulse.draining, progress=pulse.progress, echo=mark.echo,
                echo_age_us=mark.echo_age_us,
            )
        )

    def ping(self) -> asyncio.Future[float]:
        """Sends a heartbeat at once; seconds of its round trip, the time that the peer kept it left out. Nothing comes when
        the link ends: bound the wait."""
        self.beat_now()
        return self._trips.await_latest()

    # -- fabric events (EndpointHandler) ----------------------------------------------------------------------------
    def endpoint_failed(self, message: str) -> None:
        if self.state is LinkState.CLOSING:  # of the close itself, or of what the close will end
            self.fence_error = message
            return
        self.fence(FabricFailure(f"the fabric endpoint of {self.name} failed: {message}"))

    def endpoint_closed(self) -> None:
        self._become_closed()

    # -- inside ---------------------------------------------------------------------------------------------------
    async def _shake_hands(self) -> None:
        context = self._context
        try:
            async with asyncio.timeout(context.settings.connect_timeout):
                self.version = await handshake.authenticate(self._stream, context.node, initiator=self._initiator)
                hello = await handshake.exchange_hello(
                    self._stream, context.node, dialled=self.label if self._initiator else "",
                    describe=self._open_endpoint, compare=context.compare,
                )
                self.hello = hello
                await self._connect_endpoint(hello)
            if self.state is not LinkState.HANDSHAKE:  # fenced meanwhile
                return
            if self._admit is not None:
                self._admit(self)
        except TimeoutError:
            seconds = context.settings.connect_timeout
            self.fence(PeerLost(f"the handshake did not end within {seconds:g} s"))
        except PddError as error:
            self.fence(error)
        else:
            self._become_up()

    def _become_up(self) -> None:
        self._stream.allow_large_frames()
        self._state.move(LinkState.UP)
        self.was_up = True
        self._handler.link_up(self)
        self.beat_now()

    async def _open_endpoint(self, hello: wire.Hello | None) -> Offer:
        try:
            return await (self._way.offer() if hello is None else self._way.answer(hello))
        except RuntimeError as error:  # FabricError
            raise FabricFailure(f"this node cannot open a fabric endpoint for {self.label}: {error}") from error

    async def _connect_endpoint(self, hello: wire.Hello) -> None:
        try:
            await self._way.connect(hello, initiator=self._initiator)
        except Unreachable as error:
            raise PeerLost(f"{self.name} is on this host, and its memory cannot be used: {error}",
                           hint=f"the next link goes over {self._context.node.provider}") from error
        except RuntimeError as error:  # FabricError
            raise PeerIncompatible(f"the fabric cannot reach {self.name}: {error}") from error

    def _become_closed(self) -> None:
        if self.state is LinkState.CLOSED:
            return
        self._state.move(LinkState.CLOSED)
        self._context.fencing.done(self)
        self.fence_error = ""
        self._closed.set()
        if self.was_up:
            self._tell(self._handler.link_closed)

    def _tell(self, call: Callable[[PeerLink], None]) -> None:
        """Tells the handler of an end, which nothing can hold up."""
        try:
            call(self)
        except Exception:
            _log.exception("the end of the link to %s (%s) could not be handled", self.name, self.label)

    def _give_up(self, error: Exception) -> None:
        """Ends the link for an error of this node. Call it while `error` is handled."""
        _log.exception("the link to %s (%s) ends: this node could not handle it", self.name, self.label)
        self.fence(PeerLost(f"{self._context.node.name} could not handle this link: {error!r}"))

    async def _guard(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except PddError as error:
            self.fence(error)
        except Exception as error:
            self._give_up(error)

    async def _receive(self) -> None:
        while True:
            self._handle(await self._stream.receive())

    def _handle(self, message: wire.Message) -> None:
        match message:
            case wire.Heartbeat():
                self._take_heartbeat(message)
            case wire.Goodbye():
                raise said(message, self.name)
            case wire.Greeting() | wire.Proof() | wire.Hello():
                raise PeerProtocol(f"a {type(message).__name__} came after the handshake")
            case _:
                if self.is_up:
                    self._handler.link_message(self, message)

    def _take_heartbeat(self, beat: wire.Heartbeat) -> None:
        self._trips.arrive(beat, self._context.clock())
        self.load = beat.load
        self.peer_draining = beat.draining
        if self.is_up:
            self._handler.link_message(self, beat)

    async def _beat(self) -> None:
        """Sends heartbeats when they are due and counts silence between them."""
        settings = self._context.settings
        tick = settings.heartbeat / _TICKS_PER_HEARTBEAT
        awake = AwakeTime(self._context.clock, tick)
        num_bytes = self._stream.num_received_bytes
        while self.is_up:
            await asyncio.sleep(min(tick, max(0.0, self._next_beat_at - self._context.clock())))
            ran = awake.tick()
            self._silence = 0.0 if self._stream.num_received_bytes != num_bytes else self._silence + ran
            num_bytes = self._stream.num_received_bytes
            self._judge_silence()
            if self._context.clock() >= self._next_beat_at:
                self.beat_now()

    def _judge_silence(self) -> None:
        settings = self._context.settings
        if self._silence >= settings.dead_after:
            self.fence(PeerLost(f"{self.name} has been silent for {settings.dead_after:g} s"))
        elif self.state is LinkState.UP and self._silence >= settings.suspect_after:
            self._state.move(LinkState.SUSPECT, f"silent for {settings.suspect_after:g} s")
        elif self.state is LinkState.SUSPECT and self._silence == 0.0:
            self._state.move(LinkState.UP, "heard again")
            self._handler.link_up(self)
