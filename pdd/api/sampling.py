"""From a checked body and the length of its prompt to the engine's SamplingParams, one per choice.

The rule of length, the same on every node: prompt + max_tokens may reach the context limit of the model exactly, and
the KV of all of them but the last generated token must fit the node's page pool.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import TypeVar

from msgspec import UNSET, UnsetType

from pdd.api.prompts import check_token_ids
from pdd.api.schema import ChatBody, CompletionBody
from pdd.api.service import Limits
from pdd.engine.request import SamplingParams
from pdd.errors import InvalidRequest, PromptTooLong

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions when max_tokens is absent, as OpenAI has it; fewer if no more fit
_SEEDS = 2**63
N = TypeVar("N", int, float)


def sampling_params(
    body: CompletionBody | ChatBody, prompt_tokens: int, limits: Limits, eos_token_ids: tuple[int, ...]
) -> SamplingParams:
    """How the first choice of a prompt of `prompt_tokens` ids is sampled.

    Raises:
        InvalidRequest: a token id is out of the vocabulary, or min_tokens exceeds max_tokens.
        PromptTooLong: the request can never fit; the message quotes prompt tokens, max_tokens and the limit.
    """
    max_tokens = _max_tokens(body, prompt_tokens, limits)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens})", param="min_tokens")
    stop_token_ids = tuple(body.stop_token_ids or ())
    check_token_ids(stop_token_ids, limits.vocab_size, "stop_token_ids")
    return SamplingParams(
        temperature=_default(body.temperature, 1.0),
        top_k=max(0, _default(body.top_k, 0)),
        top_p=_default(body.top_p, 1.0),
        min_p=_default(body.min_p, 0.0),
        presence_penalty=_default(body.presence_penalty, 0.0),
        frequency_penalty=_default(body.frequency_penalty, 0.0),
        repetition_penalty=_default(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}, limits.vocab_size),
        seed=(secrets.randbits(63) if body.seed is None else body.seed) % _SEEDS,
        logprobs=_logprobs(body),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids if body.ignore_eos else tuple(dict.fromkeys(stop_token_ids + eos_token_ids)),
    )


def choice_sampling(first: SamplingParams, number: int) -> SamplingParams:
    """The same for choice `number` of a request: another seed, so that n choices differ and can be had again."""
    return dataclasses.replace(first, seed=(first.seed + number) % _SEEDS)


def _max_tokens(body: CompletionBody | ChatBody, prompt_tokens: int, limits: Limits) -> int:
    asked, param = _asked_tokens(body)
    bound, name = min(
        (limits.max_context, "context limit of this model"), (limits.pool_tokens + 1, "KV pool of this node")
    )
    if isinstance(asked, int):
        if prompt_tokens + asked > bound:
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens and {param} is {asked}, {prompt_tokens + asked} together; "
                f"the {name} allows {bound} tokens",
                param=param,
            )
        return asked
    room = bound - prompt_tokens
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {prompt_tokens} tokens, which leaves no room for an answer; the {name} allows {bound} "
            "tokens, prompt and answer together",
            param="messages" if isinstance(body, ChatBody) else "prompt",
        )
    return min(room, DEFAULT_COMPLETION_TOKENS) if asked is UNSET and isinstance(body, CompletionBody) else room


def _asked_tokens(body: CompletionBody | ChatBody) -> tuple[int | UnsetType | None, str]:
    """(max_tokens, the name of the field it came from); null means as many as fit."""
    if isinstance(body, ChatBody) and isinstance(body.max_completion_tokens, int):
        return body.max_completion_tokens, "max_completion_tokens"
    return body.max_tokens, "max_tokens"


def _logprobs(body: CompletionBody | ChatBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    return (body.top_logprobs or 0) if body.logprobs else None


def _logit_bias(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    parsed = []
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 20):
            raise InvalidRequest(f'logit_bias: "{key[:24]}" is not a token id', param="logit_bias")
        parsed.append((int(key), bias))
    check_token_ids([token for token, _ in parsed], vocab_size, "logit_bias")
    return tuple(parsed)


def _default(value: N | None, default: N) -> N:
    return default if value is None else value
