"""What the daemon implements for the control server."""

from __future__ import annotations

from typing import Any, Protocol

from pdd.control.schema import (
    Cancelled,
    Logs,
    Peers,
    Request,
    Requests,
    Stacks,
    Status,
    TransferList,
    Version,
    Waterfall,
)
from pdd.control.schema_check import CheckReport, Comparison, Ping, Reload
from pdd.control.stories import Explain, Flight


class StatusSource(Protocol):
    """Called on the main loop, where each call returns at once; those that are awaited, within seconds."""

    def status(self) -> Status: ...

    def version(self) -> Version: ...

    def requests(self) -> Requests: ...

    def request(self, wanted: str) -> Request:
        """One request, live or lately finished, in detail. `wanted`: any form of its id, or a prefix of one.

        Raises NoSuchRequest, AmbiguousRequest.
        """

    async def explain(self, wanted: str) -> Explain:
        """The whole story of one request, with what its prefillers say. `wanted` and errors as of `request`."""

    def waterfall(self) -> Waterfall:
        """Of the latest transfer that this node sent; its id is "" before there was any."""

    async def flight(self) -> Flight:
        """What the flight recorder holds."""

    def peers(self) -> Peers: ...

    def transfers(self) -> TransferList: ...

    def topology(self) -> dict[str, Any]:
        """A pdd.topology/1 document (pdd.topology.report.document): of the machine as it was when the node started, with
        what the node chose."""

    def config(self) -> dict[str, Any]:
        """A pdd.config/1 document (pdd.config_load.explained)."""

    def logs(self, since: int) -> Logs:
        """The log records kept after number `since`."""

    def metrics_text(self) -> str: ...

    async def reload(self, dry_run: bool) -> Reload:
        """Reads the settings again. May take a second. Raises ConfigError, ModelError, RefusedInState."""

    async def ping(self, peer: str, count: int) -> Ping:
        """`peer`: its name or address. Raises NoSuchPeer, RefusedInState, TimedOut."""

    async def compare(self, peer: str) -> Comparison:
        """As `ping`; raises PeerError, too."""

    async def check(self) -> CheckReport:
        """What the daemon sees of itself and its machine. May take a second."""

    def stacks(self) -> Stacks:
        """Raises AccessDenied where debug.allow_stacks is false."""

    def drain(self, timeout: float | None) -> None:
        """Starts to drain; again while draining only moves the deadline. Raises RefusedInState when it cannot."""

    def resume(self) -> None:
        """Takes new work again, if it did not. Raises RefusedInState when it cannot."""

    def cancel(self, wanted: str) -> Cancelled:
        """Ends the live choices of one request as if its client had left. Raises as `request` does."""
