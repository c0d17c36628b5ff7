"""llama.cpp for bench_engine, through the C API of llama-cpp-python. MODEL is a folder with DTYPE.gguf (tools/peers.sh makes it)."""

from __future__ import annotations

import pathlib
import time

import llama_cpp as ll
import numpy as np
from serve import Engine, serve

ROWS, MAX_CONTEXT, MAX_BATCH_TOKENS = 8, 1280, 2048


class Llama(Engine):
    def __init__(self, model: str, threads: int, dtype: str) -> None:
        self.name = f"llama.cpp (llama-cpp-python {ll.__version__})"
        ll.llama_backend_init()
        self.model = ll.llama_model_load_from_file(str(pathlib.Path(model) / f"{dtype}.gguf").encode(),
                                                   ll.llama_model_default_params())
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch = ROWS * MAX_CONTEXT, ROWS, MAX_BATCH_TOKENS
        params.n_threads = params.n_threads_batch = threads
        self.context = ll.llama_init_from_model(self.model, params)
        self.vocab_size = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)

    def prefill(self, prompt: list[int]) -> float:
        self._clear()
        started = time.perf_counter()
        self._run([(0, token, at, at == len(prompt) - 1) for at, token in enumerate(prompt)])
        return time.perf_counter() - started

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        self._clear()
        tokens = [self._run([(row, token, at, at == len(prompt) - 1) for at, token in enumerate(prompt)])[0]
                  for row, prompt in enumerate(prompts)]
        seconds = 0.0
        for step in range(steps + 1):  # the first is not timed
            started = time.perf_counter()
            tokens = self._run([(row, token, len(prompts[row]) + step, True) for row, token in enumerate(tokens)])
            seconds += time.perf_counter() - started if step else 0.0
        return seconds / steps

    def _clear(self) -> None:
        ll.llama_memory_clear(ll.llama_get_memory(self.context), False)

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """(row, token, position, wanted) of one batch; the greedy tokens of those wanted."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for index, (row, token, position, wanted) in enumerate(entries):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
        status = ll.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode answered {status}")
        return [int(np.ctypeslib.as_array(ll.llama_get_logits_ith(self.context, index), (self.vocab_size,)).argmax())
                for index, entry in enumerate(entries) if entry[3]]


if __name__ == "__main__":
    serve(Llama)
