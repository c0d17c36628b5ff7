"""Finds stop strings in text that arrives in pieces, and holds back what may still become one.

The text ends where a stop string begins. Of several, the one that is complete first wins; of those complete at the same
character, the one that begins first. So the result depends on the characters alone, never on how tokens cut them.

Each stop string is a Knuth-Morris-Pratt automaton: constant work per character, whatever the text.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Owner: the task of one choice."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty."""
        self._stops = tuple((stop, _failure_table(stop)) for stop in stops)
        self._matched = [0] * len(stops)  # characters of each stop that the text ends with
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that is certain to come before any stop string. After a match `stopped` is true; push no more then."""
        if not self._stops:
            return text
        window = self._held + text
        for position in range(len(self._held), len(window)):
            length = self._advance(window[position])
            if length:
                self.stopped = True
                self._held = ""
                return window[: position + 1 - length]
        keep = len(window) - max(self._matched)
        self._held = window[keep:]
        return window[:keep]

    def flush(self) -> str:
        """The held text, when no more will come."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> int:
        """Feeds one character; the length of the longest stop string that it completes, or 0."""
        complete = 0
        for index, (stop, failure) in enumerate(self._stops):
            length = self._matched[index]
            while length and stop[length] != character:
                length = failure[length - 1]
            if stop[length] == character:
                length += 1
            self._matched[index] = length
            if length == len(stop):
                complete = max(complete, length)
        return complete


def _failure_table(stop: str) -> list[int]:
    """table[i]: length of the longest proper prefix of `stop` that stop[: i + 1] ends with."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[length] != stop[index]:
            length = table[length - 1]
        if stop[length] == stop[index]:
            length += 1
        table[index] = length
    return table
