"""Logprobs in the two forms of OpenAI's API.

A logprob of minus infinity (a token that top_k or a bias excluded) has no JSON form; it is written as -9999.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pdd.api.choice import Piece
from pdd.api.service import Tokenizer

IMPOSSIBLE = -9999.0


def completion_logprobs(pieces: Sequence[Piece], tokenizer: Tokenizer, k: int) -> dict[str, list[Any]]:
    """The `logprobs` object of /v1/completions: parallel lists, one entry per token.

    top_logprobs lists the k most likely tokens and, if it is none of them, the chosen one.
    """
    return {
        "text_offset": [piece.text_offset for piece in pieces],
        "tokens": [_name(tokenizer.token_bytes(piece.output.token)) for piece in pieces],
        "token_logprobs": [_finite(piece.output.logprob) for piece in pieces],
        "top_logprobs": [_alternatives(piece, tokenizer, k) for piece in pieces],
    }


def chat_logprobs(pieces: Sequence[Piece], tokenizer: Tokenizer, k: int) -> dict[str, Any]:
    """The `logprobs` object of /v1/chat/completions; top_logprobs lists exactly the k most likely tokens."""
    content = []
    for piece in pieces:
        entry = _chat_entry(piece.output.token, piece.output.logprob, tokenizer)
        entry["top_logprobs"] = [
            _chat_entry(alternative.token, alternative.logprob, tokenizer) for alternative in piece.output.top[:k]
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def _alternatives(piece: Piece, tokenizer: Tokenizer, k: int) -> dict[str, float]:
    output = piece.output
    ranked = [(alternative.token, alternative.logprob) for alternative in output.top[:k]]
    if all(token != output.token for token, _ in ranked):
        ranked.append((output.token, IMPOSSIBLE if output.logprob is None else output.logprob))
    chosen = _name(tokenizer.token_bytes(output.token))
    named: dict[str, float] = {}
    for token, logprob in ranked:
        name = _name(tokenizer.token_bytes(token))
        # Two ids may stand for the same text, and an object has room for one of that name: the chosen token, else the
        # likelier.
        if token != output.token and (name == chosen or name in named):
            name = f"token_id:{token}"
        named[name] = _finite(logprob)
    return named


def _chat_entry(token: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": _name(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def _name(raw: bytes) -> str:
    """The token as text; one that is part of a character as OpenAI writes it, "bytes:\\xf0\\x9f"."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else IMPOSSIBLE
