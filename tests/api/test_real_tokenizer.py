"""The API over the tokenizer that pdd serves with, on the demo model's files."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pdd.api.service import Health, Limits
from tests.api.conftest import SETTINGS, running
from tests.api.fakes import FakeService, says

demo = pytest.importorskip("pdd.model.demo")
tokenizer_module = pytest.importorskip("pdd.model.tokenizer")
TEXT = "héllo 😀 wörld"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = demo.write_demo_model(tmp_path_factory.mktemp("demo"))
    return tokenizer_module.Tokenizer(directory)


@pytest.fixture
def over_real(service: FakeService, real: Any) -> FakeService:
    service.tokenizer = real
    service.limits = Limits(real.vocab_size, 10_000_000, 10_000_000)
    service.script = says(real.encode(TEXT, add_special_tokens=False))
    service.state = Health(True)
    return service


async def test_text_and_chat(over_real: FakeService, real: Any) -> None:
    async with running(over_real) as node:
        for stream in (False, True):
            answer = await node.client.completions.create(model="tiny", prompt="x", max_tokens=50, stream=stream)
            said = "".join([c.choices[0].text async for c in answer]) if stream else answer.choices[0].text
            assert said == TEXT
        messages = [{"role": "user", "content": "hi"}]
        chat = await node.client.chat.completions.create(model="tiny", messages=messages, logprobs=True)
        assert chat.choices[0].message.content == TEXT
        assert bytes(b for entry in chat.choices[0].logprobs.content for b in entry.bytes).decode() == TEXT
        rendered = real.apply_chat_template(messages)
        assert list(over_real.calls[-1].prompt) == list(real.encode(rendered, add_special_tokens=False))


async def test_probes_are_answered_while_a_long_text_is_tokenized(over_real: FakeService) -> None:
    """Scenario 100: a tokenizer that keeps Python's lock to itself stops the event loop, whatever thread it runs on."""
    async with running(over_real, dataclasses.replace(SETTINGS, max_body_bytes=4 << 20)) as node:
        await node.client.completions.create(model="tiny", prompt="x", max_tokens=1)
        body = {"prompt": "cat sat, " * 400_000, "max_tokens": 1}
        long = asyncio.create_task(node.http.post("/v1/completions", json=body, timeout=60))
        await asyncio.sleep(0.2)
        answered = 0
        while not long.done():
            assert (await node.http.get("/health")).status_code == 200
            answered += 1
        assert (await long).status_code == 200
        assert answered > 8  # 2 to 4, before and after, if the loop stands still
