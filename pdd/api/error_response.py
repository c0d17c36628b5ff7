"""The one place where a failure becomes OpenAI's error object.

Every error of this port has the form {"error": {"message", "type", "param", "code"}}, with `Retry-After` where trying
again can help. What is not a PddError is a bug of ours: it is logged by the caller, and the client learns only that
it happened.
"""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from pdd.errors import PddError, PromptTooLong, Unauthorized, UnknownModel, WrongRole

RETRY_AFTER_SECONDS = 1  # a queue that is full now drains at the pace of requests
_CODES: dict[type[PddError], str] = {
    PromptTooLong: "context_length_exceeded",
    UnknownModel: "model_not_found",
    Unauthorized: "invalid_api_key",
    WrongRole: "wrong_role",
}
_STATUS_CODES = {405: "method_not_supported"}  # OpenAI's word; for a path that is not there it has none
_STATUS_TYPES = {401: "authentication_error", 429: "overloaded_error", 503: "service_unavailable"}


def error_object(error: BaseException) -> dict[str, object]:
    """The body of an error answer, or of an error event in a stream."""
    if not isinstance(error, PddError):
        return _object("internal error; the log of this node has the details", "server_error", None, "internal_error")
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    return _object(message, error.openai_type, error.param, _CODES.get(type(error), error.id))


def error_response(error: BaseException) -> Response:
    status = error.http_status if isinstance(error, PddError) else 500
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return _json(error_object(error), status, headers)


def status_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error that HTTP itself defines: no such path, wrong method, wrong media type."""
    kind = _STATUS_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return _json(_object(message, kind, None, _STATUS_CODES.get(status)), status, headers or {})


def _object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _json(content: object, status: int, headers: dict[str, str]) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
