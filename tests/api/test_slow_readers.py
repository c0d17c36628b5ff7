"""Clients that do not read: bounded memory, a bounded time, and nobody else notices (scenario 99)."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import pytest

from tests.api.conftest import SETTINGS, Eventually, running
from tests.api.fakes import FakeService, forever, says
from tests.api.test_aborts import request

SLOW = dataclasses.replace(SETTINGS, send_timeout_seconds=0.5)


async def test_a_client_that_stops_reading_is_dropped(
    service: FakeService, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    service.limits = dataclasses.replace(service.limits, max_context=10_000_000, pool_tokens=10_000_000)
    started = asyncio.Event()
    service.script = forever(service.tokenizer.plain("x")[0], started, per_second=20_000)
    body = request({"prompt": "x", "max_tokens": 9_000_000, "stream": True, "n": 4})
    async with running(service, SLOW) as node:
        idle = [await node.raw(body, rcvbuf=4096) for _ in range(3)]
        for reader, _ in idle:
            reader._transport.pause_reading()  # type: ignore[attr-defined]
        await started.wait()
        await eventually(lambda: len(service.calls) == 12)
        service.script = says(service.tokenizer.plain("the cat"))
        answer = await node.client.completions.create(model="tiny", prompt="x", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in answer]) == "the cat"
        await eventually(lambda: service.open == 0)
        assert service.ended[:12] == ["aborted"] * 12
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert len([record for record in caplog.records if "read nothing" in record.message]) == 3
        await eventually(lambda: node.server.connections <= 1)
        for _, writer in idle:
            writer.close()


async def test_nobody_asks_for_tokens_that_nobody_reads(service: FakeService, eventually: Eventually) -> None:
    """While a client does not read, its tokens stay with the engine: the API takes no more than the sockets hold."""
    service.limits = dataclasses.replace(service.limits, max_context=10_000_000, pool_tokens=10_000_000)
    service.script = forever(service.tokenizer.plain("x")[0], asyncio.Event(), per_second=20_000)
    async with running(service) as node:
        reader, writer = await node.raw(request({"prompt": "x", "max_tokens": 9_000_000, "stream": True}), rcvbuf=4096)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await eventually(lambda: bool(service.calls) and service.calls[0].generated > 100)
        seen = -1
        while seen != service.calls[0].generated:
            seen = service.calls[0].generated
            await asyncio.sleep(0.3)
        assert service.open == 1  # paused, not ended: the time for that is far longer here
        reader._transport.resume_reading()  # type: ignore[attr-defined]
        await eventually(lambda: service.calls[0].generated > seen)
        writer.close()
        await eventually(lambda: service.open == 0)
