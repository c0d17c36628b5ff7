"""The documents of `pdd check`, of a reload and of one peer. See schema.py for what all documents have in common."""

from __future__ import annotations

from typing import Any

import msgspec


class Ping(msgspec.Struct, frozen=True, kw_only=True):
    """Round trips over the link to one peer."""

    schema: str = "pdd.ping/1"
    peer: str
    address: str
    via: str
    round_trips_seconds: tuple[float, ...]


class ComparedField(msgspec.Struct, frozen=True, kw_only=True):
    field: str
    ours: str
    theirs: str
    matters: bool  # the two cannot work together for it


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the handshake that differ between this node and a peer."""

    schema: str = "pdd.compare/1"
    peer: str
    address: str
    compatible: bool
    fields: tuple[ComparedField, ...] = ()


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """One check of `pdd check`."""

    id: str  # stable; pdd-errors(7)
    group: str
    title: str
    level: str  # pass, warn, fail; skip: it does not apply, or cannot be known
    message: str
    observed: Any = None
    expected: Any = None
    fix: tuple[str, ...] = ()


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "pdd.check/1"
    checks: tuple[CheckResult, ...] = ()


class ChangedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """Values as TOML has them."""

    key: str
    old: Any  # that the node runs with
    new: Any  # that its sources have now


class Reload(msgspec.Struct, frozen=True, kw_only=True):
    """What a reload did, or would do."""

    schema: str = "pdd.reload/1"
    dry_run: bool = False
    applied: tuple[ChangedSetting, ...] = ()
    needs_restart: tuple[ChangedSetting, ...] = ()
    reread: tuple[str, ...] = ()  # settings whose credential file holds something else than before; it is in force
