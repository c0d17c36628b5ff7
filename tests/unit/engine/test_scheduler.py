"""Policies of the scheduler, one situation each. Time is an argument; ranks are `FakeExecutor`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from pdd.engine.batch import StepPlan
from pdd.engine.effects import SinkArm, SinkClose, SinkOpen
from pdd.engine.record import TRANSITIONS, Misuse
from pdd.engine.request import (
    Finished,
    FinishReason,
    KvAbandoned,
    KvOutcome,
    KvReserved,
    KvSource,
    RequestState,
)
from pdd.errors import Draining, NoPrefiller, Overloaded, PromptTooLong
from pdd.states import Change, Facts
from tests.engine_fakes import RecordingSink, generate, oracle, prefill
from tests.unit.engine.node import PAGE, Node


def shares(plan: StepPlan | None) -> dict[int, int]:
    assert plan is not None
    return {row.row_id: len(row.tokens) for row in plan.rows}


def test_a_local_request_runs_in_chunks_and_samples_once_per_token() -> None:
    node = Node(max_batch_tokens=8)
    spec = generate("a", 18, 5)
    node.submit(spec)
    node.run()
    assert [row.sample for plan in node.executor.plans for row in plan.rows] == [False, False, True] + [True] * 4
    assert node.outputs["a"] == oracle(spec.prompt, 5)
    assert node.finished("a") == Finished("a", FinishReason.LENGTH, None, 18, 0, 5)
    assert node.pool.num_free == 16


def test_a_remote_request_runs_its_last_prompt_token_first() -> None:
    node = Node()
    spec = generate("a", 9, 3, remote=True)
    node.submit(spec)
    assert node.step().plan is None
    event = node.reserved("a")
    assert (event.tokens, len(event.pages)) == (spec.prompt[:-1], 2)
    assert node.pool.counts().reserved == 2
    node.fetch("a")
    assert node.state("a") is RequestState.READY
    row = node.step().plan.rows[0]  # type: ignore[union-attr]
    assert (row.start, row.tokens, row.new_pages[:2]) == (8, spec.prompt[-1:], event.pages)
    node.run()
    assert node.outputs["a"] == oracle(spec.prompt, 3)


def test_a_remote_prompt_of_one_token_has_nothing_to_fetch() -> None:
    node = Node()
    node.submit(generate("a", 1, 2, remote=True))
    assert node.step().plan is not None
    assert not [e for e in node.events if isinstance(e, KvReserved)]


def test_stop_tokens_end_a_request_but_not_among_the_first_min_tokens() -> None:
    alone = oracle(generate("x", 6).prompt, 8)
    for min_tokens, length in ((0, 3), (3, 5)):
        node = Node()
        node.submit(generate("a", 6, 8, stop_token_ids=(alone[2], alone[4]), min_tokens=min_tokens))
        node.run()
        assert node.outputs["a"] == alone[:length]
        assert node.finished("a").reason is FinishReason.STOP  # type: ignore[union-attr]


def test_one_token_means_one_token_and_no_page_more_than_it_needs() -> None:
    node = Node()
    node.submit(generate("a", PAGE, 1))
    node.step()
    assert len(node.outputs["a"]) == 1
    assert node.executor.tables[0] == [0]


def test_what_can_never_fit_is_refused_at_once_and_blocks_nobody() -> None:
    node = Node(num_pages=16)
    node.submit(generate("big", 70, 1), generate("edge", 60, 5), generate("over", 60, 6))
    for refused in ("big", "over"):
        error = node.finished(refused).error  # type: ignore[union-attr]
        assert isinstance(error, PromptTooLong)
    assert "prompt of 60 tokens and max_tokens 6" in str(error)
    assert "allows 65" in str(error)
    node.run()
    assert node.finished("edge").reason is FinishReason.LENGTH  # type: ignore[union-attr]


def test_a_big_waiter_may_be_passed_for_two_seconds_and_no_longer() -> None:
    node = Node(num_pages=64, max_batch_size=64)
    node.submit(generate("holder", 50 * PAGE, 56))
    node.step()
    node.submit(generate("big", 20 * PAGE, 1))
    for index in range(40):
        node.submit(generate(f"small{index}", PAGE, 1))
        node.now += 0.1
        node.step()
    served = [int(request_id[5:]) for request_id in node.outputs if request_id.startswith("small")]
    assert served == list(range(20)) or served == list(range(21))
    node.run()
    assert len([e for e in node.events if isinstance(e, Finished)]) == 42


def test_a_short_prompt_passes_between_the_chunks_of_a_long_one() -> None:
    node = Node(num_pages=200, max_batch_tokens=16)
    node.submit(generate("long", 400, 1))
    node.step()
    node.submit(generate("short", 10, 1))
    plan = node.step().plan
    assert shares(plan) == {1: 10, 0: 5}
    assert node.finished("short") is not None


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones() -> None:
    node = Node(num_pages=300, max_batch_tokens=16)
    node.submit(generate("long", 160, 1))
    for index in range(200):  # as many tokens as a step takes, in each step
        node.submit(generate(f"s{index}", 16, 1))
        node.now += 0.25
        node.step()
    assert node.finished("long") is not None


def test_decodes_come_first() -> None:
    node = Node(num_pages=100, max_batch_tokens=8)
    node.submit(generate("a", 4, 50), generate("b", 4, 50))
    node.step()
    node.submit(generate("long", 100, 1))
    for _ in range(5):
        assert sorted(shares(node.step().plan).values()) == [1, 1, 6]


def test_the_latest_arrival_is_preempted_and_still_says_the_same() -> None:
    node = Node(num_pages=6)
    specs = [generate(name, 4, 16, salt=salt) for salt, name in enumerate("abc")]
    node.submit(*specs)
    preempted = []
    while (decision := node.step()).plan is not None:
        preempted += decision.preempted
    assert preempted[0] == "c"
    assert "a" not in preempted
    for spec in specs:
        assert node.outputs[spec.request_id] == oracle(spec.prompt, 16)
    assert len(preempted) < 6


def test_a_preempted_remote_request_is_fetched_again_with_what_it_said() -> None:
    node = Node(num_pages=4)
    first, second = generate("a", 5, 8), generate("b", 5, 8, remote=True, salt=1)
    node.submit(first, second)
    node.step()
    old = node.fetch("b")
    preempted: list[str] = []
    while "b" not in preempted:
        preempted += node.step().preempted
    said = node.outputs["b"]
    assert said
    while node.reserved("b").attempt == old.attempt:
        node.step()
    assert node.reserved("b").tokens == (*second.prompt, *said)[:-1]
    node.fetch("b")
    node.run()
    assert node.outputs["b"] == oracle(second.prompt, 8)


def preempted_stream() -> tuple[Node, int]:
    """A node that has preempted the remote request `b` after its first tokens, and the attempt that is to fetch it again."""
    node = Node(num_pages=4)
    node.submit(generate("a", 5, 8), generate("b", 5, 8, remote=True, salt=1))
    node.step()
    old = node.fetch("b")
    while node.reserved("b").attempt == old.attempt:
        node.step()
    assert node.outputs["b"]
    return node, node.reserved("b").attempt


@pytest.mark.parametrize("error", [NoPrefiller("all are down"), PromptTooLong("prompt and output are too long for all")])
@pytest.mark.parametrize("outcome", [KvOutcome.RELEASED, KvOutcome.QUARANTINED])
def test_a_preempted_stream_that_no_prefiller_takes_goes_on_here(outcome: KvOutcome, error: Exception) -> None:
    node, attempt = preempted_stream()
    node.settle(attempt, outcome, None, error)
    if outcome is KvOutcome.QUARANTINED:
        node.settle(attempt, KvOutcome.RELEASED)
    node.run()
    assert node.outputs["b"] == oracle(generate("b", 5, salt=1).prompt, 8)


def test_a_preempted_stream_ends_with_the_node() -> None:
    node, attempt = preempted_stream()
    node.settle(attempt, KvOutcome.RELEASED, None, Draining("this node is shutting down"))
    finished = node.finished("b")
    assert finished is not None
    assert isinstance(finished.error, Draining)


def test_pages_that_a_write_may_touch_are_never_preempted() -> None:
    node = Node(num_pages=4)
    sink = RecordingSink()
    node.submit(generate("a", 4, 9), prefill("p", 4, sink), generate("r", 5, 2, remote=True))
    for _ in range(30):
        assert not node.step().preempted
    assert node.state("a") is RequestState.READY  # no page to grow into: waits
    assert node.state("r") is RequestState.WAITING_FOR_REMOTE_KV
    node.scheduler.prefill_settled("p", node.now)
    for _ in range(30):
        node.step()
    node.fetch("r")
    node.run()
    assert node.outputs["a"] == oracle(generate("a", 4).prompt, 9)


def test_ready_without_a_page_waits_and_is_right_later() -> None:
    node = Node(num_pages=4)
    spec = generate("r", 9, 3, remote=True)
    node.submit(generate("a", 4, 5), spec)
    node.step()
    node.step()
    assert node.pool.num_free == 0  # as the counts complete
    node.fetch("r")
    node.run()
    assert node.outputs["r"] == oracle(spec.prompt, 3)


def test_a_stalled_row_gives_its_slot_to_an_older_one() -> None:
    node = Node(num_pages=4, max_batch_size=1)
    node.submit(generate("old", 6, 2, remote=True), generate("young", 8, 9))
    node.step()
    assert node.state("young") is RequestState.RUNNING
    node.fetch("old")
    decision = node.step()  # young cannot grow, old (which needs no page) must not wait for it
    assert decision.plan is not None
    assert shares(decision.plan) == {0: 1}
    assert node.state("young") is RequestState.READY


def test_a_row_is_taken_back_when_an_older_request_preempts_it_in_the_same_step() -> None:
    node = Node(num_pages=3, max_batch_size=2)
    node.submit(generate("a", 5, 4, remote=True), generate("b", 4, 4, salt=1), generate("c", 4, 4, salt=2))
    node.step()
    node.fetch("a")  # one page, needs a second at once; both slots are taken; no page is free
    decision = node.step()  # b grows from c; a gets c's slot, and its page from b
    assert decision.preempted == ("c", "b")
    assert shares(decision.plan) == {0: 1}
    node.run()
    assert {name: len(node.outputs[name]) for name in "abc"} == {"a": 4, "b": 4, "c": 4}


def test_a_prefill_only_request_has_all_pages_before_it_starts_and_keeps_them_until_settled() -> None:
    node = Node(num_pages=8, max_batch_tokens=8)
    sink = RecordingSink()
    node.submit(prefill("p", 21, sink), prefill("q", 9, salt=1))
    first = node.step()
    opened = [e for e in first.effects if isinstance(e, SinkOpen)]
    assert [(e.request_id, len(e.pages)) for e in opened] == [("p", 6)]
    assert [(e.begin, e.end) for e in first.effects if isinstance(e, SinkArm)] == [(0, 8)]
    node.run()
    assert node.state("p") is RequestState.SENDING
    assert node.finished("p") == Finished("p", FinishReason.STOP, None, 21, 0, 0)
    assert node.pool.counts().sending == 6
    assert node.state("q") is RequestState.WAITING
    assert not any(row.sample for plan in node.executor.plans for row in plan.rows)
    node.scheduler.prefill_settled("p", node.now)
    node.run()
    assert node.state("q") is RequestState.SENDING


def test_an_aborted_prefill_keeps_its_pages_until_settled() -> None:
    node = Node(max_batch_tokens=4)
    node.submit(prefill("p", 12), prefill("w", 12))
    node.step()
    node.abort("p")
    closes = [(e.request_id, e.completed) for e in node.events if isinstance(e, SinkClose)]
    assert closes == [("p", False)]
    assert node.pool.counts().sending == 3
    node.abort("p")
    node.scheduler.prefill_settled("p", node.now)
    node.scheduler.prefill_settled("p", node.now)  # twice is harmless
    assert "p" not in node.scheduler.records
    assert node.finished("p").reason is FinishReason.ABORT  # type: ignore[union-attr]


def test_a_prefill_settled_before_it_is_done_is_ended() -> None:
    node = Node(max_batch_tokens=4)
    node.submit(prefill("p", 12))
    node.step()
    node._note(node.scheduler.prefill_settled("p", node.now))
    assert [e.completed for e in node.events if isinstance(e, SinkClose)] == [False]
    assert node.finished("p").reason is FinishReason.ABORT  # type: ignore[union-attr]
    assert node.pool.num_free == 16


@pytest.mark.parametrize("settle", [KvOutcome.RELEASED, KvOutcome.WHOLE])
def test_an_abort_while_kv_is_awaited_leaves_the_pages_to_the_messenger(settle: KvOutcome) -> None:
    node = Node()
    node.submit(generate("a", 9, 3, remote=True))
    node.step()
    attempt = node.reserved("a").attempt
    node.abort("a")
    assert KvAbandoned("a", attempt) in node.events
    assert node.pool.counts().reserved == 2
    node.settle(attempt, settle)
    assert node.pool.num_free == 16
    with pytest.raises(Misuse):
        node.settle(attempt, KvOutcome.RELEASED)


def test_a_failed_attempt_is_retried_elsewhere_while_its_pages_are_quarantined() -> None:
    node = Node()
    spec = generate("a", 9, 3, remote=True)
    node.submit(spec)
    node.step()
    first = node.reserved("a")
    node.settle(first.attempt, KvOutcome.QUARANTINED, KvSource.REMOTE)
    node.step()
    second = node.reserved("a")
    assert second.attempt != first.attempt
    assert not set(second.pages) & set(first.pages)
    assert node.pool.counts().quarantined == 2
    node.settle(second.attempt, KvOutcome.RELEASED, KvSource.LOCAL)
    node.run()
    assert node.outputs["a"] == oracle(spec.prompt, 3)
    node.settle(first.attempt, KvOutcome.RELEASED)
    assert node.pool.num_free == 16


def test_a_failed_attempt_without_retry_ends_the_request_with_its_error() -> None:
    node = Node()
    node.submit(generate("a", 9, 3, remote=True))
    node.step()
    error = RuntimeError("no prefiller")
    node.settle(node.reserved("a").attempt, KvOutcome.RELEASED, None, error)
    assert node.finished("a").error is error  # type: ignore[union-attr]
    assert node.pool.num_free == 16


@pytest.mark.parametrize("state", ["waiting", "ready", "running", "prefilling"])
def test_an_abort_in_any_state_frees_everything_at_once(state: str) -> None:
    node = Node(max_batch_size=1, max_batch_tokens=4)
    prepare: dict[str, Callable[[], None]] = {
        "waiting": lambda: node.submit(generate("hold", 4, 50), generate("a", 4)),
        "ready": lambda: node.submit(generate("hold", 4, 50), generate("a", 4, remote=True)),
        "running": lambda: node.submit(generate("a", 4, 50)),
        "prefilling": lambda: node.submit(generate("a", 40, 2)),
    }
    prepare[state]()
    node.step()
    if state == "ready":
        node.fetch("a")
    assert node.state("a").value == {"prefilling": "running"}.get(state, state)
    node.abort("a")
    node.abort("hold")
    assert node.finished("a").reason is FinishReason.ABORT  # type: ignore[union-attr]
    assert node.pool.num_free == 16
    node.submit(generate("next", 4, 1))
    node.run()
    assert len(node.executor.rows) == 1  # the ranks have forgotten the others


def test_a_victim_does_not_come_back_into_the_pages_it_gave_up() -> None:
    node = Node(num_pages=3)
    node.submit(generate("a", 4, 6), generate("r", 5, 4, remote=True))
    node.step()
    node.fetch("r")
    node.scheduler.pool.grow(node.reserved("r").attempt, 1)  # as if r had run, up to a page edge
    decision = node.step()
    assert decision.preempted == ("r",)
    assert node.pool.num_free == 1  # enough for the four tokens that r wants fetched
    assert not decision.effects


def test_newcomers_leave_room_for_running_rows_to_grow() -> None:
    node = Node(num_pages=32)
    node.submit(generate("a", 4, 20), generate("b", 4, 20, salt=1))
    node.step()
    node.submit(generate("tight", 27 * PAGE, 1), generate("fits", 26 * PAGE, 1))
    node.step()  # the two grow by a page each: 28 are free
    assert node.state("tight") is RequestState.WAITING
    assert node.finished("fits") is not None
    node.run()
    assert node.finished("tight") is not None


def test_a_full_queue_refuses() -> None:
    node = Node(num_pages=4, max_queue=2)
    node.submit(*(generate(f"r{i}", 4, 2) for i in range(3)))
    assert isinstance(node.finished("r2").error, Overloaded)  # type: ignore[union-attr]
    node.run()
    assert len(node.outputs) == 2


def test_as_many_as_a_batch_are_fetched_ahead() -> None:
    node = Node(num_pages=64, max_batch_size=2)
    node.submit(*(generate(f"r{i}", 5, 2, remote=True) for i in range(5)))
    node.step()
    assert node.pool.counts().reserved == 2
    node.fetch("r0")
    node.step()  # r0 runs, so one more is fetched
    assert [e.request_id for e in node.events if isinstance(e, KvReserved)] == ["r0", "r1", "r2"]


def test_schedulers_of_one_node_never_share_an_attempt() -> None:
    ids = itertools.count(7).__next__
    nodes = [Node(ids=ids), Node(ids=ids)]
    for _ in range(2):
        for number, node in enumerate(nodes):
            request_id = f"r{number}-{len(node.events)}"
            node.submit(generate(request_id, 5, 2, remote=True))
            node.step()
    attempts = [e.attempt for node in nodes for e in node.events if isinstance(e, KvReserved)]
    assert sorted(attempts) == [7, 8, 9, 10]
    for node in nodes:  # and the ranks do not mind the gaps
        for event in [e for e in node.events if isinstance(e, KvReserved)]:
            node.fetch(event.request_id)
        node.run()
        assert len(node.outputs) == 2


def test_the_recorder_hears_every_change_of_a_request_with_its_time_and_reason() -> None:
    changes: list[Change] = []
    node = Node(recorder=changes.append)
    node.submit(generate("a", 5, 1, remote=True))
    node.step()
    node.now = 1.0
    node.settle(node.reserved("a").attempt, KvOutcome.RELEASED, KvSource.REMOTE)
    node.step()
    node.now = 2.0
    node.fetch("a")
    node.step()
    sink = RecordingSink()
    node.submit(prefill("p", 5, sink))
    node.step()
    node.scheduler.prefill_settled("p", 3.0)
    seen = [(c.at, c.kind, c.ident, c.before, c.after, c.why) for c in changes]
    assert seen == [
        (0.0, "request", "a", "", "waiting", ""),
        (0.0, "request", "a", "waiting", "wait_kv", "attempt 0"),
        (1.0, "request", "a", "wait_kv", "waiting", "attempt 0 failed, next: remote"),
        (1.0, "request", "a", "waiting", "wait_kv", "attempt 1"),
        (2.0, "request", "a", "wait_kv", "ready", "whole"),
        (2.0, "request", "a", "ready", "running", ""),
        (2.0, "request", "a", "running", "finished", "length"),
        (2.0, "request", "p", "", "waiting", ""),
        (2.0, "request", "p", "waiting", "running", ""),
        (2.0, "request", "p", "running", "sending", "stop"),
        (3.0, "request", "p", "sending", "finished", "its writes are settled"),
    ]
    assert changes[0].facts == Facts()
    of = {(c.ident, c.after): c.facts for c in changes}
    assert (of["a", "ready"].attempt, of["a", "finished"].step) == (1, 0)  # its second attempt, and its first step
    assert of["p", "sending"].step == 1


def test_misuse_changes_nothing() -> None:
    node = Node()
    node.submit(generate("a", 4))
    with pytest.raises(Misuse):
        node.submit(generate("a", 4))
    with pytest.raises(Misuse):
        node.submit(prefill("p", 0))
    with pytest.raises(Misuse):
        node.settle(99, KvOutcome.WHOLE)
    assert len(node.scheduler.records) == 1
    node.abort("unknown")


def test_fail_all_ends_every_request_once() -> None:
    node = Node(num_pages=12, max_batch_tokens=4)
    node.submit(generate("run", 4, 40), generate("fetch", 9, remote=True), prefill("push", 12), generate("wait", 40, 2))
    node.step()
    error = RuntimeError("rank died")
    node._note(node.scheduler.fail_all(error, node.now))
    for request_id in ("run", "fetch", "push", "wait"):
        assert node.finished(request_id).error is error  # type: ignore[union-attr]
    assert node.step().plan is None


def test_a_request_moves_only_along_the_table() -> None:
    node = Node()
    node.submit(generate("a", 4))
    record = node.scheduler.records["a"]
    assert set(TRANSITIONS) == set(RequestState)
    with pytest.raises(AssertionError, match="waiting -> sending"):
        record.move(RequestState.SENDING, 0.0)
