"""What only memory between two processes of one host has: who may come, what is lent, and whose copy counts.

Everything that it has in common with a network (bounds, counts, cancel, kill, fence) is tested by the files beside this
one, over the stack "local".
"""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdd.fabric import _native as native
from tests.fabric.conftest import LOCAL, NodeFactory, Pair, link
from tests.fabric.fabric_node import PAGE, Node, RemoteNode, make_memory, spawn

_ADDRESS_AT = 4 + 2 + 1 + len("local1") + 1 + 4 + 4 + 2  # in a descriptor
_NAME_BYTES = _SECRET_BYTES = 16
_MAX_SOURCES = 64


def one_page(writer: Any, reader: Any, to_reader: int, from_writer: int) -> None:
    key = reader.call("imm_allocate", from_writer)
    reader.call("imm_arm", key, 1)
    transfer = writer.push(to_reader, key, [1], [2])
    assert reader.whole(key, [2]) == writer.digests([1])
    assert writer.wait(native.TRANSFER_DONE, transfer)[2:] == [1, 0, 0, ""]
    reader.call("imm_retire", key)


@pytest.fixture
def local_pair(make_pair: Callable[..., Pair]) -> Pair:
    return make_pair(LOCAL, num_pages=64)


# -- a writer or a target that is stopped in the middle -----------------------------------------------------------------
def flood(node: Node | RemoteNode, endpoint: int, key: int, count: int) -> int:
    transfer: int = node.push(endpoint, key, list(range(count)), list(range(0, 2 * count, 2)))
    return transfer


def test_a_target_that_is_stopped_in_a_copy_counts_nothing_that_the_writer_took_back(nodes: NodeFactory) -> None:
    """SIGSTOP in the middle of 64 MiB of copies, all of them posted; the writer gives up, closes, and gives its pages to others. When the target
    goes on, it ends its copy, of bytes that are no longer the prompt's, and must not count it."""
    pages, rounds = 16384, 12
    window: dict[str, Any] = {"window_ops": 4096, "window_bytes": 1 << 30}
    reader = nodes.there(LOCAL, 2 * pages, [""], **window)
    writer = nodes.here(LOCAL, 2 * pages, [""], **window)
    for seed in range(rounds):
        writer.fill(seed)
        old = writer.view()[: pages * PAGE].copy()
        to_reader, from_writer = link(writer, reader)
        key = reader.call("imm_allocate", from_writer)
        reader.call("imm_arm", key, 3 * pages)
        before = writer.fabric.stats()["completions"]
        transfers = [flood(writer, to_reader, key, pages)]
        while writer.fabric.stats()["completions"] - before < 50 + 20 * seed:
            pass
        reader.signal(signal.SIGSTOP)
        writer.fabric.close_endpoint(to_reader)
        writer.wait(native.ENDPOINT_CLOSED, to_reader)
        ok, failed, unknown = writer.wait(native.TRANSFER_DONE, transfers[0])[2:5]
        assert ok + failed + unknown == pages
        assert unknown > 0, "nothing was in flight: the test proves nothing"
        writer.view()[:] = 0xDD  # every page has a new owner
        reader.signal(signal.SIGCONT)
        counted = reader.settled(key)
        assert ok <= counted <= ok + unknown
        # Writes are carried out in order: the counted ones are the first, and each must be of the old bytes.
        assert reader.digests([2 * page for page in range(counted)]) == Node.digests_of(old, counted)
        reader.call("close_endpoint", from_writer)
        assert reader.call("imm_retire", key) == counted


