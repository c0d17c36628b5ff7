"""What a client sees of a failure: an HTTP error before the first token, an error event after it, never success."""

from __future__ import annotations

import json

import openai
import pytest

from pdd.engine.request import Finished, FinishReason
from pdd.errors import (
    Draining,
    EngineError,
    NoPrefiller,
    NotReady,
    Overloaded,
    PddError,
    PeerLost,
    PromptTooLong,
    RankDied,
    RequestTimeout,
)
from tests.api.conftest import Node
from tests.api.fakes import fails, says

ASK = [{"role": "user", "content": "x"}]
BODIES = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": ASK}}


@pytest.mark.parametrize("by_event", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("error", "status", "kind", "retry"),
    [
        (Overloaded("queue full"), 429, "overloaded_error", True),
        (Draining("draining"), 503, "overloaded_error", True),
        (NotReady("loading"), 503, "service_unavailable", True),
        (NoPrefiller("no prefiller", hint="start one"), 503, "service_unavailable", True),
        (PeerLost("prefill-2 died"), 503, "service_unavailable", True),
        (RequestTimeout("no progress"), 504, "timeout_error", False),
        (PromptTooLong("too long"), 400, "invalid_request_error", False),
        (EngineError("step failed"), 500, "server_error", False),
        (RankDied("rank 0 was killed by SIGKILL"), 503, "service_unavailable", True),
    ],
)
async def test_before_the_first_token(
    node: Node, path: str, stream: bool, by_event: bool, error: PddError, status: int, kind: str, retry: bool
) -> None:
    """Scenario 98, first half."""
    node.service.script = fails(error, by_event=by_event)
    answer = await node.http.post(path, json={**BODIES[path], "stream": stream})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert ("retry-after" in answer.headers) == retry
    body = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["type"] == kind
    assert error.message in body["message"]
    assert error.hint in body["message"]


@pytest.mark.parametrize("by_event", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("n", [1, 3])
async def test_after_the_first_token(node: Node, path: str, by_event: bool, n: int) -> None:
    """Scenario 98, second half: an error event, then the end, no [DONE] and no finish reason."""
    node.service.script = fails(PeerLost("prefill-2 died"), after=node.service.tokenizer.plain("the"), by_event=by_event)
    body = {**BODIES[path], "stream": True, "n": n, "stream_options": {"include_usage": True}}
    answer = await node.http.post(path, json=body)
    assert answer.status_code == 200
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert json.loads(events[-1])["error"]["message"] == "prefill-2 died"
    assert "[DONE]" not in events
    for event in events[:-1]:
        item = json.loads(event)
        assert item["usage"] is None
        assert item["choices"][0]["finish_reason"] is None


async def test_after_the_first_token_as_the_client_sees_it(node: Node) -> None:
    node.service.script = fails(PeerLost("prefill-2 died"), after=node.service.tokenizer.plain("the"))
    stream = await node.client.completions.create(model="tiny", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="prefill-2 died"):
        [chunk async for chunk in stream]


async def test_a_late_failure_of_a_whole_answer_is_an_http_error(node: Node) -> None:
    node.service.script = fails(PeerLost("died"), after=node.service.tokenizer.plain("the cat"))
    answer = await node.http.post("/v1/completions", json={"prompt": "x", "stream": False})
    assert answer.status_code == 503
    assert "choices" not in answer.json()


@pytest.mark.parametrize("after", [(), (5, 6)])
async def test_a_bug_tells_the_client_nothing_of_itself(
    node: Node, after: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    node.service.script = fails(RuntimeError("secret path /x"), after=after)
    answer = await node.http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert answer.status_code == (200 if after else 500)
    assert "secret" not in answer.text
    assert "internal error" in answer.text
    assert "[DONE]" not in answer.text
    logged = [record for record in caplog.records if record.exc_info]
    assert len(logged) == 1
    assert "secret path" in str(logged[0].exc_info[1])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_operators_cancel(node: Node, stream: bool) -> None:
    """Scenario 16: not an answer, and not silence."""

    async def script(call):  # type: ignore[no-untyped-def]
        yield Finished("r", FinishReason.ABORT)

    node.service.script = script
    answer = await node.http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert answer.status_code == 503
    assert "cancelled" in answer.json()["error"]["message"]


async def test_refused_at_the_door(node: Node) -> None:
    """Nothing is read or tokenized for a request that would not be taken."""
    node.service.refusal = Overloaded("the queue is full")
    node.service.tokenizer.encoding.clear()
    with pytest.raises(openai.RateLimitError) as raised:
        await node.client.completions.create(model="tiny", prompt="x" * 1000)
    assert raised.value.response.headers["retry-after"] == "1"
    assert not node.service.tokenizer.encoding.is_set()
    node.service.refusal = None
    assert (await node.client.completions.create(model="tiny", prompt="x")).choices


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/none", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/models/a/b/../c", 404),
        ("OPTIONS", "/v1/completions", 405),
    ],
)
async def test_http_errors_have_openais_form(node: Node, method: str, path: str, status: int) -> None:
    answer = await node.http.request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    expected = "model_not_found" if path.startswith("/v1/models/") else "method_not_supported" if status == 405 else None
    assert (error["type"], error["code"]) == ("invalid_request_error", expected)
    assert "x-request-id" in answer.headers
    if status == 405:
        assert answer.headers["allow"]


async def test_streams_survive_a_failure_of_another(node: Node) -> None:
    tokens = node.service.tokenizer.plain("the cat sat")
    node.service.script = says(tokens)
    stream = await node.client.completions.create(model="tiny", prompt="x", stream=True)
    first = await anext(aiter(stream))
    node.service.script = fails(EngineError("step failed"))
    assert (await node.http.post("/v1/completions", json={"prompt": "x"})).status_code == 500
    assert first.choices[0].text + "".join([c.choices[0].text async for c in stream]) == "the cat sat"
