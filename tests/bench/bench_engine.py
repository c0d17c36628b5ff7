"""Forward speed of one rank against transformers' generate and against the memory bandwidth, interleaved in one run.

Prefill of 1,024 tokens, decode at batch 1 and 8 after 512 tokens of context each, same weights, dtype and threads. The
roof of a decode step is the bytes it must read (weights and KV) over the bandwidth measured in the same run.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time
from collections.abc import Callable

os.environ.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import torch
import transformers

from tests.bench.common import arguments, median, prompt_of, report
from tests.model.model_harness import Harness

PREFILL_TOKENS, CONTEXT_TOKENS, BATCHES = 1024, 512, (1, 8)


class Ours:
    """This project's runner, without its process."""

    def __init__(self, model: pathlib.Path, dtype: str) -> None:
        self.harness = Harness(model, num_pages=1024, dtype=dtype)

    def prefill(self, prompt: list[int]) -> float:
        request = self.harness.request(prompt)
        started = time.perf_counter()
        self.harness.step([request])
        seconds = time.perf_counter() - started
        self._give_back([request])
        return seconds

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Seconds per step."""
        requests = [self.harness.request(prompt) for prompt in prompts]
        for request in requests:
            self.harness.step([request])
        self.harness.step(requests)
        started = time.perf_counter()
        for _ in range(steps):
            self.harness.step(requests)
        seconds = (time.perf_counter() - started) / steps
        self._give_back(requests)
        return seconds

    def _give_back(self, requests: list) -> None:
        for request in requests:
            state = self.harness.runner._rows[request.row_id]
            self.harness.free.extend(int(page) for page in state.table[: state.num_pages])


class Transformers:
    """The reference: AutoModelForCausalLM with its default attention."""

    def __init__(self, model: pathlib.Path, dtype: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.model.generation_config.eos_token_id = None

    def prefill(self, prompt: list[int]) -> float:
        return self._generate([prompt], 1)

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Seconds per step: the difference of two runs, so that prefill cancels."""
        return (self._generate(prompts, steps + 1) - self._generate(prompts, 1)) / steps

    def _generate(self, prompts: list[list[int]], count: int) -> float:
        tokens = torch.tensor(prompts)
        started = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False,
                                pad_token_id=0)
        return time.perf_counter() - started


def bandwidth() -> float:
    """Bytes per second of reading memory, with torch's threads."""
    data = torch.ones(64 << 20)
    best = 1e9
    for _ in range(4):
        started = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - started)
    return data.nbytes / best


def step_bytes(ours: Ours, batch: int) -> int:
    """Bytes that one decode step must read: all weights once (a tied embedding as the head), and the KV of each row."""
    model, layout = ours.harness.model, ours.harness.layout
    weights = model.param_bytes - model.config.vocab_size * model.config.hidden_size * model.dtype.itemsize
    return weights + batch * CONTEXT_TOKENS * layout.num_layers * layout.num_kv_heads * 2 * layout.token_bytes


def interleaved(repeats: int, *measures: Callable[[], float]) -> list[float]:
    """Medians of the measures, taken turn by turn."""
    taken: list[list[float]] = [[] for _ in measures]
    for _ in range(repeats):
        for values, measure in zip(taken, measures, strict=True):
            values.append(measure())
    return [median(values) for values in taken]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows, bounds = [], []
    for dtype in args.dtypes:
        ours, theirs = Ours(pathlib.Path(args.model), dtype), Transformers(pathlib.Path(args.model), dtype)
        long = prompt_of(PREFILL_TOKENS, 1)
        contexts = [prompt_of(CONTEXT_TOKENS, 10 + row) for row in range(max(BATCHES))]
        ours.prefill(long), theirs.prefill(long)  # kernels for these shapes
        mine, other = interleaved(args.repeats, lambda: ours.prefill(long), lambda: theirs.prefill(long))  # noqa: B023
        rows.append({"dtype": dtype, "what": f"prefill {PREFILL_TOKENS}", "ours_ms": mine * 1e3, "hf_ms": other * 1e3,
                     "ratio": other / mine, "tok/s": PREFILL_TOKENS / mine})
        bounds.append((f"{dtype} prefill: transformers / ours", other / mine, ">=", 1.0))
        for batch in BATCHES:
            prompts = contexts[:batch]
            mine, other, speed = interleaved(
                args.repeats, lambda: ours.decode(prompts, args.steps),  # noqa: B023
                lambda: theirs.decode(prompts, args.steps), bandwidth)  # noqa: B023
            roof = step_bytes(ours, batch) / speed
            rows.append({"dtype": dtype, "what": f"decode B={batch}", "ours_ms": mine * 1e3, "hf_ms": other * 1e3,
                         "ratio": other / mine, "tok/s": batch / mine, "roof_ms": roof * 1e3, "of_roof": roof / mine,
                         "GB/s": speed / 1e9})
            bounds.append((f"{dtype} decode B={batch}: transformers / ours", other / mine, ">=", 1.0))
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {args.threads} thread(s)")
    return report("engine", rows, bounds, args.json)


if __name__ == "__main__":
    sys.exit(main())
