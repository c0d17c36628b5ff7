"""/v1/completions as the real OpenAI client sees it."""

from __future__ import annotations

import json

import openai
import pytest

from tests.api.conftest import Node
from tests.api.fakes import says

TEXT = "the cat sat on the mat"


async def test_whole_answer(node: Node) -> None:
    answer = await node.client.completions.create(model="tiny", prompt="the end", max_tokens=3)
    prompt = node.service.tokenizer.encode("the end")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason == "length"
    tokens = node.service.tokenizer.plain(TEXT)[:3]
    assert answer.choices[0].text == node.service.tokenizer.real.decode(tokens)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 3)
    assert answer.usage.total_tokens == len(prompt) + 3
    assert node.service.calls[0].prompt == tuple(prompt)
    assert node.service.ended == ["finished"]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_is_exact(node: Node, count: int, stream: bool) -> None:
    """Scenario 85."""
    answer = await node.client.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=count,
        stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    if stream:
        chunks = [chunk async for chunk in answer]
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None] * count + ["length"]
        assert chunks[-1].usage.completion_tokens == count
    else:
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == count


async def test_stream_joined_equals_whole(node: Node) -> None:
    """Scenario 86, on this side of the engine: no token of the stream is missing or doubled."""
    whole = await node.client.completions.create(model="tiny", prompt="x", max_tokens=50)
    stream = await node.client.completions.create(model="tiny", prompt="x", max_tokens=50, stream=True)
    joined = "".join([chunk.choices[0].text async for chunk in stream])
    assert joined == whole.choices[0].text == TEXT


async def test_eos_stops_and_is_not_text(node: Node) -> None:
    tokenizer = node.service.tokenizer
    node.service.script = says([*tokenizer.plain("the cat"), tokenizer.eos_token_ids[0], *tokenizer.plain("more")])
    answer = await node.client.completions.create(model="tiny", prompt="x", max_tokens=40)
    assert answer.choices[0].text == "the cat"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(tokenizer.plain("the cat")) + 1
    assert node.service.calls[0].sampling.stop_token_ids == tokenizer.eos_token_ids


async def test_stop_token_ids_and_ignore_eos(node: Node) -> None:
    tokenizer = node.service.tokenizer
    mark = tokenizer.byte_tokens(b"!")[0]
    node.service.script = says([*tokenizer.plain("the cat"), tokenizer.eos_token_ids[0], mark, mark])
    extra = {"stop_token_ids": [mark], "ignore_eos": True}
    answer = await node.client.completions.create(model="tiny", prompt="x", max_tokens=40, extra_body=extra)
    assert answer.choices[0].text == "the cat"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(tokenizer.plain("the cat")) + 2
    assert node.service.calls[0].sampling.stop_token_ids == (mark,)


@pytest.mark.parametrize("per_step", [1, 2, 50])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_request(node: Node, per_step: int, stream: bool) -> None:
    node.service.script = says(node.service.tokenizer.byte_tokens(TEXT.encode()), per_step=per_step)
    answer = await node.client.completions.create(model="tiny", prompt="x", max_tokens=100, stop=["zzz", "t on"], stream=stream)
    if stream:
        chunks = [chunk async for chunk in answer]
        text, finish = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        text, finish = answer.choices[0].text, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == len("the cat sat on")
    assert (text, finish) == ("the cat sa", "stop")
    assert node.service.ended == ["stopped"]  # the engine does not go on behind the client's back


async def test_held_text_is_flushed_at_the_end(node: Node) -> None:
    node.service.script = says(node.service.tokenizer.plain("the cat sat o"))
    stream = await node.client.completions.create(model="tiny", prompt="x", max_tokens=9, stop="t on", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "the cat sat o"


async def test_min_tokens_protects_early_text_from_stop_strings(node: Node) -> None:
    node.service.script = says(node.service.tokenizer.byte_tokens(b"a!b!c"))
    answer = await node.client.completions.create(
        model="tiny", prompt="x", max_tokens=9, stop="!", extra_body={"min_tokens": 2}
    )
    assert answer.choices[0].text == "a!b"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["the cat", [5, 6, 7]])
async def test_echo(node: Node, stream: bool, prompt: str | list[int]) -> None:
    tokenizer = node.service.tokenizer
    text = prompt if isinstance(prompt, str) else tokenizer.real.decode(prompt)
    answer = await node.client.completions.create(model="tiny", prompt=prompt, echo=True, max_tokens=50, stream=stream)
    said = "".join([c.choices[0].text async for c in answer]) if stream else answer.choices[0].text
    assert said == text + TEXT


