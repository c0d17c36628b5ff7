"""The certificate and key of the HTTP port.

Who renews a certificate restarts the node, or ends TLS in the proxy before it: what was read at the start stays.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from pdd.errors import ConfigError


def server_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """TLS 1.2 and later, of the chain in `certificate` and the key in `key`, else in the same file; both PEM.

    Raises:
        ConfigError: they cannot be read, or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = f"{certificate} and {key}" if key else f"{certificate}"
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except ssl.SSLError as error:
        reason = {"KEY_VALUES_MISMATCH": "the key is of another certificate"}.get(error.reason or "", "")
        raise ConfigError(
            f"no PEM certificate with its key can be read from {files}" + (f": {reason}" if reason else ""),
            hint="the chain goes into api.tls_cert, leaf first, the key without a passphrase into api.tls_key",
        ) from None
    except OSError as error:
        raise ConfigError(f"{files} cannot be read: {error.strerror}") from None
    return context


def _no_passphrase() -> str:
    """OpenSSL would ask the terminal for one."""
    return ""
