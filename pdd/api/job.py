"""A request that passed every check, ready to be run. Building one is pure and may be slow: it tokenizes."""

from __future__ import annotations

import dataclasses

from pdd.api.answers import Form, Header, Usage
from pdd.api.chat import ChatForm
from pdd.api.choice import Choice
from pdd.api.completions import CompletionForm
from pdd.api.ids import RequestIds
from pdd.api.prompts import Prompt, PromptReader
from pdd.api.sampling import choice_sampling, sampling_params
from pdd.api.schema import ChatBody, CompletionBody, parse
from pdd.api.service import Detokenizer, Limits, Tokenizer
from pdd.engine.request import SamplingParams
from pdd.errors import InvalidRequest, UnknownModel

_CHARACTER_TOKENS = 4  # a character of UTF-8 has at most four bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One choice of the answer, and the request that the engine gets for it."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    choice: Choice


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    parts: tuple[Part, ...]  # by index of choice
    form: Form
    usage: Usage
    stream: bool
    include_usage: bool
    given_id: str | None  # the client's own name for the request


@dataclasses.dataclass(frozen=True, slots=True)
class JobBuilder:
    """What all requests to one model share. Any thread may use it."""

    model_names: tuple[str, ...]
    limits: Limits
    tokenizer: Tokenizer
    longest_token: int  # bytes

    def build(self, body: bytes, kind: type[CompletionBody] | type[ChatBody], ids: RequestIds) -> Job:
        """
        Raises:
            RequestError: the request is at fault; nothing was asked of the engine.
        """
        request: CompletionBody | ChatBody = parse(body, kind)
        model = self._model(request.model)
        prompts = self._prompts(request)
        include_usage = bool(request.stream_options and request.stream_options.include_usage)
        return Job(
            self._parts(request, prompts, ids.hex),
            self._form(request, model, ids.hex, include_usage),
            Usage(sum(len(prompt.ids) for prompt in prompts)),
            bool(request.stream),
            include_usage,
            ids.given,
        )

    def _model(self, name: str | None) -> str:
        if name is not None and name not in self.model_names:
            raise UnknownModel(
                f'the model "{name[:128]}" does not exist here; this node serves {", ".join(self.model_names)}',
                param="model",
            )
        return name or self.model_names[0]

    def _prompts(self, request: CompletionBody | ChatBody) -> list[Prompt]:
        reader = PromptReader(self.tokenizer, self.limits, self.longest_token)
        return reader.of_chat(request) if isinstance(request, ChatBody) else reader.of_completion(request)

    def _parts(self, request: CompletionBody | ChatBody, prompts: list[Prompt], request_id: str) -> tuple[Part, ...]:
        n = request.n or 1
        if len(prompts) * n > self.limits.max_choices:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n={n} make more than {self.limits.max_choices} choices", param="n"
            )
        parts: list[Part] = []
        for prompt in prompts:
            eos = tuple(self.tokenizer.eos_token_ids)
            first = sampling_params(request, len(prompt.ids), self.limits, eos)
            echo = self._text(prompt) if isinstance(request, CompletionBody) and request.echo else ""
            for number in range(n):
                sampling = choice_sampling(first, number)
                choice = Choice(len(parts), sampling, self._detokenizer(prompt), request.stops(), echo)
                own_id = request_id if len(prompts) * n == 1 else f"{request_id}-{len(parts)}"
                parts.append(Part(own_id, prompt.ids, sampling, choice))
        return tuple(parts)

    def _text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        detokenizer = self.tokenizer.detokenizer()
        return "".join(detokenizer.push(token) for token in prompt.ids)  # a character begun at its end comes later

    def _detokenizer(self, prompt: Prompt) -> Detokenizer:
        """One that knows how the prompt ends: ids may end inside a character, which the answer completes."""
        detokenizer = self.tokenizer.detokenizer()
        for token in prompt.ids[-_CHARACTER_TOKENS:]:
            detokenizer.push(token)
        return detokenizer

    def _form(self, request: CompletionBody | ChatBody, model: str, request_id: str, include_usage: bool) -> Form:
        if isinstance(request, ChatBody):
            k = (request.top_logprobs or 0) if request.logprobs else None
            return ChatForm(Header.new("chatcmpl", request_id, model), self.tokenizer, k, include_usage=include_usage)
        header = Header.new("cmpl", request_id, model)
        return CompletionForm(header, self.tokenizer, request.logprobs, include_usage=include_usage)