def test_a_writer_that_is_stopped_or_killed_holds_up_no_fence(nodes: NodeFactory) -> None:
    pages = 8192
    for how in (signal.SIGSTOP, signal.SIGKILL):
        reader = nodes.here(LOCAL, 2 * pages, ["127.0.0.1"])
        writer = nodes.there(LOCAL, 2 * pages, ["127.0.0.1"])
        writer.fill(3)
        expected = writer.digests(list(range(pages)))
        to_reader, from_writer = link(writer, reader)
        key = reader.fabric.imm_allocate(from_writer)
        reader.fabric.imm_arm(key, pages + 1)
        writer.send("push", to_reader, key, list(range(pages)), list(range(0, 2 * pages, 2)))
        while reader.fabric.stats()["units_received"] < 200:
            pass
        writer.signal(how)
        reader.fabric.close_endpoint(from_writer)
        reader.wait(native.ENDPOINT_CLOSED, from_writer)
        counted, frozen = reader.fabric.imm_arrived(key), reader.digest()
        assert 200 <= counted <= pages
        if how is signal.SIGSTOP:
            writer.signal(signal.SIGCONT)
            writer.receive()
        time.sleep(0.2)
        assert (reader.digest(), reader.fabric.imm_retire(key)) == (frozen, counted)
        assert reader.digests([2 * page for page in range(counted)]) == expected[:counted]


# -- who may come -------------------------------------------------------------------------------------------------------
def abstract(name: bytes) -> bytes:
    return b"\0pdd-" + name.hex().encode()


def socket_of(descriptor: str) -> tuple[bytes, bytes]:
    """(abstract socket address, secret) in a local descriptor."""
    address = bytes.fromhex(descriptor)[_ADDRESS_AT:]
    return abstract(address[:_NAME_BYTES]), address[_NAME_BYTES : _NAME_BYTES + _SECRET_BYTES]


def offer(secret: bytes, *, magic: bytes = b"PDDL", version: int = 1, capacity: int = 64, sizes: list[int] | None = None) -> bytes:
    """A writer's first message."""
    sizes = sizes or []
    lengths = sizes + [0] * (_MAX_SOURCES - len(sizes))
    return struct.pack(f"<4sHH16sII{_MAX_SOURCES}Q", magic, version, len(sizes), secret, capacity, 0, *lengths)


def call(name: bytes, message: bytes, fds: list[int]) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.settimeout(10)
    deadline = time.monotonic() + 10
    while True:
        try:
            caller.connect(name)
            break
        except BlockingIOError:  # more callers wait than the socket keeps
            assert time.monotonic() < deadline
            time.sleep(0.01)
        except OSError:
            caller.close()
            raise
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    if message:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # hung up on before it could speak
            caller.sendmsg([message], rights)
    return caller


def hung_up(caller: socket.socket) -> bool:
    try:
        return caller.recv(1) == b""
    except ConnectionResetError:
        return True


def segment(capacity: int = 64) -> int:
    return make_memory("ring", 256 + capacity * 129)


def test_strangers_are_hung_up_on_and_the_writer_is_served_all_the_same(nodes: NodeFactory) -> None:
    reader, writer = nodes.there(LOCAL, 64, [""]), nodes.here(LOCAL, 64, [""])
    ours, theirs = writer.open(), reader.open()
    descriptor = reader.describe(theirs)
    name, secret = socket_of(descriptor)
    fd = segment()
    wrong = bytes([secret[0] ^ 1]) + secret[1:]
    for message in (offer(wrong), offer(wrong)[:30], b"x", b"GET / HTTP/1.1\r\n\r\n", offer(secret, magic=b"NOPE"), bytes(4096)):
        with contextlib.closing(call(name, message, [fd])) as caller:
            assert hung_up(caller)
    silent = [call(name, b"", []) for _ in range(20)]
    assert hung_up(silent[0])  # the oldest of too many make room
    writer.connect(ours, descriptor)
    reader.connect(theirs, writer.describe(ours, False))
    one_page(writer, reader, ours, theirs)
    assert all(hung_up(caller) for caller in silent)  # the endpoint has its peer
    with pytest.raises(ConnectionRefusedError):
        call(name, b"", [])
    assert reader.seen() == []
    for caller in silent:
        caller.close()
    os.close(fd)


