"""What the daemon's executor and a rank process say to each other over one Unix stream socketpair.

A frame is a little-endian u32 of the payload's length, then msgpack of one tagged Struct. Descriptors (SCM_RIGHTS) ride
on the first byte of the frame they belong to. Order of a rank's life:

    daemon -> RankInit + fd                      of the memory that the ranks work together in, if there are several
    rank   -> RankProgress*                      while it loads
    rank   -> RankFits                           its weights are loaded, and so are those of the others
    daemon -> KvSize                             the same for all ranks, once all have said what fits
    rank   -> RankReady + fds (of its KV memory; rank 0 also its layer counter's memfd)
    daemon -> RunStep, rank -> StepDone          once per step, strictly in order
    daemon -> Shutdown                           the rank exits 0
    rank   -> RankFailed                         at any time instead of the above; the rank exits

A closed socket ends a rank at once. No torch here: the daemon imports this module.
"""

from __future__ import annotations

import array
import collections
import os
import select
import socket
import struct
import time

import msgspec

from pdd.engine.batch import StepPlan, StepResult
from pdd.errors import BY_ID, EngineError, PddError, RankDied
from pdd.kv.layout import KvLayout

MAX_FRAME_BYTES = 64 << 20  # a plan of 1M new tokens is 5 MB; anything near this is a lost frame boundary
_HEADER = struct.Struct("<I")
_MAX_FDS = 4


# -- daemon to rank ---------------------------------------------------------------------------------------------------
class RankInit(msgspec.Struct, frozen=True, tag="init"):
    """What a rank needs to load its shard and make its KV region."""

    model_dir: str
    rank: int = 0
    world: int = 1
    dtype: str = "auto"  # auto (the checkpoint's), bfloat16, float32
    page_size: int = 16  # tokens
    num_pages: int = 0  # 0: as many as memory_fraction allows, at most max_batch_size * max_context tokens
    memory_fraction: float = 0.2  # of the memory that is free once the weights are loaded, for KV, when num_pages is 0
    max_context: int = 0  # tokens; 0: the model's
    max_batch_size: int = 64  # rows of a step
    max_batch_tokens: int = 2048  # tokens of a step
    memory_bytes: int = 0  # that the ranks of this group may take together: its share; 0: all that is free
    beside: int = 0  # ranks of other groups of the node that run on the same CPUs
    threads: int = 0  # of the forward pass; 0: its share of the CPUs that it runs on
    cpus: tuple[int, ...] = ()  # that it is kept on; empty: wherever the system puts it
    numa: int | None = None  # node that its KV memory is kept on; None: wherever it is written first
    warm_up: bool = True  # run a few throw-away steps before RankReady


class KvSize(msgspec.Struct, frozen=True, tag="kv-size"):
    """Make the KV region."""

    num_pages: int


class RunStep(msgspec.Struct, frozen=True, tag="step"):
    plan: StepPlan


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Exit 0 now."""


# -- rank to daemon ---------------------------------------------------------------------------------------------------
class RankProgress(msgspec.Struct, frozen=True, tag="progress"):
    phase: str  # "weights", "kv", "warm-up"
    done_bytes: int
    total_bytes: int


class RankFits(msgspec.Struct, frozen=True, tag="fits"):
    """The rank waits for KvSize."""

    num_pages: int  # at least 1


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """The rank waits for steps. Carries fds: [KV memory], on rank 0 [KV memory, counter memfd]."""

    rank: int
    num_layers: int
    num_pages: int
    num_kv_heads: int  # of this rank
    page_size: int  # tokens
    head_dim: int
    dtype: str  # of weights and KV; a key of kv.layout.DTYPE_BYTES
    total_kv_heads: int  # of the model
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_context: int  # tokens
    family: str  # "llama", "qwen2", "qwen3"
    fingerprint: str  # of the checkpoint; equal on every node that may exchange KV
    kv_bytes: int  # size of the KV region
    param_bytes: int
    threads: int
    load_seconds: float
    pid: int
    attention: str = "torch"  # the decode kernel in use: "native" or "torch"
    kv_kind: str = "memfd"  # what the KV memory's fd is: "memfd", or "cuda" for a cuMem handle
    kv_device: str = ""  # PCI address of the GPU that the KV memory is in; "" for a memfd
    warnings: tuple[str, ...] = ()  # what the system refused of cpus and numa, in words
    tiles: int = 2  # of a KV head: K and V, or one latent tile

    @property
    def layout(self) -> KvLayout:
        return KvLayout(num_layers=self.num_layers, num_pages=self.num_pages, num_kv_heads=self.num_kv_heads,
                        page_size=self.page_size, head_dim=self.head_dim, dtype=self.dtype, tiles=self.tiles)


class StepDone(msgspec.Struct, frozen=True, tag="done"):
    result: StepResult


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank cannot go on. `error_id` is a key of errors.BY_ID: exit code and all else follow from the class."""

    error_id: str
    message: str
    hint: str = ""

    def to_error(self) -> PddError:
        """The exception to raise in the daemon."""
        return BY_ID.get(self.error_id, EngineError)(self.message, hint=self.hint)


