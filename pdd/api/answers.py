"""What every answer has in common: its id, its counts, and the interface of the two forms.

A form is pure: it turns deltas into the objects that are sent, and knows nothing of HTTP.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, Protocol

from pdd.api.choice import Delta, Piece


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What each object of one answer repeats."""

    id: str  # PREFIX-REQUEST_ID
    created: int  # seconds since 1970
    model: str

    @classmethod
    def new(cls, prefix: str, request_id: str, model: str) -> Header:
        return cls(f"{prefix}-{request_id}", int(time.time()), model)

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclasses.dataclass(slots=True)
class Usage:
    """Counts of one HTTP request, summed over its choices; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = 0  # None once any choice does not know

    def add(self, last: Delta) -> None:
        self.completion_tokens += last.completion_tokens
        known = self.cached_tokens is not None and last.cached_tokens is not None
        self.cached_tokens = (self.cached_tokens or 0) + (last.cached_tokens or 0) if known else None

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is not None:
            fields["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return fields


@dataclasses.dataclass(slots=True)
class Whole:
    """A choice of an answer that is sent in one piece."""

    texts: list[str] = dataclasses.field(default_factory=list)
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    finish: str | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.pieces.extend(delta.pieces)
        self.finish = delta.finish


class Form(Protocol):
    """One of the two shapes of answer."""

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The objects to stream for one delta; none if it holds nothing that a client can see."""

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last object of a stream with include_usage: no choices, only counts."""

    def answer(self, choices: Sequence[Whole], usage: Usage) -> dict[str, Any]:
        """The whole answer, for a request that does not stream."""
