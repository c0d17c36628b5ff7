"""Forward speed of one rank against other engines and the memory bandwidth, interleaved in one run: transformers, vLLM's CPU build, llama.cpp.

Prefill of 1,024 tokens, decode at batch 1 and 8 after 512 tokens of context each; same weights, dtype and threads. Every engine is a
process of its own, with the threading it comes with, and is stopped while others have their turn. The roof of a decode step is the bytes it
must read (weights and KV) over the bandwidth measured in the same run. Only transformers is a bound; the other ratios are for the log.
A peer that is not installed is named, with how to get it, and left out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from pdd.engine.rank_process import rank_environment
from tests.bench.common import arguments, median, prompt_of, report

ROOT = pathlib.Path(__file__).resolve().parents[2]
PREFILL_TOKENS, CONTEXT_TOKENS, BATCHES = 1024, 512, (1, 8)
OURS = "pdd"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How an engine is started: `python engine_NAME.py model threads dtype`, under `env`."""

    name: str
    python: pathlib.Path
    model: pathlib.Path  # the peer is missing when either is
    env: dict[str, str]


def recipes(model: pathlib.Path, peers: pathlib.Path, threads: int) -> list[Recipe]:
    here, own = pathlib.Path(sys.executable), dict(os.environ)
    preload = peers / "vllm" / "lib" / "libiomp5.so"  # vLLM asks for it
    return [
        Recipe(OURS, here, model, rank_environment(threads)),
        Recipe("transformers", here, model, own),
        Recipe("vllm", peers / "vllm" / "bin" / "python", model,
               own | ({"LD_PRELOAD": str(preload.resolve())} if preload.exists() else {})),
        Recipe("llama", peers / "llama" / "bin" / "python", peers / "gguf", own),
    ]


class Process:
    """An engine in its process, stopped between calls."""

    def __init__(self, recipe: Recipe, threads: int, dtype: str, log: pathlib.Path) -> None:
        self.short, self._log = recipe.name, log
        script = ROOT / "tests" / "bench" / "peers" / f"engine_{recipe.name}.py"
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [recipe.python, script, recipe.model, str(threads), dtype], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=stderr, env=recipe.env, text=True, start_new_session=True)
        self.name: str = self._answer()["name"]
        os.killpg(self._process.pid, signal.SIGSTOP)

    def call(self, what: str, *args: Any) -> Any:
        assert self._process.stdin is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.write(json.dumps([what, *args]) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        os.killpg(self._process.pid, signal.SIGSTOP)
        return answer

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise RuntimeError(f"engine {self.short} ended ({self._process.returncode}); its log is {self._log}")
        return json.loads(line)


def interleaved(engines: list[Process], repeats: int, what: str, *args: Any) -> tuple[dict[str, float], float]:
    """(median seconds of each engine, median bandwidth), taken turn by turn after one round that is not counted."""
    taken: dict[str, list[float]] = {engine.short: [] for engine in engines}
    speeds = []
    for turn in range(repeats + 1):
        speeds.append(engines[0].call("bandwidth"))
        for engine in engines:
            seconds = engine.call(what, *args)
            if turn:
                taken[engine.short].append(seconds)
    return {name: median(values) for name, values in taken.items()}, median(speeds)


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--peers", type=pathlib.Path, default=ROOT / "build" / "peers", help="where tools/peers.sh put them")
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm", "llama"], help="beside ours")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    bounds: list[tuple[str, float, str, float]] = []
    chosen = [recipe for recipe in recipes(pathlib.Path(args.model).resolve(), args.peers.absolute(), args.threads)
              if recipe.name in (OURS, *args.engines)]
    present = [recipe for recipe in chosen if recipe.python.exists() and recipe.model.exists()]
    for recipe in chosen:
        if recipe not in present:
            print(f"without {recipe.name}: {recipe.python} or {recipe.model} is missing; to get it: tools/peers.sh {args.peers}")
    for dtype in args.dtypes:
        measure(dtype, present, args, rows, bounds)
    return report("engine", rows, bounds, args.json)


def measure(dtype: str, present: list[Recipe], args: Any, rows: list[dict[str, Any]],
            bounds: list[tuple[str, float, str, float]]) -> None:
    """Adds the rows and bounds of one dtype."""
    log_dir = ROOT / "build"
    log_dir.mkdir(exist_ok=True)
    engines: list[Process] = []
    try:
        started = time.monotonic()
        for recipe in present:
            engines.append(Process(recipe, args.threads, dtype, log_dir / f"engine-{recipe.name}.log"))
        print(f"{dtype}, {args.threads} thread(s), loaded in {time.monotonic() - started:.0f} s: "
              + ", ".join(engine.name for engine in engines))
        facts = engines[0].call("facts")
        add(rows, bounds, f"{dtype} prefill {PREFILL_TOKENS}", PREFILL_TOKENS,
            *interleaved(engines, args.repeats, "prefill", prompt_of(PREFILL_TOKENS, 1)), None)
        for batch in BATCHES:
            prompts = [prompt_of(CONTEXT_TOKENS, 10 + row) for row in range(batch)]
            read = facts["weight_bytes"] + batch * CONTEXT_TOKENS * facts["kv_bytes"]
            add(rows, bounds, f"{dtype} decode B={batch}", batch,
                *interleaved(engines, args.repeats, "decode", prompts, args.steps), read)
    finally:
        for engine in engines:
            engine.kill()


def add(rows: list[dict[str, Any]], bounds: list[tuple[str, float, str, float]], what: str, tokens: int,
        seconds: dict[str, float], speed: float, read: float | None) -> None:
    mine = seconds[OURS]
    row = {"what": what, "tok/s": tokens / mine} | {f"{name}_ms": value * 1e3 for name, value in seconds.items()}
    row |= {f"{name}/ours": value / mine for name, value in seconds.items() if name != OURS}
    if read is not None:
        row |= {"GB/s": speed / 1e9, "roof_ms": read / speed * 1e3, "roof/ours": read / speed / mine}
    rows.append(row)
    if "transformers" in seconds:
        bounds.append((f"{what}: transformers / ours", seconds["transformers"] / mine, ">=", 1.0))


if __name__ == "__main__":
    sys.exit(main())
