"""Recorded events, and text frames that are compared with the ones kept in frames/.

`PDD_TEST_UPDATE_FRAMES=1` writes the frames anew; look at the difference before you commit it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pdd.tui.rates import History
from pdd.tui.view import Scene

_HERE = Path(__file__).parent


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (_HERE / "events.ndjson").read_text().splitlines()]


def scene_of(lines: list[dict[str, Any]], age: float = 0.0) -> Scene:
    """The scene after all `lines`, seen `age` seconds later."""
    history = History()
    for second, line in enumerate(lines):
        history.apply(line, float(second))
    return Scene(history, len(lines) - 1 + age, "12:04:31", 1.0)


def check_frame(name: str, text: str) -> None:
    path = _HERE / "frames" / f"{name}.txt"
    if os.environ.get("PDD_TEST_UPDATE_FRAMES"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text(), f"the picture differs from {path.name}"
