"""Fixtures of the fabric tests: what carries the writes, and pairs of nodes on it.

`stack` and `best_stack` are everything that carries writes between processes here, shared memory too;
`fabric_stack` and `best_fabric_stack` are libfabric alone, for what only a NIC has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("pdd.fabric._native")

from pdd.fabric import _native as native
from tests.fabric.fabric_node import Node, RemoteNode, spawn


@dataclass(frozen=True)
class Stack:
    """One libfabric with one provider; or shared memory (provider "local"), which needs none."""

    library: str
    provider: str
    version: str


def find_stack(source: str, provider: str) -> Stack:
    try:
        candidates = native.library()["candidates"]
    except native.FabricError as error:
        pytest.skip(str(error))
    for candidate in candidates:
        if candidate["source"] == source and candidate["version"]:
            if provider == "net" and candidate["version"] != "1.17":
                pytest.skip(f"the {source} libfabric is {candidate['version']}, its net is called tcp")
            return Stack(candidate["path"], provider, candidate["version"])
    pytest.skip(f"no libfabric from {source}")


LOCAL = Stack("", "local", "")
FABRICS = [("mpich-wheel", "tcp"), ("system", "net")]


@pytest.fixture(params=[*FABRICS, None], ids=lambda p: f"{p[0]}-{p[1]}" if p else "local")
def stack(request: pytest.FixtureRequest) -> Stack:
    """Every stack that pdd runs on without hardware."""
    return LOCAL if request.param is None else find_stack(*request.param)


@pytest.fixture(params=FABRICS, ids=lambda p: f"{p[0]}-{p[1]}")
def fabric_stack(request: pytest.FixtureRequest) -> Stack:
    return find_stack(*request.param)


@pytest.fixture(params=["fabric", "local"])
def best_stack(request: pytest.FixtureRequest) -> Stack:
    """The libfabric that a node would choose by itself, and what goes beside it."""
    return LOCAL if request.param == "local" else choose_stack()


@pytest.fixture
def best_fabric_stack() -> Stack:
    return choose_stack()


def choose_stack() -> Stack:
    try:
        chosen = native.library()
    except native.FabricError as error:
        pytest.skip(str(error))
    return Stack(chosen["path"], "auto", chosen["version"])


@dataclass
class Pair:
    """A writer here and a reader in another process, linked by one endpoint on each side."""

    writer: Node
    reader: RemoteNode
    to_reader: int  # the writer's endpoint
    from_writer: int  # the reader's


class NodeFactory:
    def __init__(self) -> None:
        self.local: list[Node] = []
        self.remote: list[RemoteNode] = []

    def here(self, stack: Stack, num_pages: int, bind: list[str], **options: Any) -> Node:
        node = Node(stack.library, stack.provider, bind, num_pages, **options)
        self.local.append(node)
        return node

    def there(self, stack: Stack, num_pages: int, bind: list[str], **options: Any) -> RemoteNode:
        node = spawn(stack.library, stack.provider, bind, num_pages, **options)
        self.remote.append(node)
        return node

    def close(self) -> None:
        for node in self.remote:
            node.stop()
        for local in self.local:
            local.close()


@pytest.fixture
def nodes() -> Iterator[NodeFactory]:
    factory = NodeFactory()
    yield factory
    factory.close()


def link(writer: Any, reader: Any) -> tuple[int, int]:
    """Opens an endpoint on each side and introduces them; returns (writer's, reader's)."""
    ours, theirs = writer.open(), reader.open()
    writer.connect(ours, reader.describe(theirs))
    reader.connect(theirs, writer.describe(ours, False))
    return ours, theirs


@pytest.fixture
def make_pair(nodes: NodeFactory) -> Callable[..., Pair]:
    def make(stack: Stack, num_pages: int = 256, bind: list[str] | None = None, **options: Any) -> Pair:
        where = bind or ["127.0.0.1"]
        reader = nodes.there(stack, num_pages, where)
        writer = nodes.here(stack, num_pages, where, **options)
        writer.fill(1)
        ours, theirs = link(writer, reader)
        return Pair(writer, reader, ours, theirs)

    return make


@pytest.fixture
def pair(stack: Stack, make_pair: Callable[..., Pair]) -> Pair:
    return make_pair(stack)
