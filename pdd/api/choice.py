"""One choice of an answer: the engine's tokens become pieces of text that may be sent.

Between engine and client stand the detokenizer (whole characters only) and the stop strings (text that may still
become one is held). Entries of logprobs are held for nothing: a client that asked for them sees every token when it is
made, whether it has text yet or not. There is one per generated token, up to the one that completed a stop string.

Not here: the form of answers (completions.py, chat.py), and which choice is served when (merge.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pdd.api.service import Detokenizer, TokenStream
from pdd.api.stops import StopMatcher
from pdd.engine.request import Finished, FinishReason, SamplingParams, TokenOutput
from pdd.errors import EngineError, RequestCancelled


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A generated token, and where its text begins in the text of the choice, in characters."""

    output: TokenOutput
    text_offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one choice. `finish` is set on its last delta, and only there the counts are."""

    index: int
    text: str
    pieces: tuple[Piece, ...]
    finish: str | None = None  # "stop" or "length"
    completion_tokens: int = 0
    cached_tokens: int | None = None  # None: unknown, the engine failed just then


class Choice:
    """Owner: the task that iterates `deltas`."""

    def __init__(
        self, index: int, sampling: SamplingParams, detokenizer: Detokenizer, stops: tuple[str, ...], echo: str = ""
    ) -> None:
        """
        Args:
            detokenizer: has seen the end of the prompt, where a character may have begun.
            echo: text that stands before the generated text and is sent with its first piece.
        """
        self._index = index
        self._eager = sampling.logprobs is not None
        self._min_tokens = sampling.min_tokens
        self._stop_tokens = frozenset(sampling.stop_token_ids)
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._unsent = echo
        self._length = len(echo)  # characters decoded so far, held ones included
        self._pieces: list[Piece] = []  # not sent yet
        self._count = 0

    async def deltas(self, events: TokenStream) -> AsyncGenerator[Delta, None]:
        """Ends after the delta that carries `finish`. Closing it aborts the request.

        Raises:
            PddError: the request was refused, failed, or was cancelled on this node.
        """
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Finished):
                    yield self._end(event)
                    return
                for output in event.outputs:
                    self._take(output)
                    if self._matcher.stopped:
                        yield self._delta("stop", await events.finish())
                        return
                if self._unsent or (self._eager and self._pieces):
                    yield self._delta(None, None)
        raise EngineError("the engine ended a request without saying how")

    def _take(self, output: TokenOutput) -> None:
        self._pieces.append(Piece(output, self._length))
        self._count += 1
        if output.token in self._stop_tokens:
            return  # ends the request; its text is no part of the answer
        self._append(self._detokenizer.push(output.token))

    def _append(self, text: str) -> None:
        self._length += len(text)
        # Text of the first min_tokens tokens takes part in no stop string, as those tokens are never stop tokens.
        self._unsent += text if self._count <= self._min_tokens else self._matcher.push(text)

    def _end(self, event: Finished) -> Delta:
        if event.error is not None:
            raise event.error
        if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            raise RequestCancelled("the request was cancelled on this node before it was complete")
        # A character that max_tokens cut is no text; the detokenizer writes it as U+FFFD.
        self._append(self._detokenizer.flush().removesuffix("\ufffd"))
        finish = "stop" if self._matcher.stopped else event.reason.value
        self._unsent += self._matcher.flush()
        return self._delta(finish, event.cached_tokens)

    def _delta(self, finish: str | None, cached_tokens: int | None) -> Delta:
        delta = Delta(self._index, self._unsent, tuple(self._pieces), finish, self._count, cached_tokens)
        self._unsent = ""
        self._pieces.clear()
        return delta
