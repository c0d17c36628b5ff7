"""Versions of what is installed beside pdd, without importing any of it: torch takes two seconds."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_DRIVER = Path("/sys/module/nvidia/version")


def torch_and_cuda(directory: Path | None = None) -> tuple[str | None, str | None]:
    """The version of torch, and of the CUDA that it was built for; None for what is not there.

    `directory`: torch's own; None is the one that would be imported.
    """
    if directory is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None, None
        directory = Path(spec.origin).parent
    try:
        text = (directory / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None, None
    return _assigned("__version__", text), _assigned("cuda", text)


def _assigned(name: str, text: str) -> str | None:
    match = re.search(rf"^{name}\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.M)
    return match[1] if match else None


def driver(path: Path = _DRIVER) -> str | None:
    """The version of NVIDIA's kernel driver; None where it is not loaded."""
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None
