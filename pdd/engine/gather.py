"""One frame to every rank of a node, one answer from each: all channels and the death event are looked at together.

Nothing here waits for one rank in particular. A rank that fails, closes its channel or says what nobody asked is heard
while the others still compute, and a rank that does not even read is late like one that does not answer. With one rank
it costs what a plain send and receive do: one poll between the two, no thread.

It knows no steps and judges no answer: what a message or a failure means is the executor's to say.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence

from pdd.engine.rank_protocol import Channel, ChannelClosed, DaemonMessage, RankMessage

Message = DaemonMessage | RankMessage
Take = Callable[[int, Message], bool]  # (rank, message) -> whether that was the rank's answer

_ANYTHING = select.POLLIN | select.POLLHUP | select.POLLERR | select.POLLNVAL


class RankGone(ChannelClosed):
    """The channel of `rank` is closed."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class DeathTold(Exception):
    """A rank has ended."""


class Gathering:
    """The channels of all ranks. Used by one thread; owns no descriptor."""

    def __init__(self, channels: Sequence[Channel], death_fd: int) -> None:
        """`death_fd` becomes readable, and stays so, when a rank has ended."""
        self._channels = tuple(channels)
        self._numbers = {channel.fileno(): number for number, channel in enumerate(channels)}
        self._death_fd = death_fd
        self._poll = select.poll()  # select() refuses descriptors over 1023
        self._unsent: dict[int, memoryview] = {}  # of the frame in hand, by rank
        for fd in (*self._numbers, death_fd):
            self._poll.register(fd, select.POLLIN)

    def exchange(self, frames: Sequence[bytes], take: Take, deadline: float) -> tuple[int, ...]:
        """Sends `frames[r]` to rank r (none: they were asked before), and gives what comes to `take` until it was an answer
        from each.

        Returns the ranks that have not answered at `deadline` (of time.monotonic()); none in good order.

        Raises:
            RankGone: a rank's channel is closed.
            DeathTold: a rank has ended; what came from any rank before was given to `take`.
            ProtocolError: a rank sent what is no message.
            Whatever `take` raises.
        """
        for number, frame in enumerate(frames):
            self._begin(number, frame)
        waiting = set(range(len(self._channels)))
        while waiting:
            ready = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                return tuple(sorted(waiting))
            died = False
            for fd, events in ready:
                if fd == self._death_fd:
                    died = True
                    continue
                number = self._numbers[fd]
                if events & _ANYTHING:
                    for message in self.read(number):
                        if take(number, message):
                            waiting.discard(number)
                if events & select.POLLOUT:
                    self._go_on(number)
            if died:
                raise DeathTold
        return ()

    def read(self, number: int) -> list[Message]:
        """What rank `number` has said; does not wait. Raises RankGone when there is nothing more, ever."""
        channel = self._channels[number]
        try:
            channel.read()
        except ChannelClosed as error:
            raise RankGone(number, str(error)) from error
        messages = []
        while (message := channel.take()) is not None:
            messages.append(message)
        return messages

    def _begin(self, number: int, frame: bytes) -> None:
        """Sends what the socket takes now; the poll says when it takes more."""
        num_sent = self._send(number, frame)
        if num_sent < len(frame):
            self._unsent[number] = memoryview(frame)[num_sent:]
            self._poll.modify(self._channels[number].fileno(), select.POLLIN | select.POLLOUT)

    def _go_on(self, number: int) -> None:
        frame = self._unsent[number]
        rest = frame[self._send(number, frame) :]
        if rest:
            self._unsent[number] = rest
        else:
            del self._unsent[number]
            self._poll.modify(self._channels[number].fileno(), select.POLLIN)

    def _send(self, number: int, frame: bytes | memoryview) -> int:
        try:
            return self._channels[number].send_some(frame)
        except ChannelClosed as error:
            raise RankGone(number, str(error)) from error
