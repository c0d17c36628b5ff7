"""What a picture is made from: the nodes' states, the clocks, and what the operator chose to see. All of it frozen, but
for the states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pdd.tui.node import NodeState
from pdd.units import show_bytes

_MISSED_LINES = 3
TABS = ("overview", "transfers", "requests", "topology", "logs")


@dataclasses.dataclass(frozen=True, slots=True)
class TableChoice:
    """How one table is shown."""

    cursor: str | None = None  # id of the row; None: the first, in a log the last
    sort: str = ""  # column; "" is the table's own order
    reverse: bool = False
    filter: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """A question before something is changed: the name must be typed."""

    what: str  # cancel, drain
    node: str  # label
    name: str  # id of the request, name of the node
    typed: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """Everything that keys change."""

    tab: str = "overview"
    tables: Mapping[str, TableChoice] = dataclasses.field(default_factory=dict)  # by tab
    focus: str = ""  # label of the only node that is shown; "" shows all
    typing: str | None = None  # a filter that is being typed
    drawer: bool = False
    findings: bool = False
    waterfall: str = ""  # id of the request whose transfer is drawn
    help: bool = False
    problems: bool = False
    bits: bool = False  # rates in bits
    paused: bool = False
    scroll: int = 0  # lines, of help, drawer, findings and topology
    ask: Ask | None = None
    notice: str = ""  # what the last key did
    admin: bool = False

    @property
    def table(self) -> TableChoice:
        return self.tables.get(self.tab, TableChoice())

    def with_table(self, **members: object) -> View:
        """With another choice for the table of this tab."""
        changed = dataclasses.replace(self.table, **members)  # type: ignore[arg-type]
        return dataclasses.replace(self, tables={**self.tables, self.tab: changed})

    def rate(self, bytes_per_second: float | None) -> str:
        if bytes_per_second is None:
            return "-"
        return show_bytes(bytes_per_second * 8, "b/s") if self.bits else show_bytes(bytes_per_second, "B/s")


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """Everything a picture depends on."""

    nodes: tuple[NodeState, ...]
    now: float  # same clock as NodeState.updated
    clock: str  # wall clock, as shown
    interval: float  # seconds between two lines of a stream
    patience: float = 0.0  # how long the next line may take when a longer interval was asked for before
    view: View = View()
    replay: str = ""  # how far a recording is played; "": the nodes are live

    @property
    def shown(self) -> tuple[NodeState, ...]:
        """The node that has the focus, else all."""
        return tuple(node for node in self.nodes if node.label == self.view.focus) or self.nodes

    @property
    def many(self) -> bool:
        return len(self.shown) > 1

    def age(self, node: NodeState) -> float | None:
        return None if node.updated is None else max(self.now - node.updated, 0.0)

    def is_old(self, node: NodeState) -> bool:
        """What is shown of it is not how it is: it is lost, or has missed some lines."""
        age = self.age(node)
        missed = age is not None and age > _MISSED_LINES * max(self.interval, self.patience)
        return not self.replay and (bool(node.lost) or (missed and self.is_stale(node)))

    def is_stale(self, node: NodeState) -> bool:
        age = self.age(node)
        expected = max(self.interval, self.patience)
        return age is not None and age > max(1.5 * expected, expected + 0.75)
