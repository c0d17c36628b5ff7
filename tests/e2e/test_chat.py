"""A chat with the real model through the real OpenAI client: two nodes answer as one."""

from __future__ import annotations

import pathlib

import openai
import pytest

from tests.cluster import Node, cluster

pytestmark = pytest.mark.model

SETS = ["engine.threads=1", "model.dtype=float32", "kv.num_pages=256"]
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def nodes(real_model: pathlib.Path, module_run_dir: pathlib.Path):
    with cluster(module_run_dir, real_model, decoders=2, both=1, sets=SETS, ready_timeout=180) as started:
        yield started


def client(node: Node) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0)


def name(node: Node) -> str:
    return client(node).models.list().data[0].id


def chat(node: Node, **extra):
    return client(node).chat.completions.create(model=name(node), messages=MESSAGES, temperature=0, max_tokens=24, **extra)


def test_the_answer_is_right_and_the_same_on_every_node(nodes: dict[str, Node]) -> None:
    answers = {node: chat(nodes[node]).choices[0] for node in ("d0", "d1", "b0")}
    assert "Paris" in answers["b0"].message.content
    assert len({a.message.content for a in answers.values()}) == 1
    assert {a.finish_reason for a in answers.values()} == {"stop"}


def test_a_stream_is_the_whole_answer_in_pieces(nodes: dict[str, Node]) -> None:
    whole = chat(nodes["d0"])
    chunks = list(chat(nodes["d0"], stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]


def test_logprobs_begin_at_the_first_token_and_agree(nodes: dict[str, Node]) -> None:
    ours, theirs = (chat(nodes[node], logprobs=True, top_logprobs=3).choices[0].logprobs.content for node in ("d1", "b0"))
    assert [t.token for t in ours] == [t.token for t in theirs]
    assert all(abs(a.logprob - b.logprob) < 1e-3 for a, b in zip(ours, theirs, strict=True))
    assert all(t.token in {x.token for x in t.top_logprobs} for t in ours)


def test_several_choices_with_seeds(nodes: dict[str, Node]) -> None:
    def sample(node: str) -> list[str]:
        answer = client(nodes[node]).chat.completions.create(
            model=name(nodes[node]), messages=MESSAGES, temperature=1.0, seed=11, n=3, max_tokens=12)
        assert [c.index for c in answer.choices] == [0, 1, 2]
        return [c.message.content for c in answer.choices]

    assert sample("d0") == sample("b0")
    assert len(set(sample("d1"))) > 1


def test_errors_come_in_openai_form(nodes: dict[str, Node]) -> None:
    with pytest.raises(openai.NotFoundError):
        client(nodes["d0"]).chat.completions.create(model="no-such-model", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as error:
        client(nodes["d0"]).completions.create(model=name(nodes["d0"]), prompt=[1] * 9000, max_tokens=1)
    assert "9000" in str(error.value) or "9001" in str(error.value)