async def test_batch_of_prompts_times_n(node: Node) -> None:
    tokenizer = node.service.tokenizer
    prompts = ["the cat", "the end of the story"]
    answer = await node.client.completions.create(model="tiny", prompt=prompts, n=2, max_tokens=4, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [call.prompt for call in node.service.calls] == [tuple(tokenizer.encode(p)) for p in prompts for _ in range(2)]
    assert [call.sampling.seed for call in node.service.calls] == [7, 8, 7, 8]
    assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(p)) for p in prompts)
    assert answer.usage.completion_tokens == 16


async def test_n_streams_interleave_and_all_finish(node: Node) -> None:
    """Scenario 88."""
    stream = await node.client.completions.create(
        model="tiny", prompt="x", n=4, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts, finishes = dict.fromkeys(range(4), ""), {}
    for chunk in chunks[:-1]:
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        if choice.finish_reason:
            finishes[choice.index] = choice.finish_reason
    expected = node.service.tokenizer.real.decode(node.service.tokenizer.plain(TEXT)[:5])
    assert texts == dict.fromkeys(range(4), expected)
    assert finishes == dict.fromkeys(range(4), "length")
    assert chunks[-1].usage.completion_tokens == 20
    assert len({call.sampling.seed for call in node.service.calls}) == 4


async def test_prompts_of_token_ids(node: Node) -> None:
    await node.client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=1)
    await node.client.completions.create(model="tiny", prompt=[[5], [6, 7]], max_tokens=1)
    assert [call.prompt for call in node.service.calls] == [(5, 6, 7), (5,), (6, 7)]


@pytest.mark.parametrize("include", [True, False])
async def test_usage_in_a_stream(node: Node, include: bool) -> None:
    """Scenario 91, on the bytes."""
    options = {"stream_options": {"include_usage": True}} if include else {}
    body = {"prompt": "x", "max_tokens": 3, "stream": True, **options}
    answer = await node.http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    objects = [json.loads(event) for event in events[:-1]]
    if not include:
        assert all("usage" not in item and item["choices"] for item in objects)
    else:
        assert objects[-1]["choices"] == []
        assert objects[-1]["usage"]["completion_tokens"] == 3
        assert all(item["usage"] is None and item["choices"] for item in objects[:-1])


async def test_cached_tokens_are_the_engines(node: Node) -> None:
    """Scenario 65: the same counts, streamed or not, and also when the API ends the request at a stop string."""
    node.service.script = says(node.service.tokenizer.plain(TEXT), cached=16)
    whole = await node.client.completions.create(model="tiny", prompt="x", n=2)
    assert whole.usage.prompt_tokens_details.cached_tokens == 32
    options = {"include_usage": True}
    stream = await node.client.completions.create(model="tiny", prompt="x", stream=True, stream_options=options)
    assert [chunk async for chunk in stream][-1].usage.prompt_tokens_details.cached_tokens == 16
    stopped = await node.client.completions.create(model="tiny", prompt="x", stop="cat")
    assert stopped.usage.prompt_tokens_details.cached_tokens == 7


async def test_defaults_are_those_of_openai(node: Node) -> None:
    await node.client.completions.create(model="tiny", prompt="x")
    await node.client.completions.create(model="tiny", prompt="x")
    sampling, second = (call.sampling for call in node.service.calls)
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.logprobs) == (1.0, 1.0, 16, None)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (0, 0.0, 1.0)
    assert sampling.seed != second.seed


async def test_every_parameter_reaches_the_engine(node: Node) -> None:
    await node.client.completions.create(
        model="tiny-alias", prompt="x", max_tokens=9, temperature=0, top_p=0.5, seed=-1, presence_penalty=1,
        frequency_penalty=-1, logit_bias={"5": -100, "6": 2.5}, logprobs=4, best_of=1, user="u",
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 2, "unknown_field": [1]},
    )
    sampling = node.service.calls[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 3, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert sampling.logit_bias == ((5, -100), (6, 2.5))
    assert (sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (9, 2, 4)
    assert sampling.seed == 2**63 - 1


async def test_unknown_model_is_404(node: Node) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        await node.client.completions.create(model="gpt-9", prompt="x")
    assert (raised.value.code, raised.value.param, raised.value.type) == (
        "model_not_found",
        "model",
        "invalid_request_error",
    )
    assert not node.service.calls


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_a_character_may_begin_in_the_prompt(node: Node, cut: int, echo: bool) -> None:
    """Scenario 90: the border between prefill and decode is inside a character of four bytes."""
    tokens = node.service.tokenizer.byte_tokens("hé😀!".encode())
    node.service.script = says(tokens[3 + cut :])
    answer = await node.client.completions.create(model="tiny", prompt=tokens[: 3 + cut], echo=echo)
    assert answer.choices[0].text == ("hé😀!" if echo else "😀!")
