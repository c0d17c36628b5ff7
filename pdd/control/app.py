"""The control API as an ASGI application: routes, refusals, problem documents.

status.sock may be used by anyone on the machine: GET only, and nothing about the content of requests. control.sock is
for the owner and the group: all of it. The kernel checks who may connect. A browser page cannot get here by accident:
Origin, Referer and any Host but `pdd` are refused, and what changes something needs the header Pdd-Client. Errors are
RFC 9457 problems.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdd import metrics, units
from pdd.control import events
from pdd.control.schema import API_VERSION, OneRequest, Problem
from pdd.control.source import StatusSource
from pdd.errors import BodyTooLarge, InvalidRequest, Overloaded, PddError, no_space

_log = logging.getLogger(__name__)

MAX_BODY = 1 << 20
MAX_STREAMS = 64  # of one socket
MAX_PINGS = 100
MAX_DRAIN_SECONDS = 10**9  # beyond any drain, and a number that every clock takes
STUCK_SECONDS = 600.0  # a client that reads nothing for so long is dropped; until then it holds 64 KiB
ABORT = "pdd.abort"  # key in scope["state"]: drops the connection with what is unsent; set by server.py
_TITLES = {
    400: "Bad request",
    403: "Not permitted",
    404: "Not found",
    405: "Wrong method",
    409: "Refused in this state",
    413: "Too large",
    422: "Wrong settings",
    429: "Too many",
}


def build(
    source: StatusSource, documents: Mapping[str, Callable[[], Any]], bell: events.Bell, *, private: bool
) -> ASGIApp:
    """The application of one socket.

    Args:
        documents: topic → its document now; each is GET /v1/<topic> and a topic of /v1/events.
        private: control.sock; else status.sock.
    """
    routes = [
        *_read_routes(source, documents),
        Route("/v1/events", _event_stream(source, documents, bell, private=private)),
        *(_private_routes(source, documents, bell) if private else ()),
    ]
    handlers = {404: _not_found, 405: _wrong_method, PddError: _pdd_error, Exception: _bug}
    status = source.status()
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return _Guard(app, status.version, status.boot_id, private)


def _read_routes(source: StatusSource, documents: Mapping[str, Callable[[], Any]]) -> list[Route]:
    async def version(request: HttpRequest) -> Response:
        return _json(source.version())

    async def document(request: HttpRequest) -> Response:
        return _json(documents[request.url.path.removeprefix("/v1/")]())

    async def scrape(request: HttpRequest) -> Response:
        return Response(source.metrics_text(), headers={"content-type": metrics.CONTENT_TYPE})

    return [
        Route("/version", version),
        *(Route(f"/v1/{topic}", document) for topic in documents),
        Route("/v1/metrics", scrape),
    ]


def _event_stream(
    source: StatusSource, documents: Mapping[str, Callable[[], Any]], bell: events.Bell, *, private: bool
) -> Any:
    num_streams = 0
    known = [*documents, *(["logs"] if private else [])]

    async def counted(lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        nonlocal num_streams
        num_streams += 1
        try:
            async for line in lines:
                yield line
        finally:
            num_streams -= 1

    async def event_stream(request: HttpRequest) -> Response:
        if num_streams >= MAX_STREAMS:
            raise Overloaded(f"{num_streams} event streams are open on this socket", hint="End one; control.sock has its own.")
        topics = [topic for topic in request.query_params.get("topics", "status").split(",") if topic]
        unknown = [topic for topic in topics if topic not in known]
        if unknown or not topics:
            raise InvalidRequest(f"no such topic: {', '.join(unknown)}", hint=f"Topics: {', '.join(known)}.")
        try:
            interval = units.parse_duration(request.query_params.get("interval", "1s"))
        except ValueError as error:
            raise InvalidRequest(f"interval: {error}") from None
        interval = min(max(interval, events.MIN_INTERVAL), events.MAX_INTERVAL)
        since = _since(request)
        lines = events.stream(
            {topic: documents[topic] for topic in topics if topic in documents}, bell, source.status().boot_id, interval,
            source.logs if "logs" in topics else None, since,
        )
        return StreamingResponse(counted(lines), media_type="application/x-ndjson")

    return event_stream


def _private_routes(source: StatusSource, documents: Mapping[str, Callable[[], Any]], bell: events.Bell) -> list[Route]:
    async def config(request: HttpRequest) -> Response:
        return _json(source.config())

    async def logs(request: HttpRequest) -> Response:
        return _json(source.logs(_since(request)))

    async def one_request(request: HttpRequest) -> Response:
        found = source.request(request.path_params["id"])
        return _json(OneRequest(**msgspec.structs.asdict(found)))

    async def explain(request: HttpRequest) -> Response:
        return _json(await source.explain(request.path_params["id"]))

    async def flight(request: HttpRequest) -> Response:
        return _json(await source.flight())

    async def cancel(request: HttpRequest) -> Response:
        outcome = source.cancel(request.path_params["id"])
        if outcome.cancelled:
            _log.info("request %s is cancelled through the control socket", ", ".join(outcome.ids))
        return _json(outcome, 202 if outcome.cancelled else 200)

    async def drain(request: HttpRequest) -> Response:
        timeout = (await _body(request)).get("timeout_seconds")
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float)
                                    or not 0 <= timeout <= MAX_DRAIN_SECONDS):
            raise InvalidRequest(f"timeout_seconds must be a number of seconds, at most {MAX_DRAIN_SECONDS}")
        source.drain(None if timeout is None else float(timeout))
        bell.ring()
        return _json(documents["status"](), 202)

    async def resume(request: HttpRequest) -> Response:
        source.resume()
        bell.ring()
        return _json(documents["status"]())

    async def reload(request: HttpRequest) -> Response:
        dry_run = (await _body(request)).get("dry_run", False)
        if not isinstance(dry_run, bool):
            raise InvalidRequest("dry_run must be true or false")
        document = await source.reload(dry_run)
        bell.ring()
        return _json(document)

    async def ping(request: HttpRequest) -> Response:
        count = (await _body(request)).get("count", 3)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_PINGS:
            raise InvalidRequest(f"count must be a whole number, 1 to {MAX_PINGS}")
        return _json(await source.ping(request.path_params["name"], count))

    async def compare(request: HttpRequest) -> Response:
        return _json(await source.compare(request.path_params["name"]))

    async def check(request: HttpRequest) -> Response:
        return _json(await source.check())

    async def stacks(request: HttpRequest) -> Response:
        return _json(source.stacks())

    return [
        Route("/v1/check", check, methods=["GET"]),
        Route("/v1/peers/{name:path}/ping", ping, methods=["POST"]),
        Route("/v1/peers/{name:path}/compare", compare, methods=["GET"]),
        Route("/v1/config", config, methods=["GET"]),
        Route("/v1/debug/stacks", stacks, methods=["GET"]),
        Route("/v1/reload", reload, methods=["POST"]),
        Route("/v1/logs", logs, methods=["GET"]),
        Route("/v1/flight", flight, methods=["GET"]),
        Route("/v1/requests/{id:path}/explain", explain, methods=["GET"]),
        Route("/v1/requests/{id:path}", one_request, methods=["GET"]),
        Route("/v1/requests/{id:path}", cancel, methods=["DELETE"]),
        Route("/v1/drain", drain, methods=["POST"]),
        Route("/v1/resume", resume, methods=["POST"]),
    ]


class _Guard:
    """Refuses what no client of ours sends, bounds the body, and adds the version headers."""

    def __init__(self, app: ASGIApp, version: str, boot_id: str, private: bool) -> None:
        self._app = app
        self._private = private
        self._stamp = [
            (b"pdd-api", API_VERSION.encode()),
            (b"pdd-version", version.encode()),
            (b"pdd-boot", boot_id.encode()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._stamp]}
            try:
                async with asyncio.timeout(STUCK_SECONDS):
                    await send(message)
            except TimeoutError:
                scope["state"][ABORT]()
                raise

        refusal = self._refusal(scope["method"], dict(scope["headers"]))
        await (self._app if refusal is None else refusal)(scope, receive, stamped)

    def _refusal(self, method: str, headers: dict[bytes, bytes]) -> Response | None:
        if b"origin" in headers or b"referer" in headers:
            return _problem(403, "E311", "a browser may not use this socket")
        if headers.get(b"host", b"").lower() != b"pdd":
            return _problem(403, "E311", "the Host header must be pdd")
        if method not in ("GET", "POST", "DELETE"):
            return _problem(405, "E353", f"{method} is not a method of this API", headers={"allow": "GET, POST, DELETE"})
        if method != "GET":
            if not self._private:
                return _problem(403, "E310", "the status socket is read-only", hint="Use control.sock.")
            if b"pdd-client" not in headers:
                return _problem(403, "E311", "a request that changes something needs the header Pdd-Client")
        if int(headers.get(b"content-length", b"0")) > MAX_BODY:
            return _problem(413, "E413", f"the body may have at most {MAX_BODY} bytes")
        return None


# -- answers -----------------------------------------------------------------------------------------------------------
def _json(document: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(document), status, media_type="application/json")


def _problem(
    status: int, error_id: str, detail: str, *, hint: str = "", supported: tuple[str, ...] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    title = _TITLES.get(status, "Failed")
    problem = Problem(title=title, status=status, detail=detail, id=error_id, hint=hint, supported=supported)
    return Response(msgspec.json.encode(problem), status, headers, media_type="application/problem+json")


async def _not_found(request: HttpRequest, error: Exception) -> Response:
    path = request.url.path
    if not path.startswith("/v1/"):
        return _problem(404, "E380", f"{path} is not in this API", supported=("v1",))
    return _problem(404, "E352", f"{path} is not there on this socket", hint="Some paths are on control.sock only.")


async def _wrong_method(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _problem(405, "E353", f"{request.method} is not for {request.url.path}", headers=error.headers)


async def _pdd_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, PddError)
    return _problem(error.http_status, error.id, error.message, hint=error.hint)


async def _bug(request: HttpRequest, error: Exception) -> Response:
    if (full := no_space(error)) is not None:
        return await _pdd_error(request, full)
    return _problem(500, "E001", f"{type(error).__name__}: {error}", hint="The daemon's log has the trace.")


def _since(request: HttpRequest) -> int:
    """The number of the last log record that the client has."""
    text = request.query_params.get("since", "0")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidRequest("since: it is the number of a log record", hint="0, or none, for all that are kept.")
    return int(text)


async def _body(request: HttpRequest) -> dict[str, Any]:
    """The JSON object of the body; an empty body is an empty object."""
    raw = b""
    async for piece in request.stream():  # a chunked body has no length to refuse beforehand
        raw += piece
        if len(raw) > MAX_BODY:
            raise BodyTooLarge(f"the body may have at most {MAX_BODY} bytes")
    if not raw:
        return {}
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body
