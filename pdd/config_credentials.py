"""Secrets are never settings: a setting names the file that holds one, and here is how that file is found and read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import SecretStr

from pdd.config import Api
from pdd.config_load import ConfigProblems
from pdd.config_sources import Problem


def credential_path(name: str, env: Mapping[str, str] | None = None) -> Path:
    """The file of a credential: a path, or a bare name that LoadCredential= put under $CREDENTIALS_DIRECTORY."""
    directory = (os.environ if env is None else env).get("CREDENTIALS_DIRECTORY")
    return Path(directory) / name if directory and "/" not in name else Path(name)


def tls_files(api: Api) -> tuple[Path, Path | None] | None:
    """Certificate and key of the HTTP port, or None without TLS."""
    key = credential_path(api.tls_key) if api.tls_key else None
    return (credential_path(api.tls_cert), key) if api.tls_cert else None


def read_credential(name: str, key: str, env: Mapping[str, str] | None = None) -> tuple[SecretStr, ...]:
    """The non-empty lines of a credential file: none when `name` is empty.

    Args:
        name: a path, or a bare name that systemd's LoadCredential= put under $CREDENTIALS_DIRECTORY.
        key: the setting that names it, for the message.
    Raises:
        ConfigProblems: it cannot be read or is empty. The content is never shown.
    """
    if not name:
        return ()
    path = credential_path(name, env)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigProblems([Problem("", key, f"{path} cannot be read: {reason}")]) from None
    if not lines:
        raise ConfigProblems([Problem("", key, f"{path} is empty")])
    return tuple(SecretStr(line) for line in lines)
