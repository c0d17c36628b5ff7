"""Generation as the API sees it: one stream of events per request, whichever nodes work for it.

A stream submits its request when its first event is asked for, and aborts it when it is closed early. Events come from
the engine on the main loop (`engine_event`) and wait in the stream until they are read. How a request ended is decided
once, by the first of: the end that its reader reads, a stop string, a failure, a reader that leaves; metrics and ledger
are told that, whatever the engine says about the abort that follows.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable
from typing import Self

from pdd.api.service import Health, Limits, Tokenizer
from pdd.daemon.latency import Latencies
from pdd.daemon.ledger import Ledger
from pdd.engine.limits import check_fits
from pdd.engine.request import (
    EngineEvent,
    EngineInbox,
    Finished,
    FinishReason,
    GenerateSpec,
    KvSource,
    SamplingParams,
    Tokens,
)
from pdd.errors import Draining, NotReady, Overloaded, PddError, RequestCancelled, RequestTimeout
from pdd.metrics import Metrics

_log = logging.getLogger(__name__)


class NodeService:
    """`pdd.api.service.Service` of this node. Owner: the main loop."""

    def __init__(
        self, *, model_name: str, ledger: Ledger, metrics: Metrics, latencies: Latencies, max_queue: int,
        request_timeout: float, health: Callable[[], Health], metrics_text: Callable[[], str],
        timed_out: Callable[[str, Exception], None] = lambda request_id, error: None,
    ) -> None:
        self._model_name = model_name
        self._ledger = ledger
        self._metrics = metrics
        self._latencies = latencies
        self._max_queue = max_queue
        self._request_timeout = request_timeout
        self._health = health
        self._metrics_text = metrics_text
        self._timed_out = timed_out
        self._tokenizer: Tokenizer | None = None
        self._limits: Limits | None = None
        self._inbox: EngineInbox | None = None
        self._route: Callable[[int], KvSource] = lambda _: KvSource.LOCAL
        self._streams: dict[str, _Stream] = {}
        self._num_silent = 0  # streams that wait for their first token
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._draining = False

    def loaded(
        self, tokenizer: Tokenizer, limits: Limits, inbox: EngineInbox, route: Callable[[int], KvSource]
    ) -> None:
        """The engine runs: requests are taken from now on. `route`: who computes the KV of a prompt of n tokens."""
        self._tokenizer, self._limits, self._inbox, self._route = tokenizer, limits, inbox, route

    # -- pdd.api.service.Service ------------------------------------------------------------------------------------
    @property
    def model_names(self) -> tuple[str, ...]:
        return (self._model_name,)

    @property
    def limits(self) -> Limits:
        if self._limits is None:
            raise _loading()
        return self._limits

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise _loading()
        return self._tokenizer

    @property
    def draining(self) -> bool:
        return self._draining

    def admit(self) -> None:
        if self._draining:
            raise Draining("this node is draining and takes no new work", hint="another node behind the same name will")
        if self._inbox is None:
            raise _loading()
        if self._num_silent >= self._max_queue:
            raise Overloaded(
                f"{self._num_silent} requests wait already (scheduler.max_queue = {self._max_queue})",
                hint="try again later",
            )

    def generate(
        self, prompt: tuple[int, ...], sampling: SamplingParams, *, request_id: str, given_id: str | None
    ) -> _Stream:
        return _Stream(self, request_id, given_id, prompt, sampling)

    def health(self) -> Health:
        return self._health()

    def metrics_text(self) -> str:
        return self._metrics_text()

    # -- the daemon's side ------------------------------------------------------------------------------------------
    def engine_event(self, event: EngineEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is not None and isinstance(event, Tokens | Finished):
            stream.push(event)

    def drain(self, draining: bool) -> None:
        self._draining = draining

    def set_bounds(self, max_queue: int, request_timeout: float) -> None:
        """`request_timeout`: seconds, of the requests that are open now, too, once the old ones have passed."""
        self._max_queue, self._request_timeout = max_queue, request_timeout

    async def quiet(self) -> None:
        """Returns once no request is open."""
        await self._quiet.wait()

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def cancel(self, request_id: str, error: PddError) -> bool:
        """Ends one request with `error`. False: it is not open here."""
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        stream.fail(error)
        return True

    def cancel_all(self, error: PddError) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)

    # -- of _Stream -------------------------------------------------------------------------------------------------
    def submit(self, stream: _Stream) -> None:
        self.admit()
        assert self._inbox is not None
        limits = self.limits
        check_fits(
            len(stream.prompt), stream.sampling.max_tokens, max_context=limits.max_context,
            pool_tokens=limits.pool_tokens,
        )
        request_id = stream.request_id
        self._streams[request_id] = stream
        self._num_silent += 1
        self._quiet.clear()
        self._ledger.open(request_id, stream.prompt, stream.given_id)
        self._inbox.submit(GenerateSpec(request_id, stream.prompt, stream.sampling, self._route(len(stream.prompt))))

    def observe(self, stream: _Stream, event: Tokens | Finished, now: float) -> None:
        """Latencies, as the engine's events arrive."""
        if isinstance(event, Tokens):
            if stream.last_token_at is None:
                self._num_silent -= 1
                self._metrics.time_to_first_token.observe(now - stream.submitted_at)
                self._latencies.first_token.observe(now - stream.submitted_at)
            else:
                gap = (now - stream.last_token_at) / len(event.outputs)
                self._metrics.inter_token_latency.observe(gap)
                self._latencies.between_tokens.observe(gap)
            stream.last_token_at = now
            return
        if stream.last_token_at is None:
            self._num_silent -= 1
        self._metrics.request_latency.observe(now - stream.submitted_at)
        self._streams.pop(stream.request_id, None)
        if not self._streams:
            self._quiet.set()

    def ended(self, stream: _Stream, reason: FinishReason, error: Exception | None) -> None:
        """How a request ended, for its client. Called once per request."""
        self._metrics.requests.labels(reason.value).inc()
        self._ledger.ended(stream.request_id, reason, error)
        if isinstance(error, RequestTimeout):
            self._timed_out(stream.request_id, error)

    def abort(self, request_id: str) -> None:
        assert self._inbox is not None
        self._inbox.abort(request_id)

    def expire(self, stream: _Stream) -> float | None:
        """Seconds until the stream may be looked at again; None: it was ended for lack of progress."""
        last = stream.last_token_at or stream.submitted_at
        left = last + self._request_timeout - time.monotonic()
        if left > 0:
            return left
        stream.fail(RequestTimeout(f"no token for {self._request_timeout:g} s (scheduler.request_timeout)"))
        return None

    @property
    def request_timeout(self) -> float:
        return self._request_timeout


