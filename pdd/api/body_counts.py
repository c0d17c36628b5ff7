"""Bounds on what a body consists of, looked at before it is decoded: pure.

Decoding holds the GIL to its end, and millions of values take it long: meanwhile no probe is answered and no other stream
goes on. A long text costs next to nothing; it is what stands outside of texts that counts. The look itself goes piece by
piece, so that other threads have their turn.
"""

from __future__ import annotations

import re

from pdd.errors import InvalidRequest

MAX_CONTAINERS = 131_072  # arrays and objects: each costs microseconds
MAX_MEMBERS = 196_608  # of objects: 0.3 us
MAX_STRINGS = 524_288  # give or take a few, names of members too: 0.07 us
MAX_VALUES = 1_048_576  # that a comma ends, as each token id but the last: 0.02 us
_PIECE = 1 << 20
_AT_ONCE = 4096  # strings
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # one without an end is taken to the end of the body
_BOUNDS = (
    (b"[{", MAX_CONTAINERS, "arrays and objects"),
    (b":", MAX_MEMBERS, "members of objects"),
    (b",", MAX_VALUES, "values"),
)


def check_counts(body: bytes) -> None:
    """
    Raises:
        InvalidRequest: there is more of something than any request needs.
    """
    quotes, *others = (_count(body, signs) for signs in (b'"', *(signs for signs, _, _ in _BOUNDS)))
    if quotes <= 2 * MAX_STRINGS and all(found <= most for found, (_, most, _) in zip(others, _BOUNDS, strict=True)):
        return  # even if all of it stood outside of texts
    totals = [0] * len(_BOUNDS)
    between: list[bytes] = []  # texts
    strings = end = 0
    for match in _STRING.finditer(body):
        begin, next_end = match.span()
        between.append(body[end:begin])
        end = next_end
        if len(between) == _AT_ONCE:
            strings += len(between)
            _add(b"".join(between), totals)
            between.clear()
            if strings > MAX_STRINGS:
                raise InvalidRequest(f"the body has more than {MAX_STRINGS} strings")
    _add(b"".join([*between, body[end:]]), totals)


def _add(signs: bytes, totals: list[int]) -> None:
    for index, (wanted, most, noun) in enumerate(_BOUNDS):
        totals[index] += _count(signs, wanted)
        if totals[index] > most:
            raise InvalidRequest(f"the body has more than {most} {noun}")


def _count(text: bytes, signs: bytes) -> int:
    return sum(text.count(sign, piece, piece + _PIECE) for sign in signs for piece in range(0, len(text), _PIECE))
