"""A node under random work: submits, aborts, remote writes in any order, failures, retries, quarantine, little memory.

After every action the pool's books agree and the limits hold; in the end every request has ended exactly once, with
the tokens that it generates alone, and every page is free. Remote writes land until their attempt is settled, also
after the request is gone, so a page that is handed out too early corrupts somebody's tokens.
"""

from __future__ import annotations

import random

import pytest

from pdd.engine.effects import Decision, Effect, SinkArm, SinkClose, SinkOpen
from pdd.engine.limits import SchedulerLimits
from pdd.engine.request import (
    Finished,
    FinishReason,
    GenerateSpec,
    KvAbandoned,
    KvOutcome,
    KvReserved,
    KvSource,
    PrefillSpec,
    RequestState,
    SamplingParams,
    Tokens,
)
from pdd.engine.scheduler import Scheduler
from pdd.kv.pool import PagePool
from tests.engine_fakes import VOCAB, FakeExecutor, RecordingSink, entries, oracle


class Attempt:
    """A prefiller at work on one attempt: the writes still to land, in any order."""

    def __init__(self, event: KvReserved, world: World) -> None:
        self.event = event
        self.writes = [(world.executor.slot(event.pages, i), kv) for i, kv in enumerate(entries(event.tokens))]
        world.rng.shuffle(self.writes)
        self.abandoned = False
        self.quarantined = False


class Push:
    """A prefiller's sends: what was armed is read from the pages at some time before the request is settled."""

    def __init__(self, spec: PrefillSpec) -> None:
        self.spec = spec
        self.pages: tuple[int, ...] = ()
        self.expected = entries(spec.prompt)
        self.computed = 0  # tokens armed and run
        self.armed = 0
        self.read = 0
        self.closed: bool | None = None


