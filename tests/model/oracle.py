"""Greedy continuations by transformers, and prompts for them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

GENERATED = 12  # tokens
MIN_GAP = 1e-4  # between the two best logits


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(32, 127) for _ in range(length)]


def reference(model_dir: Path, prompts: list[list[int]], count: int = GENERATED) -> list[list[int]]:
    """Greedy continuations by transformers. Fails on a near tie, which would prove nothing either way."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    results = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = torch.tensor([prompt])
            for _ in range(count):
                top = model(tokens).logits[0, -1].topk(2)
                assert top.values[0] - top.values[1] > MIN_GAP
                tokens = torch.cat([tokens, top.indices[None, :1]], dim=1)
            results.append(tokens[0, len(prompt):].tolist())
    return results
