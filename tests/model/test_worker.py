"""The rank process: a real subprocess over a real socketpair. A fake counter stands in where no native core is
built."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pdd.engine import group_memory
from pdd.engine.batch import NewRow, Row, Sampling, StepPlan
from pdd.engine.rank_process import rank_environment
from pdd.engine.rank_protocol import (
    Channel,
    ChannelClosed,
    KvSize,
    ProtocolError,
    RankFailed,
    RankFits,
    RankInit,
    RankProgress,
    RankReady,
    RunStep,
    Shutdown,
    StepDone,
)
from pdd.errors import EXIT_CONFIG, EXIT_ENGINE_DIED, EXIT_LIMITS, ConfigError, LimitError, ModelError, PddError
from pdd.model.attention import kv_tensor
from pdd.model.demo import write_demo_model
from tests.model.model_harness import Harness

# The native Counter's memfd holds a little-endian u64 at offset 0; this one writes the same by hand.
FAKE_NATIVE = """
import mmap, os, struct, sys, types
class Counter:
    def __init__(self, fd):
        self._map, self._value = mmap.mmap(fd, 64), 0
    @staticmethod
    def create():
        fd = os.memfd_create("fake-counter"); os.ftruncate(fd, 64)
        return Counter(fd), fd
    def bump(self):
        self._value += 1
        self._map[:8] = struct.pack("<Q", self._value)
        return self._value
module = types.ModuleType("pdd.fabric._native"); module.Counter = Counter
sys.modules["pdd.fabric._native"] = module
from pdd.engine.worker import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("demo"))


@contextlib.contextmanager
def rank(code: str = FAKE_NATIVE) -> Iterator[tuple[Channel, subprocess.Popen[bytes]]]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", code, "--fd", str(theirs.fileno())],
                                   pass_fds=(theirs.fileno(),), env=rank_environment(1), start_new_session=True)
    channel = Channel(ours)
    try:
        yield channel, process
    finally:
        channel.close()
        process.kill()
        process.wait(10)


def started(channel: Channel, init: RankInit) -> tuple[RankReady, tuple[int, ...], list[str]]:
    channel.send(init)
    phases = []
    while not isinstance(message := channel.receive(60), RankReady):
        if isinstance(message, RankFits):
            channel.send(KvSize(message.num_pages))
            continue
        assert isinstance(message, RankProgress), message
        phases.append(message.phase)
        assert 0 <= message.done_bytes <= message.total_bytes
    return message, channel.take_fds(), phases


def init_for(model: Path, **changes: object) -> RankInit:
    fields = dict(model_dir=str(model), num_pages=32, max_context=256, threads=1) | changes
    return RankInit(**fields)


