"""Which prefiller serves an attempt, whether to wait for one, and what to say when there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pdd.errors import NoPrefiller, PddError, PromptTooLong
from pdd.messenger.link import PeerLink
from pdd.messenger.peers import Peer, PeerTable
from pdd.messenger.retries import Tries
from pdd.states import Clock


@dataclasses.dataclass(frozen=True, slots=True)
class Chooser:
    """`num_tokens` is everywhere what the prefiller would have to hold; `tries`, what came of it so far."""

    peers: PeerTable
    outstanding: Callable[[PeerLink], tuple[int, int]]  # (attempts, tokens) of this node in hand of a link
    clock: Clock

    def choose(self, num_tokens: int, tries: Tries) -> PeerLink | None:
        """The usable link with the least work ahead; one that has not failed this request before, if there is any."""

        def burden(link: PeerLink) -> tuple[bool, int, int]:
            num_attempts, num_in_hand = self.outstanding(link)
            return link.peer.epoch in tries.failed_by, link.load.queued_tokens + num_in_hand, num_attempts

        links = [
            peer.link
            for peer in self.peers.peers
            if peer.link is not None and peer.is_usable and not self._is_too_small(peer, num_tokens, tries)
        ]
        return min(links, key=burden, default=None)

    def may_wait(self, num_tokens: int, tries: Tries) -> bool:
        """Whether a prefiller that is not usable now may be soon."""
        large = [peer for peer in self.peers.peers if not self._is_too_small(peer, num_tokens, tries)]
        hope = self.peers.hope_until(large)
        return hope is not None and self.clock() < hope

    def nobody(self, num_tokens: int, tries: Tries) -> PddError:
        """Why no prefiller can take it now: PromptTooLong when none ever will, as far as they are known."""
        possible = [peer for peer in self.peers.peers if not peer.incompatible]
        if possible and all(self._is_too_small(peer, num_tokens, tries) for peer in possible):
            limits = "; ".join(self._limit(peer, tries) for peer in possible)
            return PromptTooLong(
                f"no prefiller can hold the KV of the {num_tokens} tokens of this prompt: {limits}",
                hint="shorten the prompt", param="prompt",
            )
        before = f"; its try {tries.num_failed} failed: {tries.last}" if tries.num_failed else ""
        return NoPrefiller(
            f"no prefiller can take this request: {self.peers.explain()}{before}", hint="see `pdd peers` on this node"
        )

    @staticmethod
    def _is_too_small(peer: Peer, num_tokens: int, tries: Tries) -> bool:
        most = peer.most_tokens
        return (most is not None and num_tokens > most) or peer.epoch in tries.refused_by

    @staticmethod
    def _limit(peer: Peer, tries: Tries) -> str:
        if peer.epoch is not None and peer.epoch in tries.refused_by:
            return f"{peer.address} refused it: {tries.refused_by[peer.epoch]}"
        return f"{peer.address} takes at most {peer.most_tokens}"
