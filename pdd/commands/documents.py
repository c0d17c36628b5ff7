"""The documents that commands print and no daemon answers, for the JSON Schemas in docs/api alone.

The commands build them as plain dictionaries, because `pdd status` must start without msgspec; a test holds the two
together.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Error(msgspec.Struct, frozen=True, kw_only=True):
    """On stderr, with --json."""

    schema: str = "pdd.error/1"
    id: str
    message: str
    hint: str
    docs: str


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Of the client, and of the daemon where there is one."""

    schema: str = "pdd.version/1"
    client: str
    daemon: str | None
    api: str | None
    name: str | None = None
    boot_id: str | None = None


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    value: Any
    origin: str  # default, FILE:LINE:COLUMN, env VARIABLE, or a flag


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """By section.key."""

    schema: str = "pdd.config/1"
    settings: dict[str, Setting]


class ConfigProblem(msgspec.Struct, frozen=True, kw_only=True):
    file: str | None
    line: int | None
    column: int | None
    key: str  # a list's entry has its number, from 0: peers.static[1]
    message: str
    suggestion: str | None
    level: Literal["error", "warning"] = "error"  # a node starts in spite of a warning
    id: str = "E780"
    hint: str = ""


class ConfigCheck(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "pdd.config_check/1"
    file: str  # empty: the one that serve would read
    problems: tuple[ConfigProblem, ...]


class ModelImport(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "pdd.model_import/1"
    directory: str
    sha256: str


class TopologyExport(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "pdd.topology_export/1"
    path: str
    entries: int  # files and links in the archive
