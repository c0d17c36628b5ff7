"""Probes, metrics, models, keys and ids: what stands around generation."""

from __future__ import annotations

import dataclasses
import logging

import openai
import pytest

from pdd.api.edge import ApiKeys
from pdd.api.service import Health
from pdd.errors import NotReady
from tests.api.conftest import SETTINGS, Node, running
from tests.api.fakes import FakeService

LOCKED = dataclasses.replace(SETTINGS, api_keys=ApiKeys(("key-one", "ключ")))


async def test_ready(node: Node) -> None:
    for path in ("/health", "/health/ready", "/health/live"):
        assert (await node.http.get(path)).status_code == 200
        assert (await node.http.head(path)).status_code == 200


@pytest.mark.parametrize(
    ("state", "draining", "live", "ready", "reason"),
    [
        (Health(True, ("no prefiller is connected",)), False, 200, 503, "no prefiller"),
        (Health(False), False, 503, 503, "no progress"),
        (Health(True), True, 200, 503, "draining"),
    ],
)
async def test_not_ready(node: Node, state: Health, draining: bool, live: int, ready: int, reason: str) -> None:
    node.service.state, node.service.draining = state, draining
    assert (await node.http.get("/health/live")).status_code == live
    for path in ("/health", "/health/ready"):
        answer = await node.http.get(path)
        assert answer.status_code == ready
        assert reason in " ".join(answer.json()["reasons"])
        assert "retry-after" in answer.headers


async def test_models(node: Node) -> None:
    models = await node.client.models.list()
    assert [model.id for model in models.data] == ["tiny", "tiny-alias"]
    assert (await node.client.models.retrieve("tiny-alias")).id == "tiny-alias"
    with pytest.raises(openai.NotFoundError):
        await node.client.models.retrieve("org/other")
    node.service.model_names = ("org/model",)
    assert (await node.client.models.retrieve("org/model")).id == "org/model"
    assert (await node.http.get("/v1/models/org/model")).json()["max_model_len"] == 256


async def test_metrics_and_version(node: Node) -> None:
    answer = await node.http.get("/metrics")
    assert answer.text == node.service.metrics_text()
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert (await node.http.get("/version")).json() == {"version": "0.1.0"}


async def test_while_the_model_loads(service: FakeService) -> None:
    service.refusal = NotReady("the model is being loaded")
    service.state = Health(True, ("loading: 42 %",))
    async with running(service) as node:
        answer = await node.http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert "loaded" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        assert (await node.http.get("/health/live")).status_code == 200
        assert "42 %" in (await node.http.get("/health")).text


async def test_a_prefiller_serves_no_generation(service: FakeService) -> None:
    async with running(service, serve_generation=False) as node:
        for method, path in (
            ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/chat/completions"),
            ("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("POST", "/v1/embeddings"), ("GET", "/v1"),
        ):
            answer = await node.http.request(method, path)
            assert answer.status_code == 404
            assert answer.json()["error"] == {
                "message": "this node's role is prefill: it computes KV for decoders and answers no clients "
                "(send requests to a node of role decode or both)",
                "type": "invalid_request_error", "param": None, "code": "wrong_role",
            }
        for path in ("/health", "/health/live", "/metrics", "/version"):
            assert (await node.http.get(path)).status_code == 200
        assert (await node.http.get("/v2")).json()["error"]["code"] is None
        with pytest.raises(openai.NotFoundError) as raised:
            await node.client.completions.create(model="tiny", prompt="x")
        assert raised.value.code == "wrong_role"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer nope"}, 401),
        ({"authorization": "Bearer key-on"}, 401),
        ({"authorization": "Bearer key-one2"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Basic key-one"}, 401),
        ({"authorization": "key-one"}, 401),
        ({"authorization": "Bearer key-one"}, 200),
        ({"authorization": "bearer  key-one"}, 200),
        ({"authorization": "Bearer ключ".encode()}, 200),
        ({"authorization": b"Bearer \xff\xfe"}, 401),
    ],
)
async def test_keys_guard_all_but_health(service: FakeService, header: dict[str, str], status: int) -> None:
    async with running(service, LOCKED) as node:
        for path in ("/v1/models", "/v1/models/tiny", "/metrics", "/version"):
            assert (await node.http.get(path, headers=header)).status_code == status
        for path in BODIES:
            answer = await node.http.post(path, json=BODIES[path], headers=header)
            assert answer.status_code == status
            if status == 401:
                assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
        for path in ("/healthy", "/nothing", "/v1", "/"):
            assert (await node.http.get(path, headers=header)).status_code == (404 if status == 200 else 401)
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await node.http.get(path, headers=header)).status_code == 200
        assert len(service.calls) == (2 if status == 200 else 0)


BODIES = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]}}


async def test_the_client_with_a_key(service: FakeService) -> None:
    async with running(service, LOCKED, key="key-one") as node:
        assert (await node.client.completions.create(model="tiny", prompt="x")).choices
    async with running(service, LOCKED, key="other") as node:
        with pytest.raises(openai.AuthenticationError) as raised:
            await node.client.completions.create(model="tiny", prompt="x")
        assert raised.value.code == "invalid_api_key"


@pytest.mark.parametrize(
    ("given", "echoed"), [("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)]
)
async def test_request_ids(node: Node, given: str, echoed: bool) -> None:
    answer = await node.http.get("/health", headers={"x-request-id": given})
    assert (answer.headers["x-request-id"] == given) == echoed
    assert answer.headers["x-request-id"]
    plain = await node.http.get("/health")
    assert plain.headers["x-request-id"] != answer.headers["x-request-id"]


async def test_probes_leave_no_access_lines(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "uvicorn.access"):
        for path in ("/health", "/health/live?x=1", "/metrics", "/v1/models"):
            await node.http.get(path)
    lines = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert len(lines) == 1
    assert "/v1/models" in lines[0]
