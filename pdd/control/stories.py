"""The documents of `pdd explain` and of the flight recorder, by the rules of schema.py."""

from __future__ import annotations

import msgspec

from pdd.control.schema import Request, Stacks


class ExplainStep(msgspec.Struct, frozen=True, kw_only=True):
    """One change of state, of the request, of one of its attempts or jobs, or of the link that they went over."""

    at_seconds: float  # since the request came; negative: before it
    kind: str  # request, attempt, job, link
    of: str  # whose: an id, or a peer's address
    before: str  # "": it begins
    state: str
    why: str | None = None
    peer: str | None = None
    attempt: int | None = None
    key: int | None = None
    units: int | None = None  # counted (attempt) or written (job) by then
    step: int | None = None  # of the engine


class ExplainLack(msgspec.Struct, frozen=True, kw_only=True):
    """Units that are not proved to be written, of neighbouring layers of one chunk."""

    what: str  # not computed, not posted, in flight, failed, unknown
    chunk: int  # of the prompt, in the order of steps, from 0
    first_layer: int
    last_layer: int
    from_rank: int  # of the prefiller
    to_rank: int  # of the decoder, of the engine that has the request
    nic: str | None = None  # of the prefiller
    units: int
    seconds: float  # since it was armed (not computed), ready (not posted), first posted (in flight), or ended


class ExplainPush(msgspec.Struct, frozen=True, kw_only=True):
    """The prefiller's half. Durations up to now where the end is not there yet; null: not begun."""

    state: str
    state_seconds: float
    why: str | None = None
    queue_seconds: float | None = None
    compute_seconds: float | None = None
    send_seconds: float | None = None  # after the last step
    exposed_seconds: float | None = None  # of the transfer, what compute did not hide
    tokens: int = 0
    computed_tokens: int = 0
    units: int = 0  # when whole
    ok_units: int = 0
    failed_units: int = 0
    unknown_units: int = 0
    chunks: int = 0  # that armed writes
    lacks: tuple[ExplainLack, ...] = ()  # the worst first
    more_lacks: int = 0


class ExplainMark(msgspec.Struct, frozen=True, kw_only=True):
    units: int  # at most so many had come
    at_seconds: float  # since the request came


class ExplainAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try at the KV of the prompt."""

    attempt: int
    peer: str | None = None
    key: int | None = None
    state: str
    state_seconds: float  # in it, or since its end
    why: str | None = None
    expected_units: int = 0
    arrived_units: int = 0
    first_unit_at_seconds: float | None = None  # since the request came
    last_unit_at_seconds: float | None = None
    last_unit_seconds: float | None = None  # ago
    arrivals: tuple[ExplainMark, ...] = ()
    via: str | None = None
    fence_error: str | None = None
    push: ExplainPush | None = None  # what its prefiller says
    push_unknown: str | None = None  # why it says nothing


class ExplainPages(msgspec.Struct, frozen=True, kw_only=True):
    """Pages of this node that are held for the request."""

    holder: str  # the request, or an attempt of it
    state: str
    pages: int
    seconds: float


class ExplainTtft(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time to the first token went. Null: it did not come to that, or the part that knows does not say."""

    total_seconds: float | None = None
    queue_seconds: float | None = None  # until pages were pinned, or the first step of a prompt that is prefilled here
    reserve_seconds: float | None = None  # until a prefiller was asked
    failed_attempts_seconds: float | None = None  # of it: until the attempt before the last was over
    prefill_queue_seconds: float | None = None  # on the prefiller
    prefill_compute_seconds: float | None = None
    exposed_seconds: float | None = None  # of the transfer
    prefill_seconds: float | None = None  # from asking to whole; here: from the first step to the first token
    first_decode_seconds: float | None = None  # from whole to the first token


class Explain(msgspec.Struct, frozen=True, kw_only=True):
    """The whole story of one request, live or lately ended."""

    schema: str = "pdd.explain/1"
    id: str
    node: str
    role: str
    kind: str  # generate, prefill (for a decoder)
    state: str
    over: bool
    verdict: str  # what it waits for, or how it ended and why: for people
    age_seconds: float  # of its life
    client_request_id: str | None = None
    group: int | None = None  # of the engine that has it; null: the node has but one
    reason: str | None = None  # of its end
    error: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    tries: int = 0  # at the KV
    ttft: ExplainTtft | None = None
    attempts: tuple[ExplainAttempt, ...] = ()  # of a decoder; those that are remembered
    push: ExplainPush | None = None  # of a prefiller
    pages: tuple[ExplainPages, ...] = ()
    steps: tuple[ExplainStep, ...] = ()  # in the order of time
    dump: str | None = None  # file that the daemon wrote when it failed


class FlightLayer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of an armed plan. Times of the daemon's monotonic clock; null: not yet."""

    layer: int
    ready: float | None = None
    first_post: float | None = None
    last_post: float | None = None
    last_end: float | None = None
    posted: int = 0
    ok: int = 0
    failed: int = 0
    unknown: int = 0
    nics: tuple[str, ...] = ()
    failed_nics: tuple[str, ...] = ()


class FlightPlan(msgspec.Struct, frozen=True, kw_only=True):
    transfer: int
    key: int
    from_region: int
    to_region: int
    first_value: int  # of the layer counter
    units: int  # of a layer
    armed: float
    layers: tuple[FlightLayer, ...] = ()


class FlightChange(msgspec.Struct, frozen=True, kw_only=True):
    at: float  # the daemon's monotonic clock
    kind: str
    of: str
    before: str
    state: str
    why: str = ""
    peer: str = ""
    attempt: int | None = None
    key: int | None = None
    units: int | None = None
    step: int | None = None


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """The flight recorder's contents, as a dump or a bundle has them. No prompts, no tokens."""

    schema: str = "pdd.flight/1"
    name: str
    role: str
    boot_id: str
    version: str
    why: str  # that it was written
    ts: float  # seconds since 1970, and
    ts_mono: float  # of the daemon's monotonic clock, at the same moment
    changes: tuple[FlightChange, ...] = ()  # the oldest first
    plans: tuple[FlightPlan, ...] = ()  # the latest writes, the oldest first
    plans_unknown: str | None = None  # why there are none
    requests: tuple[Request, ...] = ()
    stacks: Stacks | None = None  # null where debug.allow_stacks is false
