"""Tells the log when a node becomes ready for requests, and when it no longer is, with the reason: a line a change.

Whoever knows of a change says so at once; what nobody tells, as that a prefiller is silent, is found by looking now and
then. A start and a drain tell of themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

_log = logging.getLogger("pdd")


class Readiness:
    """Owner: the main loop."""

    def __init__(self, state: Callable[[], tuple[str, tuple[str, ...]]], role: str, address: str) -> None:
        """`state`: the word for `pdd status`, and why the node is not ready. `address`: where it answers HTTP."""
        self._state = state
        self._role = role
        self._address = address
        self._told: bool | None = None  # what the log said last

    def tell(self) -> None:
        """Nothing to do where nothing has changed."""
        state, reasons = self._state()
        is_ready = state == "ready"
        if not (is_ready or state == "not_ready") or is_ready is self._told:
            return
        if is_ready:
            _log.info("%s ready at %s", self._role, self._address)
        else:
            level = logging.INFO if self._told is None else logging.WARNING  # at first it is how a start goes
            _log.log(level, "%s not ready: %s", self._role, "; ".join(reasons))
        self._told = is_ready
