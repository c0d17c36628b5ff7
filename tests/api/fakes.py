"""A scripted daemon and a small real tokenizer: what the API needs and nothing more."""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from pdd.api.service import Health, Limits
from pdd.engine.request import Finished, FinishReason, SamplingParams, TokenLogprob, TokenOutput, Tokens
from pdd.errors import Draining, PddError

BOS, EOS, IM_START, IM_END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE uses for bytes, as GPT-2 defined them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


ALPHABET = _byte_level_alphabet()


class SmallTokenizer:
    """Byte-level BPE of 256 bytes, some merges and four special tokens; puts BOS before a text, as Llama does."""

    def __init__(self) -> None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=sorted(ALPHABET), special_tokens=[BOS, EOS], show_progress=False
        )
        tokenizer.train_from_iterator(["the cat sat on the mat, the end of the story"] * 4, trainer)
        tokenizer.add_special_tokens([AddedToken(IM_START), AddedToken(IM_END)])
        bos = tokenizer.token_to_id(BOS)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
        self.real = tokenizer
        self.bos = bos
        self.specials = {tokenizer.token_to_id(text): text for text in (BOS, EOS, IM_START, IM_END)}
        self.vocab_size = tokenizer.get_vocab_size()
        self.eos_token_ids = (tokenizer.token_to_id(EOS), tokenizer.token_to_id(IM_END))
        self.gate = threading.Event()  # `encode` waits for it
        self.gate.set()
        self.encoding = threading.Event()  # set once `encode` was entered
        self._bytes = [self._bytes_of(token) for token in range(self.vocab_size)]

    def _bytes_of(self, token: int) -> bytes:
        if token in self.specials:
            return self.specials[token].encode()
        return bytes(ALPHABET[char] for char in self.real.id_to_token(token))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        self.encoding.set()
        assert self.gate.wait(30)
        return self.real.encode(text, add_special_tokens=add_special_tokens).ids

    def plain(self, text: str) -> list[int]:
        """Ids of `text` without BOS, whatever the gate says."""
        return self.real.encode(text, add_special_tokens=False).ids

    def byte_tokens(self, raw: bytes) -> list[int]:
        """One token per byte."""
        names = {byte: char for char, byte in ALPHABET.items()}
        return [self.real.token_to_id(names[byte]) for byte in raw]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> str:
        turns = "".join(f"{IM_START}{message['role']}\n{message['content']}{IM_END}\n" for message in messages)
        return f"{BOS}{turns}{IM_START}assistant\n"

    def detokenizer(self) -> SmallDetokenizer:
        return SmallDetokenizer(self)

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]


class SmallDetokenizer:
    def __init__(self, tokenizer: SmallTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        if token in self._tokenizer.specials:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


@dataclasses.dataclass
class Call:
    """One `generate`, as the fake daemon saw it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    request_id: str = "r"
    given_id: str | None = None
    ended: str = ""  # "finished", "stopped" (at a stop string), "failed" or "aborted"
    generated: int = 0


Script = Callable[[Call], AsyncGenerator[Tokens | Finished, None]]


class Stream:
    """A TokenStream of what a generator yields. A request that is ended at its stop string has reused 7 tokens."""

    def __init__(self, events: AsyncGenerator[Tokens | Finished, None]) -> None:
        self.complete = False  # ended by `finish`
        self._events = events

    def __aiter__(self) -> AsyncGenerator[Tokens | Finished, None]:
        return self._events

    async def finish(self) -> int | None:
        self.complete = True
        await self._events.aclose()
        return 7

    async def aclose(self) -> None:
        await self._events.aclose()


class FakeService:
    """Runs `script` for every request and keeps a record of it."""

    def __init__(self, tokenizer: SmallTokenizer) -> None:
        self.model_names = ("tiny", "tiny-alias")
        self.limits = Limits(vocab_size=tokenizer.vocab_size, max_context=256, pool_tokens=1024)
        self.tokenizer = tokenizer
        self.draining = False
        self.refusal: PddError | None = None
        self.state = Health(live=True)
        self.calls: list[Call] = []
        self.open = 0  # requests the engine works for
        self.script: Script = says(tokenizer.plain("the cat sat on the mat"))

    def admit(self) -> None:
        if self.draining:
            raise Draining("this node is draining")
        if self.refusal is not None:
            raise self.refusal

    def generate(
        self, prompt: tuple[int, ...], sampling: SamplingParams, *, request_id: str, given_id: str | None
    ) -> Stream:
        async def run() -> AsyncGenerator[Tokens | Finished, None]:
            call = Call(prompt, sampling, request_id, given_id)
            self.calls.append(call)
            call.ended = "aborted"
            self.open += 1
            try:
                async for event in self.script(call):
                    if isinstance(event, Tokens):
                        call.generated += len(event.outputs)
                    else:
                        call.ended = "finished"
                    yield event
            except Exception:
                call.ended = "failed"
                raise
            finally:
                self.open -= 1
                if stream.complete:
                    call.ended = "stopped"

        stream = Stream(run())
        return stream

    def health(self) -> Health:
        return self.state

    def metrics_text(self) -> str:
        return "# TYPE pdd_up gauge\npdd_up 1\n"

    @property
    def ended(self) -> list[str]:
        return [call.ended for call in self.calls]


def output(token: int, sampling: SamplingParams, logprob: float = -0.5) -> TokenOutput:
    """A token with logprobs as asked: the chosen one, then the ids after it, less and less likely."""
    k = sampling.logprobs
    if k is None:
        return TokenOutput(token)
    top = tuple(TokenLogprob(token if rank == 0 else (token + rank) % 250, logprob - rank) for rank in range(k))
    return TokenOutput(token, logprob, top)


def finished(call: Call, reason: FinishReason, cached: int = 0) -> Finished:
    return Finished("r", reason, None, len(call.prompt), cached, call.generated)


def says(tokens: Sequence[int], *, per_step: int = 1, cached: int = 0) -> Script:
    """Emits `tokens` as an engine would: up to max_tokens, and up to a stop token, which it emits too."""

    async def script(call: Call) -> AsyncGenerator[Tokens | Finished, None]:
        sampling = call.sampling
        reason = FinishReason.LENGTH
        wanted: list[int] = []
        for token in list(tokens)[: sampling.max_tokens]:
            wanted.append(token)
            if token in sampling.stop_token_ids and len(wanted) > sampling.min_tokens:
                reason = FinishReason.STOP
                break
        for begin in range(0, len(wanted), per_step):
            await asyncio.sleep(0)
            yield Tokens("r", tuple(output(token, sampling) for token in wanted[begin : begin + per_step]))
        yield finished(call, reason, cached)

    return script


def forever(token: int, started: asyncio.Event, *, after: int = 0, per_second: float = 200) -> Script:
    """Sets `started` when asked, is silent for good if `after` is negative, else emits `token` without end."""

    async def script(call: Call) -> AsyncGenerator[Tokens | Finished, None]:
        started.set()
        while True:
            if after < 0:
                await asyncio.Event().wait()
            await asyncio.sleep(1 / per_second)
            yield Tokens("r", (output(token, call.sampling),))

    return script


def fails(error: Exception, *, after: Sequence[int] = (), by_event: bool = False) -> Script:
    """Emits the tokens `after`, then fails: by an exception, or by a Finished that carries it."""

    async def script(call: Call) -> AsyncGenerator[Tokens | Finished, None]:
        for token in after:
            await asyncio.sleep(0)
            yield Tokens("r", (output(token, call.sampling),))
        if by_event:
            yield Finished("r", FinishReason.ERROR, error)
        else:
            raise error

    return script
