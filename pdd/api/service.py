"""What the API asks of the rest of the daemon, as Protocols and plain data.

The daemon implements `Service` once and gives it to `create_app`; tests implement it with a script. The tokenizer of
the model layer fits `Tokenizer` by shape, so that nothing here imports it.

Not here: anything about HTTP. Not promised: which thread or node computes a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from pdd.engine.request import Finished, SamplingParams, Tokens


class Detokenizer(Protocol):
    """Turns the tokens of one text into text, whole characters only."""

    def push(self, token: int) -> str:
        """Text that became certain with this token; "" inside a character or for a special token."""

    def flush(self) -> str:
        """What is still held, at the end of the text: U+FFFD for a character that was cut."""


class Tokenizer(Protocol):
    """Text to token ids and back. Every method may be called from any thread."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Ids of `text`. `add_special_tokens`: put what the model wants at the start of a text (BOS) there.

        Must not hold Python's lock in proportion to the text, or every stream of the node waits for it. Source: with
        tokenizers 0.23, `Tokenizer.encode` holds it throughout, `encode_batch_fast` of one text gives it up.
        """

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The rendered prompt, the header of the answer included. Its special tokens are part of the text.

        Raises:
            InvalidRequest: the template refuses these messages, or the model has none.
        """

    def detokenizer(self) -> Detokenizer: ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that the token stands for; the name of a special token."""


class TokenStream(Protocol):
    """The events of one request. Read to the end, or ended by one of the two methods."""

    def __aiter__(self) -> AsyncIterator[Tokens | Finished]: ...

    async def finish(self) -> int | None:
        """Ends the request because its text is complete: a stop string came. It counts as a stop, not as an abort.

        Waits for the engine's word, at most the step in hand. Returns the prompt tokens whose KV was reused; None when
        the engine failed meanwhile.
        """

    async def aclose(self) -> None:
        """The reader leaves: aborts the request, if it is not over."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one request, all counts of tokens but the last."""

    vocab_size: int  # ids are in [0, vocab_size)
    max_context: int  # prompt + generated tokens that the model takes
    pool_tokens: int  # tokens whose KV fits this node; the last generated token needs none
    max_choices: int = 256  # prompts * n of one HTTP request


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """live: the engine makes progress. reasons: why new work is not taken now; empty means ready."""

    live: bool
    reasons: tuple[str, ...] = ()


class Service(Protocol):
    """The daemon, as the API sees it. Called on the main loop only, except `tokenizer`'s methods.

    Until the model is loaded, `admit`, `limits` and `tokenizer` raise NotReady.
    """

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names a request may use; the first one is the node's own."""

    @property
    def limits(self) -> Limits: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def draining(self) -> bool: ...

    def admit(self) -> None:
        """Returns if a request would be queued now; called before its body is read, and holds nothing.

        Raises:
            Draining, Overloaded, NotReady: what the client is told at once.
        """

    def generate(
        self, prompt: tuple[int, ...], sampling: SamplingParams, *, request_id: str, given_id: str | None
    ) -> TokenStream:
        """Zero or more Tokens, then one Finished. The request is submitted by the first `__anext__`, never before.

        `request_id` is unique in this node's life and made by the API: the id of the answer without its prefix
        ("cmpl-"), with "-INDEX" added when the answer has several choices. `given_id` is what the client called the HTTP
        request, if it did; others may have the same.

        Ending the iteration early, by cancelling `__anext__` or by `aclose()`, aborts the request on every node that
        works for it, without waiting for them. The iterator buffers what comes while nobody asks: at most
        `sampling.max_tokens` outputs, and the API aborts a request whose client does not read.

        Raises:
            PddError: from the first `__anext__`, when the request is refused.
        """

    def health(self) -> Health: ...

    def metrics_text(self) -> str:
        """Prometheus text, format 0.0.4."""
