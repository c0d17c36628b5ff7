"""What a prefiller checks before it believes a request. Pure.

Every number in a PrefillRequest comes from another machine: an address beyond the decoder's own pool, a page named
twice or a token beyond the vocabulary is refused here, before the engine or the fabric hears of it.
"""

from __future__ import annotations

import dataclasses

from pdd.kv.layout import pages_of
from pdd.messenger import wire
from pdd.messenger.handshake import LocalNode
from pdd.messenger.job import Ending


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    tokens: tuple[int, ...]
    pages: tuple[int, ...]


def check_request(request: wire.PrefillRequest, peer: wire.Hello, node: LocalNode) -> Checked | Ending:
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
    if request.group >= peer.geometry.groups:
        return _refuse(f"its pages are of engine {request.group} of a decoder that has {peer.geometry.groups}")
    if not tokens:
        return _refuse("it has no tokens")
    if len(tokens) > node.max_tokens:
        # Another prefiller may have more room: this is the one refusal that says nothing about the request itself.
        return Ending(wire.EndReason.REFUSED, f"{len(tokens)} tokens are more than this prefiller takes ({node.max_tokens})")
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
    return Ending(wire.EndReason.REFUSED, message, retryable=False)
