"""A client that leaves stops the work made for it, in whatever phase it is (scenarios 97, 6-8, 14)."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import pytest

from tests.api.conftest import Eventually, Node
from tests.api.fakes import forever


def request(body: dict[str, object], path: str = "/v1/completions", length: int | None = None) -> bytes:
    raw = json.dumps(body).encode()
    fields = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {length or len(raw)}\r\n"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n".encode() + raw


def ways_out(writer: asyncio.StreamWriter, way: str) -> None:
    if way == "close":
        writer.close()
    elif way == "half-close":
        writer.write_eof()
    else:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


@pytest.mark.parametrize("way", ["close", "half-close", "reset"])
@pytest.mark.parametrize("phase", ["waiting", "decoding"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_aborts(node: Node, eventually: Eventually, way: str, phase: str, stream: bool, n: int) -> None:
    """waiting: queue, prefill and push look the same from here, no event has come yet."""
    started = asyncio.Event()
    token = node.service.tokenizer.byte_tokens(b"x")[0]
    node.service.script = forever(token, started, after=-1 if phase == "waiting" else 0)
    body = {"prompt": "the cat", "max_tokens": 200, "stream": stream, "n": n}
    _, writer = await node.raw(request(body))
    await started.wait()
    if phase == "decoding":
        await eventually(lambda: node.service.calls[-1].generated > 3)
    assert node.service.ended == ["aborted"] * n
    assert node.service.open == n
    ways_out(writer, way)
    await eventually(lambda: node.service.open == 0)
    writer.close()
    count = node.service.calls[0].generated
    await asyncio.sleep(0.05)
    assert node.service.calls[0].generated == count
    assert len(node.service.calls) == n


async def test_leaving_while_the_prompt_is_tokenized_submits_nothing(node: Node, eventually: Eventually) -> None:
    tokenizer = node.service.tokenizer
    tokenizer.gate.clear()
    _, writer = await node.raw(request({"prompt": "the cat", "max_tokens": 1, "user": "x" * 5000}))
    await asyncio.to_thread(tokenizer.encoding.wait, 10)
    writer.close()
    await asyncio.sleep(0.1)
    tokenizer.gate.set()
    answer = await node.client.completions.create(model="tiny", prompt="x", max_tokens=1)
    assert answer.choices
    assert len(node.service.calls) == 1


async def test_leaving_inside_the_body_submits_nothing(node: Node, eventually: Eventually) -> None:
    _, writer = await node.raw(request({"prompt": "x"}, length=5000))
    await asyncio.sleep(0.05)
    writer.close()
    assert (await node.client.completions.create(model="tiny", prompt="x", max_tokens=1)).choices
    assert len(node.service.calls) == 1


@pytest.mark.parametrize("apart", [False, True])
async def test_leaving_after_sending_the_next_request_ahead(node: Node, eventually: Eventually, apart: bool) -> None:
    """A pipelined request must not hide that the client left; it is not served either."""
    started = asyncio.Event()
    node.service.script = forever(5, started, after=-1)
    one = request({"prompt": "x", "max_tokens": 200})
    _, writer = await node.raw(one if apart else one * 3)
    await started.wait()
    if apart:
        writer.write(one * 2)
        await writer.drain()
        await asyncio.sleep(0.05)
    assert node.service.open == 1
    writer.close()
    await eventually(lambda: node.service.open == 0)
    assert len(node.service.calls) == 1


async def test_what_was_sent_ahead_is_answered_by_a_close(node: Node) -> None:
    one = request({"prompt": "x", "max_tokens": 2})
    reader, writer = await node.raw(one * 2)
    answer = await reader.read()
    assert answer.count(b"HTTP/1.1 200") == 1
    assert len(node.service.calls) == 1
    writer.close()


async def test_one_of_two_with_the_same_client_id(node: Node, eventually: Eventually) -> None:
    """Scenario 48: X-Request-Id is echoed and told, and names nothing inside."""
    started = asyncio.Event()
    node.service.script = forever(5, started)
    head = b"POST /v1/completions HTTP/1.1\r\nx-request-id: same\r\n"
    raw = request({"prompt": "x", "max_tokens": 200, "stream": True}).replace(b"POST /v1/completions HTTP/1.1\r\n", head)
    first, second = await node.raw(raw), await node.raw(raw)
    await eventually(lambda: len(node.service.calls) == 2 and all(call.generated for call in node.service.calls))
    for reader, _ in (first, second):
        assert b"x-request-id: same\r\n" in await reader.readuntil(b"\r\n\r\n")
    first[1].close()
    await eventually(lambda: node.service.open == 1)
    before = node.service.calls[1].generated
    await eventually(lambda: node.service.calls[1].generated > before + 5)
    assert node.service.calls[0].request_id != node.service.calls[1].request_id
    assert [call.given_id for call in node.service.calls] == ["same", "same"]
    second[1].close()
    await eventually(lambda: node.service.open == 0)


async def test_header_body_and_engine_share_one_id(node: Node) -> None:
    raw = await node.client.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=1)
    one = raw.parse()
    assert raw.headers["x-request-id"] == f"req-{node.service.calls[0].request_id}"
    assert node.service.calls[0].given_id is None
    two = await node.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], n=2)
    suffix = two.id.removeprefix("chatcmpl-")
    assert [call.request_id for call in node.service.calls] == [
        one.id.removeprefix("cmpl-"), f"{suffix}-0", f"{suffix}-1",
    ]


async def test_a_failing_choice_ends_its_siblings(node: Node, eventually: Eventually) -> None:
    started = asyncio.Event()
    endless, calls = forever(5, started), node.service.calls

    async def script(call):  # type: ignore[no-untyped-def]
        if call is calls[1]:
            await started.wait()
            raise RuntimeError("choice 1 broke")
        async for event in endless(call):
            yield event

    node.service.script = script
    answer = await node.http.post("/v1/completions", json={"prompt": "x", "n": 3, "max_tokens": 200})
    assert answer.status_code == 500
    assert node.service.open == 0
    assert sorted(node.service.ended) == ["aborted", "aborted", "failed"]
