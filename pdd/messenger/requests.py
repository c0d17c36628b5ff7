"""What a prefiller checks before it believes a request, and what it remembers of requests that are over.

Every number in a PrefillRequest comes from another machine: an address beyond the decoder's own pool, a page named
twice or a token beyond the vocabulary is refused here, before the engine or the fabric hears of it. Tables are
bounded.
"""

from __future__ import annotations

import dataclasses

from pdd.errors import PeerProtocol
from pdd.kv.layout import pages_of
from pdd.messenger import wire
from pdd.messenger.handshake import LocalNode
from pdd.messenger.job import Ending

TOMBSTONE_SECONDS = 600.0
MOST_TOMBSTONES = 4096
MOST_ANSWERED = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    tokens: tuple[int, ...]
    pages: tuple[int, ...]


def check_request(
    request: wire.PrefillRequest, peer: wire.Hello, node: LocalNode
) -> Checked | Ending:
    """The request's tokens and pages, or why it is refused."""
    if request.epoch != peer.epoch:
        return _refuse("it is meant for another life of this decoder")
    try:
        tokens, pages = wire.unpack_u32(request.tokens), wire.unpack_u32(request.pages)
    except ValueError:
        return _refuse("its tokens or pages are no whole number of u32")
    ours = node.geometry
    page_size = peer.geometry.page_size
    unit = min(page_size, ours.page_size)
    if not tokens:
        return _refuse("it has no tokens")
    if len(tokens) > node.max_tokens:
        # Another prefiller may have more room: this is the one refusal that says nothing about the request itself.
        return Ending("refused", f"{len(tokens)} tokens are more than this prefiller takes ({node.max_tokens})")
    if max(tokens) >= ours.vocab_size:
        return _refuse(f"token {max(tokens)} is beyond the vocabulary of {ours.vocab_size}")
    if request.skip_tokens >= len(tokens) or request.skip_tokens % unit:
        return _refuse(f"{request.skip_tokens} of {len(tokens)} tokens cannot be skipped in units of {unit}")
    num_pages = pages_of(len(tokens), page_size)
    if len(pages) != num_pages:
        return _refuse(f"it names {len(pages)} pages where {len(tokens)} tokens need {num_pages}")
    if max(pages) >= peer.geometry.num_pages:
        return _refuse(f"page {max(pages)} is beyond the decoder's pool of {peer.geometry.num_pages}")
    if len(set(pages)) != len(pages):
        return _refuse("it names a page twice")
    return Checked(tokens, pages)


def _refuse(message: str) -> Ending:
    """A request that no prefiller should take."""
    return Ending("refused", message, retryable=False)


class Tombstones:
    """Attempts of one link that were cancelled before they came."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}  # in the order of expiry

    def __contains__(self, attempt: int) -> bool:
        return attempt in self._until

    def __len__(self) -> int:
        return len(self._until)

    def add(self, attempt: int, now: float) -> None:
        """Raises PeerProtocol when there are too many: forgetting one would let a cancelled write land."""
        while self._until and self._until[oldest := next(iter(self._until))] <= now:
            del self._until[oldest]
        if len(self._until) >= MOST_TOMBSTONES:
            raise PeerProtocol(f"{MOST_TOMBSTONES} attempts that never came were cancelled")
        self._until.setdefault(attempt, now + TOMBSTONE_SECONDS)


class Answered:
    """What the last attempts of one link ended with: the answer to a Cancel that comes late.

    A decoder numbers its attempts upwards, so one at or below the highest number that was forgotten here may be one
    of those: its answer is that nobody knows, which makes the decoder fence the link.
    """

    def __init__(self) -> None:
        self._ended: dict[int, wire.PrefillEnded] = {}
        self._forgotten = -1  # the highest attempt that is no longer kept

    def __contains__(self, attempt: int) -> bool:
        return attempt in self._ended

    def get(self, attempt: int) -> wire.PrefillEnded | None:
        """None: no such attempt has ended on this link."""
        ended = self._ended.get(attempt)
        if ended is None and attempt <= self._forgotten:
            return Ending("failed", "how it ended is no longer known").message_for(attempt, unknown=1)
        return ended

    def add(self, ended: wire.PrefillEnded) -> None:
        self._ended[ended.attempt] = ended
        if len(self._ended) > MOST_ANSWERED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._forgotten = max(self._forgotten, oldest)
