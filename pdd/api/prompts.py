"""The prompts of a request as token ids: what the client wrote, tokenized once, here, for both nodes.

A text prompt gets the model's special start token; a rendered chat prompt has it from its template and gets no second
one. Runs on a helper thread for long bodies, so nothing here touches the event loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from pdd.api.schema import ChatBody, CompletionBody, Message
from pdd.api.service import Limits, Tokenizer
from pdd.errors import InvalidRequest, PromptTooLong

# A tokenizer may normalise text before it cuts it (composed characters, runs of blanks), so a text can be somewhat
# longer than its tokens say. Beyond this factor times the longest token of the vocabulary, no text fits.
_NORMALISATION = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    ids: tuple[int, ...]  # at least one, each in the vocabulary
    text: str | None  # None: given as ids


class PromptReader:
    """Tokenizes prompts. Stateless after construction; any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits, longest_token: int) -> None:
        """`longest_token`: in bytes; see the function of that name."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._max_characters = limits.max_context * longest_token * _NORMALISATION

    def of_completion(self, body: CompletionBody) -> list[Prompt]:
        """One prompt for a string or a list of ids, several for a list of either.

        Raises:
            InvalidRequest, PromptTooLong
        """
        prompt = body.prompt
        if isinstance(prompt, str):
            return [self._from_text(prompt, "prompt")]
        if not prompt:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        if isinstance(prompt[0], int):
            return [self._from_ids(prompt)]
        if len(prompt) > self._limits.max_choices:
            raise InvalidRequest(f"at most {self._limits.max_choices} prompts in one request", param="prompt")
        return [self._from_text(item, "prompt") if isinstance(item, str) else self._from_ids(item) for item in prompt]

    def of_chat(self, body: ChatBody) -> list[Prompt]:
        """The rendered conversation.

        Raises:
            InvalidRequest, PromptTooLong
        """
        messages = [_plain(message, index) for index, message in enumerate(body.messages)]
        text = self._tokenizer.apply_chat_template(messages)
        return [self._from_text(text, "messages", add_special_tokens=False)]

    def _from_text(self, text: str, param: str, *, add_special_tokens: bool = True) -> Prompt:
        if not text:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        # Tokenizing takes memory and time in proportion to the text; what can not fit is not worth either.
        if len(text) > self._max_characters:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, more than any prompt of {self._limits.max_context} tokens, "
                "the context limit of this model",
                param=param,
            )
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        if not ids:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        return Prompt(ids, text)

    def _from_ids(self, prompt: object) -> Prompt:
        if not isinstance(prompt, list):
            raise InvalidRequest("prompt mixes token ids and lists of them", param="prompt")
        if not prompt:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        if len(prompt) > self._limits.max_context:  # before any look at the ids: there may be millions
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens; the context limit of this model is "
                f"{self._limits.max_context} tokens",
                param="prompt",
            )
        if not all(type(token) is int for token in prompt):
            raise InvalidRequest("prompt mixes strings and token ids", param="prompt")
        check_token_ids(prompt, self._limits.vocab_size, "prompt")
        return Prompt(tuple(prompt), None)


def longest_token(tokenizer: Tokenizer) -> int:
    """Bytes of the longest token. Looks at the whole vocabulary: about 0.1 s for 150,000 tokens."""
    return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """
    Raises:
        InvalidRequest: an id is not in the vocabulary.
    """
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < vocab_size:
            shown = str(token) if abs(token) < 2**64 else "of more than 64 bits"
            raise InvalidRequest(
                f"{param}: token id {shown} is not in the vocabulary (0 to {vocab_size - 1})", param=param
            )


def _plain(message: Message, index: int) -> dict[str, Any]:
    """The message as chat templates expect it: content is a string."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message, f"messages[{index}].content")}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return plain


def _content(message: Message, param: str) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant":
            return ""  # an assistant's turn may consist of tool calls alone
        raise InvalidRequest(f"{param} must not be null", param=param)
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text" or part.text is None:
            raise InvalidRequest(
                f'{param}: part of type "{part.type[:64]}" is not supported; only text is', param=param
            )
    return "\n".join(part.text or "" for part in content)


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI carries the arguments of a call as JSON text; chat templates print them as an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, RecursionError):
        return call  # a text that is not JSON is printed as it is
    return {**call, "function": {**function, "arguments": arguments}}
