"""The last moments of a connection: what was said last arrives, though the peer still talks.

A socket that is closed while unread bytes of the peer wait in it is reset, and the reset overtakes, at the peer, what
was sent just before: a peer that is thrown out in the middle of its talking would never read why. So the end is said in
one direction only (FIN after the last queued byte), and what still comes is read and thrown away until the peer closes
too. That is bounded in bytes and in time; beyond either bound the connection is dropped after all. It takes no task,
and it tells nobody anything but the end of the connection, to the protocol that had it before.
"""

from __future__ import annotations

import asyncio

SECONDS = 0.5  # for the goodbye to leave, to be read and to be answered by the peer's own end
MOST_BYTES = 1 << 20  # thrown away; a peer that has this much more to say is not going to listen


class Linger(asyncio.Protocol):
    """Takes over the connection of a stream. Owner: the main loop."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer  # one that nobody holds closes its transport
        self._transport = writer.transport
        self._before = self._transport.get_protocol()
        self._num_bytes = 0
        self._deadline = asyncio.get_running_loop().call_later(SECONDS, self._transport.abort)

    def begin(self) -> None:
        """Says the end, after all that is queued, and reads on."""
        self._transport.set_protocol(self)
        self._transport.resume_reading()  # type: ignore[attr-defined]  # of a WriteTransport that reads, too
        try:
            self._transport.write_eof()
        except OSError:  # the peer has reset it: nothing can be said any more
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > MOST_BYTES:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """After the peer's end, which closes the transport by itself, or after an abort."""
        self._deadline.cancel()
        self._before.connection_lost(error)
