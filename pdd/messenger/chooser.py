"""Which prefiller serves an attempt, whether to wait for one, and what to say when there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pdd.errors import NoPrefiller
from pdd.messenger.link import PeerLink
from pdd.messenger.peers import PeerTable
from pdd.messenger.retries import Tries
from pdd.states import Clock


@dataclasses.dataclass(frozen=True, slots=True)
class Chooser:
    peers: PeerTable
    outstanding: Callable[[PeerLink], tuple[int, int]]  # (attempts, tokens) of this node in hand of a link
    clock: Clock

    def choose(self, tries: Tries) -> PeerLink | None:
        """The usable link with the least work ahead; one that has not failed this request before, if there is any."""

        def burden(link: PeerLink) -> tuple[bool, int, int]:
            num_attempts, num_tokens = self.outstanding(link)
            return link.peer.epoch in tries.failed_by, link.load.queued_tokens + num_tokens, num_attempts

        links = [link for link in self.peers.usable_links() if link.peer.epoch not in tries.refused_by]
        return min(links, key=burden, default=None)

    def may_wait(self) -> bool:
        """Whether a prefiller that is not usable now may be soon."""
        hope = self.peers.hope_until()
        return hope is not None and self.clock() < hope

    def nobody(self, tries: Tries) -> NoPrefiller:
        before = f"; attempt {tries.num_failed} failed: {tries.last}" if tries.num_failed else ""
        return NoPrefiller(
            f"no prefiller can take this request: {self.peers.explain()}{before}", hint="see `pdd peers` on this node"
        )
