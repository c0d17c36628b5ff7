"""What bounds a request, a step and the queue; and whether a request can ever run on this node.

Pure: `check_fits` is asked before a request is queued, on any thread, and once more by the scheduler.
"""

from __future__ import annotations

import dataclasses

from pdd.errors import PromptTooLong


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerLimits:
    page_size: int  # tokens
    max_context: int  # tokens, prompt and output
    max_batch_size: int = 64  # rows of a step; as many requests again may have their remote KV fetched ahead
    max_batch_tokens: int = 2048  # tokens of a step
    max_queue: int = 1024  # waiting requests
    queue_timeout: float = 30.0  # seconds that a request to generate may wait for its first admission


def check_fits(prompt_len: int, max_tokens: int, *, max_context: int, pool_tokens: int) -> None:
    """Returns if prompt and output fit the model and, alone on the node, the page pool.

    The last generated token needs no KV, so the pool bounds one token less than the context does. A prefill-only
    request asks with `max_tokens=0`.

    Raises:
        PromptTooLong: they do not; the message names both numbers and the limit.
    """
    pool_limit = pool_tokens + (1 if max_tokens else 0)
    limit = min(max_context, pool_limit)
    if prompt_len + max_tokens <= limit:
        return
    why = "the model's context" if max_context <= pool_limit else "the KV pool of this node"
    raise PromptTooLong(
        f"prompt of {prompt_len} tokens and max_tokens {max_tokens} make {prompt_len + max_tokens} tokens; "
        f"{why} allows {limit}",
        hint=f"shorten the prompt or set max_tokens to at most {limit - prompt_len}" if prompt_len < limit
        else "shorten the prompt",
        param="max_tokens" if prompt_len < limit else "prompt",
    )
