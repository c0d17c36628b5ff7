from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster import die_with_parent
from tests.control import fake_daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[fake_daemon.Running]:
    with fake_daemon.running(tmp_path / "run") as running:
        yield running


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a fake daemon as a process of its own and waits until it answers."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, fake_daemon.__file__, str(tmp_path / "run"), name]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            preexec_fn=die_with_parent,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "up"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def pdd(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command as a user would, on this test's run directory."""

    def run(*words: str, env: dict[str, str] | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PDD_")}
        clean |= {"HOME": str(tmp_path), "PYTHONWARNINGS": "ignore", **(env or {})}
        command = [sys.executable, "-m", "pdd.cli", "--run-dir", str(tmp_path / "run"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=clean, check=False)

    return run
