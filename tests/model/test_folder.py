"""A model folder that cannot be served says what is wrong with it and what to do, before anything is loaded."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdd.errors import ConfigError, ModelError
from pdd.model.folder import check_context, check_folder

_NOBODY = 65534


@pytest.fixture
def folder(tiny_model: Path) -> Iterator[Path]:
    """A copy that others may reach, wherever pytest keeps its own files."""
    with tempfile.TemporaryDirectory(prefix="pdd-") as directory:
        os.chmod(directory, 0o755)
        copy = Path(directory) / "model"
        shutil.copytree(tiny_model, copy)
        copy.chmod(0o755)
        yield copy


@contextlib.contextmanager
def as_somebody_else() -> Iterator[None]:
    """Modes mean nothing to root."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


CASES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no folder": (shutil.rmtree, "does not exist", "Set model.path"),
    "a file": (lambda folder: (shutil.rmtree(folder), folder.write_text("x")), "is a file, not a model folder", "Set model.path"),
    "no config.json": (lambda folder: (folder / "config.json").unlink(), "config.json is missing", "Set model.path"),
    "no weights": (lambda folder: weights(folder).unlink(), "holds no *.safetensors file", "pdd model import"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing", "fast tokenizer"),
    "a closed folder": (lambda folder: folder.chmod(0), "cannot be read: Permission denied", "The user of the daemon"),
    "a closed config": (lambda folder: (folder / "config.json").chmod(0), "config.json cannot be read", "The user of the daemon"),
    "closed weights": (lambda folder: weights(folder).chmod(0), "model.safetensors cannot be read", "The user of the daemon"),
    "torn weights": (lambda folder: os.truncate(weights(folder), 5), "not a safetensors file", "copy the checkpoint again"),
    "torn config": (lambda folder: (folder / "config.json").write_text("{"), "is not JSON", "Copy the checkpoint again"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_with_a_folder_is_e781_and_says_what_to_do(folder: Path, case: str) -> None:
    spoil, message, hint = CASES[case]
    spoil(folder)
    with as_somebody_else(), pytest.raises(ModelError) as caught:
        check_folder(folder)
    assert (caught.value.id, caught.value.exit_code) == ("E781", 78)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_a_whole_folder_says_how_long_its_contexts_may_be(folder: Path) -> None:
    with as_somebody_else():
        assert check_folder(folder) == 4096
    check_context(4096, 4096)
    check_context(0, 4096)
    with pytest.raises(ConfigError, match="4097 is more than the 4096"):
        check_context(4097, 4096)