def test_a_ranks_life(model: Path) -> None:
    """Same tokens as in process; KV in the memfd where the layout says; the counter counts attended layers."""
    prompt = tuple(range(40, 90))
    harness = Harness(model, num_pages=32)
    request = harness.request(list(prompt))
    want = harness.run([request], 4)[0]
    with rank() as (channel, process):
        ready, fds, phases = started(channel, init_for(model))
        assert phases[-1] == "warm-up"
        assert "weights" in phases
        assert (ready.pid, ready.family, ready.eos_token_ids) == (process.pid, "llama", (258, 256))
        assert (ready.max_context, ready.total_kv_heads, ready.dtype, ready.threads) == (256, 2, "float32", 1)
        assert ready.kv_bytes == ready.layout.region_bytes
        kv_fd, counter_fd = fds
        assert os.fstat(kv_fd).st_size == ready.kv_bytes
        with mmap.mmap(kv_fd, ready.kv_bytes) as region, mmap.mmap(counter_fd, 64) as counter:
            assert region[:] == bytes(len(region))  # warm-up left nothing
            assert counter[:8] == bytes(8)
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(kv_fd, 0)  # sealed
            got: list[int] = []
            plan = StepPlan(0, (), (NewRow(7, prompt, (), Sampling(temperature=0.0)),),
                            (Row(7, prompt, 0, (9, 2, 30, 4), sample=True),))
            for step in range(1, 5):
                channel.send(RunStep(plan))
                done = channel.receive(30)
                assert isinstance(done, StepDone)
                assert done.result.step == step - 1
                assert 0 < done.result.seconds < 30
                got += done.result.sampled[0].tokens
                assert int.from_bytes(counter[:8], "little") == step * ready.num_layers
                plan = StepPlan(step, (), (), (Row(7, (got[-1],), 49 + step, (), sample=True),))
            assert got == want
            ours = kv_tensor(ready.layout, memoryview(bytearray(region[:])))
            theirs_pages = harness.runner._rows[request.row_id].table[:4]
            for mine, page in zip((9, 2, 30), theirs_pages, strict=False):
                torch.testing.assert_close(ours[:, mine], harness.kv[:, int(page)])
        channel.send(Shutdown())
        assert process.wait(10) == 0
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize(("changes", "kind", "exit_code", "message", "hint"), [
    ({"model_dir": "/nonexistent"}, ModelError, EXIT_CONFIG, "does not exist", "Set model.path"),
    ({"max_context": 10**6}, ConfigError, EXIT_CONFIG, "max_context 1000000 is more than the 4096", "at most 4096"),
    ({"max_context": 1}, ConfigError, EXIT_CONFIG, "needs room for two tokens", "Raise kv.num_pages, or model.max_"),
    ({"page_size": 1, "num_pages": 1}, ConfigError, EXIT_CONFIG, "needs room for two tokens", "Raise kv.num_pages"),
    ({"num_pages": 0, "memory_fraction": 1e-12}, LimitError, EXIT_LIMITS, "does not hold one page", "memory_fraction"),
    ({"num_pages": 10**12}, LimitError, EXIT_LIMITS, "1000000000000 pages of KV take", "would fit"),
])
def test_a_failed_start_says_why(model: Path, changes: dict[str, object], kind: type[PddError], exit_code: int,
                                 message: str, hint: str) -> None:
    failed = failed_start(init_for(model, **changes), exit_code)
    assert type(failed) is kind
    assert message in str(failed)
    assert hint in failed.hint


@pytest.mark.parametrize(("tp", "why"), [
    (3, "num_attention_heads (4) does not divide over 3 ranks; intermediate_size (128) does not divide over 3 ranks"),
    (8, "num_attention_heads (4) does not divide over 8 ranks"),
])
def test_ranks_that_the_model_does_not_divide_over_are_refused_by_name(model: Path, tp: int, why: str) -> None:
    fd = group_memory.create(tp)
    try:
        failed = failed_start(init_for(model, world=tp), EXIT_CONFIG, fds=(fd,))
    finally:
        os.close(fd)
    assert type(failed) is ConfigError
    assert str(failed).startswith(f"this model cannot run on {tp} ranks: {why}")
    assert failed.hint == "Set engine.tp (--tp) to one of 1, 2, 4."


def test_the_daemon_chooses_the_size_of_the_pool(model: Path) -> None:
    with rank() as (channel, _):
        channel.send(init_for(model, warm_up=False))
        while isinstance(message := channel.receive(60), RankProgress):
            pass
        assert message == RankFits(32)
        channel.send(KvSize(7))
        while isinstance(message := channel.receive(60), RankProgress):
            pass
        assert isinstance(message, RankReady)
        assert message.num_pages == 7
        fds = channel.take_fds()
        assert os.fstat(fds[0]).st_size == message.kv_bytes == message.layout.region_bytes
        for fd in fds:
            os.close(fd)


def failed_start(init: RankInit, exit_code: int, code: str = FAKE_NATIVE, fds: tuple[int, ...] = ()) -> PddError:
    """The error that the daemon raises for a start that fails; the rank's exit code is the same as the daemon's."""
    with rank(code) as (channel, process):
        channel.send(init, fds)
        while isinstance(failed := channel.receive(60), RankProgress | RankFits):
            if isinstance(failed, RankFits):
                channel.send(KvSize(failed.num_pages))
        assert isinstance(failed, RankFailed), failed
        assert process.wait(10) == exit_code
    error = failed.to_error()
    assert error.exit_code == exit_code
    return error