def as_nobody(work: Callable[[], bool]) -> None:
    """Runs `work` in a child of another user, which must return True."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.setuid(65534)
            os._exit(0 if work() else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_neither_served_nor_believed(nodes: NodeFactory) -> None:
    reader, writer = nodes.here(LOCAL, 64, [""]), nodes.here(LOCAL, 64, [""])
    writer.fill(1)
    ours, theirs = writer.open(), reader.open()
    name, secret = socket_of(reader.describe(theirs))
    fd = segment()
    as_nobody(lambda: hung_up(call(name, offer(secret), [fd])))  # it knows the secret, too
    os.close(fd)
    writer.connect(ours, reader.describe(theirs))
    one_page(writer, reader, ours, theirs)

    fake = os.urandom(_NAME_BYTES)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        listener.bind(abstract(fake))
        listener.listen()
        os.write(told, b"1")
        signal.pause()
    os.read(ready, 1)
    descriptor = bytearray.fromhex(reader.describe(reader.open()))
    descriptor[_ADDRESS_AT : _ADDRESS_AT + _NAME_BYTES] = fake
    try:
        with pytest.raises(native.FabricError, match="belongs to another user"):
            writer.connect(writer.open(), descriptor.hex())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        listener.close()
        os.close(ready)
        os.close(told)


def test_a_container_with_a_network_of_its_own_is_not_reached(nodes: NodeFactory) -> None:
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0:
        pytest.skip("no right to make a network namespace")
    reader = spawn(LOCAL.library, LOCAL.provider, [""], 64, prefix=["unshare", "--net"])
    nodes.remote.append(reader)
    writer = nodes.here(LOCAL, 64, [""])
    with pytest.raises(native.FabricError, match="cannot be reached from here"):
        writer.connect(writer.open(), reader.describe(reader.open()))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"version": 2}, "speaks version 2, this node 1"),
        ({"capacity": 3}, "malformed"),
        ({"capacity": 1 << 20}, "malformed"),
        ({"sizes": [PAGE]}, "malformed"),  # a region without a descriptor
    ],
)
def test_a_writer_that_knows_the_secret_and_makes_no_sense_is_told(how: dict[str, Any], words: str, nodes: NodeFactory) -> None:
    reader, peer = nodes.here(LOCAL, 64, [""]), nodes.here(LOCAL, 64, [""])
    endpoint = reader.open()
    name, secret = socket_of(reader.describe(endpoint))
    fd = segment()
    with contextlib.closing(call(name, offer(secret, **how), [fd])):
        os.close(fd)
        with contextlib.suppress(TimeoutError):  # it may be noticed before connect is called
            assert words in reader.wait(native.ENDPOINT_FAILED, endpoint, 1.0)[2]
            return
        with pytest.raises(native.FabricError, match=words):
            reader.connect(endpoint, peer.describe(peer.open(), False))


@pytest.mark.parametrize("what", ["ring", "region"])
@pytest.mark.parametrize("fault", ["short", "unsealed", "no memory"])
def test_memory_that_could_go_away_under_a_reader_is_refused(what: str, fault: str, nodes: NodeFactory) -> None:
    """Reading past the end of a file is a SIGBUS."""
    reader = nodes.here(LOCAL, 64, [""])
    endpoint = reader.open()
    name, secret = socket_of(reader.describe(endpoint))
    good, pipe = segment(), os.pipe()
    if fault == "short":
        bad = make_memory("bad", 100)
    elif fault == "unsealed":
        bad = os.memfd_create("bad")
        os.ftruncate(bad, 1 << 20)
    else:
        bad = os.dup(pipe[0])
    fds = [bad] if what == "ring" else [good, bad]
    with contextlib.closing(call(name, offer(secret, sizes=[] if what == "ring" else [PAGE]), fds)):
        message = reader.wait(native.ENDPOINT_FAILED, endpoint)[2]
    assert ("the ring" if what == "ring" else "region 0 of the local peer") in message
    for fd in (good, bad, *pipe):
        os.close(fd)


class FakeWriter:
    """A peer that knows everything and writes what it likes into the ring."""

    CAPACITY = 64

    def __init__(self, reader: Node, endpoint: int) -> None:
        name, secret = socket_of(reader.describe(endpoint))
        self.key = struct.unpack("<Q", bytes.fromhex(reader.describe(endpoint))[-16:-8])[0]
        fd, source = segment(self.CAPACITY), make_memory("source", PAGE)
        self.ring = native.MappedMemory(fd, 256 + self.CAPACITY * 129).view()
        self.socket = call(name, offer(secret, sizes=[PAGE]), [fd, source])
        os.close(fd)
        os.close(source)

    def put(self, place: int, key: int, imm: int, source: int, pieces: list[tuple[int, int, int]], count: int | None = None) -> None:
        flat = [number for piece in pieces for number in piece] + [0] * (12 - 3 * len(pieces))
        entry = struct.pack("<QIHH12Q", key, imm, len(pieces) if count is None else count, source, *flat)
        self.ring[256 + 128 * place : 256 + 128 * place + len(entry)] = bytearray(entry)

    def posted(self, count: int) -> None:
        self.ring[:8] = bytearray(struct.pack("<Q", count))
        self.socket.send(b"\0")

    def done(self) -> int:
        return int(struct.unpack("<Q", bytes(self.ring[64:72]))[0])

    def result(self, place: int) -> int:
        return int(self.ring[256 + 128 * self.CAPACITY + place])


@pytest.fixture
def fake(nodes: NodeFactory) -> Iterator[tuple[Node, int, FakeWriter]]:
    reader = nodes.here(LOCAL, 64, [""])
    reader.fill(9)
    endpoint = reader.open()
    writer = FakeWriter(reader, endpoint)
    yield reader, endpoint, writer
    writer.socket.close()


def test_an_entry_outside_of_a_region_is_refused_one_by_one_and_copies_nothing(fake: tuple[Node, int, FakeWriter]) -> None:
    reader, endpoint, writer = fake
    before, everything, far = reader.digest(), 64 * PAGE, 1 << 63
    key = reader.fabric.imm_allocate(endpoint)
    bad: list[tuple[int, int, list[tuple[int, int, int]], int | None]] = [
        (writer.key, 0, [(0, everything - 1, 2)], None), (writer.key, 0, [(0, everything, 1)], None),
        (writer.key, 0, [(0, far, far)], None), (writer.key, 0, [(0, 2**64 - 1, 2)], None),
        (writer.key, 0, [(PAGE - 1, 0, 2)], None), (writer.key, 0, [(2**64 - 1, 0, 2)], None),
        (writer.key, 0, [(0, 0, PAGE), (0, everything, PAGE)], None),  # none of its pieces
        (writer.key, 1, [(0, 0, 1)], None), (writer.key, 0, [(0, 0, 1)], 5), (writer.key ^ 1, 0, [(0, 0, 1)], None),
        (0, 0, [(0, 0, 1)], None),
    ]  # fmt: skip
    for place, (to, source, pieces, count) in enumerate(bad):
        writer.put(place, to, key << 8, source, pieces, count)
    writer.posted(len(bad))
    deadline = time.monotonic() + 10
    while writer.done() < len(bad) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert all(writer.result(place) for place in range(len(bad)))
    assert (reader.digest(), reader.fabric.imm_arrived(key)) == (before, 0)
    writer.put(len(bad), writer.key, key << 8, 0, [(0, 5 * PAGE, PAGE)])  # and the next good one counts
    writer.posted(len(bad) + 1)
    reader.fabric.imm_arm(key, 1)
    reader.wait(native.IMM_REACHED, key)
    assert not reader.view()[5 * PAGE : 6 * PAGE].any()


def test_what_a_dead_writer_had_posted_is_still_counted(fake: tuple[Node, int, FakeWriter]) -> None:
    """Nobody gives its pages back any more, so what stands in the ring is as good as what was in a socket."""
    reader, endpoint, writer = fake
    key = reader.fabric.imm_allocate(endpoint)
    reader.fabric.imm_arm(key, 50)
    for place in range(50):
        writer.put(place, writer.key, key << 8, 0, [(0, place * PAGE, PAGE)])
    writer.ring[:8] = bytearray(struct.pack("<Q", 50))
    writer.socket.close()
    reader.wait(native.IMM_REACHED, key)
    assert not reader.view()[: 50 * PAGE].any()
    assert "its process is gone" in reader.wait(native.ENDPOINT_FAILED, endpoint)[2]


def test_what_a_writer_that_has_closed_had_posted_is_not(fake: tuple[Node, int, FakeWriter]) -> None:
    reader, endpoint, writer = fake
    key = reader.fabric.imm_allocate(endpoint)
    writer.put(0, writer.key, key << 8, 0, [(0, 0, PAGE)])
    writer.ring[8:12] = bytearray(struct.pack("<I", 1))  # writer_closed
    writer.posted(1)
    writer.socket.close()
    time.sleep(0.2)
    assert (reader.fabric.imm_arrived(key), writer.done(), reader.seen()) == (0, 0, [])


@pytest.mark.parametrize("posted", [FakeWriter.CAPACITY + 1, 2**64 - 1, 2**63])
def test_a_ring_that_cannot_be_ends_the_endpoint(posted: int, fake: tuple[Node, int, FakeWriter]) -> None:
    reader, endpoint, writer = fake
    before = reader.digest()
    writer.posted(posted)
    assert "into a ring of 64" in reader.wait(native.ENDPOINT_FAILED, endpoint)[2]
    assert reader.digest() == before


def test_a_target_that_lies_about_what_is_done_ends_the_endpoint(nodes: NodeFactory) -> None:
    """It could make a writer give pages back that are still read: by itself, which harms nobody else."""
    writer, other = nodes.here(LOCAL, 64, [""]), nodes.here(LOCAL, 64, [""])
    descriptor = bytearray.fromhex(other.describe(other.open()))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = os.urandom(_NAME_BYTES)  # other runs of this test are on this machine, too
    listener.bind(abstract(name))
    listener.listen()
    descriptor[_ADDRESS_AT : _ADDRESS_AT + _NAME_BYTES] = name
    endpoint = writer.open()
    writer.connect(endpoint, descriptor.hex())
    peer, _ = listener.accept()
    _, fds, _, _ = socket.recv_fds(peer, 4096, 8)
    ring = native.MappedMemory(fds[0], os.fstat(fds[0]).st_size).view()
    transfer = writer.push(endpoint, 1, [0, 2, 4], [0, 2, 4])
    ring[64:72] = bytearray(struct.pack("<Q", 1000))
    with contextlib.suppress(BrokenPipeError):  # a writer that is awake has seen it, and hung up
        peer.send(b"\0")
    assert "says that 1000 writes" in writer.wait(native.ENDPOINT_FAILED, endpoint)[2]
    assert sum(writer.wait(native.TRANSFER_DONE, transfer)[2:5]) == 3
    for fd in fds:
        os.close(fd)
    peer.close()
    listener.close()


# -- what is lent ---------------------------------------------------------------------------------------------------------
def test_peers_are_lent_memory_that_they_cannot_write_to(nodes: NodeFactory) -> None:
    writer, other = nodes.here(LOCAL, 64, [""]), nodes.here(LOCAL, 64, [""])
    descriptor = bytearray.fromhex(other.describe(other.open()))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = os.urandom(_NAME_BYTES)
    listener.bind(abstract(name))
    listener.listen()
    descriptor[_ADDRESS_AT : _ADDRESS_AT + _NAME_BYTES] = name
    writer.connect(writer.open(), descriptor.hex())
    peer, _ = listener.accept()
    _, fds, _, _ = socket.recv_fds(peer, 4096, 8)
    assert len(fds) == 2
    with pytest.raises(native.FabricError, match="Permission denied"):
        native.MappedMemory(fds[1], PAGE)  # maps for writing
    for fd in fds:
        os.close(fd)
    peer.close()
    listener.close()


@pytest.mark.parametrize(("fd", "why"), [("none", "no memfd was given"), ("unsealed", "not sealed"), ("short", "has 4096 bytes")])
def test_a_writer_whose_memory_cannot_be_lent_says_so_when_it_connects(fd: str, why: str, nodes: NodeFactory) -> None:
    writer, reader = nodes.here(LOCAL, 64, [""]), nodes.here(LOCAL, 64, [""])
    if fd == "none":
        writer.fabric.register(writer.memory.address, PAGE)
    elif fd == "unsealed":
        unsealed = os.memfd_create("kv")
        os.ftruncate(unsealed, PAGE)
        writer.fabric.register(writer.memory.address, PAGE, unsealed)
        os.close(unsealed)
    else:
        short = make_memory("kv", PAGE)
        writer.fabric.register(writer.memory.address, 2 * PAGE, short)
        os.close(short)
    with pytest.raises(native.FabricError, match=f"cannot be lent: .*{why}"):
        writer.connect(writer.open(), reader.describe(reader.open()))


def test_a_peer_that_is_gone_or_somewhere_else_cannot_be_reached(nodes: NodeFactory) -> None:
    writer, reader = nodes.here(LOCAL, 64, [""]), nodes.here(LOCAL, 64, [""])
    theirs = reader.open()
    descriptor = reader.describe(theirs)
    reader.fabric.close_endpoint(theirs)
    reader.wait(native.ENDPOINT_CLOSED, theirs)
    with pytest.raises(native.FabricError, match="cannot be reached from here"):
        writer.connect(writer.open(), descriptor)


def test_local_endpoints_go_beside_those_of_a_fabric(nodes: NodeFactory, best_fabric_stack: Any) -> None:
    writer = nodes.here(best_fabric_stack, 64, ["127.0.0.1"], local=True)
    reader = nodes.there(best_fabric_stack, 64, ["127.0.0.1"], local=True)
    writer.fill(2)
    over_tcp = link(writer, reader)
    ours, theirs = writer.call("open_endpoint", True), reader.call("open_endpoint", True)
    writer.connect(ours, reader.describe(theirs))
    reader.connect(theirs, writer.describe(ours, False))
    for _ in range(3):
        one_page(writer, reader, ours, theirs)
        one_page(writer, reader, *over_tcp)
    with pytest.raises(native.FabricError, match="speaks local1, this node tcp"):
        writer.connect(writer.open(), reader.describe(reader.call("open_endpoint", True)))
    assert writer.fabric.stats()["nic_writes"] == [3]  # a NIC's count knows nothing of the others
    plain = nodes.here(best_fabric_stack, 8, ["127.0.0.1"])
    with pytest.raises(native.FabricError, match="turned off"):
        plain.call("open_endpoint", True)


def test_nothing_is_left_open_when_links_come_and_go(local_pair: Pair) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum("memfd:pdd-local" in line or "memfd:arena" in line for line in maps)

    one_page(local_pair.writer, local_pair.reader, local_pair.to_reader, local_pair.from_writer)
    before, maps_before = open_files(), mappings()
    there = local_pair.reader.open_files()
    for _ in range(30):
        ours, theirs = link(local_pair.writer, local_pair.reader)
        one_page(local_pair.writer, local_pair.reader, ours, theirs)
        local_pair.writer.fabric.close_endpoint(ours)
        local_pair.writer.wait(native.ENDPOINT_CLOSED, ours)
        local_pair.reader.call("close_endpoint", theirs)
        local_pair.reader.wait(native.ENDPOINT_CLOSED, theirs)
    assert (open_files(), mappings()) == (before, maps_before)
    assert local_pair.reader.open_files() == there
