"""How an end of a connection proves that it holds the shared token, without saying it."""

from __future__ import annotations

import hashlib
import hmac

NONCE_BYTES = 32


def proof(token: bytes, label: bytes, own_nonce: bytes, peer_nonce: bytes) -> bytes:
    """`label`: of the protocol and the side that proves, so that no side's proof can be played back as another's."""
    return hmac.new(token, label + own_nonce + peer_nonce, hashlib.sha256).digest()
