"""Shares of a step: short prompts are not held up by long ones, and long ones go on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdd.engine.packing import AGED_STEPS, SMALL_PART, TURN_STEPS, share_budget
from pdd.engine.record import Record
from pdd.engine.request import GenerateSpec, SamplingParams


def waiting(seq: int, tokens: int) -> Record:
    return Record.of(GenerateSpec(f"r{seq}", tuple(range(tokens)), SamplingParams()), seq, 0.0)


def shares(records: list[Record], budget: int, step: int = 1) -> dict[str, int]:
    return {record.request_id: count for record, count in share_budget(records, budget, step)}


def test_a_step_that_finishes_a_prompt_carries_half_as_much_of_others() -> None:
    assert shares([waiting(0, 1000), waiting(1, 80)], 512) == {"r1": 80, "r0": 40}
    assert shares([waiting(0, 1000), waiting(1, 80), waiting(2, 900)], 512) == {"r1": 80, "r2": 40}
    assert shares([waiting(0, 1000), waiting(1, 400)], 512) == {"r1": 400, "r0": 112}


def test_a_longer_prompt_that_would_be_finished_too_at_most_doubles_the_step() -> None:
    assert shares([waiting(0, 300), waiting(1, 100)], 512) == {"r1": 100, "r0": 50}
    assert shares([waiting(0, 200), waiting(1, 100), waiting(2, 100)], 512) == {"r1": 100, "r2": 100, "r0": 200}


def test_a_tiny_prompt_leaves_a_sixteenth_of_the_step_to_others() -> None:
    assert shares([waiting(0, 1000), waiting(1, 3)], 512) == {"r1": 3, "r0": 32}
    assert shares([waiting(0, 30), waiting(1, 3), waiting(2, 1000)], 512) == {"r1": 3, "r0": 30, "r2": 32}
    assert shares([waiting(0, 60), waiting(1, 3), waiting(2, 1000)], 512) == {"r1": 3, "r0": 60, "r2": 32}


def test_a_step_that_finishes_nothing_is_filled() -> None:
    assert shares([waiting(0, 1000), waiting(1, 900)], 512) == {"r1": 512}


def test_prompts_that_all_fit_go_together() -> None:
    assert shares([waiting(0, 60), waiting(1, 64), waiting(2, 120)], 512) == {"r0": 60, "r1": 64, "r2": 120}


def test_each_fourth_step_gives_half_to_the_oldest_or_as_much_as_it_finishes() -> None:
    assert shares([waiting(0, 1000), waiting(1, 900)], 512, AGED_STEPS) == {"r1": 256, "r0": 256}
    longs = [waiting(0, 1000), waiting(1, 900), waiting(2, 64)]
    assert shares(longs, 512, AGED_STEPS) == {"r2": 64, "r0": 32}
    assert shares(longs, 512, TURN_STEPS) == {"r2": 64, "r0": 256}
    assert shares([waiting(0, 100), waiting(1, 64), waiting(2, 500)], 512, TURN_STEPS) == {"r1": 64, "r0": 100, "r2": 82}


def test_a_stream_of_tiny_prompts_starves_no_long_one() -> None:
    long = waiting(0, 4096)
    steps = 0
    while long.remaining:
        steps += 1
        tiny = waiting(steps, 8)
        for record, count in share_budget([long, tiny], 512, steps):
            record.computed += count
        assert not tiny.remaining
    assert steps <= 4096 / (256 / TURN_STEPS)


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=12), st.integers(1, 1024), st.integers(0, 64))
def test_a_step_is_within_its_budget_and_serves_the_shortest(remaining: list[int], budget: int, step: int) -> None:
    records = [waiting(seq, tokens) for seq, tokens in enumerate(remaining)]
    taken = share_budget(records, budget, step)
    assert len({record.seq for record, _ in taken}) == len(taken)
    assert all(1 <= count <= record.remaining for record, count in taken)
    assert sum(count for _, count in taken) <= budget
    finished = sum(count for record, count in taken if count == record.remaining)
    others = sum(count for record, count in taken if count < record.remaining)
    if not finished:
        assert others == budget
    elif step % TURN_STEPS:
        assert others <= max(finished, budget // SMALL_PART) // 2
    if step % AGED_STEPS:
        assert min(records, key=lambda record: (record.remaining, record.seq)) is taken[0][0]
