"""Any form in which an operator may have met a request's id leads to it; what is not certain is refused."""

from __future__ import annotations

import pytest

from pdd.daemon.ledger import MOST_FINISHED, Ledger
from pdd.daemon.request_ids import of_one, unknown
from pdd.engine.request import Finished, FinishReason
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


def test_a_request_that_is_not_known_is_told_with_what_is_kept_and_where_else_to_look() -> None:
    error = unknown("abc1", live=3, ended=512, forgotten=4000, oldest_seconds=95.0, dumps="/var/log/pdd/d0")
    assert error.message == (
        "no request abc1 is known here: it is not among 3 live requests and the latest 512 that ended, the oldest 1m35s ago "
        "(at most 512 are kept); 4000 older ones are forgotten"
    )
    for place in ("Another node", "its last start", "journalctl", "/var/log/pdd/d0"):
        assert place in error.hint
    fresh = unknown("abc1", live=1, ended=0, forgotten=0, oldest_seconds=None, dumps="/d").message
    assert fresh == "no request abc1 is known here: it is not among 1 live request (at most 512 that ended are kept)"


def test_the_ledger_counts_what_it_forgets() -> None:
    ledger = Ledger(lambda: 1.0)
    for number in range(MOST_FINISHED + 3):
        ledger.open(f"r{number}", (1,))
        ledger.engine_event(Finished(f"r{number}", FinishReason.STOP))
    assert (len(ledger.finished()), ledger.num_forgotten) == (MOST_FINISHED, 3)
    assert ledger.find("r2") is None
    assert ledger.find("r3") is not None
