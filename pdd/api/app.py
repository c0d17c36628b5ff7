"""The OpenAI-compatible API of a node: which path is served by what.

    POST /v1/completions, /v1/chat/completions    on nodes that generate; a prefiller says that it is one
    GET  /v1/models, /v1/models/{id}              likewise: what is listed can be asked for here
    GET  /health/live     200 while the engine makes progress
    GET  /health/ready    200 while new work is taken, else 503 and the reasons; /health is the same
    GET  /metrics, /version

Not here: listening (server.py), what a request means (schema.py, prompts.py, sampling.py), and running it
(generation.py).
"""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pdd import metrics
from pdd.api.body import BodyReader
from pdd.api.edge import ApiKeys, Edge
from pdd.api.error_response import RETRY_AFTER_SECONDS, status_response
from pdd.api.generation import Generation
from pdd.api.schema import ChatBody, CompletionBody
from pdd.api.service import Service
from pdd.api.workers import Workers
from pdd.errors import UnknownModel, WrongRole

_GENERATION_PATHS: dict[str, type[CompletionBody] | type[ChatBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
}


@dataclasses.dataclass(frozen=True, slots=True)
class ApiSettings:
    version: str  # of pdd, for /version
    max_body_bytes: int = 16 << 20
    body_budget_bytes: int = 256 << 20  # of all bodies that are being read or tokenized
    api_keys: ApiKeys = dataclasses.field(default_factory=ApiKeys)
    body_idle_seconds: float = 30.0  # longest wait for the next byte of a body
    body_total_seconds: float = 300.0
    send_timeout_seconds: float = 30.0  # a client that reads nothing for so long is dropped and its request aborted


def create_app(service: Service, settings: ApiSettings, *, stop: asyncio.Event, serve_generation: bool) -> ASGIApp:
    """The ASGI app. `stop`: set when the node goes down now; requests that still run end with an error."""
    handlers = _Handlers(service, settings.version)
    routes = [
        Route("/health/live", handlers.live),
        Route("/health/ready", handlers.ready),
        Route("/health", handlers.ready),
        Route("/metrics", handlers.metrics),
        Route("/version", handlers.version),
    ]
    if not serve_generation:
        routes += [Route("/v1", _WrongRole()), Route("/v1/{rest:path}", _WrongRole())]
    else:
        routes += [Route("/v1/models", handlers.models), Route("/v1/models/{name:path}", handlers.model)]
        bodies = BodyReader(
            settings.max_body_bytes,
            budget_bytes=settings.body_budget_bytes,
            idle_seconds=settings.body_idle_seconds,
            total_seconds=settings.body_total_seconds,
        )
        workers = Workers()
        for path, kind in _GENERATION_PATHS.items():
            endpoint = Generation(kind, service, bodies, workers, stop, settings.send_timeout_seconds)
            routes.append(Route(path, endpoint, methods=["POST"]))
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _http_error},
        middleware=[Middleware(Edge, settings.api_keys, lambda: service.draining)],
    )
    app.router.redirect_slashes = False
    return app


class _WrongRole:
    """All of /v1 on a prefiller, whatever the method. As an ASGI app, because a function would be given GET alone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise WrongRole(
            "this node's role is prefill: it computes KV for decoders and answers no clients",
            hint="send requests to a node of role decode or both",
        )


class _Handlers:
    def __init__(self, service: Service, version: str) -> None:
        self._service = service
        self._version = version

    async def models(self, request: Request) -> Response:
        cards = [self._card(name) for name in self._service.model_names]
        return _json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._service.model_names:
            raise UnknownModel(f'the model "{name[:128]}" does not exist here', param="model")
        return _json(self._card(name))

    async def live(self, request: Request) -> Response:
        live = self._service.health().live
        return _json({"status": "live" if live else "stuck"}, 200 if live else 503)

    async def ready(self, request: Request) -> Response:
        health = self._service.health()
        reasons = list(health.reasons)
        if not health.live:
            reasons.append("the engine makes no progress")
        if self._service.draining and not reasons:
            reasons.append("draining: no new work is taken")
        if reasons:
            return _json({"status": "not ready", "reasons": reasons}, 503)
        return _json({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics_text(), headers={"content-type": metrics.CONTENT_TYPE})

    async def version(self, request: Request) -> Response:
        return _json({"version": self._version})

    def _card(self, name: str) -> dict[str, object]:
        limit = self._service.limits.max_context
        return {"id": name, "object": "model", "created": 0, "owned_by": "pdd", "max_model_len": limit}


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is nothing at {request.url.path[:128]} on this node",
        405: f"{request.method} is not allowed at {request.url.path[:128]}",
    }.get(error.status_code, error.detail)
    return status_response(error.status_code, message, dict(error.headers or {}))


def _json(content: object, status: int = 200) -> Response:
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if status == 503 else None
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
