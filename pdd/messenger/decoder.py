"""The decoder's side of remote prefill: gets the KV of a prompt written into pages that the engine reserved.

The engine says KvReserved; this module picks a prefiller, allocates and arms a key, asks, and counts. It settles
every attempt with the engine exactly once for good: WHOLE when the units are all there, RELEASED when nothing that
names the pages can land any more. What cannot be proved is QUARANTINED by fencing the link, and RELEASED by the fence
alone (settling.py). No timer ever frees a page: timers cancel, and an unanswered cancel fences.

    nothing happens     no unit arrives, the prefiller's heartbeats show no progress -> Cancel, then another prefiller
    cancel unanswered   -> fence          counts that do not add up -> fence          more units than expected -> fence
    link ends           -> its attempts, and only those, are quarantined and tried elsewhere at once

Time is that in which this process ran: after a pause nobody is judged by it. Owner: the main loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from pdd.address import Address
from pdd.engine.request import EngineEvent, EngineInbox, Finished, KvAbandoned, KvOutcome, KvReserved
from pdd.errors import (
    Draining,
    FabricFailure,
    PeerLost,
    PeerProtocol,
    PrefillRefused,
    PromptTooLong,
    RequestTimeout,
)
from pdd.messenger import wire
from pdd.messenger.asking import Asks
from pdd.messenger.attempt import TABLE, Attempt, AttemptState
from pdd.messenger.awake import AwakeTime
from pdd.messenger.book import AttemptBook
from pdd.messenger.chooser import Chooser
from pdd.messenger.deadlines import Deadlines, Late
from pdd.messenger.link import LinkContext, PeerLink, Pulse
from pdd.messenger.peers import Backoff, Connect, PeerTable, open_tcp
from pdd.messenger.ports import Planner
from pdd.messenger.progress import LinkView
from pdd.messenger.quiet import QuietLog
from pdd.messenger.settings import DecoderSettings
from pdd.messenger.settling import Settling
from pdd.messenger.status import AttemptDone, AttemptStatus, DecoderCounters, PeerStatus
from pdd.messenger.verdict import Judge
from pdd.states import State

_log = logging.getLogger(__name__)
_TICKS_PER_HEARTBEAT = 10


class Decoder:
    """Handler of the links to prefillers, of immediates, and of the engine's KV events."""

    def __init__(
        self, context: LinkContext, addresses: Sequence[Address], inbox: EngineInbox, planner: Planner,
        settings: DecoderSettings, *, connect: Connect = open_tcp, backoff: Backoff = Backoff(),  # noqa: B008
        rng: random.Random | None = None, report: Callable[[AttemptDone], None] = lambda done: None,
        linked: Callable[[], None] = lambda: None,
    ) -> None:
        """`report`: of each attempt that is over. `linked`: called when a prefiller can, or can no longer, be asked."""
        self._rng = rng or random.Random()
        self.peers = PeerTable(addresses, context, self, connect=connect, backoff=backoff, rng=self._rng)
        self._context = context
        self._fabric = context.fabric
        self._planner = planner
        self._deadlines = _deadlines(context, settings)
        self._linked = linked
        self._book = AttemptBook(context.fabric)
        self._judge = Judge(Chooser(self.peers, self._book.outstanding, context.clock), settings)
        self._settling = Settling(inbox, self._book, self._judge, self._look, report)
        self._quiet = QuietLog(_log, context.clock)
        self._asks = Asks()
        self._ticker: asyncio.Task[None] | None = None
        self._has_attempts = asyncio.Event()
        self._tick_seconds = context.settings.heartbeat / _TICKS_PER_HEARTBEAT
        self._awake = AwakeTime(context.clock, self._tick_seconds)
        context.events.on_immediates(self)

    async def start(self) -> None:
        self.peers.start()
        self._ticker = asyncio.create_task(self._tick_for_ever(), name="decoder ticks")

    async def close(self, fence_seconds: float = 5.0) -> None:
        """Ends every link and attempt; waits for the fences, at most `fence_seconds`."""
        self._settling.closing = True
        await self.peers.close(fence_seconds)
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        for attempt in self._book.all():
            if attempt.state.value is AttemptState.CHOOSING:
                self._place(attempt)

    def set(self, settings: DecoderSettings) -> None:
        """For the attempts in hand, too."""
        self._deadlines = _deadlines(self._context, settings)
        self._judge.set(settings)

    # -- asking ---------------------------------------------------------------------------------------------------
    def attempts(self) -> tuple[AttemptStatus, ...]:
        """Every attempt that is not settled for good, the oldest first."""
        return self._book.status(self._context.clock())

    @property
    def counters(self) -> DecoderCounters:
        """Of attempts, since the start."""
        return self._settling.counters

    @property
    def bytes_received(self) -> int:
        """Bytes that all units stand for which attempts have counted. Monotonic."""
        return self.counters.bytes + self._book.bytes_in_hand()

    @property
    def num_open(self) -> int:
        """Attempts that are not settled for good."""
        return len(self._book)

    async def ask_about(self, attempt: int, peer: str) -> wire.ExplainAnswer | str:
        """What the prefiller that is called `peer` has done for an attempt, or why it does not say. At most a second."""
        in_hand = self._book.get(attempt)
        link = in_hand.link if in_hand is not None else next(  # names need not differ
            (each.link for each in self.peers.peers if each.link is not None and each.link.name == peer), None
        )
        if link is None or not link.is_up:
            return f"{peer} is not linked"
        return await self._asks.ask(link, attempt)

    def peer_status(self) -> tuple[PeerStatus, ...]:
        return self.peers.status(self._book.outstanding)

    # -- from the engine --------------------------------------------------------------------------------------------
    def engine_event(self, event: EngineEvent) -> None:
        """Takes KvReserved, KvAbandoned and Finished; the rest is not for the messenger."""
        match event:
            case KvReserved():
                self._begin(event)
            case KvAbandoned():
                self._abandon(event.attempt)
            case Finished():
                self._judge.retries.forget(event.request_id)

    def _begin(self, reserved: KvReserved) -> None:
        context = self._context
        ident = f"{reserved.request_id}/{reserved.attempt}"
        state = State(
            "attempt", ident, AttemptState.CHOOSING, TABLE, clock=context.clock, recorder=context.recorder
        )
        attempt = Attempt(reserved, state, progress_at=self._awake.seconds)
        self._book.enter(attempt)
        self._has_attempts.set()
        self._settling.count(attempts=1)
        self._attend(attempt, self._place)

    def _abandon(self, number: int) -> None:
        attempt = self._book.get(number)
        if attempt is None:  # settled while the event was on its way
            return
        attempt.abandoned = True
        if attempt.state.value is AttemptState.CHOOSING:
            self._settling.settle(attempt, KvOutcome.RELEASED, "abandoned before anyone was asked")
        elif attempt.state.value is AttemptState.REQUESTED:
            self._cancel(attempt, "the client left")

    # -- asking a prefiller -----------------------------------------------------------------------------------------
    def _place(self, attempt: Attempt) -> None:
        """Gives a CHOOSING attempt to a prefiller, lets it wait for one, or gives it up."""
        if self._settling.closing:
            self._settling.give_up(attempt, Draining("this node is shutting down"))
            return
        link = self._judge.choose(attempt)
        if link is not None:
            self._ask(attempt, link)
        elif not self._judge.may_wait(attempt):
            self._settling.give_up(attempt, self._judge.nobody(attempt))

    def _ask(self, attempt: Attempt, link: PeerLink) -> None:
        if not attempt.fits_a_frame:
            self._settling.give_up(attempt, PromptTooLong(f"{attempt.num_tokens} tokens do not fit a request to a prefiller"))
            return
        ends, lengths = (link.peer.geometry, self._context.node.geometry), (attempt.num_tokens, attempt.reserved.skip_tokens)
        attempt.expected_units = self._planner.expected_units(*ends, *lengths)
        attempt.expected_bytes = self._planner.expected_bytes(*ends, *lengths)
        attempt.source_sets = self._planner.choose_source_sets(*ends, self._rng)
        assert link.endpoint is not None
        try:
            key = self._fabric.imm_allocate(link.endpoint)
        except RuntimeError as error:  # FabricError
            self._settling.give_up(attempt, FabricFailure(f"no key for {link.name}: {error}"))
            return
        attempt.progress_at = self._awake.seconds
        self._book.give(attempt, link, key)
        attempt.state.move(AttemptState.ARMED, link.name)
        if attempt.expected_units == 0:
            self._settling.whole(attempt)
            return
        self._fabric.imm_arm(key, attempt.expected_units)
        if link.send(attempt.request(self._context.node.epoch)):  # else the link has ended and took the attempt along
            attempt.state.move(AttemptState.REQUESTED, link.name)
            attempt.asked = attempt.state.since

    def _cancel(self, attempt: Attempt, why: str) -> None:
        assert attempt.link is not None
        attempt.state.move(AttemptState.CANCELLING, why)
        attempt.progress_at = self._awake.seconds
        self._settling.count(cancels=1)
        attempt.link.send(wire.Cancel(attempt=attempt.id))

    # -- fabric events (ImmHandler) ---------------------------------------------------------------------------------
    def imm_reached(self, key: int, arrived: int) -> None:
        """The event may be about an earlier use of the key; the count itself is what proves."""
        attempt = self._book.by_key(key)
        if attempt is not None and self._book.arrived(attempt) == attempt.expected_units:
            self._settling.whole(attempt)

    def imm_overrun(self, key: int, arrived: int) -> None:
        attempt = self._book.by_key(key)
        if attempt is None:
            return
        assert attempt.link is not None
        arrived = self._book.arrived(attempt)
        if arrived > attempt.expected_units:
            self._settling.count(overruns=1)
            why = f"{arrived} units arrived where {attempt.expected_units} were expected"
            attempt.failure = attempt.failure or PeerProtocol(f"{attempt.link.name}: {why}")
            self._fence(attempt, why)

    # -- link events (LinkHandler) ----------------------------------------------------------------------------------
    def link_up(self, link: PeerLink) -> None:
        self._linked()
        self._book.views.setdefault(link, LinkView())
        for attempt in self._book.all():
            if attempt.state.value is AttemptState.CHOOSING:
                self._attend(attempt, self._place)

    def link_message(self, link: PeerLink, message: wire.Message) -> None:
        match message:
            case wire.PrefillEnded():
                self._ended(link, message)
            case wire.Heartbeat():
                self._book.views[link].hear(message, self._awake.seconds)
            case wire.ExplainAnswer():
                self._asks.take(link, message)
            case _:
                raise PeerProtocol(f"a {type(message).__name__} came from a prefiller")

    def link_down(self, link: PeerLink) -> None:
        self._linked()
        self._asks.link_down(link)
        for attempt in list(self._book.views[link].attempts.values()):
            self._attend(attempt, self._settling.quarantine)

    def link_closed(self, link: PeerLink) -> None:
        for attempt in list(self._book.views.pop(link).attempts.values()):
            self._attend(attempt, self._settling.release_fenced)

    def pulse(self, link: PeerLink) -> Pulse:
        return Pulse()  # nobody asks a decoder for work

    def _ended(self, link: PeerLink, ended: wire.PrefillEnded) -> None:
        attempt = self._book.views[link].attempts.get(ended.attempt)
        if attempt is None or attempt.state.value not in (AttemptState.REQUESTED, AttemptState.CANCELLING):
            return  # an answer to a cancel that crossed the end
        attempt.ended = ended
        if ended.reason is wire.EndReason.DRAINING:
            link.peer_draining = True
        if attempt.failure is None:
            attempt.failure = PrefillRefused(f"{link.name}: {wire.one_line(ended.message)}")
            attempt.retryable = ended.retryable
        if ended.unknown_units:
            self._fence(attempt, f"{link.name} does not know the fate of {ended.unknown_units} units")
        else:
            self._compare_counts(attempt, ended)

    def _compare_counts(self, attempt: Attempt, ended: wire.PrefillEnded) -> None:
        """Settles an attempt whose writes are all terminal, waits for units on the way, or fences."""
        arrived = self._look(attempt)
        if arrived == attempt.expected_units:
            self._settling.whole(attempt)
        elif arrived == ended.ok_units:
            self._settling.settle(attempt, KvOutcome.RELEASED, ended.reason.value)
        elif arrived > ended.ok_units:
            self._fence(attempt, f"{arrived} units arrived though only {ended.ok_units} were written")
        elif attempt.state.value is not AttemptState.DRAINING:
            attempt.state.move(AttemptState.DRAINING, f"{ended.ok_units - arrived} units on the way")
            attempt.progress_at = self._awake.seconds

    def _attend(self, attempt: Attempt, work: Callable[[Attempt], None]) -> None:
        """Does `work` for one attempt. What goes wrong with it costs its own link at most, not the other attempts."""
        try:
            work(attempt)
        except Exception as error:
            _log.exception("attempt %d of %s could not be handled", attempt.id, attempt.reserved.request_id)
            failure = PeerLost(f"attempt {attempt.id} could not be handled: {error!r}")
            if attempt.link is not None:
                attempt.link.fence(failure)
            elif attempt.state.value is AttemptState.CHOOSING:
                self._settling.give_up(attempt, failure)

    # -- deadlines ----------------------------------------------------------------------------------------------------
    async def _tick_for_ever(self) -> None:
        while True:
            await self._has_attempts.wait()  # an idle node is not woken
            await asyncio.sleep(self._tick_seconds)
            self.tick()
            if not self.num_open:
                self._has_attempts.clear()

    def tick(self) -> None:
        """Checks every deadline. Called many times per heartbeat while there is an attempt."""
        self._awake.tick()
        for attempt in self._book.all():
            self._attend(attempt, self._check)

    def _check(self, attempt: Attempt) -> None:
        match attempt.state.value:
            case AttemptState.CHOOSING:
                self._place(attempt)
            case AttemptState.FENCING:
                return  # until its link is fenced, whose alarm is that of `Fencing`
            case AttemptState.DRAINING:
                assert attempt.ended is not None
                self._compare_counts(attempt, attempt.ended)
                if attempt.state.value is AttemptState.DRAINING:
                    self._check_deadline(attempt)
            case _:
                self._look(attempt)
                self._check_deadline(attempt)

    def _check_deadline(self, attempt: Attempt) -> None:
        match self._deadlines.check(attempt, self._awake.seconds):
            case Late.LOST, why:
                self._fence(attempt, why)
            case Late.STALLED, why:
                assert attempt.link is not None
                attempt.failure = RequestTimeout(f"the prefill on {attempt.link.name} {why}")
                self._settling.count(stalls=1)
                self._quiet.log(logging.WARNING, f"{attempt.reserved.request_id}: {attempt.failure}")
                self._cancel(attempt, "no progress")

    def _look(self, attempt: Attempt) -> int:
        """Units that have arrived; more than at the last look is progress."""
        arrived = self._book.arrived(attempt)
        if arrived != attempt.arrived_units:
            attempt.arrived_units, attempt.progress_at = arrived, self._awake.seconds
        return arrived

    def _fence(self, attempt: Attempt, why: str) -> None:
        """Ends the link of an attempt whose writes nobody can account for; `link_down` does the rest."""
        assert attempt.link is not None
        self._settling.count(fences=1)
        attempt.link.fence(PeerProtocol(f"{attempt.reserved.request_id}: {why}"))


def _deadlines(context: LinkContext, settings: DecoderSettings) -> Deadlines:
    return Deadlines(context.settings.dead_after, settings.prefill_stall_timeout)
