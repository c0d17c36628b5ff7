"""Which version of the peer protocol two nodes speak. Pure.

Each end greets with the newest version that it speaks and the oldest that it still does; both take the older of the
two newest, if each still speaks it. An end that does not say `oldest` speaks one version only. DESIGN.md says what a
change to the wire must do.
"""

from __future__ import annotations

import dataclasses

from pdd.errors import PeerIncompatible, PeerProtocol

PROTOCOL_VERSION = 3  # the newest that this node speaks
OLDEST_VERSION = 1  # and the oldest
EXPLAIN_VERSION = 2  # the first that has ExplainRequest and ExplainAnswer
GROUPS_VERSION = 3  # the first that has PrefillRequest.group: a decoder may have several engines


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Versions `oldest` to `newest`, both included."""

    oldest: int
    newest: int
    why: str = ""  # no older one does, for whoever is refused

    def __str__(self) -> str:
        return f"version {self.newest}" if self.oldest == self.newest else f"versions {self.oldest} to {self.newest}"

    @property
    def short(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest}-{self.newest}"


OURS = Range(OLDEST_VERSION, PROTOCOL_VERSION)


def of_decoder(groups: int) -> Range:
    """What a decoder of so many engines speaks. An older prefiller would write the KV of all of them into the first."""
    if groups == 1:
        return OURS
    return Range(GROUPS_VERSION, PROTOCOL_VERSION, f"engine.dp = {groups} needs version {GROUPS_VERSION}")


def agree(ours: Range, theirs: Range) -> int:
    """The version that both ends speak from here on; each end comes to the same.

    Raises:
        PeerProtocol: `theirs` is no range.
        PeerIncompatible: the ranges do not meet; the message says which end is behind.
    """
    if theirs.oldest > theirs.newest:
        raise PeerProtocol(f"the peer says that it speaks peer protocol {theirs.oldest} to {theirs.newest}, which is no range")
    version = min(ours.newest, theirs.newest)
    if version < max(ours.oldest, theirs.oldest):
        behind = "this node" if ours.newest < theirs.newest else "the peer"
        because = f" ({ours.why})" if ours.why else ""
        raise PeerIncompatible(
            f"the peer speaks {theirs} of the peer protocol and this node {ours}{because}: upgrade pdd on {behind}",
            hint="nodes of neighbouring releases work together, so upgrade one at a time",
        )
    return version