@pytest.mark.parametrize("damage", ["truncate", "directory", "garbage"])
def test_a_checkpoint_that_cannot_be_read_says_what_to_do(tmp_path: Path, damage: str) -> None:
    folder = write_demo_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    if damage == "truncate":
        os.truncate(weights, weights.stat().st_size - 1)
    elif damage == "garbage":
        weights.write_bytes(b"once upon a time")
    else:
        (folder / "model.safetensors.index.json").mkdir()
    error = failed_start(init_for(folder), EXIT_CONFIG)
    assert type(error) is ModelError
    assert "safetensors" in str(error)
    assert "opy the checkpoint again" in error.hint


def test_weights_that_do_not_fit_are_refused_before_they_are_loaded(model: Path) -> None:
    small = "import pdd.engine.machine as m; m.free_memory = lambda: 4096\n" + FAKE_NATIVE
    error = failed_start(init_for(model), EXIT_LIMITS, small)
    assert type(error) is LimitError
    assert "the weights take" in str(error)
    assert "4.1 kB of memory are free" in str(error)
    assert "smaller model" in error.hint


def test_a_group_has_no_more_than_its_share_of_what_is_free(model: Path) -> None:
    """Others load at the same time, and what is free now is theirs, too."""
    with rank() as (channel, _):
        ready, fds, _ = started(channel, init_for(model, warm_up=False))
        for fd in fds:
            os.close(fd)
    need = ready.param_bytes + ready.kv_bytes
    small = failed_start(init_for(model, memory_bytes=ready.param_bytes - 1), EXIT_LIMITS)
    assert "the weights take" in str(small)
    assert "are left of the memory that is free for each group" in str(small)
    tight = failed_start(init_for(model, memory_bytes=need - 1), EXIT_LIMITS)
    assert "32 pages of KV take" in str(tight)
    assert "(31 would fit)" in tight.hint
    with rank() as (channel, _):
        ready, fds, _ = started(channel, init_for(model, warm_up=False, memory_bytes=need))
        for fd in fds:
            os.close(fd)
        assert ready.num_pages == 32
    with rank() as (channel, _):
        init = init_for(model, warm_up=False, memory_bytes=need, num_pages=0, memory_fraction=0.5)
        ready, fds, _ = started(channel, init)
        for fd in fds:
            os.close(fd)
        assert ready.num_pages == 16


def test_memory_fraction_is_of_what_is_free(model: Path) -> None:
    free = 16 << 20
    small = f"import pdd.engine.machine as m; m.free_memory = lambda: {free}\n" + FAKE_NATIVE
    with rank(small) as (channel, _):
        ready, fds, _ = started(channel, init_for(model, num_pages=0, memory_fraction=0.25, warm_up=False))
        for fd in fds:
            os.close(fd)
        page = dataclasses.replace(ready.layout, num_pages=1)
        assert ready.num_pages == free // 4 // page.region_bytes


def test_a_rank_stays_on_its_cpus_and_says_what_the_system_refused(model: Path) -> None:
    everywhere = os.sched_getaffinity(0)
    first = min(everywhere)
    for changes, cpus, threads, refused in (
        ({"cpus": (first, 8000), "numa": 0}, {first}, 1, []),
        ({"threads": 2, "cpus": (first,)}, {first}, 2, []),
        ({}, everywhere, len(everywhere), []),
        ({"cpus": (8000, 8001), "numa": 1000}, everywhere, len(everywhere), ["none of the CPUs 8000-8001", "NUMA node 1000"]),
    ):
        with rank(FAKE_NATIVE) as (channel, process):
            ready, fds, _ = started(channel, init_for(model, **{"threads": 0, "warm_up": False, **changes}))
            for fd in fds:
                os.close(fd)
            assert (os.sched_getaffinity(process.pid), ready.threads) == (cpus, threads)
            assert len(ready.warnings) == len(refused)
            assert all(words in warning for words, warning in zip(refused, ready.warnings, strict=True))


def test_a_rank_whose_daemon_died_at_once_loads_nothing(model: Path) -> None:
    """Killed before the rank could bind its life to the daemon's, which had sent its request already."""
    code = "import sys; sys.modules['torch'] = None; from pdd.engine.worker import main; sys.exit(main())"
    with rank(code) as (channel, process):
        channel.send(init_for(model))
        channel.close()
        assert process.wait(10) == 0


