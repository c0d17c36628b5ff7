"""Clusters of real daemons, one per test module that asks, and a client that compares token ids."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest


@dataclasses.dataclass(frozen=True)
class Answer:
    tokens: tuple[str, ...]
    text: str
    finish_reason: str
    usage: dict[str, int]


def post(url: str, body: dict[str, Any], timeout: float = 60.0) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        document: dict[str, Any] = json.load(response)
    return document


def complete(url: str, prompt: Sequence[int] | str, max_tokens: int = 8, **extra: Any) -> Answer:
    """One greedy completion, with the text of every token so that answers compare token by token."""
    body = {"model": model_name(url), "prompt": list(prompt) if not isinstance(prompt, str) else prompt,
            "max_tokens": max_tokens, "temperature": 0, "logprobs": 0, **extra}
    choice_document = post(f"{url}/v1/completions", body)
    choice = choice_document["choices"][0]
    return Answer(tuple(choice["logprobs"]["tokens"]), choice["text"], choice["finish_reason"], choice_document["usage"])


_model_names: dict[str, str] = {}


def model_name(url: str) -> str:
    if url not in _model_names:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as response:
            _model_names[url] = json.load(response)["data"][0]["id"]
    return _model_names[url]


def error_of(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and OpenAI error object of a completion that must fail."""
    try:
        post(f"{url}/v1/completions", body)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]
    raise AssertionError("the request was answered")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that differ from prompt to prompt, from the first page on."""
    return [3 + (seed * 31 + i * 7 + (i * i) % 11) % 200 for i in range(length)]


@pytest.fixture(params=["tcp", pytest.param("local", marks=pytest.mark.slow)])
def via(request: pytest.FixtureRequest) -> str:
    """What carries the KV between two nodes here: the network, or, in `make test-all`, memory that they share."""
    return str(request.param)


def way_sets(via: str) -> list[str]:
    """The settings that make it so."""
    return [f"fabric.local={'auto' if via == 'local' else 'off'}"]


@pytest.fixture
def run_dir() -> Iterator[pathlib.Path]:
    """Short, because a Unix socket's path may have 107 bytes only."""
    with tempfile.TemporaryDirectory(prefix="pdd-") as directory:
        yield pathlib.Path(directory)


@pytest.fixture(scope="module")
def module_run_dir() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="pdd-") as directory:
        yield pathlib.Path(directory)
