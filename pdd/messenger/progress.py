"""What a decoder knows of one link's attempts: how much is in hand there, and whether it moves.

Progress of an attempt is: a unit arrived, the prefiller computed more of it, or it is still queued while the
prefiller's engine steps. A deadline measures the lack of progress, never the length of a queue.
"""

from __future__ import annotations

import dataclasses

from pdd.messenger import wire
from pdd.messenger.attempt import Attempt


@dataclasses.dataclass(slots=True)
class LinkView:
    """Owner: Decoder. One per link."""

    attempts: dict[int, Attempt] = dataclasses.field(default_factory=dict)
    steps: int = 0  # of the prefiller's engine, as last told
    listed: dict[int, int] = dataclasses.field(default_factory=dict)  # attempt -> tokens computed

    @property
    def num_tokens(self) -> int:
        return sum(attempt.num_tokens for attempt in self.attempts.values())

    def hear(self, beat: wire.Heartbeat, now: float) -> None:
        """Takes what a heartbeat says about progress."""
        listed = dict(beat.progress)
        queue_moved = beat.load.steps != self.steps or listed != self.listed
        self.steps, self.listed = beat.load.steps, listed
        for attempt in self.attempts.values():
            tokens = listed.get(attempt.id)
            if tokens is None:
                attempt.num_absent += 1
                continue
            attempt.num_absent = 0
            if tokens != attempt.peer_tokens or (tokens == 0 and queue_moved):
                attempt.peer_tokens, attempt.progress_at = tokens, now
