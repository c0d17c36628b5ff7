"""Runs a node until it is told to stop: signals, drain, systemd, exit code.

SIGTERM and SIGINT drain: no new work, what runs finishes (at most drain.timeout), exit 0; a second one exits now. A node
that cannot start says why in one line and exits with the code of that failure; a rank that dies ends it with 75.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import signal
from typing import Any

from pdd import sdnotify
from pdd.config import Config
from pdd.daemon.node import Node
from pdd.errors import EXIT_OK, RequestCancelled

_log = logging.getLogger("pdd")
_DRAIN_MARGIN_SECONDS = 30.0  # what systemd is told beyond the drain itself


def run(config: Config, *, demo: bool = False) -> int:
    """Serves until stopped; returns the exit code. `demo`: a tiny random model instead of model.path.

    Raises:
        PddError: the node cannot start, or a rank died.
    """
    faulthandler.enable()  # SIGABRT of systemd's watchdog leaves the stacks in the journal
    return asyncio.run(_serve(config, demo=demo))


async def _serve(config: Config, *, demo: bool) -> int:
    node = Node(config, demo=demo)
    stop, now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _signalled, stop, now)
    start: asyncio.Future[None] = asyncio.create_task(node.start(), name="start")
    wanted = asyncio.create_task(stop.wait(), name="stop")
    watchdog = asyncio.create_task(_watch(node), name="watchdog")
    try:
        await asyncio.wait(_any(start, wanted, node.failed), return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            sdnotify.notify("READY=1", f"STATUS={node.summary()}")
            await asyncio.wait(_any(wanted, node.failed), return_when=asyncio.FIRST_COMPLETED)
        if node.failed.done():
            raise node.failed.result()
        if start.done():
            await _drain(node, config.drain.timeout, now)
        return EXIT_OK
    finally:
        sdnotify.notify("STOPPING=1")
        for task in (start, wanted, watchdog):
            task.cancel()
        for task in (start, wanted, watchdog):
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        await node.close()


def _any(*futures: asyncio.Future[Any]) -> set[asyncio.Future[Any]]:
    return set(futures)


def _signalled(stop: asyncio.Event, now: asyncio.Event) -> None:
    if stop.is_set():
        now.set()
    stop.set()


async def _drain(node: Node, timeout: float, now: asyncio.Event) -> None:
    """Ends all work: by waiting for it, else, after `timeout` or a second signal, by failing it."""
    sdnotify.notify(f"EXTEND_TIMEOUT_USEC={int((timeout + _DRAIN_MARGIN_SECONDS) * 1e6)}", "STATUS=draining")
    _log.info("draining: %d requests open, %d pushes; a second signal exits now", *node.open_work())
    node.drain()
    quiet = asyncio.create_task(node.quiet())
    hurry = asyncio.create_task(now.wait())
    done, _ = await asyncio.wait(_any(quiet, hurry, node.failed), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if quiet not in done:
        quiet.cancel()
        why = "told twice" if now.is_set() else f"drain.timeout = {timeout:g} s is over"
        _log.warning("%s: %d requests and %d pushes are given up", why, *node.open_work())
        node.give_up(RequestCancelled("this node is shutting down", hint="try again; another node will answer"))


async def _watch(node: Node) -> None:
    """Tells systemd that the engine makes progress, and nothing when it does not."""
    period = sdnotify.watchdog_seconds()
    if period is None:
        return
    while True:
        if node.health().live:
            sdnotify.notify("WATCHDOG=1", f"STATUS={node.summary()}")
        await asyncio.sleep(period / 3)
