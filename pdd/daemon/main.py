"""Runs a node until it is told to stop: signals, drain, systemd, exit code.

SIGHUP reloads the settings, unless it comes because the terminal is gone. SIGTERM and SIGINT drain: no new work, what runs
finishes (at most drain.timeout), exit 0; a second one exits now. A node that cannot start says why in one line and exits
with the code of that failure; a rank that dies ends it with 75.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import time
from typing import Any

from pdd import sdnotify
from pdd.config import Config
from pdd.config_load import Origins
from pdd.daemon.node import Node
from pdd.daemon.reload import Reread
from pdd.daemon.watchdog import Watchdog
from pdd.errors import EXIT_OK

_log = logging.getLogger("pdd")
_MARGIN_SECONDS = 10.0  # more time that systemd is asked for
_STATUS_SECONDS = 2.0


def run(config: Config, origins: Origins, *, demo: bool = False, reread: Reread) -> int:
    """Serves until stopped; returns the exit code. `demo`: a tiny random model instead of model.path. `reread`: the settings
    again, for a reload.

    Raises:
        PddError: the node cannot start, or a rank died.
    """
    faulthandler.enable()  # SIGABRT of systemd's watchdog leaves the stacks in the journal
    return asyncio.run(_serve(config, origins, demo=demo, reread=reread))


async def _serve(config: Config, origins: Origins, *, demo: bool, reread: Reread) -> int:
    node = Node(config, origins, demo=demo, reread=reread)
    stop, now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _signalled, stop, now)
    loop.add_signal_handler(signal.SIGHUP, _hung_up, node, os.isatty(sys.stderr.fileno()), stop)
    start: asyncio.Future[None] = asyncio.create_task(node.start(), name="start")
    wanted = asyncio.create_task(stop.wait(), name="stop")
    systemd = asyncio.create_task(_tell_systemd(node), name="systemd")
    try:
        await asyncio.wait(_any(start, wanted, node.failed), return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            start.result()
            sdnotify.notify("READY=1", f"STATUS={node.view.summary()}")
            await asyncio.wait(_any(wanted, node.failed), return_when=asyncio.FIRST_COMPLETED)
        if node.failed.done():
            raise node.failed.result()
        if start.done():
            await _drain(node, node.config.drain.timeout, now)
    finally:
        sdnotify.notify("STOPPING=1")
        for task in (start, wanted, systemd):
            task.cancel()
        for task in (start, wanted, systemd):
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        await node.close()
    _log.info("stopped")  # a failure is told instead, by whoever exits with its code
    return EXIT_OK


def _any(*futures: asyncio.Future[Any]) -> set[asyncio.Future[Any]]:
    return set(futures)


def _signalled(stop: asyncio.Event, now: asyncio.Event) -> None:
    if stop.is_set():
        now.set()
    stop.set()


def _hung_up(node: Node, had_terminal: bool, stop: asyncio.Event) -> None:
    """A reload; but a node whose terminal was closed stops, as any program of that terminal."""
    if had_terminal and not os.isatty(sys.stderr.fileno()):
        stop.set()
        return
    node.reloader.reload_soon()


async def _drain(node: Node, timeout: float, now: asyncio.Event) -> None:
    """Ends all work: by waiting for it, else, after `timeout` or a second signal, by failing it."""
    sdnotify.notify(f"EXTEND_TIMEOUT_USEC={int((timeout + _MARGIN_SECONDS) * 1e6)}", "STATUS=draining")
    node.drain.begin(timeout, for_good=True)
    _log.info("a second signal exits now")
    quiet = asyncio.create_task(node.drain.quiet())
    hurry = asyncio.create_task(now.wait())
    await asyncio.wait(
        _any(quiet, hurry, node.failed), timeout=timeout + _MARGIN_SECONDS, return_when=asyncio.FIRST_COMPLETED
    )
    if now.is_set():
        node.drain.give_up("a second signal")
    quiet.cancel()
    hurry.cancel()


async def _tell_systemd(node: Node) -> None:
    """Tells systemd how the start goes, then that the engine makes progress, and nothing when it does not."""
    period = sdnotify.watchdog_seconds()
    pause = _STATUS_SECONDS if period is None else min(_STATUS_SECONDS, period / 3)
    watchdog = Watchdog(pause)
    while True:
        if not node.failed.done():
            node.readiness.tell()
        starting = node.phase.name != "serve"
        if starting:
            sdnotify.notify(f"EXTEND_TIMEOUT_USEC={int(_MARGIN_SECONDS * 1e6)}", f"STATUS={node.view.summary()}")
        config = node.config
        why = watchdog.look(time.monotonic(), node.view.turn_age(), config.engine.step_timeout, config.peers.dead_after)
        if starting or not (why or node.failed.done()):
            sdnotify.notify("WATCHDOG=1", f"STATUS={node.view.summary()}")
        await asyncio.sleep(pause)
