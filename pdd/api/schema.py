"""The JSON bodies of the two generation endpoints, and their translation into a checked request.

`parse` does all that needs no tokenizer: types, ranges, combinations. Fields that pdd does not know are ignored, as
OpenAI and vLLM do; fields that would change the answer and that pdd can not honour are refused, unless they are
switched off.
"""

from __future__ import annotations

import difflib
import itertools
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pdd.api.body_counts import check_counts
from pdd.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 4096  # characters
MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_MESSAGES = 65_536
_LONGEST_NAME, _MOST_NAMES = 64, 64  # characters of a field that may be meant for another; so many are looked at

_Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

# Fields that are understood only in their "off" form; see _refuse_unsupported.
_UNSUPPORTED = (
    "suffix", "tools", "functions", "function_call", "audio", "prompt_logprobs", "use_beam_search",
    "continue_final_message", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
)


class StreamOptions(msgspec.Struct, gc=False):
    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, gc=False):
    type: str


class _Body(msgspec.Struct, kw_only=True):
    """What both endpoints take. null means the default everywhere."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: int | None = None
    max_tokens: _Count | UnsetType | None = UNSET
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # 0 and -1: off, as in vLLM
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: _Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    tool_choice: Any = None

    suffix: Any = None
    tools: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    prompt_logprobs: Any = None
    use_beam_search: Any = None
    continue_final_message: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None

    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(_Body, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class TextPart(msgspec.Struct, gc=False):
    type: str
    text: str | None = None


class Message(msgspec.Struct, gc=False):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatBody(_Body, kw_only=True):
    messages: list[Message]
    max_completion_tokens: _Count | UnsetType | None = UNSET
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


B = TypeVar("B", bound=_Body)


def parse(body: bytes, kind: type[B]) -> B:
    """A body whose fields are in range and fit each other.

    Raises:
        InvalidRequest: names the first field at fault.
    """
    try:
        check_counts(body)
        parsed = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _missing_field(body, kind) or _invalid_field(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    _check(parsed)
    return parsed


def _missing_field(body: bytes, kind: type[_Body]) -> InvalidRequest | None:
    """Of a body that cannot be taken: that a field is not there is told before what is wrong in others, and which one may be
    meant for it. None: they are all there."""
    try:
        names = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):  # not an object, or worse
        return None
    for field in msgspec.structs.fields(kind):
        if field.required and field.encode_name not in names:
            some = [name for name in itertools.islice(names, _MOST_NAMES) if len(name) <= _LONGEST_NAME]
            near = difflib.get_close_matches(field.encode_name, some, n=1)
            more = f'; did you mean that by "{near[0]}"?' if near else ""
            return InvalidRequest(f"you must provide {field.encode_name}{more}", param=field.encode_name)
    return None


def _invalid_field(message: str) -> InvalidRequest:
    """msgspec says "Expected `int`, got `str` - at `$.max_tokens`"."""
    problem, _, path = message.partition(" - at ")
    param = path.strip("`").removeprefix("$").removeprefix(".")
    missing = re.search(r"missing required field `([^`]*)`", problem)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return InvalidRequest(f"you must provide {param}", param=param)
    problem = problem[:1].lower() + problem[1:]
    return InvalidRequest(f"{param or 'the body'}: {problem}", param=param or None)


def _check(body: _Body) -> None:
    _refuse_unsupported(body)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is only for stream=true", param="stream_options")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest(
            f"best_of must equal n ({body.n or 1}): pdd returns every choice it makes", param="best_of"
        )
    _check_stops(body)
    if body.logit_bias is not None and len(body.logit_bias) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias has more than {MAX_BIASES} entries", param="logit_bias")
    if isinstance(body, ChatBody):
        _check_chat(body)
    elif isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        raise InvalidRequest(
            "echo with logprobs is not supported: pdd does not compute logprobs of prompt tokens", param="echo"
        )


def _refuse_unsupported(body: _Body) -> None:
    for field in _UNSUPPORTED:
        if getattr(body, field) and not (field == "tools" and body.tool_choice == "none"):
            raise InvalidRequest(f"{field} is not supported by this server", param=field)
    if body.response_format is not None and body.response_format.type != "text":
        raise InvalidRequest(
            f'response_format type "{body.response_format.type[:64]}" is not supported; only "text" is',
            param="response_format",
        )
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice is not supported by this server", param="tool_choice")


def _check_stops(body: _Body) -> None:
    stops = body.stops()
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop takes at most {MAX_STOPS} strings, not {len(stops)}", param="stop")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequest(f"each stop string has 1 to {MAX_STOP_LENGTH} characters", param="stop")
    if body.stop_token_ids is not None and len(body.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"stop_token_ids takes at most {MAX_STOP_TOKENS} ids", param="stop_token_ids")


def _check_chat(body: ChatBody) -> None:
    if not body.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    if len(body.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages has more than {MAX_MESSAGES} entries", param="messages")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
