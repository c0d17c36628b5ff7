"""Versions of torch, CUDA and the driver are read, not imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pdd import installed

CPU = "__version__ = '2.13.0+cpu'\ndebug = False\ncuda: Optional[str] = None\ngit_version = 'abc'\n"
GPU = "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"


@pytest.mark.parametrize(("text", "told"), [(CPU, ("2.13.0+cpu", None)), (GPU, ("2.13.0", "13.0")), ("x = 1\n", (None, None))])
def test_torch_and_cuda(text: str, told: tuple[str | None, str | None], tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(text)
    assert installed.torch_and_cuda(tmp_path) == told
    assert installed.torch_and_cuda(tmp_path / "nowhere") == (None, None)


def test_the_torch_that_would_be_imported_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch" / "version.py").write_text(GPU)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert installed.torch_and_cuda() == ("2.13.0", "13.0")
    assert "torch" not in sys.modules


def test_driver(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("595.71.05\n")
    assert installed.driver(tmp_path / "version") == "595.71.05"
    assert installed.driver(tmp_path / "nowhere") is None
