"""The messages of a peer link, and how they become bytes.

    frame = u32 length (big endian, at most MAX_FRAME_BYTES) | msgpack map with a "type" tag

A link is one TCP connection from decoder to prefiller. It goes through: Greeting both ways, Proof both ways (when a
token is configured), Hello both ways, then anything below. Nothing about memory is said before the Proof. There is no
message for success: the decoder counts units.

One link owns one fabric endpoint on each side. A link that ends, for whatever reason, closes its endpoint, and a
closed endpoint is the fence: no write of this peer lands any more.

An attempt is named by its number, which only grows and is never used twice in a decoder's life. Its key only tags
writes and may be reused for a later attempt as soon as nothing that carries it can arrive, while the other side still
tidies up.

Fields are added at the end, with a default that means what their absence meant before: unknown fields of a newer peer
are ignored, those that an older one does not send take their defaults, and a word of an enum that is not known here
reads UNKNOWN. A field whose being ignored would do harm needs a new version, and is sent only where the link's version
has it (`PeerLink.version`); so do new message types, new meanings and tighter bounds. A field of Geometry needs none:
both ends compare, so the newer of the two sees a misfit. DESIGN.md says the rest; a test holds the fields as they are.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

MAX_FRAME_BYTES = 16 << 20
MAX_HANDSHAKE_BYTES = 256 << 10  # no stranger makes us hold more

# Names and words of a peer end up in logs and on terminals: no line breaks, no escapes, no change of direction.
_ONE_LINE = r"^[^\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]*\Z"
ShortText = Annotated[str, msgspec.Meta(max_length=256, pattern=_ONE_LINE)]
LongText = Annotated[str, msgspec.Meta(max_length=4096)]  # through one_line() before anybody sees it
Key = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Greeting(msgspec.Struct, frozen=True, tag="greeting"):
    """First frame of each side. `protocol` and `oldest` are compared before anything else is decoded, so these two and
    the frame around them stay what they are in every version."""

    protocol: int  # the newest version that the sender speaks
    nonce: bytes  # 32 random bytes
    authenticated: bool  # whether a shared token is configured; both must agree
    oldest: Count = 0  # version that the sender still speaks; 0: none but `protocol`


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """HMAC-SHA256(token, label | own nonce | peer nonce); label tells the two directions apart."""

    mac: bytes


class Geometry(msgspec.Struct, frozen=True):
    """Everything that must fit between two nodes, compared field by field at the handshake, on both."""

    model: ShortText  # fingerprint of config and weights
    dtype: ShortText
    num_layers: Size
    num_kv_heads: Size  # of the whole model, before sharding
    head_dim: Size
    page_size: Size
    tp: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    num_pages: Size  # of every rank; bounds check, need not be equal
    vocab_size: Size
    tiles: Size = 2  # of a head: K and V, or the one latent tile of MLA
    groups: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1  # engines, each of `tp` ranks and a pool of its own


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Who a node is."""

    name: ShortText
    role: ShortText
    epoch: int  # random u64 of this life of the node
    provider: ShortText
    geometry: Geometry
    descriptor: bytes  # Fabric.describe: endpoint of this link and KV regions, group * tp + rank; empty: refused
    version: ShortText  # of pdd, for the log
    dialled: ShortText = ""  # the initiator's word for the address; a newer link of the same word replaces the older
    max_tokens: Count = 0  # most tokens of one prompt that it will ever prefill for a peer; 0: it does not say
    host: ShortText = ""  # boot id of its host, when KV may go through memory that both nodes see; "": it may not
    local: bytes = b""  # descriptor of an endpoint for that: the initiator's offer; the acceptor's: that way is taken


