"""Shares of a step: short prompts are not held up by long ones, and long ones go on."""

from __future__ import annotations

from pdd.engine.packing import OVERDUE_STEPS, share_budget
from pdd.engine.record import Record
from pdd.engine.request import GenerateSpec, SamplingParams


def waiting(seq: int, tokens: int, served_step: int = 0) -> Record:
    record = Record.of(GenerateSpec(f"r{seq}", tuple(range(tokens)), SamplingParams()), seq, 0.0)
    record.served_step = served_step
    return record


def shares(records: list[Record], budget: int, step: int = 1) -> dict[str, int]:
    return {record.request_id: count for record, count in share_budget(records, budget, step)}


def test_a_step_that_finishes_a_prompt_carries_no_more_of_others_than_it_finishes() -> None:
    assert shares([waiting(0, 1000), waiting(1, 64)], 512) == {"r1": 64, "r0": 64}
    assert shares([waiting(0, 1000), waiting(1, 64), waiting(2, 900)], 512) == {"r1": 64, "r2": 64}
    assert shares([waiting(0, 1000), waiting(1, 400)], 512) == {"r1": 400, "r0": 112}


def test_a_step_that_finishes_nothing_is_filled() -> None:
    assert shares([waiting(0, 1000), waiting(1, 900)], 512) == {"r1": 512}


def test_prompts_that_all_fit_go_together() -> None:
    assert shares([waiting(0, 300), waiting(1, 64)], 512) == {"r1": 64, "r0": 300}


def test_a_prompt_that_was_in_no_step_for_long_takes_half() -> None:
    late = OVERDUE_STEPS + 1
    assert shares([waiting(0, 1000), waiting(1, 64, served_step=late)], 512, step=late) == {"r1": 64, "r0": 256 + 64}
