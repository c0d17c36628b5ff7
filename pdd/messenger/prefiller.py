"""The prefiller's side: takes requests of decoders, has the engine compute them, and pushes what it computed.

A job is one request in hand. It ends when the engine has let go of it and every posted write is terminal, never
before, and only then are its source pages given back and, if the decoder does not have it all, PrefillEnded sent with
the exact counts. Success is not told. A link that ends takes its jobs with it: their transfers end with the endpoint.

    QUEUED    the engine has it, no page yet        SENDING     computed, writes on their way
    PUSHING   pages reserved, steps running         CANCELLING  given up; draining        DONE

It never frees pages by time, never retries a write, and believes nothing that a request says without checking it.
Owner: the main loop; sinks run on the engine thread and post here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Callable

from pdd.engine.request import EngineEvent, EngineInbox, Finished, FinishReason, PrefillSpec
from pdd.errors import PeerProtocol, RequestError
from pdd.fabric.types import TransferEnd
from pdd.kv.layout import pages_of
from pdd.messenger import wire
from pdd.messenger.asking import Answers, PastJobs
from pdd.messenger.endings import Answered, Tombstones
from pdd.messenger.explain import Push, explained, push_of
from pdd.messenger.job import TABLE, Ending, Job, JobState
from pdd.messenger.link import LinkContext, PeerLink, Pulse
from pdd.messenger.listener import PeerListener
from pdd.messenger.ports import FlightPort, Planner, PushPlan
from pdd.messenger.requests import Checked, check_request
from pdd.messenger.settings import PrefillLimits
from pdd.messenger.sink import Post, Pusher, PushSink
from pdd.messenger.status import JobDone, JobStatus, PeerStatus, PrefillerCounters, added
from pdd.messenger.wire import EndReason
from pdd.states import State

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _LinkView:
    """What the prefiller keeps of one link."""

    jobs: dict[int, Job] = dataclasses.field(default_factory=dict)  # by attempt
    answered: Answered = dataclasses.field(default_factory=Answered)
    tombstones: Tombstones = dataclasses.field(default_factory=Tombstones)
    past: PastJobs = dataclasses.field(default_factory=PastJobs)
    answers: Answers = dataclasses.field(default_factory=Answers)


class Prefiller:
    """Handler of the links from decoders, of transfers, and of the engine's news about prefill requests."""

    def __init__(
        self, context: LinkContext, sock: socket.socket, inbox: EngineInbox, planner: Planner, *,
        watch: int, post: Post, load: Callable[[], wire.Load], report: Callable[[JobDone], None] = lambda done: None,
        limits: PrefillLimits = PrefillLimits(),  # noqa: B008  frozen
        flight: FlightPort | None = None,
    ) -> None:
        self.listener = PeerListener(sock, context, self)
        self.counters = PrefillerCounters()
        self._context = context
        self._inbox = inbox
        self._planner = planner
        self._limits = limits
        self._flight = flight
        self._load = load
        self._report = report
        self._pusher = Pusher(context.fabric, watch, context.node.geometry.num_layers, post, self)
        self._views: dict[PeerLink, _LinkView] = {}
        self._jobs: dict[str, Job] = {}  # by request id in the engine
        self._by_transfer: dict[int, Job] = {}
        self._early_ends: dict[int, TransferEnd] = {}  # transfers that ended before they were known here
        self._idle = asyncio.Event()  # no job is in hand
        self._idle.set()
        self._serial = 0
        self._draining = False
        context.events.on_transfers(self)

    async def start(self) -> None:
        await self.listener.start()

    async def close(self, fence_seconds: float = 5.0) -> None:
        """Ends every link and job; waits for the fences and the engine, at most `fence_seconds` for each."""
        self._draining = True
        await self.listener.close(fence_seconds)
        try:
            async with asyncio.timeout(fence_seconds):
                await self.wait_idle()
        except TimeoutError:
            _log.error("%d prefills have not ended: %s", len(self._jobs), ", ".join(self._jobs))

    async def wait_idle(self) -> None:
        """Returns once no job is in hand: after `drain`, when the last push is over."""
        await self._idle.wait()

    def drain(self) -> None:
        """Takes no new request; what is in hand is finished. Decoders hear of it at once."""
        self._set_draining(True)

    def resume(self) -> None:
        self._set_draining(False)

    def _set_draining(self, draining: bool) -> None:
        self._draining = draining
        for link in self.listener.links:
            link.beat_now()

    # -- asking ---------------------------------------------------------------------------------------------------
    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def jobs(self) -> tuple[JobStatus, ...]:
        """Every job in hand, the oldest first."""
        now = self._context.clock()
        return tuple(job.status(now) for job in self._jobs.values())

    def peer_status(self) -> tuple[PeerStatus, ...]:
        return self.listener.status(
            {
                link: (len(view.jobs), sum(job.num_tokens for job in view.jobs.values()))
                for link, view in self._views.items()
            }
        )

    # -- link events (LinkHandler) ----------------------------------------------------------------------------------
    def link_up(self, link: PeerLink) -> None:
        self._views.setdefault(link, _LinkView())

    def link_message(self, link: PeerLink, message: wire.Message) -> None:
        match message:
            case wire.PrefillRequest():
                self._take(link, message)
            case wire.Cancel():
                self._cancel(link, message.attempt)
            case wire.Heartbeat():
                return
            case wire.ExplainRequest():
                self._explain(link, message)
            case _:
                raise PeerProtocol(f"a {type(message).__name__} came from a decoder")

    def link_down(self, link: PeerLink) -> None:
        for job in list(self._views.pop(link).jobs.values()):
            self._stop(job, Ending(None, f"the link ended: {link.error}"))

    def link_closed(self, link: PeerLink) -> None:
        """Its transfers have ended one by one before; nothing is left to do."""

    def pulse(self, link: PeerLink) -> Pulse:
        view = self._views.get(link)
        jobs = view.jobs.values() if view is not None else ()
        progress = tuple((job.attempt, job.sink.computed_tokens) for job in jobs)
        return Pulse(self._load(), self._draining, progress)

    # -- requests and cancels ---------------------------------------------------------------------------------------
    def _take(self, link: PeerLink, request: wire.PrefillRequest) -> None:
        view = self._views[link]
        if request.attempt in view.tombstones:
            ending = Ending(EndReason.CANCELLED, "cancelled before it came")
            self._answer(link, ending.message_for(request.attempt))
            return
        if request.attempt in view.jobs or request.attempt in view.answered:
            # An answer could be taken for that of the first, whose writes may still land: the link must end.
            raise PeerProtocol(f"attempt {request.attempt} came twice")
        checked = self._check(link, view, request)
        if isinstance(checked, Ending):
            self._count(refused=1)
            ended = checked.message_for(request.attempt)
            view.answered.add(ended)
            self._answer(link, ended)
            return
        self._start(link, view, request, checked)

    def _check(self, link: PeerLink, view: _LinkView, request: wire.PrefillRequest) -> Checked | Ending:
        if self._draining:
            return Ending(EndReason.DRAINING, "this prefiller is draining")
        if len(view.jobs) >= self._limits.max_jobs_per_link:
            return Ending(EndReason.FAILED, f"{len(view.jobs)} requests of this decoder are in hand already")
        # A decoder may use a key again before this side has seen the last completion of a write, not before that write.
        if any(job.key == request.key and job.sink.armed_tokens < job.num_tokens for job in view.jobs.values()):
            return Ending(EndReason.FAILED, f"key {request.key:#08x} is still in use here")
        return check_request(request, link.peer, self._context.node)

    def _start(self, link: PeerLink, view: _LinkView, request: wire.PrefillRequest, checked: Checked) -> None:
        context = self._context
        ours, theirs = context.node.geometry, link.peer.geometry
        self._serial += 1
        request_id = f"pf{self._serial}-{request.request_id}"

        def make_plans(source_pages: tuple[int, ...]) -> list[PushPlan]:
            num_tokens = len(checked.tokens)
            return list(
                self._planner.plan(ours, theirs, source_pages, checked.pages, num_tokens, request.skip_tokens,
                                   request.source_sets, request.group)
            )

        assert link.endpoint is not None
        sink = PushSink(self._pusher, request_id, link.endpoint, request.key, make_plans)
        job = Job(
            request_id=request_id, client_id=request.request_id, received=context.clock(),
            attempt=request.attempt, key=request.key, link=link, sink=sink,
            num_tokens=len(checked.tokens),
            num_units=self._planner.expected_units(ours, theirs, len(checked.tokens), request.skip_tokens),
            state=State("job", request_id, JobState.QUEUED, TABLE, clock=context.clock, recorder=context.recorder),
        )
        self._jobs[request_id] = view.jobs[job.attempt] = job
        self._idle.clear()
        self._count(jobs=1)
        self._inbox.submit_prefill(PrefillSpec(request_id, checked.tokens, sink, request.skip_tokens))

    def _cancel(self, link: PeerLink, attempt: int) -> None:
        view = self._views[link]
        job = view.jobs.get(attempt)
        if job is not None:
            self._stop(job, Ending(EndReason.CANCELLED, "cancelled by the decoder"))
            return
        ended = view.answered.get(attempt)
        if ended is None:
            view.tombstones.add(attempt, self._context.clock())  # raises when there are too many: the link ends
            self._count(tombstones=1)
            ended = Ending(EndReason.CANCELLED, "cancelled before it came").message_for(attempt)
        self._answer(link, ended)

    def _answer(self, link: PeerLink, ended: wire.PrefillEnded) -> None:
        link.send(ended)

    def _explain(self, link: PeerLink, request: wire.ExplainRequest) -> None:
        """A view of one attempt, for people at the decoder."""
        view = self._views[link]
        job, now = view.jobs.get(request.attempt), self._context.clock()
        push = view.past.get(request.attempt) if job is None else push_of(job.status(now), now)
        view.answers.begin(now, self._answer_for(link, request, push))

    async def _answer_for(self, link: PeerLink, request: wire.ExplainRequest, push: Push | None) -> None:
        link.send(await explained(request, push, self._flight, self._context.node.regions, self._context.clock))

    # -- from the engine --------------------------------------------------------------------------------------------
    def engine_event(self, event: EngineEvent) -> None:
        """Takes Finished of prefill requests; the rest is not for the messenger."""
        if not isinstance(event, Finished):
            return
        job = self._jobs.get(event.request_id)
        if job is None:
            return
        job.engine_is_done = True
        if event.reason in (FinishReason.ERROR, FinishReason.ABORT):
            text = str(event.error) if event.error is not None else "aborted on the prefiller"
            # A request that cannot be right for this node will not be on the next try; a full queue may.
            reason = EndReason.REFUSED if isinstance(event.error, RequestError) else EndReason.FAILED
            self._stop(job, Ending(reason, text))
        self._end_if_over(job)

    def sink_opened(self, request_id: str, transfer: int) -> None:
        job = self._jobs[request_id]  # a job does not end while its sink is open
        job.transfer = transfer
        early = self._early_ends.pop(transfer, None)
        if early is not None:
            self._transfer_ended(job, early)
            return
        self._by_transfer[transfer] = job
        if job.state.value is JobState.QUEUED:
            job.state.move(JobState.PUSHING)
            job.started = job.state.since
        else:
            self._cancel_transfer(job)

    def sink_failed(self, request_id: str, message: str) -> None:
        job = self._jobs.get(request_id)
        if job is not None:
            self._stop(job, Ending(EndReason.FAILED, message))

    def sink_closed(self, request_id: str, completed: bool) -> None:
        job = self._jobs.get(request_id)
        if job is None:
            return
        job.sink_is_closed, job.is_computed = True, completed
        if completed and job.state.value is JobState.PUSHING:
            job.state.move(JobState.SENDING)
            job.computed = job.state.since
        self._end_if_over(job)  # if not completed, Finished follows and says why

    # -- fabric events (TransferHandler) ------------------------------------------------------------------------------
    def transfer_done(self, transfer: int, end: TransferEnd) -> None:
        job = self._by_transfer.pop(transfer, None)
        if job is None:
            self._early_ends[transfer] = end
        else:
            self._transfer_ended(job, end)

    def _transfer_ended(self, job: Job, end: TransferEnd) -> None:
        job.end = end
        self._count(units_ok=end.ok, units_failed=end.failed, units_unknown=end.unknown)
        if end.failed or end.unknown:
            self._stop(job, Ending(EndReason.FAILED, f"{end.failed + end.unknown} units were not written: {end.error}"))
        self._end_if_over(job)

    # -- ends ---------------------------------------------------------------------------------------------------------
    def _stop(self, job: Job, ending: Ending) -> None:
        """Gives a job up; the first cause stays. It ends when the engine and the fabric have let go of it."""
        if job.state.value in (JobState.CANCELLING, JobState.DONE):
            return
        job.ending = ending
        job.state.move(JobState.CANCELLING, ending.message)
        if not job.engine_is_done:
            self._inbox.abort(job.request_id)
        self._cancel_transfer(job)
        self._end_if_over(job)

    def _cancel_transfer(self, job: Job) -> None:
        if job.transfer is None or job.end is not None:
            return
        try:
            self._context.fabric.cancel(job.transfer)
        except RuntimeError as error:  # over already; its event is on the way
            _log.debug("transfer of %s cannot be cancelled: %s", job.request_id, error)

    def _end_if_over(self, job: Job) -> None:
        if job.state.value is JobState.DONE or not job.is_over:
            return
        end = job.end or TransferEnd(0, 0, 0)
        whole = job.state.value is JobState.SENDING and end.ok == job.num_units
        if not whole and job.ending is None:
            job.ending = Ending(EndReason.FAILED, f"{end.ok} of {job.num_units} units were written")
        job.state.move(JobState.DONE, "whole" if whole else job.state.why)
        del self._jobs[job.request_id]
        if not self._jobs:
            self._idle.set()
        if job.sink.holds_pages:  # also when no transfer could be opened
            self._inbox.prefill_settled(job.request_id)
        ending = job.ending or Ending(EndReason.CANCELLED, "it was written in full")
        view = self._views.get(job.link)
        if view is not None:  # else nobody is left to tell
            del view.jobs[job.attempt]
            ended = ending.message_for(job.attempt, end.ok, end.failed, end.unknown)
            view.answered.add(ended)
            if not whole:
                self._answer(job.link, ended)
        reason = "" if whole else ending.label
        self._count(**{reason or "whole": 1})
        done = JobDone(
            request_id=job.client_id, attempt=job.attempt, peer=job.link.name, whole=whole,
            reason=reason, error="" if whole else ending.message, received=job.received, started=job.started,
            computed=job.computed, finished=self._context.clock(), num_tokens=job.num_tokens, units=end.ok,
            writes=end.writes, bytes=end.bytes, busy_seconds=end.busy_seconds, exposed_seconds=end.exposed_seconds,
            pages=pages_of(job.num_tokens, self._context.node.geometry.page_size) * end.ok // max(1, job.num_units),
            via=job.link.via, job_id=job.request_id, transfer=job.transfer, expected_units=job.num_units,
            failed_units=end.failed, unknown_units=end.unknown, computed_tokens=job.sink.computed_tokens,
            peer_tp=job.link.peer.geometry.tp,
        )
        if view is not None:
            view.past.add(done)
        self._report(done)

    def _count(self, **amounts: int) -> None:
        self.counters = added(self.counters, **amounts)
