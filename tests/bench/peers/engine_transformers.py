"""transformers' generate for bench_engine: AutoModelForCausalLM with its default attention and torch's own threading."""

from __future__ import annotations

import torch
import transformers
from serve import Generating, serve


class Transformers(Generating):
    def __init__(self, model: str, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        self.name = f"transformers {transformers.__version__} (torch {torch.__version__})"
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], count: int) -> None:
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            self.model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False,
                                pad_token_id=0)


if __name__ == "__main__":
    serve(Transformers)
