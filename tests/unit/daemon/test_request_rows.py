"""A request looks the same in the list and by itself, in whatever state it is, and on whichever node."""

from __future__ import annotations

import dataclasses

import pytest

from pdd.daemon import request_rows
from pdd.daemon.ledger import Ledger
from pdd.engine.request import Finished, FinishReason, KvReserved, TokenOutput, Tokens
from pdd.engine.snapshot import RequestRow
from pdd.messenger.status import AttemptDone, AttemptStatus, JobDone, JobStatus

CONTEXT = request_rows.Context(now=100.0, page_size=16)
ROW = RequestRow("r", "generate", "wait_kv", 90.0, 95.0, prompt_tokens=100, pages=7)
ATTEMPT = AttemptStatus(
    attempt=7, request_id="r", state="requested", age_seconds=1.0, peer="p0", key=1, num_tokens=99, num_pages=7,
    arrived_units=12, expected_units=28, why="",
)


class Clock:
    now = 90.0

    def __call__(self) -> float:
        return self.now


def ledger() -> tuple[Ledger, Clock]:
    clock = Clock()
    book = Ledger(clock)
    book.open("r", (1,) * 100)
    return book, clock


def one(row: RequestRow, book: Ledger, *attempts: AttemptStatus):  # type: ignore[no-untyped-def]
    [request] = request_rows.live([row], book.live(), attempts, (), CONTEXT)
    return request


def test_pages_on_their_way_are_counted() -> None:
    book, _ = ledger()
    request = one(ROW, book, ATTEMPT)
    assert (request.pages.have, request.pages.need) == (3, 7)
    assert (request.peer, request.attempt) == ("p0", 7)


def test_pages_of_a_transfer_are_pages_whatever_a_unit_is() -> None:
    """Between nodes of unequal page sizes a page is many units of each layer, so units cannot be turned back into pages."""
    book, _ = ledger()
    book.engine_event(KvReserved("r", 7, (1,), (0,)))
    book.attempt_done(AttemptDone("r", 7, "p0", True, "whole", "", 91.0, 92.0, 224, 4096, 7))
    request = one(dataclasses.replace(ROW, state="running"), book)
    assert (request.transfer.pages, request.transfer.units) == (7, 224)
    assert request.why == "all KV came from p0"


def test_the_state_is_the_engines_after_preemption_and_retry() -> None:
    """The ledger saw tokens and a failed attempt; the engine has the request in its queue again."""
    book, _ = ledger()
    book.engine_event(KvReserved("r", 7, (1,), (0,)))
    book.attempt_done(AttemptDone("r", 7, "p0", False, "the link ended", "peer_lost", 91.0, 92.0, 0, 0, 0))
    book.engine_event(Tokens("r", (TokenOutput(1),)))
    waiting = dataclasses.replace(ROW, state="waiting", state_since=99.0, output_tokens=1, pages=0)
    request = one(waiting, book)
    assert (request.state, request.state_age_seconds) == ("waiting", 1.0)
    assert (request.peer, request.attempts, request.why) == ("p0", 1, "the link ended")
    assert (request.pages.have, request.pages.need) == (0, 7)


def test_a_fence_of_an_earlier_attempt_is_not_the_state_of_the_request() -> None:
    """The request was tried again at p1; the pages of its first attempt are quarantined still."""
    book, _ = ledger()
    old = dataclasses.replace(ATTEMPT, attempt=6, peer="p0", state="fencing", why="p0 is gone", arrived_units=28)
    orphan = RequestRow("r", "attempt", "quarantined", 92.0, 92.0, pages=7)
    request, pages = request_rows.live([ROW, orphan], book.live(), (old, dataclasses.replace(ATTEMPT, peer="p1")), (), CONTEXT)
    assert (request.peer, request.attempt, request.why) == ("p1", 7, None)
    assert (pages.kind, pages.state, pages.peer, pages.attempt) == ("attempt", "quarantined", "p0", 6)
    running = one(dataclasses.replace(ROW, state="running", computed_tokens=100), book, old)
    assert (running.why, running.pages.have) == (None, 7)


def test_a_request_prefilled_here_has_its_times_too() -> None:
    book, clock = ledger()
    book.first_step("r", 92.0)
    running = dataclasses.replace(ROW, state="running", computed_tokens=50)
    assert one(running, book).queue_seconds == 2.0
    clock.now = 95.0
    book.engine_event(Tokens("r", (TokenOutput(1),)))
    assert one(running, book).prefill_seconds == 3.0
    book.engine_event(Finished("r", FinishReason.STOP))
    entry = book.find("r")
    assert entry is not None
    request = request_rows.finished(entry, CONTEXT)
    assert (request.state, request.reason, request.prefill_seconds, request.state_age_seconds) == ("finished", "stop", 3.0, 5.0)


def test_one_that_the_snapshot_does_not_have_yet_waits() -> None:
    book, _ = ledger()
    [request] = request_rows.live([], book.live(), (), (), CONTEXT)
    assert (request.id, request.state, request.state_age_seconds) == ("r", "waiting", 10.0)


def test_a_prefill_is_shown_by_its_decoders_id_and_name() -> None:
    row = RequestRow("pf3-abc-0", "prefill", "running", 90.0, 91.0, prompt_tokens=99, computed_tokens=32, pages=7)
    job = JobStatus(
        request_id="pf3-abc-0", client_id="abc-0", peer="d1", attempt=9, state="pushing", age_seconds=1.0, num_tokens=99,
        computed_tokens=48, why="",
    )
    [request] = request_rows.live([row], {}, (), (job,), CONTEXT)
    assert (request.id, request.peer, request.attempt, request.kind) == ("abc-0", "d1", 9, "prefill")
    [request] = request_rows.live([row], {}, (), (), CONTEXT)  # its job is over, its pages are about to be
    assert (request.id, request.peer) == ("pf3-abc-0", None)


@pytest.mark.parametrize(("reason", "shown"), [("", "stop"), ("cancelled", "abort"), ("refused", "error"), ("peer_lost", "error")])
def test_a_prefill_ends_as_its_job_did(reason: str, shown: str) -> None:
    book, _ = ledger()
    book.job_done(JobDone("p", 7, "d0", not reason, reason, "why", 90.0, None, None, 91.0, 9, 0, 0, 0, 0.0, 0.0, 0))
    entry = book.find("p")
    assert entry is not None
    assert entry.reason == shown
