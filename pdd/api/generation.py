"""The endpoints that generate: read, check, run, answer.

A failure before the first token is an HTTP error: a stream's headers are sent only when there is something to send. A
failure after it is an error event, after which the stream ends without [DONE]. When the client leaves, in whatever
phase, the work for it ends with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.types import Receive, Scope, Send

from pdd.api import sse
from pdd.api.answers import Whole
from pdd.api.body import BodyReader, check_media_type
from pdd.api.choice import Delta
from pdd.api.connection import ClientGone, Sender, client_left, stopped, unless
from pdd.api.error_response import error_object
from pdd.api.ids import RequestIds, kept
from pdd.api.job import Job, JobBuilder
from pdd.api.merge import merge
from pdd.api.prompts import longest_token
from pdd.api.schema import ChatBody, CompletionBody
from pdd.api.service import Service
from pdd.api.workers import Workers
from pdd.errors import PddError

_log = logging.getLogger("pdd.api")


class Generation:
    """An ASGI endpoint for one kind of body. Owner: main loop."""

    def __init__(
        self,
        kind: type[CompletionBody] | type[ChatBody],
        service: Service,
        bodies: BodyReader,
        workers: Workers,
        stop: asyncio.Event,
        send_timeout_seconds: float,
    ) -> None:
        """`stop`: set when the node goes down; what still runs ends with an error."""
        self._kind = kind
        self._service = service
        self._bodies = bodies
        self._workers = workers
        self._stop = stop
        self._send_timeout_seconds = send_timeout_seconds
        self._longest_token: int | None = None  # found at the first request: no model is loaded at the start

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = await unless(self._read_job(scope, receive), stopped(self._stop))
        await unless(self._respond(job, Sender(scope, send, self._send_timeout_seconds)), client_left(receive))

    async def _read_job(self, scope: Scope, receive: Receive) -> Job:
        """The checked request; its body is forgotten, which may be long."""
        with self._bodies.hold() as held:
            try:
                self._service.admit()
                check_media_type(scope)
            except PddError:
                await held.discard(scope, receive)
                raise
            body = await held.read(scope, receive)
            return await unless(self._build_job(body, kept(scope)), client_left(receive))

    async def _build_job(self, body: bytes, ids: RequestIds) -> Job:
        service = self._service
        names, limits, tokenizer, known = service.model_names, service.limits, service.tokenizer, self._longest_token

        def build() -> tuple[int, Job]:
            longest = known or longest_token(tokenizer)
            return longest, JobBuilder(names, limits, tokenizer, longest).build(body, self._kind, ids)

        self._longest_token, job = await self._workers.run(len(body), build, inline=known is not None)
        return job

    async def _respond(self, job: Job, send: Sender) -> None:
        runs = [
            part.choice.deltas(
                self._service.generate(
                    part.prompt, part.sampling, request_id=part.request_id, given_id=job.given_id
                )
            )
            for part in job.parts
        ]
        async with aclosing(merge(runs, self._stop)) as deltas:
            if job.stream:
                await _stream(job, deltas, send)
            else:
                await _send_whole(job, deltas, send)


async def _stream(job: Job, deltas: AsyncGenerator[Delta, None], send: Sender) -> None:
    begun = False
    try:
        async for delta in deltas:
            if not begun:
                await send({"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
                begun = True
            if delta.finish is not None:
                job.usage.add(delta)
            await _send_part(sse.events(job.form.chunks(delta)), send)
    except PddError as error:
        if not begun:
            raise
        last = sse.events([error_object(error)])
    except Exception as error:
        if not begun or isinstance(error, ClientGone):
            raise
        _log.exception("a stream failed")
        last = sse.events([error_object(error)])
    else:
        usage = [job.form.usage_chunk(job.usage)] if job.include_usage else []
        last = sse.events(usage) + sse.DONE
    await send({"type": "http.response.body", "body": last, "more_body": False})


async def _send_whole(job: Job, deltas: AsyncGenerator[Delta, None], send: Sender) -> None:
    choices = [Whole() for _ in job.parts]
    async for delta in deltas:
        choices[delta.index].add(delta)
        if delta.finish is not None:
            job.usage.add(delta)
    body = msgspec.json.encode(job.form.answer(choices, job.usage))
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _send_part(body: bytes, send: Sender) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})
