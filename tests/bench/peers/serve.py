"""The engine's side of bench_engine: answers one JSON line per request on stdin, so that engines of any venv can take turns.

Imports the standard library only; engine_*.py next to it run under the Python of their own venv. What an engine prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Engine:
    """What each engine_*.py implements. Made with (model, threads, dtype)."""

    name = ""  # with the version, for the report

    def prefill(self, prompt: list[int]) -> float:
        """Seconds from the prompt to its first token."""
        raise NotImplementedError

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        """Seconds per greedy decode step of all prompts together, after their prefill."""
        raise NotImplementedError

    def facts(self) -> dict[str, float]:
        """Whatever else bench_engine asks of this engine."""
        return {}


class Generating(Engine):
    """An engine that only generates: a decode step is the difference of two runs, so that prefill cancels."""

    def generate(self, prompts: list[list[int]], count: int) -> None:
        raise NotImplementedError

    def prefill(self, prompt: list[int]) -> float:
        return self._seconds([prompt], 1)

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        short = self._seconds(prompts, 2)
        return (self._seconds(prompts, steps + 2) - short) / steps

    def _seconds(self, prompts: list[list[int]], count: int) -> float:
        started = time.perf_counter()
        self.generate(prompts, count)
        return time.perf_counter() - started


def serve(make: Callable[[str, int, str], Engine]) -> None:
    """argv: MODEL THREADS DTYPE. Ends with its stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    engine = make(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    answer({"name": engine.name})
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        answer(getattr(engine, call)(*arguments))