DaemonMessage = RankInit | KvSize | RunStep | Shutdown
RankMessage = RankProgress | RankFits | RankReady | StepDone | RankFailed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[DaemonMessage | RankMessage] = msgspec.msgpack.Decoder(DaemonMessage | RankMessage)


def encode_frame(message: DaemonMessage | RankMessage) -> bytes:
    """The bytes of one message, for every channel that it is to go over."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {type(message).__name__} of {len(payload)} bytes is over {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(payload)) + payload


class ChannelClosed(RankDied):
    """The other end of the socketpair is gone."""


class ProtocolError(EngineError):
    """A frame that cannot be: too long, not msgpack, or not one of the messages above."""


class Channel:
    """One end of the socketpair. Blocking; used by one thread. Owns the socket and the fds it received until taken."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._buffer = bytearray()
        self._fds: collections.deque[int] = collections.deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        """Closes the socket and every fd that nobody took. Idempotent."""
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())

    def send(self, message: DaemonMessage | RankMessage, fds: tuple[int, ...] = ()) -> None:
        """Sends one frame; `fds` are duplicated into the other process and stay open here.

        Raises:
            ChannelClosed: the other end is gone.
        """
        frame = memoryview(encode_frame(message))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            sent = self._sock.sendmsg([frame], rights, socket.MSG_NOSIGNAL)
            while sent < len(frame):
                sent += self._sock.send(frame[sent:], socket.MSG_NOSIGNAL)
        except OSError as error:
            raise ChannelClosed(f"the other end of the rank channel is gone: {error.strerror}") from error

    def send_some(self, frame: bytes | memoryview) -> int:
        """Sends as much of a frame as the socket takes without waiting; returns how many bytes that were.

        Raises:
            ChannelClosed: the other end is gone.
        """
        try:
            return self._sock.send(frame, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelClosed(f"the other end of the rank channel is gone: {error.strerror}") from error

    def receive(self, timeout: float | None = None) -> DaemonMessage | RankMessage | None:
        """The next message, or None when `timeout` seconds pass first (a partial frame is kept).

        Raises:
            ChannelClosed: end of stream.
            ProtocolError: the bytes are no message of this protocol.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self.take()
            if message is not None:
                return message
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._wait_readable(wait):
                return None
            self.read()

    def take(self) -> DaemonMessage | RankMessage | None:
        """The next message of those that `read` has read whole.

        Raises:
            ProtocolError: the bytes are no message of this protocol.
        """
        frame = self._take_frame()
        if frame is None:
            return None
        try:
            return _decoder.decode(frame)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ProtocolError(f"a malformed frame on the rank channel: {error}") from error

    def take_fds(self) -> tuple[int, ...]:
        """The fds received so far; the caller now owns (and closes) them. They come with, or before, their message."""
        fds = tuple(self._fds)
        self._fds.clear()
        return fds

    def _take_frame(self) -> bytes | None:
        if len(self._buffer) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self._buffer)
        if size > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {size} bytes on the rank channel is over {MAX_FRAME_BYTES}")
        end = _HEADER.size + size
        if len(self._buffer) < end:
            return None
        frame = bytes(memoryview(self._buffer)[_HEADER.size : end])
        del self._buffer[:end]
        return frame

    def _wait_readable(self, seconds: float | None) -> bool:
        poller = select.poll()  # select() refuses descriptors over 1023
        poller.register(self._sock.fileno(), select.POLLIN)
        return bool(poller.poll(None if seconds is None else seconds * 1000))

    def read(self) -> None:
        """Reads what is there, for `take`. Does not wait.

        Raises:
            ChannelClosed: end of stream.
            ProtocolError: descriptors were lost on the way.
        """
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(1 << 18, socket.CMSG_SPACE(_MAX_FDS * 4),
                                                           socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed(f"the other end of the rank channel is gone: {error.strerror}") from error
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(raw[: len(raw) - len(raw) % received.itemsize])
                self._fds.extend(received)
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("descriptors on the rank channel were cut off (too many at once, or RLIMIT_NOFILE)")
        if not data:
            raise ChannelClosed("the other end of the rank channel closed it")
        self._buffer += data
