"""Which prefiller serves an attempt, over peers that are written down."""

from __future__ import annotations

import types
from typing import Any

import pytest

from pdd.errors import NoPrefiller, PromptTooLong
from pdd.messenger.chooser import Chooser
from pdd.messenger.retries import Tries


def peer(epoch: int, *, queued: int = 0, usable: bool = True, most: int | None = 1000, linked: bool = True) -> Any:
    found = types.SimpleNamespace(epoch=epoch, address=f"p{epoch}", is_usable=usable, most_tokens=most, incompatible=False)
    link = types.SimpleNamespace(peer=types.SimpleNamespace(epoch=epoch), load=types.SimpleNamespace(queued_tokens=queued))
    found.link = link if linked else None
    return found


def chooser(*peers: Any, in_hand: dict[int, tuple[int, int]] | None = None, hope: float | None = None) -> Chooser:
    """`in_hand`: epoch → (attempts, tokens) of this node there. `hope`: until when a peer that is away may come; now is 10."""
    table: Any = types.SimpleNamespace(
        peers=peers, hope_until=lambda large: hope if large else None, explain=lambda: "everybody is away"
    )
    return Chooser(table, lambda link: (in_hand or {}).get(link.peer.epoch, (0, 0)), lambda: 10.0)


@pytest.mark.parametrize(
    ("peers", "in_hand", "tries", "chosen"),
    [
        ([peer(1, queued=9), peer(2, queued=8)], {}, Tries(), 2),  # the least queued tokens
        ([peer(1, queued=9), peer(2, queued=8)], {2: (1, 5)}, Tries(), 1),  # with those that are ours and not in its load yet
        ([peer(1), peer(2)], {1: (3, 0), 2: (2, 0)}, Tries(), 2),  # then the fewest attempts
        ([peer(1), peer(2)], {}, Tries(), 1),
        ([peer(1), peer(2, queued=900)], {}, Tries(failed_by={1}), 2),  # rather one that has not failed it before
        ([peer(1), peer(2, usable=False)], {}, Tries(failed_by={1}), 1),  # but a second time rather than not at all
        ([peer(1, usable=False), peer(2, linked=False)], {}, Tries(), None),
        ([peer(1, most=99), peer(2, queued=500, most=100)], {}, Tries(), 2),  # the prompt has 100 tokens
        ([peer(1, most=None)], {}, Tries(), 1),  # never met: who knows
        ([peer(1), peer(2, queued=500)], {}, Tries(refused_by={1: "too long"}), 2),
        ([peer(1)], {}, Tries(refused_by={1: "too long"}), None),
    ],
)
def test_the_least_burdened_that_can_hold_it(
    peers: list[Any], in_hand: dict[int, tuple[int, int]], tries: Tries, chosen: int | None
) -> None:
    link = chooser(*peers, in_hand=in_hand).choose(100, tries)
    assert (link.peer.epoch if link is not None else None) == chosen


@pytest.mark.parametrize(("hope", "waits"), [(None, False), (10.0, False), (10.1, True)])
def test_a_peer_is_waited_for_while_there_is_hope(hope: float | None, waits: bool) -> None:
    assert chooser(peer(1, usable=False), hope=hope).may_wait(100, Tries()) is waits
    assert not chooser(peer(1, usable=False, most=99), hope=hope).may_wait(100, Tries()), "one that is too small is not"


def test_what_is_said_when_there_is_nobody() -> None:
    gone = chooser(peer(1, usable=False)).nobody(100, Tries(num_failed=2, last="its link was lost"))
    assert isinstance(gone, NoPrefiller)
    assert "everybody is away; its try 2 failed: its link was lost" in str(gone)


def test_a_prompt_that_none_can_ever_hold_is_its_clients_error() -> None:
    small = chooser(peer(1, most=99), peer(2)).nobody(100, Tries(refused_by={2: "its pool has 5 pages"}))
    assert isinstance(small, PromptTooLong)
    assert "p1 takes at most 99; p2 refused it: its pool has 5 pages" in str(small)
    assert isinstance(chooser(peer(1, most=99), peer(2)).nobody(100, Tries()), NoPrefiller), "the second could"
    assert isinstance(chooser().nobody(100, Tries()), NoPrefiller)
