"""Size, pace and number of request bodies, and the event loop while a long one is tokenized (scenario 100)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket

import msgspec
import pytest

from pdd.api import body_counts, schema
from pdd.api.body import BodyReader
from pdd.errors import InvalidRequest, Overloaded
from tests.api.conftest import SETTINGS, Eventually, Node, running
from tests.api.fakes import FakeService

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def status_of(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    return int(head.split(b" ")[1])


async def test_a_body_over_the_limit_is_413(node: Node) -> None:
    limit = SETTINGS.max_body_bytes
    body = json.dumps({"prompt": [5], "user": ""}).encode()
    fits = body.replace(b'""', b'"' + b"x" * (limit - len(body)) + b'"')
    assert len(fits) == limit
    headers = {"content-type": "application/json"}
    assert (await node.http.post("/v1/completions", content=fits, headers=headers)).status_code == 200
    over = await node.http.post("/v1/completions", content=fits + b" ", headers=headers)
    assert over.status_code == 413
    assert str(limit) in over.json()["error"]["message"]
    assert len(node.service.calls) == 1


@pytest.mark.parametrize(("field", "begin", "item"), [("prompt", "", "[5]"), ("tools", '"prompt": "a", ', "{}")])
def test_a_body_of_countless_containers_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch, field: str, begin: str, item: str
) -> None:
    """Decoding holds the GIL: millions of arrays stopped the event loop, probes included, for seconds."""
    monkeypatch.setattr(msgspec.json, "decode", None)
    body = f'{{{begin}"{field}": [{",".join([item] * body_counts.MAX_CONTAINERS)}]}}'
    with pytest.raises(InvalidRequest, match="arrays and objects"):
        schema.parse(body.encode(), schema.CompletionBody)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"prompt": [' + b"7," * 1_100_000 + b"7]}", "values"),
        (b'{"prompt": "a", "stop": [' + b'"a",' * 530_000 + b'"a"]}', "strings"),
        (b'{"prompt": "a", "logit_bias": {' + b",".join(b'"%d":1' % key for key in range(200_000)) + b"}}", "members"),
        (b'{"prompt": "' + b'"' * 1_100_000, "strings"),
    ],
)
def test_a_body_of_countless_values_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch, body: bytes, what: str
) -> None:
    """One within api.max_body stopped every other client for as long as its decoding took."""
    monkeypatch.setattr(msgspec.json, "decode", None)
    with pytest.raises(InvalidRequest, match=what):
        schema.parse(body, schema.CompletionBody)


def test_as_many_messages_as_are_taken_fit_the_bounds() -> None:
    messages = [{"role": "user", "content": "a"}] * (schema.MAX_MESSAGES - 1)
    assert len(schema.parse(json.dumps({"messages": messages}).encode(), schema.ChatBody).messages) == schema.MAX_MESSAGES - 1


def test_brackets_inside_a_text_are_no_containers() -> None:
    text = '[{\\",:' * body_counts.MAX_VALUES
    assert schema.parse(json.dumps({"prompt": text}).encode(), schema.CompletionBody).prompt == text


@pytest.mark.parametrize("factor", [2, 3])
async def test_a_chunked_body_over_the_limit_is_413(node: Node, factor: int) -> None:
    """Its size is not announced; the client writes to the end and still sees the answer."""

    async def parts():  # type: ignore[no-untyped-def]
        for _ in range(factor * 8):
            yield b"x" * (SETTINGS.max_body_bytes // 8)

    headers = {"content-type": "application/json", "connection": "close"}
    answer = await node.http.post("/v1/completions", content=parts(), headers=headers)
    assert answer.status_code == 413


async def test_a_client_that_writes_first_and_reads_then_sees_the_413(node: Node) -> None:
    """Many clients take a failed write for the end. The connection stays open until they have written it all."""
    loop = asyncio.get_running_loop()
    piece = b"x" * (SETTINGS.max_body_bytes // 2)
    head = HEAD + f"connection: close\r\ncontent-length: {6 * len(piece)}\r\n\r\n".encode()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", node.port))
        for part in (head, *[piece] * 6):
            await loop.sock_sendall(client, part)
            await asyncio.sleep(0.05)
        assert (await loop.sock_recv(client, 100)).startswith(b"HTTP/1.1 413")


async def test_a_client_that_asks_before_sending_is_told_at_once(node: Node) -> None:
    size = str(SETTINGS.max_body_bytes + 1).encode()
    reader, writer = await node.raw(HEAD + b"expect: 100-continue\r\ncontent-length: " + size + b"\r\n\r\n")
    assert await status_of(reader) == 413
    writer.close()


async def test_an_endless_body_is_refused_while_it_comes(node: Node) -> None:
    reader, writer = await node.raw(HEAD + b"content-length: 99999999999999999999\r\n\r\n")

    async def write() -> None:
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    writing = asyncio.create_task(write())
    assert await status_of(reader) == 413
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    writer.close()


async def test_a_body_that_stops_coming_is_504(service: FakeService) -> None:
    settings = dataclasses.replace(SETTINGS, body_idle_seconds=0.05)
    async with running(service, settings) as node:
        reader, writer = await node.raw(HEAD + b'content-length: 100\r\n\r\n{"prompt"')
        assert await status_of(reader) == 504
        writer.close()


async def test_a_refusal_outlives_a_body_that_stops_coming(service: FakeService) -> None:
    settings = dataclasses.replace(SETTINGS, body_idle_seconds=0.05)
    service.refusal = Overloaded("the queue is full")
    async with running(service, settings) as node:
        for length in (100, SETTINGS.max_body_bytes + 1):
            reader, writer = await node.raw(HEAD + f'content-length: {length}\r\n\r\n{{"prompt"'.encode())
            assert await status_of(reader) == 429
            writer.close()


async def test_a_body_that_trickles_is_504(service: FakeService) -> None:
    settings = dataclasses.replace(SETTINGS, body_idle_seconds=5, body_total_seconds=0.2)
    async with running(service, settings) as node:
        reader, writer = await node.raw(HEAD + b"content-length: 50000\r\n\r\n")

        async def trickle() -> None:
            while True:
                writer.write(b" ")
                await asyncio.sleep(0.01)

        trickling = asyncio.create_task(trickle())
        assert await status_of(reader) == 504
        trickling.cancel()
        writer.close()


def test_the_budget_of_all_bodies_comes_back() -> None:
    bodies = BodyReader(100, budget_bytes=150, idle_seconds=1, total_seconds=1)
    with bodies.hold() as first:
        bodies.take(100)
        first.taken = 100
        with pytest.raises(Overloaded):
            bodies.take(60)
    with bodies.hold() as third:
        bodies.take(150)
        third.taken = 150


async def test_bodies_over_the_budget_are_429_and_the_budget_returns(service: FakeService) -> None:
    settings = dataclasses.replace(SETTINGS, body_budget_bytes=SETTINGS.max_body_bytes)
    async with running(service, settings) as node:
        most = SETTINGS.max_body_bytes - 1000
        open_head = HEAD + f"content-length: {most + 10}\r\n\r\n".encode()
        _, holder = await node.raw(open_head + b" " * most)
        body = {"prompt": [5], "user": "x" * 2000}

        async def until(status: int) -> None:
            async with asyncio.timeout(15):
                while (await node.http.post("/v1/completions", json=body)).status_code != status:
                    pass

        await until(429)  # once the holder's bytes have all been read
        holder.close()
        await until(200)


async def test_probes_and_streams_go_on_while_a_long_prompt_is_tokenized(node: Node, eventually: Eventually) -> None:
    """Scenario 100: the tokenizer is held by the test, so only a blocked event loop can fail this."""
    tokenizer = node.service.tokenizer
    assert (await node.client.completions.create(model="tiny", prompt="x", max_tokens=1)).choices
    tokenizer.gate.clear()
    tokenizer.encoding.clear()
    long = asyncio.create_task(node.http.post("/v1/completions", json={"prompt": "cat", "user": "x" * 5000}))
    await asyncio.to_thread(tokenizer.encoding.wait, 10)
    for _ in range(3):
        assert (await node.http.get("/health")).status_code == 200
    stream = await node.client.completions.create(model="tiny", prompt=[5], max_tokens=8, stream=True)
    assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"
    assert not long.done()
    tokenizer.gate.set()
    assert (await long).status_code == 200
