"""The form of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdd.api.answers import Header, Usage, Whole
from pdd.api.choice import Delta, Piece
from pdd.api.logprobs import chat_logprobs
from pdd.api.service import Tokenizer

_CHUNK = "chat.completion.chunk"


class ChatForm:
    def __init__(self, header: Header, tokenizer: Tokenizer, logprobs: int | None, *, include_usage: bool) -> None:
        self._header = header
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._nulls = {"usage": None} if include_usage else {}
        self._begun: set[int] = set()  # choices whose role was sent

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}, None, None))
        said = {"content": delta.text} if delta.text else {}
        if said or delta.finish or delta.pieces:
            chunks.append(self._chunk(delta.index, said, self._logprobs_of(delta.pieces), delta.finish))
        return chunks

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._header.fields(_CHUNK), "choices": [], "usage": usage.fields()}

    def answer(self, choices: Sequence[Whole], usage: Usage) -> dict[str, Any]:
        listed = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
                "logprobs": self._logprobs_of(choice.pieces),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._header.fields("chat.completion"), "choices": listed, "usage": usage.fields()}

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {**self._header.fields(_CHUNK), "choices": [choice], **self._nulls}

    def _logprobs_of(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        return None if self._logprobs is None else chat_logprobs(pieces, self._tokenizer, self._logprobs)
