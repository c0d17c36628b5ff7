"""Fixtures of the GPU tests: the same tests run on a fake driver, in every suite, and on a GPU, with `-m cuda`."""

from __future__ import annotations

import pathlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("pdd.fabric._native")

from tests.fabric.conftest import Stack, find_stack, link
from tests.fabric.fabric_node import PAGE, RemoteNode
from tests.gpu.gpu_node import spawn

HAS_GPU = pathlib.Path("/dev/nvidiactl").exists()
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU its tests are left out, unless they were asked for: then they fail."""
    if HAS_GPU or "cuda" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("cuda")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The directory of a libcuda.so.1 that needs no GPU."""
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "no C++ compiler, which building pdd needs too"
    directory = tmp_path_factory.mktemp("fake_cuda")
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{REPOSITORY / 'native'}",
         "-o", str(directory / "libcuda.so.1"), str(REPOSITORY / "tests/native/fake_cuda.cpp")],
        check=True,
    )
    return directory


@dataclass
class Gpu:
    """A driver, and the processes that a test starts on it."""

    environment: dict[str, str]
    stack: Stack
    running: list[RemoteNode] = field(default_factory=list)

    def node(self, num_pages: int = 64, **options: Any) -> RemoteNode:
        return self._start("node", self.stack.library, self.stack.provider, num_pages, **options)

    def rank(self, num_pages: int = 64, **options: Any) -> RemoteNode:
        return self._start("rank", num_pages, **options)

    def _start(self, kind: str, *args: Any, **options: Any) -> RemoteNode:
        started = spawn(kind, self.environment, *args, **options)
        self.running.append(started)
        return started

    def pair(self, num_pages: int = 64, **options: Any) -> GpuPair:
        writer, reader = self.node(num_pages, **options), self.node(num_pages)
        writer.fill(1)
        ours, theirs = link(writer, reader)
        return GpuPair(writer, reader, ours, theirs, reader.call("imm_allocate", theirs))


@dataclass
class GpuPair:
    """Two nodes with GPU memory, linked; `key` is the reader's."""

    writer: RemoteNode
    reader: RemoteNode
    to_reader: int
    from_writer: int
    key: int


@pytest.fixture
def fake_gpu(fake_driver: pathlib.Path) -> Iterator[Gpu]:
    gpu = Gpu({"LD_LIBRARY_PATH": str(fake_driver)}, find_stack("mpich-wheel", "tcp"))
    yield gpu
    for process in gpu.running:
        process.stop()


@pytest.fixture
def real_gpu() -> Iterator[Gpu]:
    assert HAS_GPU, "no NVIDIA GPU on this machine (no /dev/nvidiactl)"
    gpu = Gpu({}, find_stack("mpich-wheel", "tcp"))
    yield gpu
    for process in gpu.running:
        process.stop()


@pytest.fixture(params=["fake_gpu", pytest.param("real_gpu", marks=pytest.mark.cuda)])
def gpu(request: pytest.FixtureRequest) -> Gpu:
    """Both drivers."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Gpu)
    return found


def handed_over(rank: RemoteNode, ours: socket.socket, theirs: socket.socket) -> int:
    """The descriptor of the rank's memory, by SCM_RIGHTS."""
    rank.hand_over(theirs.fileno())
    theirs.close()
    _, fds, _, _ = socket.recv_fds(ours, 16, 1)
    return fds[0]


__all__ = ["PAGE", "Gpu", "GpuPair", "handed_over"]
