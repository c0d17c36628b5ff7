"""What time says about an attempt. Pure: the decoder tells what was counted and when, and does what follows.

    asked, nothing moves        -> STALLED: cancel it
    cancel unanswered           -> LOST: fence its link
    units written, not arrived  -> LOST: fence its link

Deadlines measure the lack of progress, in time in which this process ran. None of them frees a page.
"""

from __future__ import annotations

import dataclasses
import enum

from pdd.messenger.attempt import Attempt, AttemptState

_NUM_ABSENT = 3  # heartbeats without an attempt that say: the prefiller has no work left for it


class Late(enum.Enum):
    STALLED = "stalled"
    LOST = "lost"


@dataclasses.dataclass(frozen=True, slots=True)
class Deadlines:
    """In seconds."""

    dead_after: float  # for an answer, and for what is on the way
    stall: float  # for progress of a prefill

    def check(self, attempt: Attempt, ran: float) -> tuple[Late, str] | None:
        """What is late and why, `ran` seconds into this process' life; None: nothing is."""
        still = ran - attempt.progress_at
        match attempt.state.value:
            case AttemptState.REQUESTED:
                peer_is_done = attempt.num_absent >= _NUM_ABSENT  # and yet units are missing
                limit = self.dead_after if peer_is_done else self.stall
                here = f"{attempt.arrived_units} of {attempt.expected_units} units are here"
                return (Late.STALLED, f"has not advanced for {limit:g} s; {here}") if still >= limit else None
            case AttemptState.CANCELLING if still >= self.dead_after:
                return Late.LOST, f"a cancel was not answered within {self.dead_after:g} s"
            case AttemptState.DRAINING if still >= self.dead_after:
                assert attempt.ended is not None
                missing = attempt.ended.ok_units - attempt.arrived_units
                return Late.LOST, f"{missing} units that were written have not arrived in {self.dead_after:g} s"
        return None
