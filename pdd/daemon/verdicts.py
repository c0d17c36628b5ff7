"""One sentence about a request: what it waits for, of whom and for how long, or how it ended. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from pdd.control import schema, stories
from pdd.messenger.explain import FAILED, IN_FLIGHT, NOT_COMPUTED, NOT_POSTED, UNKNOWN
from pdd.units import counted, show_duration

_WORDS = {
    IN_FLIGHT: "in flight",
    FAILED: "failed",
    UNKNOWN: "of unknown fate",
    NOT_POSTED: "computed and not posted",
    NOT_COMPUTED: "not computed",
}


def judged(story: stories.Explain, row: schema.Request) -> stories.Explain:
    """The story with its verdict."""
    return replace(story, verdict=_ended(story) if story.over else _live(story, row))


def place_of(lack: stories.ExplainLack) -> str:
    """"layers 3-29 of chunk 1, rank 0 -> rank 0, NIC 10.0.0.1"."""
    one = lack.first_layer == lack.last_layer
    layers = f"layer {lack.first_layer}" if one else f"layers {lack.first_layer}-{lack.last_layer}"
    nic = f", NIC {lack.nic}" if lack.nic else ""
    return f"{layers} of chunk {lack.chunk}, rank {lack.from_rank} -> rank {lack.to_rank}{nic}"


def lack_text(lack: stories.ExplainLack) -> str:
    since = "ago" if lack.what in (FAILED, UNKNOWN) else "by now"
    what = f"{counted(lack.units, 'unit')} {_WORDS.get(lack.what, lack.what)}"
    return f"{what}: {place_of(lack)}, {show_duration(lack.seconds)} {since}"


def _ended(story: stories.Explain) -> str:
    if story.error:
        return f"failed after {show_duration(story.age_seconds)}: {story.error}"
    if story.kind == "prefill":
        return f"prefilled and sent in {show_duration(story.age_seconds)}"
    total = story.ttft.total_seconds if story.ttft is not None else None
    first = f", first token after {show_duration(total)}" if total is not None else ""
    return f"ended ({story.reason}) after {show_duration(story.age_seconds)}{first}"


def _live(story: stories.Explain, row: schema.Request) -> str:
    since = show_duration(row.state_age_seconds or 0.0)
    if story.push is not None:
        return f"{story.push.state} for {since}: {_push(story.push)}"
    attempt = story.attempts[-1] if story.attempts else None
    if attempt is not None and story.state in ("wait_kv", "abandoned", "quarantined"):
        return f"{_attempt(attempt)}"
    if story.state == "waiting":
        return f"waits for pages or a place in the batch for {since}" + (f": {row.why}" if row.why else "")
    return f"{story.state} for {since}, {counted(story.output_tokens, 'token')} out" + (f": {row.why}" if row.why else "")


def _attempt(attempt: stories.ExplainAttempt) -> str:
    if not attempt.peer:
        return "waits for a prefiller" + (f": {attempt.why}" if attempt.why else "")
    if attempt.fence_error:
        return f"the link to {attempt.peer} has ended and is not fenced: {attempt.fence_error}"
    came = f"{attempt.arrived_units} of {attempt.expected_units} units are here"
    if attempt.last_unit_seconds is not None:
        came += f", the last came {show_duration(attempt.last_unit_seconds)} ago"
    head = f"waits for KV from {attempt.peer} ({attempt.state} for {show_duration(attempt.state_seconds)}): {came}"
    if attempt.push_unknown:
        return f"{head}; {attempt.push_unknown}"
    if attempt.push is None:
        return head
    on_the_way = attempt.push.ok_units - attempt.arrived_units
    if not attempt.push.lacks and on_the_way > 0 and attempt.push.ok_units == attempt.push.units:
        missing = counted(on_the_way, "unit")
        return f"{head}; {attempt.peer} wrote all, and {missing} have not arrived: on the way, or lost by a NIC"
    return f"{head}; {attempt.peer} {attempt.push.state}: {_push(attempt.push)}"


def _push(push: stories.ExplainPush) -> str:
    if push.lacks:
        return lack_text(push.lacks[0])
    if push.why:
        return push.why
    return f"{push.computed_tokens} of {push.tokens} tokens computed, {push.ok_units} of {push.units} units written"
