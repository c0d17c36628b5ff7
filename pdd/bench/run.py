"""A whole benchmark: where its two ends come from, and what was found. No printing.

    with loopback(options, cells, timeout) as reader: report(reader, cells, ...)
    with dial(address, token, options, cells, timeout) as reader: ...
    listen(...)                                                  the other end of dial

The two ends are the same whichever way they met; over loopback they share a socket pair that nobody else can reach.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from pdd.address import Address
from pdd.bench import wire, writer
from pdd.bench.cells import Cell
from pdd.bench.channel import Channel
from pdd.bench.node import BenchNode, FabricOptions
from pdd.bench.reader import Reader
from pdd.bench.result import End, Report, Row, row
from pdd.daemon.listen import numeric_host
from pdd.errors import AddressInUse, BenchPeerLost, PddError, UsageError

_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))  # s, s, probes
Progress = Callable[[Cell, int], None]  # the cell, and which of its repeats begins


@contextlib.contextmanager
def loopback(options: FabricOptions, cells: Sequence[Cell], timeout: float) -> Iterator[Reader]:
    """Both ends on this machine; the writer is a process of its own, which ends with the block."""
    options = replace(options, source=options.source or "127.0.0.1")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", writer.__name__, str(theirs.fileno()), msgspec.json.encode(options).decode()],
            pass_fds=[theirs.fileno()], process_group=0,  # ^C is for this end, which then ends that one
        )
        theirs.close()
        try:
            with _reading(Channel(ours, "the writer", timeout, proved=True), options, cells) as reader:
                yield reader
        finally:
            ours.close()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@contextlib.contextmanager
def dial(address: Address, token: bytes | None, options: FabricOptions, cells: Sequence[Cell],
         timeout: float) -> Iterator[Reader]:
    """The reading end here, the writing one at `address`, where `listen` runs."""
    try:
        sock = socket.create_connection((address.host, address.port), timeout)
    except OSError as error:
        raise BenchPeerLost(f"{address} does not answer: {error.strerror or error}",
                            hint=f"Start `pdd bench kv --listen` there, on port {address.port}.") from None
    with sock:
        _keep_alive(sock)
        channel = Channel(sock, str(address), timeout)
        channel.authenticate(token, reads=True)
        with _reading(channel, replace(options, source=options.source or channel.local_host), cells) as reader:
            yield reader


@contextlib.contextmanager
def _reading(channel: Channel, options: FabricOptions, cells: Sequence[Cell]) -> Iterator[Reader]:
    node = None
    try:
        node = BenchNode(options, max(cell.pool_bytes for cell in cells))
        reader = Reader(channel, node)
        reader.begin()
        yield reader
        channel.close(wire.FINISHED)
    except KeyboardInterrupt:
        channel.close("it was interrupted")
        raise
    except PddError as error:
        channel.close(error.message)
        raise
    finally:
        channel.close()
        if node is not None:
            node.close()


def listen(address: Address, token: bytes | None, options: FabricOptions, patience: float | None, timeout: float,
           say: Callable[[str], None], *, keep: bool = False) -> None:
    """Waits for one reader, at most `patience` seconds, and serves it; with `keep` the next one, too, and so on. Strangers
    are told of by `say` and turned away.

    Raises:
        AddressInUse, UsageError: no listening there. BenchPeerLost: nobody came, or the reader went away.
    """
    with _bind(address) as listener:
        say(f"listening on {Address(address.host, listener.getsockname()[1])}")
        deadline = None if patience is None else time.monotonic() + patience
        while True:
            try:
                listener.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
                sock, place = listener.accept()
            except TimeoutError:
                raise BenchPeerLost(f"nobody came to {address} within {patience:g} s") from None
            with sock:
                channel = Channel(sock, str(Address(place[0], place[1])), timeout)
                try:
                    _keep_alive(sock)
                    channel.authenticate(token, reads=False)
                except PddError as error:
                    say(f"turned away: {error.message}")
                    channel.close(error.message)
                    continue
                say(f"writing for {channel.peer}")
                try:
                    writer.serve(channel, replace(options, source=options.source or channel.local_host))
                except PddError as error:
                    if not keep:
                        raise
                    say(f"ended: {error.message}")
                if not keep:
                    return
                deadline = None if patience is None else time.monotonic() + patience


def _bind(address: Address) -> socket.socket:
    try:
        host = numeric_host(address.host, address.port)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, address.port), family=family, dualstack_ipv6=host == "::")
    except OSError as error:
        kind = AddressInUse if error.errno == errno.EADDRINUSE else UsageError
        raise kind(f"--listen: cannot listen on {address}: {error.strerror or error}",
                   hint="`ip address` lists this machine's addresses.") from None


def _keep_alive(sock: socket.socket) -> None:
    """So that a machine that vanished is noticed by an end that waits."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def measure(reader: Reader, cells: Sequence[Cell], seconds: float, repeats: int, progress: Progress) -> Report:
    """Every cell, `repeats` times `seconds`, after a short one that connects and touches memory."""
    ends = (End.of_node(reader.node), End.of_ready(reader.writer))
    started, rows = time.time(), list[Row]()
    for cell in cells:
        reader.take(cell)
        progress(cell, 0)
        reader.measure(0.0)
        samples = []
        for repeat in range(repeats):
            progress(cell, repeat + 1)
            samples.append(reader.measure(seconds))
        rows.append(row(cell, samples, *ends))
    return Report(started=started, reader=ends[0], writer=ends[1], rows=tuple(rows))
