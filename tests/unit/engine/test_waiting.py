"""Who waits how long: deadlines of what never started, and the place of what did."""

from __future__ import annotations

import types

from pdd.engine.effects import SinkClose
from pdd.engine.request import (
    FinishReason,
    RequestState,
)
from pdd.errors import RequestTimeout
from tests.engine_fakes import generate, prefill
from tests.unit.engine.node import Node


def test_a_reload_changes_the_bounds_of_those_that_wait() -> None:
    node = Node(num_pages=4, queue_timeout=5.0)
    scheduler = node.scheduler
    scheduler.set_queue(3, 2.0, 0.0)
    assert (scheduler.limits.max_queue, scheduler.limits.queue_timeout) == (3, 2.0)
    queue = scheduler.waiting
    record = types.SimpleNamespace(admissions=0, seq=1, sink=None, arrived=0.0, state=RequestState.WAITING)
    queue.add(record)  # type: ignore[arg-type]
    assert queue.next_deadline() == 2.0
    queue.set_timeout(7.0)
    assert queue.next_deadline() == 7.0


def test_a_request_that_is_not_admitted_in_time_expires() -> None:
    node = Node(num_pages=4, queue_timeout=5.0)
    node.submit(generate("hold", 9, 8))
    node.step()
    node.now = 1.0
    node.submit(generate("late", 9, 2))
    assert node.step().wake_at == 6.0
    node.now = 6.0
    assert node.step().expired == ("late",)
    assert isinstance(node.finished("late").error, RequestTimeout)  # type: ignore[union-attr]


def test_a_queue_of_prefills_longer_than_the_timeout_is_done_to_its_end() -> None:
    """A step a second, a timeout of three: the decoders of those at the back see the queue move, and wait."""
    node = Node(num_pages=4, queue_timeout=3.0, max_batch_tokens=8)
    names = [f"p{i}" for i in range(10)]
    node.submit(*(prefill(name, 13, salt=i) for i, name in enumerate(names)))
    node.submit(generate("late", 13, 2))
    for _ in range(100):
        decision = node.step()
        assert decision.expired in ((), ("late",))
        for name, record in list(node.scheduler.records.items()):
            if record.state is RequestState.SENDING:
                node.scheduler.prefill_settled(name, node.now)
        node.now += 1.0
    assert {name: node.finished(name).reason for name in names} == dict.fromkeys(names, FinishReason.STOP)  # type: ignore[union-attr]
    assert isinstance(node.finished("late").error, RequestTimeout)  # type: ignore[union-attr]
    assert [e.completed for e in node.events if isinstance(e, SinkClose)] == [True] * 10


def test_a_prefill_alone_sets_no_alarm() -> None:
    node = Node(num_pages=4, queue_timeout=3.0)
    node.submit(prefill("p", 13), prefill("q", 13))
    node.run()
    assert node.state("q") is RequestState.WAITING
    assert node.step().wake_at is None
    node.abort("q")  # its decoder has had enough
    assert node.finished("q").reason is FinishReason.ABORT  # type: ignore[union-attr]


def test_a_request_that_started_never_expires() -> None:
    node = Node(num_pages=4, queue_timeout=5.0)
    node.submit(generate("a", 4, 12), generate("b", 4, 12, salt=1))
    preempted: list[str] = []
    while not preempted:
        preempted += node.step().preempted
    node.now = 100.0
    node.run()
    assert node.finished("b").reason is FinishReason.LENGTH  # type: ignore[union-attr]


def test_a_stream_that_was_preempted_does_not_wait_for_a_newcomer() -> None:
    """`big` came before `b`, never started, and has waited long enough for nobody new to pass it."""
    node = Node(num_pages=12, queue_timeout=100.0)
    node.submit(generate("a", 16, 24), generate("d", 12, 12, salt=1), generate("big", 40, 1), generate("b", 4, 12, salt=2))
    preempted: list[str] = []
    while not preempted:
        preempted += node.step().preempted
    assert preempted == ["b"]
    node.now = 50.0
    node.submit(generate("new", 1, 1))
    while node.state("b") is RequestState.WAITING:
        node.step()
    assert node.state("a") is RequestState.RUNNING
    assert node.state("big") is node.state("new") is RequestState.WAITING
    node.run()
    for name in ("a", "d", "big", "b", "new"):
        assert node.finished(name).reason is FinishReason.LENGTH  # type: ignore[union-attr]


def test_a_request_that_started_never_expires_behind_one_that_did_not() -> None:
    node = Node(num_pages=4, queue_timeout=5.0)
    node.submit(generate("a", 4, 12), generate("big", 16, 1), generate("b", 4, 12, salt=1))
    preempted: list[str] = []
    while not preempted:
        preempted += node.step().preempted
    assert preempted == ["b"]
    node.now = 5.0
    assert node.step().expired == ("big",)
    node.run()
    assert node.finished("b").reason is FinishReason.LENGTH  # type: ignore[union-attr]
