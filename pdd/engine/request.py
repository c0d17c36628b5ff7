"""What the engine is asked to do, and the states that a request goes through.

Requests are plain data. The engine thread owns every mutable field of a request's life; the rest of the daemon holds
the frozen specs below and the ids.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `temperature == 0` is greedy."""

    temperature: float = 1.0  # >= 0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # [-2, 2], on tokens already generated
    frequency_penalty: float = 0.0  # [-2, 2]
    repetition_penalty: float = 1.0  # > 0, on prompt and generated tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # the token at position i depends on (seed, i) alone, never on batch or node
    logprobs: int | None = None  # None: none; k: the chosen token's and the k most likely
    max_tokens: int = 16  # >= 1
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # includes the model's eos ids unless ignore_eos


class KvSource(enum.Enum):
    """Who computes the KV of the prompt."""

    LOCAL = "local"  # this node's engine
    REMOTE = "remote"  # a prefiller writes it into pages that this node reserves


class FinishReason(enum.Enum):
    STOP = "stop"  # a stop token id (the API layer maps its stop strings to this too)
    LENGTH = "length"
    ABORT = "abort"  # the client left
    ERROR = "error"


class RequestState(enum.Enum):
    """States as `pdd requests` shows them."""

    WAITING = "waiting"  # queued for pages or for a slot
    WAITING_FOR_REMOTE_KV = "wait_kv"  # pages reserved; a prefiller is asked
    READY = "ready"  # its KV is whole; waits for a slot
    RUNNING = "running"  # in the batch (prefill chunks or decode)
    SENDING = "sending"  # prefill done; pages pinned until every write is terminal
    FINISHED = "finished"


@dataclasses.dataclass(frozen=True, slots=True)
class GenerateSpec:
    """A request to generate tokens."""

    request_id: str  # unique in this node's life; made by this node, never by the client
    prompt: tuple[int, ...]  # token ids, at least one
    sampling: SamplingParams
    kv_source: KvSource = KvSource.LOCAL


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillSpec:
    """A request to compute the KV of `prompt` and hand it to `sink`. Nothing is sampled."""

    request_id: str
    prompt: tuple[int, ...]  # already without the last prompt token, which the decoder runs
    sink: KvSink
    skip_tokens: int = 0  # leading tokens the decoder already holds: computed (or cached) here, not sent


class KvSink(Protocol):
    """Takes the KV of one prefill-only request. Called on the engine thread; must not block.

    Order: `open` once, `arm` before each step that runs a chunk of the request, `close` after the last arm. A request
    that ends before it has pages is closed without having been opened. The engine pins the pages from `open` on until
    `EngineInbox.prefill_settled(request_id)`, whatever happened; only when `open` itself raises does it free them.
    """

    def open(self, pages: tuple[int, ...]) -> None:
        """The source pages of the whole prompt, in token order."""

    def arm(self, step: int, begin_token: int, end_token: int) -> None:
        """Step number `step` will compute tokens [begin_token, end_token) of the prompt."""

    def close(self, *, completed: bool) -> None:
        """No further arm follows. `completed=False`: the request ended early (cancel, shutdown)."""


# -- what the engine says, in order, about one request ----------------------------------------------------------------
# A prefill-only request has one Finished: STOP when its whole prompt is computed. It comes before the sink is closed.
@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float


@dataclasses.dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token."""

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()  # the most likely tokens, best first, when asked for


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    request_id: str
    outputs: tuple[TokenOutput, ...]  # more than one per step with speculation


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    request_id: str
    reason: FinishReason
    error: Exception | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was reused from this node's prefix cache
    completion_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class KvReserved:
    """Pages for the remote KV of a request are pinned. The messenger now owns their way back:
    `EngineInbox.kv_settled(attempt, ...)` is the only exit, also after an abort."""

    request_id: str
    attempt: int  # unique in this node's life; one try at one prompt's KV
    tokens: tuple[int, ...]  # whose KV is wanted: all known tokens of the request but the last
    pages: tuple[int, ...]  # destination pages in token order, those of the skipped prefix included
    skip_tokens: int = 0
    group: int = 0  # whose pages they are: the index of this engine among those of its node


@dataclasses.dataclass(frozen=True, slots=True)
class KvAbandoned:
    """The request of this attempt ended (client left, deadline); its pages still wait for `kv_settled`."""

    request_id: str
    attempt: int


EngineEvent = Tokens | Finished | KvReserved | KvAbandoned


class KvOutcome(enum.Enum):
    """How an attempt ended, as the messenger proved it."""

    WHOLE = "whole"  # arrived units == expected units: decode may start
    RELEASED = "released"  # not whole, and no write that names the pages can still land: pages are free again
    QUARANTINED = "quarantined"  # not whole, a write may still land: pages stay out of the pool until RELEASED


class EngineInbox(Protocol):
    """What other threads may ask of the engine thread. Every call returns at once and may come from any thread."""

    def submit(self, spec: GenerateSpec) -> None: ...

    def submit_prefill(self, spec: PrefillSpec) -> None: ...

    def abort(self, request_id: str) -> None:
        """End a request of either kind. Idempotent; unknown ids are ignored. Answered by Finished(ABORT)."""

    def kv_settled(self, attempt: int, outcome: KvOutcome, *, retry: KvSource | None = None,
                   error: Exception | None = None) -> None:
        """Says how a `KvReserved` attempt ended.

        WHOLE: the request becomes READY. RELEASED or QUARANTINED: the request starts over from `retry` (new pages, new
        attempt), or fails with `error` when `retry` is None. A QUARANTINED attempt is settled again by RELEASED.
        """

    def prefill_settled(self, request_id: str) -> None:
        """Every write that reads the source pages is terminal: they may be reused."""