class World:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.page_size = rng.choice([1, 2, 4])
        num_pages = rng.randint(6, 24)
        self.limits = SchedulerLimits(
            page_size=self.page_size, max_context=10_000, max_batch_size=rng.randint(1, 6),
            max_batch_tokens=rng.choice([1, 3, 8, 64]), max_queue=rng.choice([4, 1000]),
            queue_timeout=rng.choice([0.5, 1e9]),
        )
        self.pool = PagePool(num_pages)
        self.scheduler = Scheduler(self.pool, self.limits)
        self.executor = FakeExecutor(num_pages, self.page_size)
        self.now = 0.0
        self.specs: dict[str, GenerateSpec | PrefillSpec] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, Finished] = {}
        self.attempts: dict[int, Attempt] = {}
        self.pushes: dict[str, Push] = {}
        self.generated = 0
        self.preemptions = 0

    # -- what the rest of the daemon does --------------------------------------------------------------------------
    def submit(self) -> None:
        rng, request_id = self.rng, f"r{len(self.specs)}"
        most = self.pool.num_pages * self.page_size
        length = rng.choice([1, self.page_size, self.page_size + 1, rng.randint(1, most), rng.randint(1, 4)])
        tokens = tuple(rng.randrange(VOCAB) for _ in range(length))
        spec: GenerateSpec | PrefillSpec
        if rng.random() < 0.3:
            spec = PrefillSpec(request_id, tokens, RecordingSink())
            self.pushes[request_id] = Push(spec)
        else:
            stop = tuple(rng.sample(range(VOCAB), 100)) if rng.random() < 0.5 else ()
            max_tokens = rng.choice([1, 2, rng.randint(1, 12), max(1, most - length + 1)])
            sampling = SamplingParams(max_tokens=max_tokens, min_tokens=rng.choice([0, 0, 2]), stop_token_ids=stop)
            spec = GenerateSpec(request_id, tokens, sampling, rng.choice(list(KvSource)))
            self.outputs[request_id] = []
        self.specs[request_id] = spec
        self.carry_out(self.scheduler.submit(spec, self.now))

    def abort(self) -> None:
        if self.specs:
            self.carry_out(self.scheduler.abort(self.rng.choice(list(self.specs)), self.now))

    def land(self, number: int) -> None:
        """Lets some remote writes land, whoever owns their pages now."""
        for attempt in list(self.attempts.values()):
            for _ in range(min(self.rng.randint(0, number), len(attempt.writes))):
                slot, kv = attempt.writes.pop()
                self.executor.memory[slot] = kv

    def settle(self, *, failures: bool) -> None:
        rng = self.rng
        for number, attempt in list(self.attempts.items()):
            roll = rng.random()
            if not attempt.writes and not attempt.quarantined:
                outcome, retry = KvOutcome.WHOLE, None
            elif attempt.abandoned or attempt.quarantined:
                if roll < 0.5:
                    continue
                outcome, retry = KvOutcome.RELEASED, None
            elif failures and roll < 0.3:
                outcome = rng.choice([KvOutcome.RELEASED, KvOutcome.QUARANTINED])
                retry = rng.choice([KvSource.REMOTE, KvSource.LOCAL, None])
            else:
                continue
            if outcome is KvOutcome.QUARANTINED:
                attempt.quarantined = True
            else:
                del self.attempts[number]
            self.carry_out(self.scheduler.kv_settled(number, outcome, retry, RuntimeError("planned"), self.now))

    def send(self) -> None:
        """Reads some of what was armed, and settles pushes that are over."""
        for request_id, push in list(self.pushes.items()):
            for _ in range(self.rng.randint(0, 6)):
                if push.read < push.computed:
                    assert self.executor.memory[self.executor.slot(push.pages, push.read)] == push.expected[push.read]
                    push.read += 1
            done = push.closed is not None and (not push.closed or push.read == len(push.expected))
            if done and self.rng.random() < 0.7:
                del self.pushes[request_id]
                self.carry_out(self.scheduler.prefill_settled(request_id, self.now))

    # -- what the loop does ----------------------------------------------------------------------------------------
    def step(self) -> Decision:
        decision = self.scheduler.schedule(self.now)
        self.preemptions += len(decision.preempted)
        self.carry_out(decision.effects)
        self.check(decision)
        if decision.plan is not None:
            result = self.executor.execute(decision.plan)
            for push in self.pushes.values():
                push.computed = push.armed
            self.carry_out(self.scheduler.complete(decision.plan, result, self.now))
            self.generated += len(result.sampled)
        else:  # the loop sleeps now, so nothing may be left undone
            again = self.scheduler.schedule(self.now)
            assert again.plan is None
            assert not again.effects
        return decision

    def carry_out(self, effects: list[Effect] | tuple[Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case Tokens(request_id, outputs):
                    assert request_id not in self.ended
                    self.outputs[request_id] += [output.token for output in outputs]
                case Finished(request_id):
                    assert request_id not in self.ended, "ended twice"
                    self.ended[request_id] = effect
                case KvReserved(attempt=attempt):
                    assert effect.tokens == (self.specs[effect.request_id].prompt
                                             + tuple(self.outputs[effect.request_id]))[:-1]
                    self.attempts[attempt] = Attempt(effect, self)
                case KvAbandoned(attempt=attempt):
                    self.attempts[attempt].abandoned = True
                case SinkOpen(request_id, _, pages):
                    self.pushes[request_id].pages = pages
                case SinkArm(request_id, _, begin, end):
                    push = self.pushes[request_id]
                    assert begin == push.armed
                    push.armed = end
                case SinkClose(request_id, _, completed):
                    push = self.pushes[request_id]
                    assert push.closed is None
                    assert completed == (push.computed == len(push.expected))
                    push.closed = completed
        self.pool.check_integrity()
        assert self.pool.counts().total == self.pool.num_pages

    def check(self, decision: Decision) -> None:
        states = [record.state for record in self.scheduler.records.values()]
        assert states.count(RequestState.RUNNING) <= self.limits.max_batch_size
        assert states.count(RequestState.WAITING) == len(self.scheduler.waiting)
        counts = self.pool.counts()
        assert counts.quarantined <= sum(
            len(attempt.event.pages) for attempt in self.attempts.values() if attempt.quarantined
        )
        if decision.plan is not None:
            assert len(decision.plan.rows) <= self.limits.max_batch_size
            assert sum(len(row.tokens) for row in decision.plan.rows) <= self.limits.max_batch_tokens
        for request_id in decision.preempted:
            assert isinstance(self.specs[request_id], GenerateSpec)

    # -- a whole life ----------------------------------------------------------------------------------------------
    def act(self) -> None:
        roll = self.rng.random()
        if roll < 0.25:
            self.submit()
        elif roll < 0.32:
            self.abort()
        elif roll < 0.45:
            self.settle(failures=True)
        elif roll < 0.7:
            self.land(4)
            self.send()
        else:
            self.step()
        self.now += self.rng.choice([0.0, 0.001, 0.3])

    def finish(self) -> None:
        """No new work and no new failure: everything must end, however little memory there is."""
        for _ in range(20_000):
            self.land(6)
            self.settle(failures=False)
            self.send()
            self.step()
            self.now += 0.001
            if not (self.scheduler.records or self.attempts or self.pushes):
                return
        raise AssertionError(f"stuck: {list(self.scheduler.records.values())}")

    def judge(self) -> None:
        assert set(self.ended) == set(self.specs), "every request ends"
        counts = self.pool.counts()
        assert counts.free == counts.total
        assert not self.scheduler.orphans
        for request_id, spec in self.specs.items():
            ended = self.ended[request_id]
            if isinstance(spec, PrefillSpec):
                continue
            sampling = spec.sampling
            right = oracle(spec.prompt, sampling.max_tokens, sampling.stop_token_ids, sampling.min_tokens)
            got = self.outputs[request_id]
            assert got == right[: len(got)], request_id
            assert ended.completion_tokens == len(got)
            if ended.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert got == right
                stopped = right[-1] in sampling.stop_token_ids and len(right) > sampling.min_tokens
                assert (ended.reason is FinishReason.STOP) == stopped


def live(seed: int) -> World:
    world = World(seed)
    for _ in range(world.rng.randint(20, 160)):
        world.act()
    world.finish()
    world.judge()
    return world


@pytest.mark.parametrize("block", [*range(8), *(pytest.param(block, marks=pytest.mark.slow) for block in range(8, 60))])
def test_everything_ends_as_it_would_alone(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        try:
            live(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_the_worlds_are_worth_something() -> None:
    worlds = [live(seed) for seed in range(150)]
    reasons = [ended.reason for world in worlds for ended in world.ended.values()]
    for reason in FinishReason:
        assert reasons.count(reason) > 20
    preemptions = sum(world.preemptions for world in worlds)
    assert preemptions > 50
    assert preemptions < sum(world.generated for world in worlds)
