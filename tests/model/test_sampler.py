"""Sampling: distribution, seeds, cut-offs, penalties, logprobs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.engine.batch import Sampling
from pdd.engine.sampler import SampleState, sample, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def draw(sampling: Sampling, position: int = 0, logits: torch.Tensor = LOGITS, prompt: tuple[int, ...] = (),
         output: tuple[int, ...] = ()):
    state = SampleState(1, sampling, prompt, {})
    for token in output:
        state.add(token)
    return sample(logits[None].clone(), [state], [position])[0]


def counts(sampling: Sampling, number: int = 4000, logits: torch.Tensor = LOGITS) -> torch.Tensor:
    """How often each token comes at `number` positions, as a fraction."""
    rows = [SampleState(index, sampling, (), {}) for index in range(number)]
    tokens = [row.tokens[0] for row in sample(logits.expand(number, -1), rows, range(number))]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / number


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_distribution(temperature: float) -> None:
    want = torch.softmax(LOGITS / temperature, -1)
    assert (counts(Sampling(temperature=temperature, seed=3)) - want).abs().max() < 0.03  # 4 sigma is 0.032 at p = 0.5


def test_different_seeds_are_independent() -> None:
    same = sum(draw(Sampling(seed=1), position).tokens == draw(Sampling(seed=2), position).tokens
               for position in range(600))
    expected = float((torch.softmax(LOGITS, -1) ** 2).sum())
    assert abs(same / 600 - expected) < 0.09


@given(seed=st.integers(-(2**63), 2**64 - 1), position=st.integers(0, 2**31))
def test_uniform_is_a_function_in_the_unit_interval(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1
    assert uniform(seed, position) == uniform(seed, position)
    assert uniform(seed, position) != uniform(seed, position + 1)
    assert uniform(seed, position) != uniform(seed + 1, position)


@settings(max_examples=30, deadline=None)
@given(company=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 8), st.floats(0.1, 1.0)), max_size=5),
       place=st.integers(0, 5))
def test_token_does_not_depend_on_the_rest_of_the_batch(company: list[tuple[float, int, float]], place: int) -> None:
    subject = Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=11, logprobs=2)
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    want = draw(subject, 17, logits[0])
    rows = [SampleState(10 + index, Sampling(temperature=t, top_k=k, top_p=p, seed=index), (), {})
            for index, (t, k, p) in enumerate(company)]
    place = min(place, len(rows))
    rows.insert(place, SampleState(1, subject, (), {}))
    batch = torch.cat([logits[1 : place + 1], logits[:1], logits[place + 1 : len(rows)]])
    assert sample(batch, rows, [17] * len(rows))[place] == want


def test_greedy_takes_the_best_on_both_paths() -> None:
    assert draw(Sampling(temperature=0.0)).tokens == (0,)
    assert draw(Sampling(temperature=0.0, logprobs=0)).tokens == (0,)
    assert draw(Sampling(temperature=1e-6, seed=5)).tokens == (0,)


def test_top_k_keeps_k_and_ties() -> None:
    assert (counts(Sampling(top_k=2, seed=1), 500) > 0).tolist() == [True, True, False, False, False, False]
    tied = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert (counts(Sampling(top_k=2, seed=1), 500, tied) > 0).tolist() == [True, True, True, False]
    assert counts(Sampling(top_k=1, temperature=5.0), 50)[0] == 1


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, 1), (0.5, 1), (0.6, 2), (0.8, 3), (0.9, 4), (1.0, 6)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: int) -> None:
    # Cumulative: 0.561, 0.767, 0.892, 0.968, 0.996, 1
    assert int((counts(Sampling(top_p=top_p, seed=2)) > 0).sum()) == kept


def test_top_p_over_a_flat_distribution_looks_beyond_the_quick_candidates() -> None:
    flat = torch.linspace(0, 1e-3, 5000)
    tokens = [draw(Sampling(top_p=0.9, seed=seed), 0, flat).tokens[0] for seed in range(300)]
    assert min(tokens) >= 5000 * 0.09
    assert sum(token < 5000 - 1024 for token in tokens) > 150


def test_top_k_and_top_p_compose() -> None:
    """top_p acts on what top_k left, renormalised: 0.561 / 0.767 = 0.73 of the first two."""
    assert int((counts(Sampling(top_k=2, top_p=0.7, seed=2), 500) > 0).sum()) == 1
    assert int((counts(Sampling(top_k=2, top_p=0.75, seed=2), 500) > 0).sum()) == 2


def test_min_p_drops_what_is_unlikely_beside_the_best() -> None:
    # p / p_max: 1, 0.37, 0.22, 0.135, 0.05, 0.0067
    assert int((counts(Sampling(min_p=0.2, seed=2)) > 0).sum()) == 3


def test_bias_and_bans() -> None:
    assert draw(Sampling(temperature=0.0, logit_bias=((5, 100.0),))).tokens == (5,)
    assert draw(Sampling(temperature=0.0, logit_bias=((0, -100.0),))).tokens == (1,)
    ban = Sampling(temperature=0.0, banned=(0, 1), min_tokens=2)
    assert draw(ban, output=(3,)).tokens == (2,)
    assert draw(ban, output=(3, 3)).tokens == (0,)
    assert counts(Sampling(banned=(0,), min_tokens=1, temperature=3.0), 300)[0] == 0


def test_penalties_change_the_logits_as_documented() -> None:
    greedy = dict(temperature=0.0)
    # 2.0 - 0.6 * 2 (frequency) = 0.8 < 1.0
    assert draw(Sampling(**greedy, frequency_penalty=0.6), output=(0, 0)).tokens == (1,)
    assert draw(Sampling(**greedy, frequency_penalty=0.4), output=(0, 0)).tokens == (0,)
    assert draw(Sampling(**greedy, presence_penalty=1.5), output=(0, 0)).tokens == (1,)
    assert draw(Sampling(**greedy, presence_penalty=1.5), prompt=(0, 0)).tokens == (0,)  # generated tokens only
    assert draw(Sampling(**greedy, repetition_penalty=4.0), prompt=(0,)).tokens == (1,)  # prompt too: 2 / 4 = 0.5
    negative = torch.tensor([-1.0, -1.5])
    assert draw(Sampling(**greedy, repetition_penalty=2.0), 0, negative, prompt=(0,)).tokens == (1,)  # -1 * 2 = -2


def test_counts_advance_with_each_sampled_token() -> None:
    state = SampleState(1, Sampling(temperature=0.0, frequency_penalty=2.0), (), {})
    tokens = [sample(LOGITS[None].clone(), [state], [i])[0].tokens[0] for i in range(4)]
    assert tokens == [0, 1, 2, 0]  # 2 1 .5 0 -> 0 1 .5 0 -> 0 -1 .5 0 -> 0 -1 -1.5 0


def test_logprobs_are_of_the_raw_distribution() -> None:
    raw = torch.log_softmax(LOGITS, -1)
    row = draw(Sampling(temperature=0.0, logprobs=3, logit_bias=((4, 50.0),)))
    assert row.tokens == (4,)
    assert math.isclose(row.logprobs[0], float(raw[4]), rel_tol=1e-6)
    assert [token for token, _ in row.top[0]] == [0, 1, 2]
    assert all(math.isclose(value, float(raw[token]), rel_tol=1e-6) for token, value in row.top[0])
    only = draw(Sampling(temperature=0.0, logprobs=0))
    assert len(only.logprobs) == 1
    assert only.top == ((),)
    assert draw(Sampling(temperature=0.0)).logprobs == ()
