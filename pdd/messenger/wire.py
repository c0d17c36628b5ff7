"""The messages of a peer link, and their frames.

    frame = u32 length (big endian, at most MAX_FRAME_BYTES) | msgpack map with a "type" tag

A link is one TCP connection from decoder to prefiller. It goes through: Greeting both ways, Proof both ways (when a token is
configured), Hello both ways, then anything below. Nothing about memory is said before the Proof. There is no message for
success: the decoder counts units.

One link owns one fabric endpoint on each side. A link that ends, for whatever reason, closes its endpoint, and a closed
endpoint is the fence: no write of this peer lands any more.
"""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 << 20


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    """First frame of each side. Field `protocol` is compared before anything else is decoded."""

    protocol: int
    nonce: bytes  # 32 random bytes
    authenticated: bool  # whether a shared token is configured; both must agree


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """HMAC-SHA256(token, label | own nonce | peer nonce); label tells the two directions apart."""

    mac: bytes


class Geometry(msgspec.Struct, frozen=True):
    """Everything that must fit between two nodes, compared field by field at the handshake."""

    model: str  # fingerprint of config and weights
    dtype: str
    num_layers: int
    num_kv_heads: int  # of the whole model, before sharding
    head_dim: int
    page_size: int
    tp: int
    num_pages: int  # of every rank; bounds check, need not be equal
    vocab_size: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    name: str
    role: str
    epoch: int  # random u64 of this life of the node
    provider: str
    geometry: Geometry
    descriptor: bytes  # Fabric.describe: endpoint of this link and KV regions, one per rank
    version: str  # of pdd, for the log


class PrefillRequest(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute the KV of `tokens` and write it to `pages`; every write carries `key`."""

    key: int  # 24 bits, unique among the live attempts of this link
    epoch: int  # the decoder's: a request meant for an earlier life is refused
    tokens: bytes  # u32 little endian each
    pages: bytes  # u32 little endian each, destination pages in token order
    skip_tokens: int
    request_id: str  # the decoder's, for logs and `explain`


class PrefillEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The attempt did not complete. Sent once, when every posted write is terminal. Answers a Cancel too.

    The decoder frees the pages when unknown == 0 and its own count equals ok_units; else it fences the link.
    """

    key: int
    reason: str  # "cancelled", "refused", "failed"
    message: str
    ok_units: int = 0
    failed_units: int = 0
    unknown_units: int = 0
    retryable: bool = True


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop working for `key`. May overtake its request: the prefiller keeps a tombstone. Idempotent."""

    key: int


class Load(msgspec.Struct, frozen=True):
    queued_tokens: int = 0
    running: int = 0
    free_pages: int = 0


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    seq: int
    load: Load
    draining: bool = False
    progress: tuple[tuple[int, int], ...] = ()  # (key, tokens computed) of attempts in hand, queued ones as 0
    echo: int = 0  # seq of the last heartbeat received, for the round-trip time


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The sender closes the link on purpose and says why (drain, incompatible, protocol error)."""

    reason: str


Message = Greeting | Proof | Hello | PrefillRequest | PrefillEnded | Cancel | Heartbeat | Goodbye
