"""Logprobs in both forms: one entry per token, the chosen one listed, JSON always valid."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator

import pytest

from pdd.engine.request import Finished, FinishReason, TokenLogprob, TokenOutput, Tokens
from tests.api.conftest import Node
from tests.api.fakes import Call, finished, says

ASK = [{"role": "user", "content": "x"}]


def one(*outputs: TokenOutput):  # type: ignore[no-untyped-def]
    async def script(call: Call) -> AsyncGenerator[Tokens | Finished, None]:
        yield Tokens("r", outputs)
        yield finished(call, FinishReason.LENGTH)

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_one_entry_per_token(node: Node, stream: bool) -> None:
    """Scenario 87."""
    tokenizer = node.service.tokenizer
    tokens = [*tokenizer.plain("the cat"), *tokenizer.byte_tokens("é".encode()), tokenizer.eos_token_ids[0]]
    node.service.script = says(tokens)
    answer = await node.client.completions.create(model="tiny", prompt="x", logprobs=5, max_tokens=50, stream=stream, stop="zz")
    parts = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    assert "".join(part.text for part in parts) == "the caté"
    names = [name for part in parts for name in part.logprobs.tokens]
    offsets = [offset for part in parts for offset in part.logprobs.text_offset]
    tops = [top for part in parts for top in part.logprobs.top_logprobs]
    assert names[-3:] == ["bytes:\\xc3", "bytes:\\xa9", "</s>"]
    assert "".join(names[:-3]) == "the cat"
    assert offsets == [sum(map(len, names[:i])) for i in range(len(names) - 2)] + [7, 8]
    assert len(names) == len(tokens) == len(tops)
    for name, top, part_logprob in zip(names, tops, [p for q in parts for p in q.logprobs.token_logprobs], strict=True):
        assert len(top) == 5
        assert top[name] == part_logprob == -0.5


async def test_completions_lists_a_chosen_token_that_is_not_among_the_likeliest(node: Node) -> None:
    a, b, c = node.service.tokenizer.byte_tokens(b"abc")
    node.service.script = one(TokenOutput(a, -7.0, (TokenLogprob(b, -0.1), TokenLogprob(c, -2.0))))
    answer = await node.client.completions.create(model="tiny", prompt="x", logprobs=2)
    assert answer.choices[0].logprobs.top_logprobs == [{"b": -0.1, "c": -2.0, "a": -7.0}]


async def test_ids_with_the_same_text_stay_distinct(node: Node) -> None:
    tokenizer = node.service.tokenizer
    half, other = tokenizer.byte_tokens(b"\xc3\xc4")
    twin = tokenizer.byte_tokens(b"t")[0]
    real = tokenizer._bytes
    tokenizer._bytes = [*real[:twin], real[half], *real[twin + 1 :]]
    try:
        node.service.script = one(
            TokenOutput(half, -1.0, (TokenLogprob(twin, -0.5), TokenLogprob(half, -1.0), TokenLogprob(other, -2.0)))
        )
        answer = await node.client.completions.create(model="tiny", prompt="x", logprobs=3)
    finally:
        tokenizer._bytes = real
    expected = {f"token_id:{twin}": -0.5, "bytes:\\xc3": -1.0, "bytes:\\xc4": -2.0}
    assert answer.choices[0].logprobs.top_logprobs == [expected]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("k", [None, 0, 3, 20])
async def test_chat_entries(node: Node, stream: bool, k: int | None) -> None:
    node.service.script = says(node.service.tokenizer.byte_tokens("aé".encode()))
    extra = {} if k is None else {"top_logprobs": k}
    answer = await node.client.chat.completions.create(model="tiny", messages=ASK, logprobs=True, stream=stream, **extra)
    parts = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert [entry.token for entry in entries] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "aé"
    assert [len(entry.top_logprobs) for entry in entries] == [k or 0] * 3
    assert node.service.calls[0].sampling.logprobs == (k or 0)


async def test_no_logprobs_unless_asked(node: Node) -> None:
    answer = await node.client.chat.completions.create(model="tiny", messages=ASK, logprobs=False)
    assert answer.choices[0].logprobs is None
    assert node.service.calls[0].sampling.logprobs is None


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_impossible_tokens_leave_the_json_valid(node: Node, value: float, path: str, stream: bool) -> None:
    """Scenario 96."""
    a, b = node.service.tokenizer.byte_tokens(b"ab")
    node.service.script = one(TokenOutput(a, -0.0, (TokenLogprob(a, -0.0), TokenLogprob(b, value))))
    chat = {"messages": ASK, "logprobs": True, "top_logprobs": 20}
    body = chat if "chat" in path else {"prompt": "x", "logprobs": 20}
    answer = await node.http.post(path, json={**body, "top_k": 1, "logit_bias": {str(b): -100}, "stream": stream})
    assert answer.status_code == 200
    events = answer.text.split("\n\n")[:-2] if stream else ["data: " + answer.text]
    for event in events:
        json.loads(event.removeprefix("data: "), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert "-9999.0" in answer.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_entries_wait_for_no_text(node: Node, path: str) -> None:
    """A stop string that may still come, or half a character, holds text back but not the entries of its tokens."""
    node.service.script = says(node.service.tokenizer.byte_tokens("st😀".encode()))
    ask = {"messages": ASK, "logprobs": True} if "chat" in path else {"prompt": "x", "logprobs": 0}
    answer = await node.http.post(path, json={**ask, "stream": True, "stop": "stop"})
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in answer.text.split("\n\n")[:-2]]
    names = "content" if "chat" in path else "tokens"
    assert [len(c["logprobs"][names]) for c in choices if c["logprobs"] and c["finish_reason"] is None] == [1] * 6
