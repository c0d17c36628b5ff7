"""Tokens to text: whole characters, stop strings and logprob entries, however the engine groups its tokens."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.api.choice import Choice, Delta
from pdd.engine.request import SamplingParams
from pdd.errors import EngineError, RequestCancelled
from tests.api.fakes import Call, FakeService, SmallTokenizer, Stream, says

TOKENIZER = SmallTokenizer()
BYTES = st.integers(0, 255).map(lambda byte: TOKENIZER.byte_tokens(bytes([byte]))[0])
UNICODE = st.text(alphabet="a é€😀👩‍👩‍👧", max_size=12)


def run(tokens: list[int], sampling: SamplingParams, *, per_step: int, stops: tuple[str, ...] = ()) -> list[Delta]:
    async def collect() -> list[Delta]:
        choice = Choice(3, sampling, TOKENIZER.detokenizer(), stops)
        script = says(tokens, per_step=per_step)
        call = Call((1,), sampling)
        return [delta async for delta in choice.deltas(Stream(script(call)))]

    return asyncio.run(collect())


def split(raw: bytes, places: list[int]) -> list[int]:
    """Tokens that spell `raw`: merged ones where the tokenizer has them, bytes elsewhere."""
    edges = sorted({0, len(raw), *(place % (len(raw) + 1) for place in places)})
    tokens: list[int] = []
    for a, b in itertools.pairwise(edges):
        try:
            tokens += TOKENIZER.plain(raw[a:b].decode())
        except UnicodeDecodeError:
            tokens += TOKENIZER.byte_tokens(raw[a:b])
    return tokens


@settings(max_examples=60)
@given(UNICODE, st.lists(st.integers(0, 60), max_size=8), st.integers(1, 5))
def test_characters_are_whole_wherever_tokens_cut_them(text: str, places: list[int], per_step: int) -> None:
    """Scenario 90."""
    tokens = split(text.encode(), places)
    deltas = run(tokens, SamplingParams(max_tokens=1000), per_step=per_step)
    assert "".join(delta.text for delta in deltas) == text
    assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert deltas[-1].completion_tokens == len(tokens)


@settings(max_examples=60)
@given(st.lists(BYTES, max_size=30), st.integers(1, 5), st.integers(1, 30))
def test_grouping_of_tokens_never_shows(tokens: list[int], per_step: int, max_tokens: int) -> None:
    """Any bytes, valid UTF-8 or not, cut anywhere by max_tokens."""
    sampling = SamplingParams(max_tokens=max_tokens, logprobs=1)
    grouped, single = (run(tokens, sampling, per_step=size, stops=("ab", "é")) for size in (per_step, 1))
    assert "".join(delta.text for delta in grouped) == "".join(delta.text for delta in single)
    assert [p for delta in grouped for p in delta.pieces] == [p for delta in single for p in delta.pieces]
    assert grouped[-1].completion_tokens == single[-1].completion_tokens == sum(len(d.pieces) for d in single)
    assert grouped[-1].finish == single[-1].finish


def test_a_cut_character_at_the_end_is_dropped() -> None:
    """Scenario 90: max_tokens inside a character of four bytes."""
    tokens = TOKENIZER.byte_tokens("ok😀".encode())
    for cut in (3, 4, 5):
        deltas = run(tokens, SamplingParams(max_tokens=cut), per_step=1)
        assert "".join(delta.text for delta in deltas) == "ok"
        assert deltas[-1].finish == "length"


def test_a_stop_string_may_end_inside_a_group_of_tokens() -> None:
    tokens = TOKENIZER.byte_tokens(b"one two three")
    deltas = run(tokens, SamplingParams(max_tokens=100, logprobs=0), per_step=13, stops=("two",))
    assert [(delta.text, delta.finish) for delta in deltas] == [("one ", "stop")]
    assert deltas[0].completion_tokens == len(deltas[0].pieces) == len("one two")


def test_text_offsets_are_characters_of_the_decoded_text() -> None:
    tokens = TOKENIZER.byte_tokens("é!x".encode())
    deltas = run(tokens, SamplingParams(max_tokens=100, logprobs=0), per_step=1)
    assert [piece.text_offset for delta in deltas for piece in delta.pieces] == [0, 0, 1, 2]


async def test_an_engine_that_falls_silent_is_an_error(service: FakeService) -> None:
    async def script(call: Call):  # type: ignore[no-untyped-def]
        return
        yield

    choice = Choice(0, SamplingParams(), TOKENIZER.detokenizer(), ())
    with pytest.raises(EngineError):
        [delta async for delta in choice.deltas(Stream(script(Call((), SamplingParams()))))]


async def test_an_abort_that_no_client_asked_for_is_an_error() -> None:
    """Scenario 16: an operator's cancel is not an answer."""
    from pdd.engine.request import Finished, FinishReason

    async def script():  # type: ignore[no-untyped-def]
        yield Finished("r", FinishReason.ABORT)

    choice = Choice(0, SamplingParams(), TOKENIZER.detokenizer(), ())
    with pytest.raises(RequestCancelled):
        [delta async for delta in choice.deltas(Stream(script()))]
