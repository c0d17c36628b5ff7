"""What is refused, with which words, and that the next request is served (scenarios 92-95)."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.api.conftest import Node

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASK = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "x"}, CHAT: {"messages": ASK}}
BOTH = pytest.mark.parametrize("path", BODIES)


async def refused(node: Node, path: str, body: Any) -> dict[str, Any]:
    """The error object of a 400, after which the node still serves; nothing reached the engine."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await node.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert not node.service.calls
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (await node.http.post(path, json={**BODIES[path], "max_tokens": 1})).status_code == 200
    return error


@BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_tokens", value) for value in (0, -1, 1.5, "8", True, [], 2**31, 2**63, 10**400)),
        *(("n", value) for value in (0, -1, 129, "1", 1.5)),
        *(("temperature", value) for value in (-0.1, 2.1, "hot")),
        *(("top_p", value) for value in (0, -1, 1.01)),
        *(("top_k", value) for value in (-2, 1.5, 2**40)),
        *(("min_p", value) for value in (-0.1, 1.1)),
        *(("presence_penalty", value) for value in (-2.1, 2.1)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1)),
        *(("repetition_penalty", value) for value in (0, -1, 11)),
        *(("seed", value) for value in (2**63, -(2**63) - 1, "1", 0.5)),
        *(("stop", value) for value in ("", [""], ["x"] * 17, 5, [5], "x" * 5000)),
        *(("stop_token_ids", value) for value in ([-1], [2**31], [2**63], [10**400], ["x"], 5, [0] * 300)),
        *(("logit_bias", value) for value in ({"x": 1}, {"-1": 1}, {"1.5": 1}, {"1": 101}, {"1": "a"}, [1])),
        *(("logit_bias", {key: 1}) for key in ("99999", str(2**31), str(2**63), "9" * 500, "٣")),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("best_of", 2),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("model", 5),
        ("user", 5),
        ("response_format", {"type": "json_object"}),
        ("response_format", "json"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("guided_json", {"type": "object"}),
        ("structured_outputs", {"regex": "a"}),
        ("prompt_logprobs", 1),
        ("use_beam_search", True),
        ("suffix", "x"),
    ],
)
async def test_bad_fields(node: Node, path: str, field: str, value: object) -> None:
    body = {"max_tokens": 16, **BODIES[path], field: value}
    error = await refused(node, path, body)
    assert error["param"].split("[")[0] == field
    assert field in error["message"]


@BOTH
async def test_fields_that_are_off_or_unknown_are_taken(node: Node, path: str) -> None:
    off = {
        "tools": [], "tool_choice": "auto", "functions": None, "response_format": {"type": "text"}, "suffix": None,
        "guided_json": None, "stop": None, "logit_bias": {}, "n": None, "temperature": None, "seed": None, "top_k": -1,
        "stream": None, "stream_options": None, "logprobs": None, "best_of": 1, "service_tier": "auto", "store": False,
        "metadata": {"a": "b"}, "reasoning_effort": "low", "something_new": [[{}]], "min_tokens": None, "model": None,
    }
    answer = await node.http.post(path, json={**BODIES[path], **off})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("extra", [{}, {"echo": True}, {"logprobs": 1}])
@pytest.mark.parametrize(("value", "expected"), [(None, "fit"), ("absent", 16)])
async def test_null_and_absent_max_tokens_of_completions(
    node: Node, extra: dict[str, Any], value: object, expected: object
) -> None:
    """Scenario 93: null is as many as fit; absent is OpenAI's 16."""
    body = {"prompt": "x", **extra, **({} if value == "absent" else {"max_tokens": None})}
    assert (await node.http.post(COMPLETIONS, json=body)).status_code == 200
    call = node.service.calls[0]
    fit = node.service.limits.max_context - len(call.prompt)
    assert call.sampling.max_tokens == (fit if expected == "fit" else expected)


async def test_absent_max_tokens_shrinks_where_16_do_not_fit(node: Node) -> None:
    prompt = [5] * (node.service.limits.max_context - 3)
    assert (await node.http.post(COMPLETIONS, json={"prompt": prompt})).status_code == 200
    assert node.service.calls[0].sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ("", "empty"),
        ([""], "empty"),
        ([], "empty"),
        ([[]], "empty"),
        ([[], [1]], "empty"),
        (["x", ""], "empty"),
        (None, "null"),
        (5, "int"),
        ([1, "x"], "mixes"),
        (["x", 1], "mixes"),
        ([1, [1]], "mixes"),
        ([[1, "x"]], "int"),
        ([[[1]]], "array"),
        ([1.5], "float"),
        ([True], "bool"),
        ({"a": 1}, "object"),
        (["x"] * 300, "256"),
    ],
)
async def test_bad_prompts(node: Node, prompt: object, word: str) -> None:
    """Scenario 92."""
    error = await refused(node, COMPLETIONS, {"prompt": prompt})
    assert error["param"].startswith("prompt")
    assert word in error["message"]


async def test_no_prompt_at_all(node: Node) -> None:
    assert (await refused(node, COMPLETIONS, {}))["param"] == "prompt"
    assert (await refused_again(node, CHAT, {}))["param"] == "messages"


