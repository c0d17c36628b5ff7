"""Every attempt of a decoder that is not settled for good: by number, by key, and by the link that it is in hand of.

Keys are retired here, and only when an attempt is struck out or its link is fenced: a key that is free may be given to
the next attempt at once.
"""

from __future__ import annotations

from pdd.messenger.attempt import Attempt, AttemptState
from pdd.messenger.link import PeerLink
from pdd.messenger.ports import FabricPort
from pdd.messenger.progress import LinkView
from pdd.messenger.status import AttemptStatus


class AttemptBook:
    """Owner: Decoder."""

    def __init__(self, fabric: FabricPort) -> None:
        self.views: dict[PeerLink, LinkView] = {}  # from a link's first moment up until its fence
        self._fabric = fabric
        self._by_number: dict[int, Attempt] = {}
        self._by_key: dict[int, Attempt] = {}

    # -- asking ---------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._by_number)

    def all(self) -> list[Attempt]:
        """The oldest first."""
        return list(self._by_number.values())

    def get(self, number: int) -> Attempt | None:
        return self._by_number.get(number)

    def by_key(self, key: int) -> Attempt | None:
        """Whose units come under `key`, if they still count."""
        attempt = self._by_key.get(key)
        return None if attempt is None or attempt.state.value is AttemptState.FENCING else attempt

    def outstanding(self, link: PeerLink) -> tuple[int, int]:
        """(attempts, tokens) in hand of a link."""
        view = self.views.get(link)
        return (len(view.attempts), view.num_tokens) if view is not None else (0, 0)

    def arrived(self, attempt: Attempt) -> int:
        """Units, as counted now."""
        return self._fabric.imm_arrived(attempt.key) if attempt.key is not None else 0

    def bytes_in_hand(self) -> int:
        """That the units stand for which have arrived, of attempts that nothing was reported of yet."""
        counting = [a for a in self._by_number.values() if a.state.value is not AttemptState.FENCING]
        return sum(attempt.bytes_of(self.arrived(attempt)) for attempt in counting)

    def status(self, now: float) -> tuple[AttemptStatus, ...]:
        return tuple(attempt.status(now, self.arrived(attempt)) for attempt in self._by_number.values())

    # -- changing -------------------------------------------------------------------------------------------------
    def enter(self, attempt: Attempt) -> None:
        self._by_number[attempt.id] = attempt

    def give(self, attempt: Attempt, link: PeerLink, key: int) -> None:
        """It is in hand of `link` from now on, under `key`."""
        attempt.link, attempt.key = link, key
        self._by_key[key] = attempt
        self.views[link].attempts[attempt.id] = attempt

    def strike(self, attempt: Attempt) -> None:
        """It is settled for good; its last count stays in `arrived_units`."""
        if attempt.key is not None:
            del self._by_key[attempt.key]
            attempt.arrived_units = self._fabric.imm_retire(attempt.key)
        view = self.views.get(attempt.link) if attempt.link is not None else None
        if view is not None:
            view.attempts.pop(attempt.id, None)
        del self._by_number[attempt.id]