def _loading() -> NotReady:
    return NotReady("the model is still being loaded", hint="GET /health/ready tells when it is done")


class _Stream:
    """The events of one request, in order; ends after Finished. Read by one task."""

    def __init__(
        self, service: NodeService, request_id: str, given_id: str | None, prompt: tuple[int, ...],
        sampling: SamplingParams,
    ) -> None:
        self.request_id = request_id
        self.given_id = given_id
        self.prompt = prompt
        self.sampling = sampling
        self.submitted_at = 0.0
        self.last_token_at: float | None = None
        self._service = service
        self._events: collections.deque[Tokens | Finished] = collections.deque()
        self._more = asyncio.Event()
        self._submitted = False
        self._over = False  # Finished was pushed
        self._read = False  # Finished was read, or the reader left
        self._told = False  # how it ended
        self._timer: asyncio.TimerHandle | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tokens | Finished:
        if self._read:
            raise StopAsyncIteration
        if not self._submitted:
            self.submitted_at = time.monotonic()
            self._service.submit(self)
            self._submitted = True
            self._watch(self._service.request_timeout)
        event = await self._next()
        if isinstance(event, Finished):
            self._read = True
            self._tell(event.reason, event.error)
        return event

    async def finish(self) -> int | None:
        self._tell(FinishReason.STOP, None)
        if not self._over:
            self._service.abort(self.request_id)
        while not self._read:
            event = await self._next()
            if isinstance(event, Finished):
                self._read = True
                return event.cached_tokens if event.error is None else None
        return None

    async def aclose(self) -> None:
        self._leave()

    async def _next(self) -> Tokens | Finished:
        while not self._events:
            self._more.clear()
            try:
                await self._more.wait()
            except asyncio.CancelledError:
                self._leave()
                raise
        return self._events.popleft()

    def push(self, event: Tokens | Finished) -> None:
        """From the engine. What comes after the end is dropped."""
        if self._over:
            return
        self._over = isinstance(event, Finished)
        self._service.observe(self, event, time.monotonic())
        self._events.append(event)
        self._more.set()
        if self._over and self._timer is not None:
            self._timer.cancel()

    def fail(self, error: PddError) -> None:
        """Ends the request here and now; the engine is told to let go of it."""
        if not self._over:
            self._service.abort(self.request_id)
            self._tell(FinishReason.ERROR, error)
            self.push(Finished(self.request_id, FinishReason.ERROR, error, prompt_tokens=len(self.prompt)))

    def _leave(self) -> None:
        """The client is gone, perhaps after the end that it did not read."""
        self._read = True
        if not self._submitted:
            return
        if not self._over:
            self._service.abort(self.request_id)
            self.push(Finished(self.request_id, FinishReason.ABORT, RequestCancelled("the client left")))
        for event in self._events:
            if isinstance(event, Finished):
                self._tell(event.reason, event.error)
        self._events.clear()

    def _tell(self, reason: FinishReason, error: Exception | None) -> None:
        if not self._told:
            self._told = True
            self._service.ended(self, reason, error)

    def _watch(self, seconds: float) -> None:
        def look() -> None:
            left = self._service.expire(self)
            if left is not None:
                self._watch(left)

        self._timer = asyncio.get_running_loop().call_later(seconds, look)
