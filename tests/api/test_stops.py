"""Stop strings against a reference that sees the whole text at once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdd.api.stops import StopMatcher

texts = st.text(alphabet="abc", max_size=40)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first; of several complete there, the longest."""
    for end in range(1, len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(complete)], True
    return text, False


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(texts, stop_lists, st.lists(st.integers(0, 40), max_size=10))
@example("aab", ["ab"], [1, 2])
@example("ababac", ["abac"], [])
@example("abc", ["c", "abc", "bc"], [])
def test_pieces_joined_equal_the_reference(text: str, stops: list[str], places: list[int]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for piece in cut(text, places):
        sent += matcher.push(piece)
        if matcher.stopped:
            break
    if not matcher.stopped:
        sent += matcher.flush()
    assert (sent, matcher.stopped) == reference(text, stops)


@given(texts, stop_lists)
def test_no_more_is_held_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for character in text:
        sent += matcher.push(character)
        if matcher.stopped:
            return
    rest = matcher.flush()
    assert rest == "" or any(stop.startswith(rest) and stop != rest for stop in stops)
    assert all(not stop.startswith(longer) for longer in _longer_suffixes(text, rest) for stop in stops)


def _longer_suffixes(text: str, held: str) -> list[str]:
    return [text[begin:] for begin in range(len(text) - len(held))]


@pytest.mark.parametrize("size", [1, 7])
def test_repetitive_text_takes_linear_work(size: int) -> None:
    """A text that almost matches at every place: quadratic work would not end within the suite's timeout."""
    matcher = StopMatcher(["a" * 4000 + "b"] * 2)
    text = "a" * 100_000
    sent = "".join(matcher.push(text[begin : begin + size]) for begin in range(0, len(text), size))
    assert sent + matcher.flush() == text