def test_a_missing_native_core_is_told(model: Path) -> None:
    code = "import sys; sys.modules['pdd.fabric._native'] = None; from pdd.engine.worker import main; sys.exit(main())"
    with rank(code) as (channel, process):
        channel.send(init_for(model, warm_up=False))
        while isinstance(failed := channel.receive(60), RankProgress | RankFits):
            if isinstance(failed, RankFits):
                channel.send(KvSize(failed.num_pages))
        assert isinstance(failed, RankFailed)
        assert "native core cannot be loaded" in failed.message
        assert process.wait(10) == EXIT_CONFIG


def test_a_bad_plan_is_told_and_ends_the_rank(model: Path) -> None:
    with rank() as (channel, process):
        _, fds, _ = started(channel, init_for(model, warm_up=False))
        channel.send(RunStep(StepPlan(0, (), (), (Row(3, (1,), 0, (0,), sample=False),))))
        failed = channel.receive(30)
        assert isinstance(failed, RankFailed)
        assert failed.message == "step 0, row 3: is not known"
        assert process.wait(10) == EXIT_ENGINE_DIED
        for fd in fds:
            os.close(fd)


def test_garbage_instead_of_a_frame(model: Path) -> None:
    with rank() as (channel, process):
        os.write(channel.fileno(), b"\x05\0\0\0hello")
        failed = channel.receive(30)
        assert isinstance(failed, RankFailed)
        assert "malformed frame" in failed.message
        assert process.wait(10) == EXIT_ENGINE_DIED


def test_a_closed_socket_ends_the_rank_and_signals_do_not(model: Path) -> None:
    with rank() as (channel, process):
        _, fds, _ = started(channel, init_for(model, warm_up=False))
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        channel.send(RunStep(StepPlan(0, (), (), ())))
        assert isinstance(channel.receive(30), StepDone)
        for fd in fds:
            os.close(fd)
        channel.close()
        assert process.wait(10) == 0


def test_killing_the_parent_leaves_no_orphan(model: Path) -> None:
    """The parent is killed while the socket's other end is still open elsewhere: only the death signal can end the
    rank."""
    ours, theirs = socket.socketpair()
    parent_code = ("import subprocess, sys, time\n"
                   "rank = subprocess.Popen([sys.executable, '-c', sys.argv[1], '--fd', sys.argv[2]], "
                   "pass_fds=(int(sys.argv[2]),), start_new_session=True)\n"
                   "print(rank.pid, flush=True)\ntime.sleep(60)\n")
    parent = subprocess.Popen([sys.executable, "-c", parent_code, FAKE_NATIVE, str(theirs.fileno())],
                              pass_fds=(theirs.fileno(),), stdout=subprocess.PIPE, env=rank_environment(1))
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    channel = Channel(ours)
    _, fds, _ = started(channel, init_for(model, warm_up=False))
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pid)
    theirs.close()
    channel.close()
    for fd in fds:
        os.close(fd)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- the channel itself -----------------------------------------------------------------------------------------------
def test_frames_survive_any_split_and_fds_come_along() -> None:
    left, right = (Channel(end) for end in socket.socketpair())
    read, write = os.pipe()
    big = RunStep(StepPlan(1, (), (NewRow(1, tuple(range(200_000)), (), None),), ()))
    left.send(RankProgress("kv", 1, 2), (read,))
    assert right.receive(1) == RankProgress("kv", 1, 2)
    (received,) = right.take_fds()
    os.write(write, b"x")
    assert os.read(received, 1) == b"x"
    sender = threading.Thread(target=left.send, args=(big,))  # larger than the socket's buffer: needs a reader
    sender.start()
    assert right.receive(10) == big
    sender.join(10)
    assert right.receive(0.01) is None
    for fd in (read, write, received):
        os.close(fd)
    left.close()
    with pytest.raises(ChannelClosed):
        right.receive(1)
    with pytest.raises(ChannelClosed):
        right.send(Shutdown())
    right.close()


def test_an_absurd_length_is_refused() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="a frame of 4294967295 bytes"):
        channel.receive(1)
    theirs.close()
    channel.close()
