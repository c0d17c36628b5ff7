"""Any form in which an operator may have met a request's id leads to it; what is not certain is refused."""

from __future__ import annotations

import pytest

from pdd.daemon.request_ids import of_one
from pdd.errors import AmbiguousRequest, NoSuchRequest

KNOWN = {"abc1": None, "abd2": "job-7", "eee3-0": "two", "eee3-1": "two", "fff4": "same", "fff5": "same", "fff": "abd2"}


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("abc1", ["abc1"]),
        ("req-abc1", ["abc1"]),
        ("chatcmpl-abc1", ["abc1"]),
        ("cmpl-abc1", ["abc1"]),
        ("abc", ["abc1"]),
        ("chatcmpl-abc", ["abc1"]),
        ("job-7", ["abd2"]),
        ("job", ["abd2"]),
        ("eee3", ["eee3-0", "eee3-1"]),
        ("chatcmpl-eee3-1", ["eee3-1"]),
        ("eee3-0", ["eee3-0"]),
        ("two", ["eee3-0", "eee3-1"]),
        ("fff", ["fff"]),  # whole, though others begin so
        ("abd2", ["abd2"]),  # the node's own id before a client's
    ],
)
def test_found(wanted: str, found: list[str]) -> None:
    assert of_one(wanted, KNOWN) == found


@pytest.mark.parametrize(("wanted", "names"), [("ab", "abc1, abd2"), ("same", "fff4, fff5"), ("fff4x"[:2], "fff, fff4, fff5")])
def test_what_may_be_several_is_refused_and_they_are_named(wanted: str, names: str) -> None:
    with pytest.raises(AmbiguousRequest, match=f"any of {names}"):
        of_one(wanted, KNOWN)


def test_a_long_list_is_cut() -> None:
    with pytest.raises(AmbiguousRequest, match="a0, a1, a2, a3 and 2 more"):
        of_one("a", {f"a{i}": None for i in range(6)})


@pytest.mark.parametrize("wanted", ["x", "chatcmpl-", "req-", "abc12", "JOB-7"])
def test_what_is_nothing(wanted: str) -> None:
    with pytest.raises(NoSuchRequest, match="no request"):
        of_one(wanted, KNOWN)
