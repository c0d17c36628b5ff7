"""The engine thread's own record of one request: where it is in its life, and how far its KV has come.

There is no prefill or decode phase in the data: a request has `tokens`, of which the KV of the first `computed` is in
its pages; what is `remaining` is caught up chunk by chunk, and a request that samples gets one more token each time it
has caught up. A preempted request is the same request with `computed` back at 0.
"""

from __future__ import annotations

import dataclasses

from pdd.engine.batch import NewRow, SampledRow, Sampling
from pdd.engine.request import (
    Finished,
    FinishReason,
    GenerateSpec,
    KvSink,
    KvSource,
    PrefillSpec,
    RequestState,
    SamplingParams,
    TokenLogprob,
    TokenOutput,
)
from pdd.states import Facts, Recorder, TimedState, record_nothing

TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    # admitted with pages to be filled by a prefiller; admitted with a slot; aborted, expired or refused
    RequestState.WAITING: frozenset(
        {RequestState.WAITING_FOR_REMOTE_KV, RequestState.RUNNING, RequestState.FINISHED}
    ),
    # counted whole; the attempt failed and another follows; failed or aborted
    RequestState.WAITING_FOR_REMOTE_KV: frozenset(
        {RequestState.READY, RequestState.WAITING, RequestState.FINISHED}
    ),
    # got a slot; preempted; aborted
    RequestState.READY: frozenset({RequestState.RUNNING, RequestState.WAITING, RequestState.FINISHED}),
    # no page to grow into, slot given back; preempted; prefill-only and done or cut short; done, aborted
    RequestState.RUNNING: frozenset(
        {RequestState.READY, RequestState.WAITING, RequestState.SENDING, RequestState.FINISHED}
    ),
    RequestState.SENDING: frozenset({RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}

NO_HOLD = -1


class Misuse(ValueError):
    """A caller broke the inbox's contract (a second id, an attempt that is not open). Nothing was changed."""


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """One request, from submission to its last page's release. Owner: the scheduler, on the engine thread."""

    request_id: str
    seq: int  # order of arrival, kept through preemptions
    arrived: float
    tokens: list[int]  # prompt, then output
    prompt_len: int
    sampling: SamplingParams | None  # None: prefill only
    sink: KvSink | None  # of a prefill-only request
    kv_source: KvSource
    stop_ids: frozenset[int]
    life: TimedState[RequestState]
    hold: int = NO_HOLD  # page hold, row id at the ranks and attempt at the messenger in one; new at each admission
    computed: int = 0  # tokens whose KV is in the pages
    pages_told: int = 0  # pages that the ranks know of
    row_known: bool = False  # the ranks have seen this row id
    admissions: int = 0
    last_step: int | None = None  # that it was in
    blocked_since: float | None = None  # since when too few pages were free for it

    def __post_init__(self) -> None:
        self.life.facts = self._facts

    def _facts(self) -> Facts:
        return Facts(attempt=None if self.hold == NO_HOLD else self.hold, step=self.last_step)

    @classmethod
    def of(cls, spec: GenerateSpec | PrefillSpec, seq: int, now: float, recorder: Recorder = record_nothing) -> Record:
        """A new request. `seq` orders requests by arrival."""
        if isinstance(spec, GenerateSpec):
            sampling, sink, source = spec.sampling, None, spec.kv_source
            stop_ids = frozenset(spec.sampling.stop_token_ids)
        else:
            sampling, sink, source, stop_ids = None, spec.sink, KvSource.LOCAL, frozenset()
        return cls(
            request_id=spec.request_id, seq=seq, arrived=now, tokens=list(spec.prompt), prompt_len=len(spec.prompt),
            sampling=sampling, sink=sink, kv_source=source, stop_ids=stop_ids,
            life=TimedState("request", spec.request_id, RequestState.WAITING, TRANSITIONS, at=now, recorder=recorder),
        )

    # -- asking ---------------------------------------------------------------------------------------------------
    @property
    def state(self) -> RequestState:
        return self.life.value

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed here."""
        return len(self.tokens) - self.computed

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def wants_remote(self) -> bool:
        """Whether its next admission asks a prefiller. A single token is run here, as the last one always is."""
        return self.kv_source is KvSource.REMOTE and len(self.tokens) > 1

    @property
    def preemptable(self) -> bool:
        """Whether its pages can be taken without asking anyone: no write may land in them or read them."""
        return self.sink is None and self.state in (RequestState.READY, RequestState.RUNNING)

    def _finish_reason(self) -> FinishReason | None:
        """Why the token appended last ends the request, if it does. The first min_tokens tokens are no stop tokens."""
        assert self.sampling is not None
        if self.tokens[-1] in self.stop_ids and self.output_len > self.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.output_len >= self.sampling.max_tokens else None

    def finished(self, reason: FinishReason, error: Exception | None = None) -> Finished:
        return Finished(
            self.request_id, reason, error, prompt_tokens=self.prompt_len, completion_tokens=self.output_len
        )

    def new_row(self) -> NewRow:
        """What the ranks must know before the row's first step."""
        prompt, output = tuple(self.tokens[: self.prompt_len]), tuple(self.tokens[self.prompt_len :])
        return NewRow(
            row_id=self.hold, prompt=prompt, output=output,
            sampling=None if self.sampling is None else to_wire(self.sampling),
        )

    # -- changing -------------------------------------------------------------------------------------------------
    def move(self, state: RequestState, now: float, why: str = "") -> None:
        self.life.move_at(now, state, why)

    def admit(self, hold: int) -> None:
        """Starts a new life with new pages, of which the ranks know nothing."""
        self.hold, self.computed, self.pages_told, self.row_known = hold, 0, 0, False
        self.admissions += 1
        self.blocked_since = None

    def take(self, sampled: SampledRow) -> tuple[tuple[TokenOutput, ...], FinishReason | None]:
        """Appends sampled tokens up to the one that ends the request, which is still output."""
        outputs: list[TokenOutput] = []
        reason = None
        for index, token in enumerate(sampled.tokens):
            self.tokens.append(token)
            outputs.append(TokenOutput(
                token, sampled.logprobs[index] if sampled.logprobs else None,
                tuple(TokenLogprob(*entry) for entry in sampled.top[index]) if sampled.top else (),
            ))
            if (reason := self._finish_reason()) is not None:
                break
        return tuple(outputs), reason


@dataclasses.dataclass(frozen=True, slots=True)
class Orphan:
    """Pages whose request is gone, or has started over, while the attempt that they belong to is not settled."""

    request_id: str
    since: float


def to_wire(sampling: SamplingParams) -> Sampling:
    """The part of SamplingParams that the sampler needs; lengths and stops are decided on the engine thread."""
    return Sampling(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty, frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty, logit_bias=sampling.logit_bias,
        banned=sampling.stop_token_ids if sampling.min_tokens else (), min_tokens=sampling.min_tokens,
        seed=sampling.seed, logprobs=sampling.logprobs,
    )