async def test_a_field_that_is_missing_is_told_before_what_is_wrong_in_others(node: Node) -> None:
    error = await refused(node, CHAT, {"max_tokens": -50, "mesages": [{"role": "user", "content": "x"}]})
    assert error["param"] == "messages"
    assert error["message"] == 'you must provide messages; did you mean that by "mesages"?'
    error = await refused_again(node, COMPLETIONS, {"max_tokens": -50, **{f"x{i}": 0 for i in range(200)}, "promt": "x"})
    assert error["message"] == "you must provide prompt"  # no more than the first names are looked through
    assert (await refused_again(node, CHAT, []))["param"] is None


async def refused_again(node: Node, path: str, body: Any) -> dict[str, Any]:
    node.service.calls.clear()
    return await refused(node, path, body)


@pytest.mark.parametrize("token", [-1, "vocab", 2**31, 2**63, 2**64, 10**400])
@pytest.mark.parametrize("field", ["prompt", "prompts", "stop_token_ids", "logit_bias"])
async def test_ids_outside_the_vocabulary(node: Node, token: int | str, field: str) -> None:
    """Scenario 95."""
    bad = node.service.limits.vocab_size if token == "vocab" else token
    fields: dict[str, dict[str, Any]] = {
        "prompt": {"prompt": [5, bad, 5]},
        "prompts": {"prompt": [[5], [bad]]},
        "stop_token_ids": {"prompt": "x", "stop_token_ids": [5, bad]},
        "logit_bias": {"prompt": "x", "logit_bias": {"5": 1, str(bad): 1}},
    }
    error = await refused(node, COMPLETIONS, fields[field])
    assert error["param"] == field.removesuffix("s" if field == "prompts" else "")


async def test_the_last_id_of_the_vocabulary_is_taken(node: Node) -> None:
    last = node.service.limits.vocab_size - 1
    body = {"prompt": [0, last], "stop_token_ids": [last], "logit_bias": {str(last): 1, "0": -1}}
    assert (await node.http.post(COMPLETIONS, json=body)).status_code == 200


@BOTH
@pytest.mark.parametrize("over", [-1, 0, 1])
@pytest.mark.parametrize(("context", "pool"), [(100, 1000), (1000, 99)])
async def test_the_length_limit_is_exact(node: Node, path: str, over: int, context: int, pool: int) -> None:
    """Scenarios 94 and 69: the KV of all tokens but the last must fit the pool, so 99 tokens of pool allow 100."""
    node.service.limits = dataclasses.replace(node.service.limits, max_context=context, pool_tokens=pool)
    await node.http.post(path, json={**BODIES[path], "max_tokens": 1})
    prompt_tokens = len(node.service.calls.pop().prompt)
    asked = 100 - prompt_tokens + over
    answer = await node.http.post(path, json={**BODIES[path], "max_tokens": asked})
    if over <= 0:
        assert answer.status_code == 200
        assert node.service.calls[0].sampling.max_tokens == asked
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "max_tokens")
    for number in (prompt_tokens, asked, prompt_tokens + asked, 100):
        assert str(number) in error["message"]
    assert ("context limit" if context == 100 else "KV pool") in error["message"]
    assert not node.service.calls


@pytest.mark.parametrize("length", [99, 100, 101, 5000])
async def test_a_prompt_that_leaves_no_room(node: Node, length: int) -> None:
    node.service.limits = dataclasses.replace(node.service.limits, max_context=100)
    answer = await node.http.post(COMPLETIONS, json={"prompt": [5] * length, "max_tokens": None})
    if length == 99:
        assert answer.status_code == 200
        assert node.service.calls[0].sampling.max_tokens == 1
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert str(length) in error["message"]
    assert "100" in error["message"]


async def test_a_text_that_can_not_fit_is_not_even_tokenized(node: Node) -> None:
    tokenizer = node.service.tokenizer
    longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
    node.service.limits = dataclasses.replace(node.service.limits, max_context=100)
    await node.http.post(COMPLETIONS, json={"prompt": "x"})
    tokenizer.encoding.clear()
    answer = await node.http.post(COMPLETIONS, json={"prompt": "x" * (100 * longest * 4 + 1)})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert not tokenizer.encoding.is_set()


@pytest.mark.parametrize("extra", [{"logprobs": 0}, {"logprobs": 5}])
async def test_echo_with_logprobs_is_refused(node: Node, extra: dict[str, Any]) -> None:
    error = await refused(node, COMPLETIONS, {"prompt": "x", "echo": True, **extra})
    assert error["param"] == "echo"
    assert "logprobs" in error["message"]


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (CHAT, {"logprobs": 5}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 1000}, "max_completion_tokens"),
        (COMPLETIONS, {"prompt": ["x"] * 200, "n": 2}, "n"),
    ],
)
async def test_bad_logprobs_and_lengths(node: Node, path: str, extra: dict[str, Any], param: str) -> None:
    assert (await refused(node, path, {**BODIES[path], **extra}))["param"] == param


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nul",
        b"[]",
        b"5",
        b'"x"',
        b"{} {}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 6000 + b"}",
        b'{"x":' + b"[" * 20000 + b"]" * 20000 + b"}",
        b'{"prompt":' + b"[" * 20000,
        b"\x00" * 100,
        b'{"prompt": "x"' + b"," * 1000,
    ],
)
async def test_malformed_json(node: Node, path: str, body: bytes) -> None:
    assert (await refused(node, path, body))["message"]


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_other_media_types(node: Node, media_type: str) -> None:
    """A page in a browser may send these to any address without asking; JSON it may not."""
    answer = await node.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": media_type})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]
    assert not node.service.calls
    right = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await node.http.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=right)).status_code == 200
