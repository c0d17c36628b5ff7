"""The pure parts of the messenger: frames, routing, log limits, back-off, tables."""

from __future__ import annotations

import enum
import logging
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.engine.request import KvSource
from pdd.errors import (
    Draining,
    FabricFailure,
    PddError,
    PeerIncompatible,
    PeerLost,
    PeerProtocol,
    PeerUnauthenticated,
)
from pdd.messenger import wire
from pdd.messenger.endings import MOST_ANSWERED, MOST_TOMBSTONES, TOMBSTONE_SECONDS, Answered, Tombstones
from pdd.messenger.frames import FrameBuffer
from pdd.messenger.goodbye import InOrder, goodbye, said
from pdd.messenger.peers import Backoff
from pdd.messenger.quiet import QuietLog, level_of_end
from pdd.messenger.retries import Retries
from pdd.messenger.router import route
from pdd.messenger.versions import Range, agree
from pdd.states import Change, Facts, State, told


# -- frames -----------------------------------------------------------------------------------------------------------
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.data())
def test_frames_survive_any_cut(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(len(p).to_bytes(4, "big") + p for p in payloads)
    buffer, found, at = FrameBuffer(limit=40), [], 0
    while at < len(stream):
        step = data.draw(st.integers(1, len(stream) - at))
        buffer.feed(stream[at : at + step])
        at += step
        while (payload := buffer.next()) is not None:
            found.append(payload)
    assert found == payloads
    assert len(buffer) == 0


@pytest.mark.parametrize("length", [0, 41, 1 << 24, 0xFFFFFFFF])
def test_length_that_nobody_sends(length: int) -> None:
    buffer = FrameBuffer(limit=40)
    buffer.feed(length.to_bytes(4, "big"))
    with pytest.raises(PeerProtocol, match=str(length)):
        buffer.next()


def test_an_http_server_is_told_from_a_bad_length() -> None:
    """The commonest mistake: the API port where the peer port was meant."""
    buffer = FrameBuffer(limit=1 << 18)
    buffer.feed(b"HTTP/1.1 400 Bad Request")
    with pytest.raises(PeerProtocol, match=r"'HTTP'.*peers\.listen"):
        buffer.next()


MESSAGES: list[wire.Message] = [
    wire.Greeting(protocol=1, nonce=b"n" * 32, authenticated=True),
    wire.Proof(mac=b"m" * 32),
    wire.Hello("n", "prefill", 2**64 - 1, "tcp", wire.Geometry("m", "float32", 1, 1, 8, 4, 1, 9, 10), b"d", "0.1.0"),
    wire.PrefillRequest(3, 2**24 - 1, 2**64 - 1, wire.pack_u32([1, 2**32 - 1]), wire.pack_u32([0]), 0, "r", (3, 1)),
    wire.PrefillEnded(3, wire.EndReason.FAILED, "why", 1, 2, 3, False),
    wire.Cancel(3),
    wire.Heartbeat(1, wire.Load(1, 2, 3, 4), True, ((1, 2), (3, 4)), 5, 6),
    wire.Goodbye("why"),
    wire.ExplainRequest(1, 2),
    wire.ExplainAnswer(
        1, 2, True, "pushing", 0.5, "why", 0.1, 0.2, None, None, 9, 4, 36, 12, 1, 2, 3,
        (wire.Lack("in flight", 0, 3, 4, 0, 1, "10.0.0.1", 5, 0.25),), 6,
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_round_trip(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_no_message(payload: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        wire.decode(payload)


@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_message_is_an_error_or_a_message(message: wire.Message, data: st.DataObject) -> None:
    payload = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire.decode(bytes(payload))
    except msgspec.MsgspecError:
        return


@pytest.mark.parametrize("change", [{"key": 1 << 24}, {"key": -1}, {"attempt": -1}, {"skip_tokens": -1}])
def test_fields_are_checked(change: dict[str, int]) -> None:
    plain = msgspec.to_builtins(MESSAGES[3], builtin_types=(bytes,))
    with pytest.raises(msgspec.MsgspecError):
        wire.decode(msgspec.msgpack.encode({**plain, **change}))


@pytest.mark.parametrize("change", [
    {"state_seconds": -1.0}, {"state_seconds": float("nan")}, {"send_seconds": float("inf")}, {"units": -1},
    {"state": "two\nlines"}, {"lacks": [["in flight", 0, 3, 4, 0, 1, "n\x1b[2J", 5, 0.25]]},
    {"lacks": [{"what": "w", "chunk": 0, "first_layer": 0, "last_layer": 0, "from_rank": 0, "to_rank": 0, "nic": "", "units": 1,
                "seconds": 0.0}] * 65},
])  # fmt: skip
def test_an_explanation_is_checked(change: dict[str, object]) -> None:
    plain = msgspec.to_builtins(MESSAGES[9], builtin_types=(bytes,))
    with pytest.raises(msgspec.MsgspecError):
        wire.decode(msgspec.msgpack.encode({**plain, **change}))


def _with(message: wire.Message, **fields: object) -> bytes:
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    for name, value in fields.items():
        plain[name] = {**plain[name], **value} if isinstance(value, dict) else value
    return msgspec.msgpack.encode(plain)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_unknown_fields_of_a_newer_peer_are_ignored(message: wire.Message) -> None:
    assert wire.decode(_with(message, later=[1, {"x": 2}])) == message


def test_unknown_fields_inside_of_fields_are_ignored_too() -> None:
    assert wire.decode(_with(MESSAGES[2], geometry={"later": 1})) == MESSAGES[2]
    assert wire.decode(_with(MESSAGES[6], load={"later": 1})) == MESSAGES[6]


# What the first version sends at least. A field beyond these must have a default, and these must stay as they are.
FIRST_VERSION: dict[type[wire.Message], dict[str, object]] = {
    wire.Greeting: {"type": "greeting", "protocol": 1, "nonce": b"n" * 32, "authenticated": True},
    wire.Proof: {"type": "proof", "mac": b"m"},
    wire.Hello: {
        "type": "hello", "name": "n", "role": "both", "epoch": 1, "provider": "tcp", "descriptor": b"d", "version": "0.1.0",
        "geometry": {"model": "m", "dtype": "float32", "num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "page_size": 4,
                     "tp": 1, "num_pages": 9, "vocab_size": 10},
    },
    wire.PrefillRequest: {
        "type": "prefill", "attempt": 1, "key": 2, "epoch": 1, "tokens": b"", "pages": b"", "skip_tokens": 0, "request_id": "r"
    },
    wire.PrefillEnded: {"type": "ended", "attempt": 1, "reason": "refused", "message": "why"},
    wire.Cancel: {"type": "cancel", "attempt": 1},
    wire.Heartbeat: {"type": "heartbeat", "seq": 1, "load": {}},
    wire.Goodbye: {"type": "goodbye", "reason": "why"},
    # since version 2
    wire.ExplainRequest: {"type": "explain", "ask": 1, "attempt": 2},
    wire.ExplainAnswer: {"type": "explained", "ask": 1, "attempt": 2, "known": False},
}


@pytest.mark.parametrize("kind", FIRST_VERSION, ids=lambda kind: kind.__name__)
def test_messages_of_the_first_version_are_read_and_every_field_of_them_is_needed(kind: type[wire.Message]) -> None:
    """Raise versions.OLDEST_VERSION when this no longer holds, and this test with it."""
    fields = FIRST_VERSION[kind]
    assert type(wire.decode(msgspec.msgpack.encode(fields))) is kind
    needed = {field.encode_name for field in msgspec.structs.fields(kind) if field.required}
    assert needed == set(fields) - {"type"}


def test_words_of_a_newer_peer_are_unknown() -> None:
    ended = wire.decode(_with(MESSAGES[4], reason="migrated"))
    assert isinstance(ended, wire.PrefillEnded)
    assert ended.reason is wire.EndReason.UNKNOWN
    goodbye = wire.decode(_with(MESSAGES[7], cause="rebalanced"))
    assert isinstance(goodbye, wire.Goodbye)
    assert goodbye.cause is wire.Cause.UNKNOWN


@pytest.mark.parametrize(
    ("ours", "theirs", "version"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((1, 9), (4, 4), 4), ((3, 3), (1, 3), 3)],
)
def test_both_ends_agree_on_the_older_of_the_two_newest(ours: tuple[int, int], theirs: tuple[int, int], version: int) -> None:
    assert agree(Range(*ours), Range(*theirs)) == agree(Range(*theirs), Range(*ours)) == version


@pytest.mark.parametrize(("ours", "theirs", "behind"), [((1, 2), (3, 4), "this node"), ((3, 4), (1, 2), "the peer")])
def test_ranges_that_do_not_meet_say_both_and_who_is_behind(
    ours: tuple[int, int], theirs: tuple[int, int], behind: str
) -> None:
    with pytest.raises(PeerIncompatible, match=f"versions {theirs[0]} to {theirs[1]} .* versions {ours[0]} to {ours[1]}: .* on {behind}"):
        agree(Range(*ours), Range(*theirs))


@pytest.mark.parametrize(
    ("index", "change"),
    [(2, {"name": "x" * 257}), (2, {"geometry": {"tp": 0}}), (2, {"epoch": "1"}),
     (6, {"seq": -1}), (6, {"load": {"running": -1}}), (6, {"progress": [[1]]}), (4, {"reason": 1}), (5, {"attempt": "1"}),
     (0, {"oldest": -1})],
)
def test_what_is_known_stays_strict(index: int, change: dict[str, object]) -> None:
    with pytest.raises(msgspec.MsgspecError):
        wire.decode(_with(MESSAGES[index], **change))


def test_u32_lists() -> None:
    assert wire.unpack_u32(wire.pack_u32([])) == ()
    assert wire.unpack_u32(wire.pack_u32(range(1000))) == tuple(range(1000))
    assert wire.pack_u32([258]) == b"\x02\x01\x00\x00"
    with pytest.raises(ValueError):
        wire.unpack_u32(b"123")


# -- routing ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("role", "num_tokens", "local", "source"),
    [("decode", 1, 0, KvSource.LOCAL), ("decode", 2, 0, KvSource.REMOTE), ("decode", 16, 16, KvSource.LOCAL),
     ("decode", 17, 16, KvSource.REMOTE), ("both", 5000, 0, KvSource.LOCAL)],
)
def test_route(role: str, num_tokens: int, local: int, source: KvSource) -> None:
    assert route(role, num_tokens, local) is source


# -- small parts ------------------------------------------------------------------------------------------------------
def test_quiet_log_names_the_cause_and_then_keeps_quiet(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    quiet = QuietLog(logging.getLogger("test"), lambda: now)
    for tenth in range(1300):
        now = tenth / 10
        quiet.log(logging.WARNING, "connection refused")
    assert [record.message for record in caplog.records] == [
        "connection refused", "connection refused (599 lines held back)", "connection refused (599 lines held back)",
    ]
    caplog.clear()
    for tenth in range(100):
        now = 1000 + tenth / 10
        quiet.log(logging.WARNING, f"cause {tenth}")
    assert len(caplog.records) == 10


def test_quiet_log_takes_lines_of_one_key_for_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Two decoders that are refused call every two seconds, each time from another port."""
    now = 0.0
    quiet = QuietLog(logging.getLogger("test"), lambda: now)
    for second in range(120):
        now = float(second)
        host = f"10.0.0.{second % 2}"
        quiet.log(logging.WARNING, f"a call from {host}:{40000 + second}", key=host)
    assert len(caplog.records) == 4


def test_a_goodbye_in_good_order_is_no_warning() -> None:
    assert level_of_end(said(goodbye(InOrder()), "p0")) == logging.INFO
    assert level_of_end(said(goodbye(PeerLost("d0 has been silent for 5 s")), "p0")) == logging.WARNING


@pytest.mark.parametrize(
    ("error", "cause"),
    [(InOrder(), "orderly"), (PeerLost("x"), "lost"), (PeerProtocol("x"), "protocol"), (PeerIncompatible("x"), "incompatible"),
     (PeerUnauthenticated("x"), "unauthenticated"), (FabricFailure("x"), "fabric"), (Draining("x"), "unknown")],
)
def test_a_goodbye_names_its_cause(error: PddError, cause: str) -> None:
    assert goodbye(error).cause.value == cause
    assert str(said(goodbye(error), "p0")) == f"p0 said goodbye: {error}"


def test_backoff_doubles_up_to_its_bound() -> None:
    rng = random.Random(1)
    plain = [Backoff(jitter=0.0).seconds(n, rng) for n in range(7)]
    assert plain == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    jittered = [Backoff().seconds(1000, rng) for _ in range(200)]
    assert 1.5 <= min(jittered) < 1.8 < 2.2 < max(jittered) <= 2.5


def test_tombstones_are_bounded_and_expire() -> None:
    tombstones = Tombstones()
    for attempt in range(MOST_TOMBSTONES):
        tombstones.add(attempt, now=0.0)
    with pytest.raises(PeerProtocol):
        tombstones.add(9999, now=1.0)
    tombstones.add(9999, now=TOMBSTONE_SECONDS + 1)
    assert 9999 in tombstones
    assert len(tombstones) == 1


def test_answers_are_bounded() -> None:
    answered = Answered()
    for attempt in range(MOST_ANSWERED + 10):
        answered.add(wire.PrefillEnded(attempt, wire.EndReason.FAILED, ""))
    assert 9 not in answered
    assert 10 in answered


def test_answer_that_was_forgotten_is_not_called_harmless() -> None:
    answered = Answered()
    attempts = [7, 3, *range(8, MOST_ANSWERED + 8)]
    for attempt in attempts:
        answered.add(wire.PrefillEnded(attempt, wire.EndReason.CANCELLED, "", ok_units=1))
    for attempt in (7, 3, 5):  # 5 may have ended before those that are still known
        ended = answered.get(attempt)
        assert ended is not None
        assert (ended.attempt, ended.unknown_units) == (attempt, 1)
    ended = answered.get(8)
    assert ended is not None
    assert ended.unknown_units == 0
    assert answered.get(MOST_ANSWERED + 8) is None  # this one never came


def test_retries_are_bounded_and_forgotten() -> None:
    retries = Retries()
    for n in range(5000):
        retries.failed(f"r{n}", n, "why", refused=n % 2 == 0)
    assert len(retries) == 4096
    assert retries.of("r0").num_failed == 0
    tries = retries.failed("r4999", 7, "again", refused=True)
    assert (tries.num_failed, tries.failed_by, tries.refused_by, tries.last) == (2, {4999, 7}, {7: "again"}, "again")
    retries.forget("r4999")
    assert retries.of("r4999").num_failed == 0


class Light(enum.Enum):
    RED = "red"
    GREEN = "green"


def test_state_moves_only_as_its_table_says_and_tells_the_recorder() -> None:
    seen: list[Change] = []
    table = {Light.RED: frozenset({Light.GREEN}), Light.GREEN: frozenset({Light.RED})}
    state = State("light", "x", Light.RED, table, clock=lambda: 7.0, recorder=seen.append)
    state.move(Light.GREEN, "time")
    assert seen == [Change(7.0, "light", "x", "", "red", ""), Change(7.0, "light", "x", "red", "green", "time")]
    state.facts = lambda: Facts(peer="p0", key=5, units=9)
    state.move(Light.RED, "again")
    assert seen[-1] == Change(7.0, "light", "x", "green", "red", "again", Facts(peer="p0", key=5, units=9))
    assert told(seen[-1]) == "light x green -> red: again (peer p0, key 5, units 9)"
    assert told(seen[0]) == "light x red"
    with pytest.raises(AssertionError, match="red -> red"):
        state.move(Light.RED)
