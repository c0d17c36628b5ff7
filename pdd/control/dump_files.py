"""Where an instance's dumps of the flight recorder lie and what they are called. Stdlib only; shared by client and server.

The daemon writes to one directory; a client, which does not know how a node was started, looks wherever it may have.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_PREFIX, _SUFFIX = "flight-", ".json.gz"
_NAME = r"[\w.-]+?"
_SYSTEM_LOG_DIR = Path("/var/log/pdd")  # LogsDirectory= of the unit is a directory below, by the node's name


def directory(instance_dir: Path, env: Mapping[str, str] = os.environ) -> Path:
    """Where the daemon of an instance writes. Under systemd: the first directory of LogsDirectory=."""
    logs = env.get("LOGS_DIRECTORY", "").partition(":")[0]
    return Path(logs) if logs else instance_dir


def directories(instance_dir: Path, env: Mapping[str, str] = os.environ) -> list[Path]:
    """Where an instance may have written."""
    return list(dict.fromkeys([instance_dir, _SYSTEM_LOG_DIR / instance_dir.name, directory(instance_dir, env)]))


def file_name(name: str, stamp: str) -> str:
    """Of a node's dump. `name`: of word characters, dots and dashes; `stamp`: as 20261201T043000123Z."""
    return f"{_PREFIX}{name}-{stamp}{_SUFFIX}"


def stem(path: Path) -> str:
    return path.name.removesuffix(_SUFFIX)


def kept(folder: Path, name: str = "") -> list[Path]:
    """The dumps in a directory, the oldest first; of one node, when it is named. None where it cannot be read."""
    ours = re.compile(rf"{_PREFIX}{re.escape(name) or _NAME}-(\d{{8}}T\d{{9}}Z){re.escape(_SUFFIX)}")
    try:
        found = [(match[1], path) for path in folder.iterdir() if (match := ours.fullmatch(path.name))]
    except OSError:
        return []
    return [path for _, path in sorted(found)]
