"""Secrets from files: a path, or the bare name of a systemd credential. Their content is in no log and no document."""

from __future__ import annotations

import os
from pathlib import Path

from pdd.errors import ConfigError


def read_token(credential: str, key: str) -> bytes | None:
    """The one secret in the file that config key `key` names; None when no file is named."""
    lines = read_lines(credential, key)
    if not lines:
        return None
    if len(lines) > 1:
        raise ConfigError(f"{key}: {credential} has {len(lines)} lines where one token is expected")
    return lines[0].encode()


def read_lines(credential: str, key: str) -> tuple[str, ...]:
    """The lines of the file, without blank ones and comments (#)."""
    if not credential:
        return ()
    path = Path(credential)
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    if "/" not in credential and directory:
        path = Path(directory) / credential
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(
            f"{key}: {path} cannot be read: {reason}", hint="a bare name is looked up in $CREDENTIALS_DIRECTORY (systemd)"
        ) from None
    lines = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    if not lines:
        raise ConfigError(f"{key}: {path} is empty")
    return lines
