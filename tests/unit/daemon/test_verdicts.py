"""What `pdd explain` says first: one sentence that names who is waited for, for what, and since when."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pdd.control import schema, stories
from pdd.daemon.verdicts import judged

ROW = schema.Request(id="r", state="wait_kv", age_seconds=9.0, state_age_seconds=4.0)
LACK = stories.ExplainLack(what="in flight", chunk=1, first_layer=12, last_layer=12, from_rank=0, to_rank=1, nic="10.0.0.1",
                          units=3, seconds=2.1)
PUSH = stories.ExplainPush(state="pushing", state_seconds=4.0, tokens=1024, computed_tokens=512, units=480, ok_units=300)
ATTEMPT = stories.ExplainAttempt(attempt=7, peer="p0", state="requested", state_seconds=4.0, expected_units=480,
                                arrived_units=120, last_unit_seconds=2.3)


def verdict(*attempts: stories.ExplainAttempt, row: schema.Request = ROW, **facts: Any) -> str:
    story = stories.Explain(id="r", node="d0", role="decode", kind="generate", state=row.state, over=row.state == "finished",
                           verdict="", age_seconds=9.0, attempts=attempts)
    return judged(replace(story, **facts), row).verdict


HEAD = "waits for KV from p0 (requested for 4.0s): 120 of 480 units are here, the last came 2.3s ago"


@pytest.mark.parametrize(("attempt", "told"), [
    (replace(ATTEMPT, peer=None, state="choosing", why="p0 is down"), "waits for a prefiller: p0 is down"),
    (ATTEMPT, HEAD),
    (replace(ATTEMPT, push_unknown="p0 has been silent for 2.1 s"), f"{HEAD}; p0 has been silent for 2.1 s"),
    (replace(ATTEMPT, push=replace(PUSH, lacks=(LACK,))),
     f"{HEAD}; p0 pushing: 3 units in flight: layer 12 of chunk 1, rank 0 -> rank 1, NIC 10.0.0.1, 2.1s by now"),
    (replace(ATTEMPT, push=replace(PUSH, lacks=(replace(LACK, what="failed", last_layer=13),))),
     f"{HEAD}; p0 pushing: 3 units failed: layers 12-13 of chunk 1, rank 0 -> rank 1, NIC 10.0.0.1, 2.1s ago"),
    (replace(ATTEMPT, push=PUSH), f"{HEAD}; p0 pushing: 512 of 1024 tokens computed, 300 of 480 units written"),
    (replace(ATTEMPT, push=replace(PUSH, ok_units=480)), f"{HEAD}; p0 wrote all, and 360 units have not arrived: on the way, or lost by a NIC"),
    (replace(ATTEMPT, fence_error="it would not close"), "the link to p0 has ended and is not fenced: it would not close"),
])  # fmt: skip
def test_of_one_that_waits_for_its_kv(attempt: stories.ExplainAttempt, told: str) -> None:
    assert verdict(attempt) == told


def test_the_latest_attempt_is_the_one_that_is_waited_for() -> None:
    assert "p1" in verdict(replace(ATTEMPT, state="peer_lost"), replace(ATTEMPT, peer="p1", attempt=8))


def test_of_one_that_waits_runs_or_has_ended() -> None:
    waiting = replace(ROW, state="waiting", why="12 pages are missing")
    assert verdict(row=waiting) == "waits for pages or a place in the batch for 4.0s: 12 pages are missing"
    assert verdict(row=replace(ROW, state="running"), output_tokens=1) == "running for 4.0s, 1 token out"
    ended = replace(ROW, state="finished")
    assert verdict(row=ended, error="no prefiller") == "failed after 9.0s: no prefiller"
    ttft = stories.ExplainTtft(total_seconds=0.2)
    assert verdict(row=ended, reason="stop", ttft=ttft) == "ended (stop) after 9.0s, first token after 200ms"
    assert verdict(row=ended, kind="prefill") == "prefilled and sent in 9.0s"
