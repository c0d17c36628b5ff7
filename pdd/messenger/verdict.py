"""What becomes of a request whose attempt at its KV failed: tried again, prefilled here, or told an error.

An attempt is tried again while its failure allows it and a prefiller is left that may do better; a prefiller that will
never take the prompt costs no try. Then local prefill may step in. An error is the last one's, unless every prefiller is
too small for the prompt: that is the client's to know, at once, whatever was tried before.

Owner: Decoder, which settles the attempt accordingly.
"""

from __future__ import annotations

import dataclasses

from pdd.engine.request import KvSource
from pdd.errors import NoPrefiller, PddError, PeerLost, PeerProtocol, PrefillRefused, PromptTooLong, RequestTimeout
from pdd.messenger.attempt import Attempt
from pdd.messenger.chooser import Chooser
from pdd.messenger.link import PeerLink
from pdd.messenger.retries import Retries
from pdd.messenger.settings import DecoderSettings


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """How the request goes on (`retry`), or ends (`error`); neither when nobody waits for it any more."""

    retry: KvSource | None = None
    error: Exception | None = None


class Judge:
    """Knows what was tried before, for each request."""

    def __init__(self, chooser: Chooser, settings: DecoderSettings) -> None:
        self.retries = Retries()
        self._chooser = chooser
        self._settings = settings

    def set(self, settings: DecoderSettings) -> None:
        """For what is judged from now on."""
        self._settings = settings

    def choose(self, attempt: Attempt) -> PeerLink | None:
        """Whom to ask now."""
        return self._chooser.choose(attempt.num_tokens, self.retries.of(attempt.reserved.request_id))

    def may_wait(self, attempt: Attempt) -> bool:
        """Whether somebody may be asked soon."""
        return self._chooser.may_wait(attempt.num_tokens, self.retries.of(attempt.reserved.request_id))

    def nobody(self, attempt: Attempt) -> PddError:
        """Why nobody can be asked."""
        return self._chooser.nobody(attempt.num_tokens, self.retries.of(attempt.reserved.request_id))

    def failed(self, attempt: Attempt, *, closing: bool) -> Verdict:
        """What follows an attempt that is over and not whole. Call it once per attempt. `closing`: this node goes down."""
        request_id = attempt.reserved.request_id
        if attempt.abandoned:
            self.retries.forget(request_id)
            return Verdict()
        epoch = attempt.link.peer.epoch if attempt.link is not None else None
        error = attempt.failure or PeerLost("the attempt ended without a cause")
        tries = self.retries.failed(request_id, epoch, str(error), refused=attempt.is_refused)
        num_counted = tries.num_failed - len(tries.refused_by)
        may_retry = attempt.retryable and num_counted < self._settings.max_attempts and not closing
        if may_retry and (self.choose(attempt) is not None or self.may_wait(attempt)):
            return Verdict(retry=KvSource.REMOTE)
        if attempt.is_refused and attempt.retryable and isinstance(hopeless := self.nobody(attempt), PromptTooLong):
            error = hopeless
        self.retries.forget(request_id)
        if self._settings.local_fallback and not closing:
            return Verdict(retry=KvSource.LOCAL)
        if tries.num_failed > 1 and not isinstance(error, NoPrefiller | PromptTooLong):
            tried = f"{tries.num_failed} attempts"
            error = PrefillRefused(f"no prefiller served this request in {tried}; the last: {error}")
        return Verdict(error=error)


def reason(attempt: Attempt) -> str:
    """Why an attempt is not whole, as a metric's label (`metrics.FAILURE_REASONS`)."""
    match attempt.failure:
        case _ if attempt.abandoned:
            return "cancelled"
        case NoPrefiller():
            return "no_prefiller"
        case PromptTooLong():
            return "refused"
        case PeerLost():
            return "peer_lost"
        case RequestTimeout():
            return "stalled"
        case PeerProtocol():
            return "overrun"
        case PrefillRefused() if attempt.is_refused:
            return "refused"
    return "failed"
