"""The form of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdd.api.answers import Header, Usage, Whole
from pdd.api.choice import Delta, Piece
from pdd.api.logprobs import completion_logprobs
from pdd.api.service import Tokenizer

_KIND = "text_completion"  # of whole answers and of chunks alike


class CompletionForm:
    def __init__(self, header: Header, tokenizer: Tokenizer, logprobs: int | None, *, include_usage: bool) -> None:
        self._header = header
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._nulls = {"usage": None} if include_usage else {}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        choice = self._choice(delta.index, delta.text, delta.pieces, delta.finish)
        return [{**self._header.fields(_KIND), "choices": [choice], **self._nulls}]

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._header.fields(_KIND), "choices": [], "usage": usage.fields()}

    def answer(self, choices: Sequence[Whole], usage: Usage) -> dict[str, Any]:
        listed = [
            self._choice(index, "".join(choice.texts), choice.pieces, choice.finish)
            for index, choice in enumerate(choices)
        ]
        return {**self._header.fields(_KIND), "choices": listed, "usage": usage.fields()}

    def _choice(self, index: int, text: str, pieces: Sequence[Piece], finish: str | None) -> dict[str, Any]:
        k = self._logprobs
        logprobs = None if k is None else completion_logprobs(pieces, self._tokenizer, k)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
