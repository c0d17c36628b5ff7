"""/v1/chat/completions as the real OpenAI client sees it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.api.conftest import Node
from tests.api.fakes import BOS, says

TEXT = "the cat sat on the mat"
ASK = [{"role": "user", "content": "the end"}]


async def test_whole_answer(node: Node) -> None:
    answer = await node.client.chat.completions.create(model="tiny", messages=ASK, max_completion_tokens=50)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == len(node.service.tokenizer.plain(TEXT))


async def test_stream(node: Node) -> None:
    stream = await node.client.chat.completions.create(
        model="tiny", messages=ASK, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in own[1:])
        assert "".join(choice.delta.content or "" for choice in own) == TEXT
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 2 * len(node.service.tokenizer.plain(TEXT))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_bos_is_not_doubled(node: Node) -> None:
    """Scenario 101: a chat prompt has the ids of its rendered text, and one BOS."""
    tokenizer = node.service.tokenizer
    answer = await node.client.chat.completions.create(model="tiny", messages=ASK)
    rendered = tokenizer.apply_chat_template(ASK)
    assert rendered.startswith(BOS)
    assert list(node.service.calls[0].prompt) == tokenizer.plain(rendered)
    assert node.service.calls[0].prompt.count(tokenizer.bos) == 1
    assert answer.usage.prompt_tokens == len(tokenizer.plain(rendered))
    await node.client.completions.create(model="tiny", prompt=rendered.removeprefix(BOS))
    assert node.service.calls[1].prompt == node.service.calls[0].prompt


async def test_end_of_turn_stops(node: Node) -> None:
    tokenizer = node.service.tokenizer
    node.service.script = says([*tokenizer.plain("the cat"), tokenizer.eos_token_ids[1]])
    answer = await node.client.chat.completions.create(model="tiny", messages=ASK)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("the cat", "stop")


async def test_every_role_and_form_of_content(node: Node) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: list[Any] = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
    ]
    await node.client.chat.completions.create(model="tiny", messages=messages)
    tokenizer = node.service.tokenizer
    rendered = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "rules"},
            {"role": "user", "content": "one\ntwo"},
            {"role": "assistant", "content": ""},
            {"role": "tool", "content": "42"},
        ]
    )
    assert list(node.service.calls[0].prompt) == tokenizer.plain(rendered)


async def test_absent_and_null_max_tokens_mean_as_many_as_fit(node: Node) -> None:
    """Scenario 93."""
    for extra in ({}, {"max_tokens": None}, {"max_completion_tokens": None}):
        await node.http.post("/v1/chat/completions", json={"messages": ASK, **extra})
    for call in node.service.calls:
        assert call.sampling.max_tokens == node.service.limits.max_context - len(call.prompt)
    await node.client.chat.completions.create(model="tiny", messages=ASK, max_tokens=9, max_completion_tokens=5)
    assert node.service.calls[-1].sampling.max_tokens == 5


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ("hello", "messages"),
        (None, "messages"),
    ],
)
async def test_bad_messages_are_400(node: Node, messages: Any, param: str) -> None:
    """Scenario 92."""
    with pytest.raises(openai.BadRequestError) as raised:
        await node.client.chat.completions.create(model="tiny", messages=messages)
    assert raised.value.param == param
    assert not node.service.calls
    assert (await node.client.chat.completions.create(model="tiny", messages=ASK)).choices


async def test_empty_content_is_a_prompt_of_the_template_alone(node: Node) -> None:
    messages: list[Any] = [{"role": "user", "content": ""}]
    await node.client.chat.completions.create(model="tiny", messages=messages)
    tokenizer = node.service.tokenizer
    template = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    assert node.service.calls[0].prompt == tuple(template)
