"""The messages between the two ends of a benchmark. A protocol of its own: no serving node understands it.

    reader (dials, measures)                     writer (listens)
    Hello                                        Hello             only over TCP, and Proof both ways with a token
    Setup                                     →
                                              ←  Ready             its fabric is open
    Target                                    →                    where to write
    per cell    Cell                          →
                                              ←  Filled            checksum of every page, in the cell's order
    per repeat  Start                         →
                                              ←  Started
                Ask ...                       →                    keys to write under; arrivals answer
                Stop                          →
                                              ←  Stopped           what it cost
    Goodbye, from either side, ends it and says why; Failed is the writer's word for a write that did not go.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

PROTOCOL = 1
MAX_FRAME_BYTES = 4 << 20
MAX_STRANGER_BYTES = 4096  # before the token is proved
FINISHED = "finished"  # the reason of a goodbye when all is measured

Text = Annotated[str, msgspec.Meta(max_length=256)]
Words = Annotated[str, msgspec.Meta(max_length=2048)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]
Key = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]


class Hello(msgspec.Struct, frozen=True, tag="bench_hello", forbid_unknown_fields=True):
    """First of each side. Of another protocol, only `protocol` is read."""

    protocol: int
    nonce: bytes  # 32 random bytes
    authenticated: bool  # whether this side has a token; both must agree
    version: Text  # of pdd


class Proof(msgspec.Struct, frozen=True, tag="bench_proof", forbid_unknown_fields=True):
    """HMAC-SHA256(token, label | own nonce | peer nonce); the labels are not those of a serving link."""

    mac: bytes


class Setup(msgspec.Struct, frozen=True, tag="bench_setup", forbid_unknown_fields=True):
    memory_bytes: Size  # of the largest pool
    timeout: Annotated[float, msgspec.Meta(gt=0)]  # seconds without progress


class Ready(msgspec.Struct, frozen=True, tag="bench_ready", forbid_unknown_fields=True):
    provider: Text
    library_version: Text
    nics: tuple[Text, ...]
    line_rate: float | None  # bytes/s of its NICs together; None: not known
    descriptor: bytes  # of its endpoint, without memory


class Target(msgspec.Struct, frozen=True, tag="bench_target", forbid_unknown_fields=True):
    descriptor: bytes  # of the reader's endpoint and memory


class Cell(msgspec.Struct, frozen=True, tag="bench_cell", forbid_unknown_fields=True):
    page_bytes: Size
    pages: Size  # of one request
    sources: bytes  # u32 little endian each: page of the writer, by entry
    targets: bytes  # page of the reader, by entry


class Filled(msgspec.Struct, frozen=True, tag="bench_filled", forbid_unknown_fields=True):
    checksums: bytes  # u32 little endian each: CRC-32 of the page of each entry


class Start(msgspec.Struct, frozen=True, tag="bench_start", forbid_unknown_fields=True):
    pass


class Started(msgspec.Struct, frozen=True, tag="bench_started", forbid_unknown_fields=True):
    pass


class Ask(msgspec.Struct, frozen=True, tag="bench_ask", forbid_unknown_fields=True):
    """Write the requests of these slots of the pool, each under its key."""

    slots: tuple[Count, ...]
    keys: tuple[Key, ...]


class Stop(msgspec.Struct, frozen=True, tag="bench_stop", forbid_unknown_fields=True):
    pass


class Stopped(msgspec.Struct, frozen=True, tag="bench_stopped", forbid_unknown_fields=True):
    """Since Start."""

    cpu_seconds: float  # of the writer's process
    elapsed_seconds: float
    writes: Count  # operations of its NICs


class Failed(msgspec.Struct, frozen=True, tag="bench_failed", forbid_unknown_fields=True):
    message: Words


class Goodbye(msgspec.Struct, frozen=True, tag="bench_goodbye", forbid_unknown_fields=True):
    reason: Words


Message = (Hello | Proof | Setup | Ready | Target | Cell | Filled | Start | Started | Ask | Stop | Stopped | Failed
           | Goodbye)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Outline(msgspec.Struct):
    """As much of a first message as any version, and the serving link, has."""

    type: str = ""
    protocol: int = 0


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> Message:
    """Raises msgspec.MsgspecError when it is none of ours."""
    return _decoder.decode(payload)
