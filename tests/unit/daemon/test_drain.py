"""Drain: who is told, when what is left is failed, and what `pdd status` says meanwhile."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import pytest

from pdd.daemon import view
from pdd.daemon.drain import Drain
from pdd.errors import PddError, RefusedInState


class Work:
    """Service, prefiller and engine in one, with one request and one prefill open."""

    def __init__(self) -> None:
        self.num_open = self.num_jobs = 1
        self.draining = self.prefills_draining = False
        self.failed: list[PddError] = []
        self.aborted: list[str] = []
        self.changes = 0

    def drain(self, draining: bool = True) -> None:
        self.draining = draining

    def cancel_all(self, error: PddError) -> None:
        self.failed.append(error)
        self.num_open = 0

    def jobs(self) -> tuple[Any, ...]:
        return (types.SimpleNamespace(request_id="pf1-r"),)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.num_jobs = 0

    def changed(self) -> None:
        self.changes += 1

    def resume(self) -> None:
        self.draining = False


def drain_of(work: Any, timeout: float = 60.0) -> Drain:
    drain = Drain(work, timeout, work.changed)
    drain.covers(work, work)
    return drain


async def test_what_is_left_at_the_deadline_is_failed() -> None:
    work = Work()
    drain = drain_of(work)
    assert drain.seconds_left is None
    drain.begin(30.0)
    assert work.draining
    assert 29 < (drain.seconds_left or 0) <= 30
    drain.begin(0.0)  # again: only the deadline moves
    await asyncio.sleep(0.01)
    assert len(work.failed) == 1
    assert work.aborted == ["pf1-r"]
    assert drain.open_work() == (0, 0)
    assert drain.seconds_left is None  # drained: nothing is waited for
    assert drain.active


async def test_resume_takes_the_deadline_away() -> None:
    work = Work()
    drain = drain_of(work)
    drain.end()  # nothing to do, and no error: a resume that is sent again
    drain.begin(0.01)
    drain.end()
    await asyncio.sleep(0.03)
    assert work.failed == []
    assert not work.draining
    assert work.changes == 2


async def test_a_node_that_stops_is_not_resumed() -> None:
    work = Work()
    drain = drain_of(work)
    drain.begin(60.0, for_good=True)
    with pytest.raises(RefusedInState, match="stopping"):
        drain.end()
    drain.begin(30.0)  # by an operator: the deadline moves, the end stays
    with pytest.raises(RefusedInState, match="stopping"):
        drain.end()
    assert work.draining
    drain.close()


async def test_a_prefiller_that_comes_later_drains_too() -> None:
    work: Any = Work()
    drain = Drain(work, 60.0, work.changed)
    drain.begin()
    work.draining = False
    drain.covers(work, work)
    assert work.draining
    drain.close()


def test_what_is_left_is_said_in_words() -> None:
    assert view.left(1, 0) == "1 request"
    assert view.left(0, 1) == "1 prefill for decoders"
    assert view.left(2, 3) == "2 requests, 3 prefills for decoders"


def test_a_drained_node_says_drained() -> None:
    work = (1, 0)
    node: Any = types.SimpleNamespace(
        phase=types.SimpleNamespace(name="serve"), drain=types.SimpleNamespace(active=True, open_work=lambda: work)
    )
    assert view.NodeView(node).state() == ("draining", ("draining, left: 1 request",))
    work = (0, 0)
    state, reasons = view.NodeView(node).state()
    assert (state, reasons[0].split(":")[0]) == ("drained", "drained")
