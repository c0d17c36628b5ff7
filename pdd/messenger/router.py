"""Whether a prompt is prefilled here or by a prefiller. Pure."""

from __future__ import annotations

from pdd.engine.request import KvSource


def route(role: str, num_prompt_tokens: int, local_prefill_tokens: int) -> KvSource:
    """Source of the KV of a new prompt of `num_prompt_tokens` (n >= 1) tokens on a node of `role`.

    Only the first n - 1 tokens are ever fetched, so n == 1 has nothing to fetch. Prompts of at most
    `local_prefill_tokens` tokens are cheaper to compute than to ask for.
    """
    if role != "decode" or num_prompt_tokens <= max(1, local_prefill_tokens):
        return KvSource.LOCAL
    return KvSource.REMOTE
