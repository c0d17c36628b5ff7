"""The ends of attempts: what the engine, the report and the counters are told of each, exactly once for good.

    whole             every unit has arrived                          -> WHOLE
    settle, give_up   nothing that names the pages can land any more  -> RELEASED
    quarantine        the link has ended, and its fence is not up     -> QUARANTINED, then `release_fenced`: RELEASED

Which of them it is, the decoder finds out; what becomes of the request then is the judge's verdict. Owner: Decoder.
"""

from __future__ import annotations

from collections.abc import Callable

from pdd.engine.request import EngineInbox, KvOutcome, KvSource
from pdd.errors import PddError, PeerLost
from pdd.messenger.attempt import Attempt, AttemptState
from pdd.messenger.book import AttemptBook
from pdd.messenger.status import AttemptDone, DecoderCounters, added
from pdd.messenger.verdict import Judge, reason


class Settling:
    """Settles the attempts of one book with the engine."""

    def __init__(
        self, inbox: EngineInbox, book: AttemptBook, judge: Judge, look: Callable[[Attempt], int],
        report: Callable[[AttemptDone], None],
    ) -> None:
        """`look`: brings an attempt's `arrived_units` up to date and returns them. `report`: of each that is over."""
        self.counters = DecoderCounters()
        self.closing = False  # this node goes down: nothing is tried again
        self._inbox = inbox
        self._book = book
        self._judge = judge
        self._look = look
        self._report = report

    def whole(self, attempt: Attempt) -> None:
        self.count(tokens=attempt.num_tokens)
        self._judge.retries.forget(attempt.reserved.request_id)
        assert attempt.link is not None
        attempt.link.has_carried = True
        self.settle(attempt, KvOutcome.WHOLE, "whole")

    def give_up(self, attempt: Attempt, error: PddError) -> None:
        """Ends an attempt that never reached a prefiller."""
        attempt.failure = error
        attempt.retryable = False
        self.settle(attempt, KvOutcome.RELEASED, str(error))

    def settle(self, attempt: Attempt, outcome: KvOutcome, why: str) -> None:
        """WHOLE or RELEASED: the last word about an attempt. Nothing that names its pages can land any more."""
        self._look(attempt)
        attempt.state.move(AttemptState.DONE, why)
        self._book.strike(attempt)
        self._tell(attempt, whole=outcome is KvOutcome.WHOLE)
        if outcome is KvOutcome.WHOLE:
            self.count(whole=1)
            self._inbox.kv_settled(attempt.id, outcome)
        else:
            self.count(released=1)
            retry, error = self._verdict(attempt)
            self._inbox.kv_settled(attempt.id, outcome, retry=retry, error=error)

    def quarantine(self, attempt: Attempt) -> None:
        """The first word about an attempt whose link has ended; the second comes with the fence."""
        assert attempt.link is not None
        link = attempt.link
        if self._look(attempt) == attempt.expected_units:
            self.whole(attempt)  # every unit had come before the end
            return
        if attempt.failure is None:
            attempt.failure = PeerLost(f"the link to {link.name} ended: {link.error}")
        attempt.state.move(AttemptState.FENCING, str(link.error))
        retry, error = self._verdict(attempt)
        self.count(quarantined=1)
        self._inbox.kv_settled(attempt.id, KvOutcome.QUARANTINED, retry=retry, error=error)
        self._tell(attempt, whole=False)

    def release_fenced(self, attempt: Attempt) -> None:
        attempt.state.move(AttemptState.DONE, "fenced")
        self._book.strike(attempt)
        self._inbox.kv_settled(attempt.id, KvOutcome.RELEASED)

    def _tell(self, attempt: Attempt, *, whole: bool) -> None:
        """Reports an attempt that is over, as far as its request is concerned."""
        num_bytes = attempt.bytes_of(attempt.arrived_units)
        self.count(bytes=num_bytes)
        self._report(
            AttemptDone(
                request_id=attempt.reserved.request_id, attempt=attempt.id,
                peer=attempt.link.name if attempt.link is not None else "", whole=whole, why=attempt.state.why,
                reason="" if whole else reason(attempt), asked=attempt.asked, finished=attempt.state.since,
                units=attempt.arrived_units, bytes=num_bytes, pages=attempt.arrived_pages,
                via=attempt.link.via if attempt.link is not None else "", key=attempt.key,
                expected_units=attempt.expected_units,
            )
        )

    def _verdict(self, attempt: Attempt) -> tuple[KvSource | None, Exception | None]:
        verdict = self._judge.failed(attempt, closing=self.closing)
        self.count(
            retries=verdict.retry is KvSource.REMOTE, local_fallbacks=verdict.retry is KvSource.LOCAL,
            failed=verdict.error is not None,
        )
        return verdict.retry, verdict.error

    def count(self, **amounts: int) -> None:
        """Adds to the counters of those names."""
        self.counters = added(self.counters, **amounts)
