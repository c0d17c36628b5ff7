"""500 seeds of the messenger's simulation; `make sim` plays more. What each run checks is in tests/messenger's fakes."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.sim import messenger_sim
from tests.sim.mutants import REPOSITORY

_SEEDS, _CHUNK = 500, 50


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(1, _SEEDS + 1, _CHUNK))
def test_seeds(first: int) -> None:
    tally: Counter[str] = Counter()
    for seed in range(first, first + _CHUNK):
        violations, history = messenger_sim.play(seed, tally)
        if violations:
            print("\n".join(history))
        assert violations == [], f"replay: python -m tests.sim.messenger_sim --first {seed} --seeds 1"
    # Misfortune everywhere, and yet most is served.
    assert tally["whole"] > 5 * _CHUNK
    assert min(tally[what] for what in ("aborted", "connections cut", "nodes killed", "endpoints failed", "writes hurt")) > 0


def test_a_seed_gives_one_history() -> None:
    for seed in (1, 7, 23):
        _, first = messenger_sim.play(seed, keep=True)
        _, second = messenger_sim.play(seed, keep=True)
        assert len(first) > 100
        assert first == second


def test_a_seed_gives_one_history_in_every_process() -> None:
    """Whatever the order of sets and the place of objects there."""
    code = "from tests.sim import messenger_sim as m; print(*m.play(7, keep=True)[1], sep='\\n')"
    told = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": number}, cwd=REPOSITORY,
                       capture_output=True, text=True, check=True).stdout
        for number in ("1", "2")
    ]  # fmt: skip
    assert told[0].count("\n") > 100
    assert told[0] == told[1]
