"""Gives changed settings to a running node: each to its one owner, and says which of them wait for a restart.

    read the same sources again -> refuse all of it for any mistake -> apply what is live -> tell the rest

What is live is marked in the config model (`config.LIVE`), and APPLY has an entry for each such setting and for no other. A
setting that needs a restart keeps its old value in `node.config`, so the next reload tells of it again. Of the files that
settings name, those with API keys and the token of peers are read again, all or none; certificate and model are not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from pdd import config as model
from pdd import log, open_files, sdnotify
from pdd.config import Config
from pdd.config_load import Origins, explained
from pdd.control import schema_check
from pdd.daemon.reach import addresses_towards, choose_source, mixed_families
from pdd.errors import ConfigError, LimitError, PddError, RefusedInState

if TYPE_CHECKING:
    from pdd.daemon.node import Node

Reread = Callable[[], tuple[Config, Origins]]  # raises ConfigError, ModelError

_CLIENTS = "top."  # settings of a client, which reads them at each start
_log = logging.getLogger("pdd")


def changes(old: Config, new: Config) -> list[str]:
    """The keys, in the order of the file, that the two differ in and a node reads."""
    before, after = model.values(old), model.values(new)
    return [key for key in before if before[key] != after[key] and not key.startswith(_CLIENTS)]


def taken_over(old: Config, new: Config, keys: list[str]) -> Config:
    """`old` with the values that `new` has for `keys`."""
    sections = {key.split(".")[0] for key in keys}
    return old.model_copy(update={
        section: getattr(old, section).model_copy(update={
            key.split(".")[1]: getattr(getattr(new, section), key.split(".")[1])
            for key in keys if key.startswith(f"{section}.")
        })
        for section in sections
    })


class Reloader:
    """Owner: the main loop."""

    def __init__(self, node: Node, reread: Reread) -> None:
        """`reread` reads what the node was started with, and is called on a thread."""
        self._node = node
        self._reread = reread
        self._one_at_a_time = asyncio.Lock()
        self._soon: set[asyncio.Task[None]] = set()

    async def reload(self, *, dry_run: bool = False) -> schema_check.Reload:
        """What has changed, applied unless `dry_run`.

        Raises:
            ConfigError, ModelError: every mistake of all sources; nothing was changed.
            RefusedInState: the node is still starting.
        """
        async with self._one_at_a_time:
            node = self._node
            if node.phase.name != "serve":
                raise RefusedInState("the node is still starting", hint="`pdd status --wait ready` tells when it is done.")
            if not dry_run:
                sdnotify.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
            try:
                return await self._reload(dry_run)
            finally:
                if not dry_run:
                    sdnotify.notify("READY=1", f"STATUS={node.view.summary()}")

    def reload_soon(self) -> None:
        """For whoever asks by a signal, and hears of it in the log alone."""
        task = asyncio.create_task(self._reload_and_log(), name="reload")
        self._soon.add(task)
        task.add_done_callback(self._soon.discard)

    async def _reload_and_log(self) -> None:
        try:
            await self.reload()
        except PddError as error:
            for line in str(error).splitlines():
                _log.error("reload refused, nothing has changed: %s [%s]", line, error.id)
        except Exception:
            _log.exception("reload failed")

    async def _reload(self, dry_run: bool) -> schema_check.Reload:
        node = self._node
        new, origins = await asyncio.to_thread(self._reread)
        await asyncio.to_thread(self._check_reach, new)
        credentials = await asyncio.to_thread(node.credentials.again, node.config, new)
        keys = changes(node.config, new)
        live = [key for key in keys if key in APPLY]
        after = taken_over(node.config, new, live)
        if after.peers.static != node.config.peers.static:
            _require_files(after)
        document = _document(node.config, new, live, [key for key in keys if key not in APPLY], dry_run)
        document = msgspec.structs.replace(document, reread=node.credentials.changed(credentials))
        if dry_run:
            return document
        node.take_credentials(credentials)
        node.config = after
        node.origins = {**node.origins, **{key: origins[key] for key in live}}
        for apply in dict.fromkeys(APPLY[key] for key in live):
            apply(node)
        _log.info("reload: %s", summary(document))
        return document

    def _check_reach(self, new: Config) -> None:
        """New prefillers must reach the fabric that this node has opened. Raises ConfigError."""
        fabric, old = self._node.fabric, self._node.config
        if new.peers.static == old.peers.static or fabric is None or fabric.provider != "tcp" or old.fabric.bind:
            return
        towards, before = addresses_towards(new), choose_source(addresses_towards(old))
        why = mixed_families(towards)
        if not why and towards and choose_source(towards) != before:
            why = f"peers.static: it is reached from {choose_source(towards)}, and the fabric of this node is at {before}"
        if why:
            raise ConfigError(why, hint="Restart the node for that, or set fabric.bind.")


def _require_files(new: Config) -> None:
    """As many prefillers must have their connections. Raises ConfigError."""
    try:
        open_files.require(new, open_files.soft_limit())
    except LimitError as error:
        raise ConfigError(f"peers.static: {error.message}", hint=f"Name fewer, or restart the node: {error.hint}.") from None


def _document(old: Config, new: Config, live: list[str], rest: list[str], dry_run: bool) -> schema_check.Reload:
    before, after = (explained(each, {})["settings"] for each in (old, new))

    def told(keys: list[str]) -> tuple[schema_check.ChangedSetting, ...]:
        return tuple(schema_check.ChangedSetting(key=key, old=before[key]["value"], new=after[key]["value"]) for key in keys)

    return schema_check.Reload(dry_run=dry_run, applied=told(live), needs_restart=told(rest))


def summary(document: schema_check.Reload) -> str:
    """applied: log.level; needs restart: kv.page_size"""
    parts = [("applied", document.applied), ("needs restart", document.needs_restart)]
    told = [f"{word}: {', '.join(each.key for each in found)}" for word, found in parts if found]
    told += [f"read again: the file of {', '.join(document.reread)}"] if document.reread else []
    return "; ".join(told) or "nothing has changed"


# -- the owners --------------------------------------------------------------------------------------------------------
def _bounds(node: Node) -> None:
    node.service.set_bounds(node.config.scheduler.max_queue, node.config.scheduler.request_timeout)


def _queues(node: Node) -> None:
    _bounds(node)
    for group in node.groups:
        if group.loop is not None:
            group.loop.set_queue(node.config.scheduler.max_queue, node.config.scheduler.queue_timeout)


def _decoder(node: Node) -> None:
    if node.decoder is not None:
        node.decoder.set(node.decoder_settings())


def _members(node: Node) -> None:
    node.take_peers()


def _level(node: Node) -> None:
    log.set_level(node.config.log.level)


def _drain(node: Node) -> None:
    node.drain.set_timeout(node.config.drain.timeout)


def _prompts(node: Node) -> None:
    node.ledger.keep_prompts(node.config.debug.show_prompts)


def _nobody(node: Node) -> None:
    """It is read from `node.config` where it is needed."""


APPLY: dict[str, Callable[[Node], None]] = {
    "scheduler.max_queue": _queues,
    "scheduler.queue_timeout": _queues,
    "scheduler.request_timeout": _bounds,
    "scheduler.local_prefill_tokens": _nobody,
    "scheduler.local_prefill_fallback": _decoder,
    "peers.static": _members,
    "peers.prefill_stall_timeout": _decoder,
    "peers.max_attempts": _decoder,
    "log.level": _level,
    "drain.timeout": _drain,
    "debug.show_prompts": _prompts,
    "debug.allow_stacks": _nobody,
}