class PrefillRequest(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute the KV of `tokens` and write it to `pages`; every write carries `key`."""

    attempt: Count
    key: Key  # unique among the attempts of this link that may still be written
    epoch: int  # the decoder's: a request meant for an earlier life is refused
    tokens: bytes  # u32 little endian each
    pages: bytes  # u32 little endian each, destination pages in token order, those of the skipped prefix included
    skip_tokens: Count
    request_id: ShortText  # the decoder's, for logs and `explain`
    source_sets: tuple[Count, ...] = ()  # the copy that feeds each replica set of the decoder; a wish: counts do not change
    group: Count = 0  # of the decoder's engines, whose pages are meant; others than 0 only from GROUPS_VERSION on


class EndReason(enum.Enum):
    """Why an attempt did not complete."""

    CANCELLED = "cancelled"
    DRAINING = "draining"
    FAILED = "failed"
    REFUSED = "refused"  # will never be taken here; when retryable, perhaps elsewhere
    UNKNOWN = "unknown"  # a newer peer's word; never sent

    @classmethod
    def _missing_(cls, value: object) -> EndReason:
        return cls.UNKNOWN


class PrefillEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The attempt did not complete. Sent once, when every posted write is terminal. Answers each Cancel too.

    The decoder frees the pages when unknown == 0 and its own count equals ok_units; else it fences the link.
    """

    attempt: Count
    reason: EndReason
    message: LongText
    ok_units: Count = 0
    failed_units: Count = 0
    unknown_units: Count = 0
    retryable: bool = True


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Stop working for `attempt`. May overtake its request: the prefiller keeps a tombstone. Idempotent."""

    attempt: Count


class Load(msgspec.Struct, frozen=True):
    """How busy a prefiller is."""

    queued_tokens: Count = 0
    running: Count = 0
    free_pages: Count = 0
    steps: Count = 0  # forward steps in this life: a queue behind an engine that steps is not stuck


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """A sign of life."""

    seq: Count
    load: Load
    draining: bool = False
    progress: tuple[tuple[int, int], ...] = ()  # (attempt, tokens computed by steps that have ended) of all in hand
    echo: Count = 0  # seq of the last heartbeat received, 0: none
    echo_age_us: Count = 0  # how long ago that was; the round trip is what remains


class Cause(enum.Enum):
    """Why a link ends, for programs."""

    ORDERLY = "orderly"  # the node closes its links: nothing is wrong
    INCOMPATIBLE = "incompatible"
    UNAUTHENTICATED = "unauthenticated"
    PROTOCOL = "protocol"  # the receiver sent what it must not
    LOST = "lost"  # silence, or a failure of the sender
    FABRIC = "fabric"
    UNKNOWN = "unknown"  # a newer peer's word, or none

    @classmethod
    def _missing_(cls, value: object) -> Cause:
        return cls.UNKNOWN


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The sender closes the link on purpose and says why."""

    reason: LongText
    cause: Cause = Cause.UNKNOWN


class ExplainRequest(msgspec.Struct, frozen=True, tag="explain"):
    """What have you done for this attempt? For people: nothing is decided by the answer. Of a decoder, since
    `EXPLAIN_VERSION`. A prefiller that is asked too often says nothing."""

    ask: Count  # tells answers apart
    attempt: Count


class Lack(msgspec.Struct, frozen=True):
    """Units of an attempt that are not proved to be written, in one word, and for how long."""

    what: ShortText  # not computed, not posted, in flight, failed, unknown; a newer peer may have other words
    chunk: Count  # of the prompt, in the order of steps, from 0
    first_layer: Count
    last_layer: Count
    from_rank: Count  # of the prefiller
    to_rank: Count  # of the decoder
    nic: ShortText  # of the prefiller; several are joined by "+"
    units: Count
    seconds: Seconds  # since it was armed (not computed), ready (not posted), first posted, or ended


class ExplainAnswer(msgspec.Struct, frozen=True, tag="explained"):
    """A prefiller's half of the story of an attempt. Times are durations: clocks of nodes are not compared."""

    ask: Count
    attempt: Count
    known: bool  # the rest says nothing when false
    state: ShortText = ""  # of the job
    state_seconds: Seconds = 0.0
    why: LongText = ""
    queue_seconds: Seconds | None = None  # from the request to pinned pages, or until now
    compute_seconds: Seconds | None = None  # from there to the end of the last step, or until now
    send_seconds: Seconds | None = None  # from there to the last completion, or until now
    exposed_seconds: Seconds | None = None
    tokens: Count = 0
    computed_tokens: Count = 0
    units: Count = 0  # of all layers, when whole
    ok_units: Count = 0
    failed_units: Count = 0
    unknown_units: Count = 0
    steps: Count = 0  # that armed writes
    lacks: Annotated[tuple[Lack, ...], msgspec.Meta(max_length=64)] = ()
    more_lacks: Count = 0  # that found no room


Message = (
    Greeting | Proof | Hello | PrefillRequest | PrefillEnded | Cancel | Heartbeat | Goodbye | ExplainRequest | ExplainAnswer
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def one_line(text: str) -> str:
    """What a peer wrote, fit for a log line and a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def pack_u32(numbers: Sequence[int]) -> bytes:
    """Numbers as u32 little endian, for `tokens` and `pages`."""
    return np.asarray(numbers, dtype="<u4").tobytes()


def unpack_u32(data: bytes) -> tuple[int, ...]:
    """The reverse. Raises ValueError when `data` is no whole number of u32."""
    return tuple(np.frombuffer(data, dtype="<u4").tolist())


def encode(message: Message) -> bytes:
    """The payload of one frame."""
    return _encoder.encode(message)


def decode(payload: bytes) -> Message:
    """The message in one frame. Raises msgspec.MsgspecError when it is none of ours."""
    return _decoder.decode(payload)
