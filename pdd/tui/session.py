"""What is known of all nodes while a program looks at them: takes the news of an inbox into the nodes' states, and into a
recording. Pure but for the recording."""

from __future__ import annotations

from collections.abc import Sequence

from pdd.tui.feed import News
from pdd.tui.node import NodeState
from pdd.tui.recording import Recorder


class Session:
    """Owner: the thread that takes the news."""

    def __init__(self, labels: Sequence[str], recorder: Recorder | None = None) -> None:
        self.nodes = {label: NodeState(label if len(labels) > 1 else "") for label in labels}
        self._recorder = recorder

    def take(self, news: Sequence[News], now: float) -> None:
        for each in news:
            node = self.nodes[each.label]
            if each.line is not None:
                node.apply(each.line, now)
            elif each.error is not None:
                node.lose(each.error.message)
            if self._recorder is not None:
                self._recorder.add(each)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
