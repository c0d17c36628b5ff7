"""How a request ended is the same in its metric, in the ledger and for its client, whoever ended it."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from pdd.api.service import Health, Limits
from pdd.daemon.latency import Latencies
from pdd.daemon.ledger import Entry, Ledger
from pdd.daemon.service import NodeService
from pdd.engine.request import Finished, FinishReason, GenerateSpec, KvSource, SamplingParams, TokenOutput, Tokens
from pdd.errors import RequestCancelled
from pdd.metrics import OUTCOMES, Metrics

PROMPT = (1, 2, 3)


@dataclasses.dataclass
class World:
    """A service, and an engine that answers each abort with Finished(ABORT) when it is told to."""

    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    ledger: Ledger = dataclasses.field(default_factory=lambda: Ledger(lambda: 0.0))
    aborted: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.service = NodeService(
            model_name="m", ledger=self.ledger, metrics=self.metrics, latencies=Latencies.new(lambda: 0.0), max_queue=8, request_timeout=60.0,
            health=lambda: Health(True), metrics_text=lambda: "",
        )
        self.service.loaded(None, Limits(100, 100, 100), self, lambda _: KvSource.LOCAL)  # type: ignore[arg-type]

    def submit(self, spec: GenerateSpec) -> None: ...

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def says(self, *events: Tokens | Finished) -> None:
        for event in events:  # in the order of the node's dispatch
            self.ledger.engine_event(event)
            self.service.engine_event(event)

    @property
    def outcomes(self) -> dict[str, float]:
        counts = {word: self.metrics.requests.labels(word)._value.get() for word in OUTCOMES}
        return {word: count for word, count in counts.items() if count}

    @property
    def entry(self) -> Entry:
        found = self.ledger.find("r")
        assert found is not None
        return found


@pytest.fixture
async def world() -> World:
    return World()


async def begin(world: World):  # type: ignore[no-untyped-def]
    """A stream that has read its first token."""
    stream = world.service.generate(PROMPT, SamplingParams(), request_id="r", given_id=None)
    first = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    world.says(Tokens("r", (TokenOutput(5),)))
    await first
    return stream


ABORTED = Finished("r", FinishReason.ABORT, None, 3, cached_tokens=2)


async def test_a_stop_string_is_a_stop(world: World) -> None:
    stream = await begin(world)
    finishing = asyncio.ensure_future(stream.finish())
    await asyncio.sleep(0)
    assert world.aborted == ["r"]
    assert not finishing.done()
    world.says(Tokens("r", (TokenOutput(6),)), ABORTED)
    assert await finishing == 2  # what the engine says it reused
    await stream.aclose()
    assert world.outcomes == {"stop": 1}
    assert (world.entry.reason, world.entry.error) == ("stop", "")
    assert world.service.num_open == 0


async def test_a_stop_string_at_the_last_token_is_a_stop(world: World) -> None:
    """The engine ended it by length; the client was told stop."""
    stream = await begin(world)
    world.says(Tokens("r", (TokenOutput(6),)), Finished("r", FinishReason.LENGTH, cached_tokens=3))
    await anext(stream)
    assert await stream.finish() == 3
    assert world.aborted == []
    assert world.outcomes == {"stop": 1}
    assert world.entry.reason == "stop"


async def test_a_failure_keeps_its_cause_whatever_the_engine_says(world: World) -> None:
    """504, the end of a drain, an operator: the engine is told to abort, and answers so."""
    stream = await begin(world)
    assert world.service.cancel("r", RequestCancelled("the operator ended it"))
    world.says(ABORTED)
    event = await anext(stream)
    assert str(event.error) == "the operator ended it"
    assert world.outcomes == {"error": 1}
    assert (world.entry.reason, world.entry.error) == ("error", "the operator ended it")


async def test_a_client_that_leaves_is_an_abort(world: World) -> None:
    stream = await begin(world)
    await stream.aclose()
    world.says(ABORTED)
    assert world.outcomes == {"abort": 1}
    assert (world.entry.reason, world.entry.error) == ("abort", "the client left")


@pytest.mark.parametrize("reads", [True, False])
async def test_a_normal_end_is_one_also_when_it_is_not_read(world: World, reads: bool) -> None:
    stream = await begin(world)
    world.says(Finished("r", FinishReason.LENGTH))
    if reads:
        await anext(stream)
    await stream.aclose()
    assert world.outcomes == {"length": 1}
    assert world.entry.reason == "length"


async def test_a_failure_ends_a_wait_for_the_engines_word(world: World) -> None:
    stream = await begin(world)
    finishing = asyncio.ensure_future(stream.finish())
    await asyncio.sleep(0)
    world.service.cancel_all(RequestCancelled("the node ends its work"))
    assert await finishing is None  # the text was complete: a stop, of which only the count is not known
    assert world.outcomes == {"stop": 1}


def test_prompts_are_kept_only_when_that_is_asked_for() -> None:
    for keep, expected in ((False, None), (True, PROMPT)):
        ledger = Ledger(lambda: 0.0, keep_prompts=keep)
        ledger.open("r", PROMPT)
        entry = ledger.find("r")
        assert entry is not None
        assert (entry.prompt, entry.prompt_tokens) == (expected, 3)
