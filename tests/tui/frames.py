"""Recorded events, and text frames that are compared with the ones kept in frames/.

`PDD_TEST_UPDATE_FRAMES=1` writes the frames anew; look at the difference before you commit it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pdd.tui import recording
from pdd.tui.node import NodeState
from pdd.tui.scene import Scene, View
from pdd.tui.session import Session

_HERE = Path(__file__).parent
PAIR = _HERE / "pair.ndjson"  # two prefillers and a decoder, written by `pdd top --record`


def recorded() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (_HERE / "events.ndjson").read_text().splitlines()]


def node_of(lines: Iterable[dict[str, Any]], label: str = "") -> NodeState:
    """The node after all `lines`; the clock is that of the line after the first."""
    node = NodeState(label)
    first = None
    for line in lines:
        first = line["ts_mono"] if first is None else first
        node.apply(line, line["ts_mono"] - first)
    return node


def scene_of(lines: Iterable[dict[str, Any]], age: float = 0.0, view: View | None = None) -> Scene:
    """The scene after all `lines`, seen `age` seconds later."""
    return scene(node_of(lines), age=age, view=view)


def scene(*nodes: NodeState, age: float = 0.0, view: View | None = None) -> Scene:
    now = max((node.updated for node in nodes if node.updated is not None), default=0.0)
    return Scene(nodes, now + age, "12:04:31", 1.0, view=view or View())


def pair(view: View | None = None) -> Scene:
    """The recorded pair as it was in the end."""
    session = Session(recording.labels(PAIR))
    at = 0.0
    for moment in recording.read(PAIR):
        at = moment.at
        session.take([moment.news], at)
    nodes: Sequence[NodeState] = tuple(session.nodes.values())
    return Scene(tuple(nodes), at, "12:04:31", 1.0, view=view or View())


def check_frame(name: str, text: str) -> None:
    path = _HERE / "frames" / f"{name}.txt"
    if os.environ.get("PDD_TEST_UPDATE_FRAMES"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text(), f"the picture differs from {path.name}"
