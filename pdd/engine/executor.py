"""Runs the rank processes of a node: starts them, sends each step to all, gathers, and notices at once when one dies.

    start()    spawn -> RankInit -> ... -> RankReady with the fds of KV region and layer counter
    execute()  RunStep to every rank, StepDone from every rank; rank 0's result counts
    close()    Shutdown, then SIGKILL

One thread of its own, the keeper, spawns the ranks, reads their stderr into the log and watches their pidfds, so that a
death is told while no step runs, too. The keeper lives as long as the ranks: the kernel kills a rank when the *thread*
that started it ends, which also covers a daemon that was killed; so does the closed socketpair.

A rank that died or hangs is not restarted: nothing of the KV it held can be trusted. `start`, `watch` and `close`
belong to the daemon, `execute` to the engine thread, which must have ended before `close`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import IO

import msgspec

from pdd.engine.batch import StepPlan, StepResult
from pdd.engine.rank_process import rank_command, rank_environment
from pdd.engine.rank_protocol import (
    Channel,
    ChannelClosed,
    RankFailed,
    RankInit,
    RankMessage,
    RankProgress,
    RankReady,
    RunStep,
    Shutdown,
    StepDone,
)
from pdd.errors import EngineError, RankDied

START_TIMEOUT_SECONDS = 600.0  # a large checkpoint from a cold disk
SHUTDOWN_SECONDS = 2.0  # from Shutdown to SIGKILL
DEATH_NOTE_SECONDS = 1.0  # from a closed socket to the exit status that explains it
MAX_STDERR_LINE = 4096  # bytes

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank that is ready. The executor owns the fds and closes them in `close`: map or duplicate them before."""

    ready: RankReady
    kv_fd: int  # memfd of `ready.kv_bytes`
    counter_fd: int | None  # memfd of the layer counter; rank 0 only


@dataclasses.dataclass(slots=True)
class _Rank:
    """What the keeper keeps of one process."""

    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    stderr: IO[bytes]
    partial: bytes = b""
    last_lines: collections.deque[str] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=5))


class RankExecutor:
    """The rank processes of one node."""

    def __init__(
        self, init: RankInit, *, step_timeout: float, start_timeout: float = START_TIMEOUT_SECONDS,
        on_progress: Callable[[int, RankProgress], object] | None = None,
        command: Callable[[int], list[str]] = rank_command,
    ) -> None:
        """`init.world` ranks are started; `init.rank` is filled in. `on_progress(rank, progress)` is called by `start`.

        `command` gives the argv of a rank that inherits an fd.
        """
        self._init = init
        self._step_timeout = step_timeout
        self._start_timeout = start_timeout
        self._on_progress = on_progress
        self._command = command
        self._channels: list[Channel] = []
        self._infos: tuple[RankInfo, ...] = ()
        self._ranks: list[_Rank] = []
        self._keeper = threading.Thread(target=self._keep, name="pdd-ranks", daemon=True)
        self._spawned = threading.Event()
        self._spawn_error: OSError | None = None
        self._lock = threading.Lock()  # of the three below; held for assignments only
        self._death: RankDied | None = None
        self._on_death: Callable[[RankDied], object] | None = None
        self._closing = False
        self._died = threading.Event()

    # -- daemon ---------------------------------------------------------------------------------------------------
    def start(self) -> tuple[RankInfo, ...]:
        """Starts the ranks and waits until all are ready; on failure nothing is left running.

        Raises:
            ModelError, ConfigError, LimitError: the ranks cannot run this model with these settings or this memory.
            RankDied: a rank ended, or did not get ready in time.
        """
        self._keeper.start()
        self._spawned.wait()
        try:
            if self._spawn_error is not None:
                raise EngineError(
                    f"a rank process cannot be started: {self._spawn_error}",
                    hint="Look at this service's limits of processes and memory (TasksMax, MemoryMax, ulimit -u).",
                ) from self._spawn_error
            deadline = time.monotonic() + self._start_timeout
            for number, channel in enumerate(self._channels):
                self._send(channel, msgspec.structs.replace(self._init, rank=number))
            self._infos = tuple(self._await_ready(number, deadline) for number in range(self._init.world))
        except BaseException:
            self.close()
            raise
        return self._infos

    def watch(self, on_death: Callable[[RankDied], object]) -> None:
        """Has `on_death` called once, on the keeper's thread, when a rank ends; at once if one has."""
        with self._lock:
            self._on_death, death = on_death, self._death
        if death is not None:
            on_death(death)

    def close(self) -> None:
        """Ends the ranks. Idempotent; takes at most a few seconds. A `start` on another thread then raises RankDied."""
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            for channel in self._channels:
                with contextlib.suppress(ChannelClosed):
                    channel.send(Shutdown())
            deadline = time.monotonic() + SHUTDOWN_SECONDS
            for rank in self._ranks:
                try:
                    rank.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    rank.process.kill()
        if self._keeper.is_alive() and self._keeper is not threading.current_thread():
            self._keeper.join(SHUTDOWN_SECONDS)
        if first:
            for channel in self._channels:
                channel.close()
            for info in self._infos:
                os.close(info.kv_fd)
                if info.counter_fd is not None:
                    os.close(info.counter_fd)

    # -- engine thread --------------------------------------------------------------------------------------------
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step on all ranks.

        Raises:
            RankDied: a rank ended or did not answer within the step timeout, and was killed.
            EngineError: a rank says that it failed.
        """
        message = RunStep(plan)
        for channel in self._channels:
            self._send(channel, message)
        deadline = time.monotonic() + self._step_timeout
        results = [self._await_step(number, plan.step, deadline) for number in range(len(self._channels))]
        return results[0]

    def _await_step(self, number: int, step: int, deadline: float) -> StepResult:
        message = self._receive(number, deadline, f"step {step}", self._step_timeout)
        if isinstance(message, StepDone) and message.result.step == step:
            return message.result
        raise EngineError(f"rank {number} answered step {step} with {message!r:.200}")

    def _await_ready(self, number: int, deadline: float) -> RankInfo:
        channel = self._channels[number]
        while True:
            message = self._receive(number, deadline, "its start", self._start_timeout)
            if isinstance(message, RankProgress):
                if self._on_progress is not None:
                    self._on_progress(number, message)
                continue
            if not isinstance(message, RankReady):
                raise EngineError(f"rank {number} answered RankInit with {message!r:.200}")
            fds = channel.take_fds()
            expected = 2 if number == 0 else 1
            if len(fds) != expected:
                for fd in fds:
                    os.close(fd)
                raise EngineError(f"rank {number} came with {len(fds)} descriptors instead of {expected}")
            return RankInfo(message, fds[0], fds[1] if number == 0 else None)

    def _send(self, channel: Channel, message: RankInit | RunStep) -> None:
        try:
            channel.send(message)
        except ChannelClosed as error:
            raise self._explain(error) from error

    def _receive(self, number: int, deadline: float, what: str, timeout: float) -> RankMessage:
        try:
            message = self._channels[number].receive(max(0.0, deadline - time.monotonic()))
        except ChannelClosed as error:
            raise self._explain(error) from error
        if message is None:
            hung = RankDied(
                f"rank {number} did not finish {what} within {timeout:g} s and was killed",
                hint="Look at the load of this machine; engine.step_timeout bounds a step of engine.max_batch_tokens tokens.",
            )
            self._note_death(hung)
            self._ranks[number].process.kill()
            raise hung
        if isinstance(message, RankFailed):
            raise message.to_error()
        if not isinstance(message, RankProgress | RankReady | StepDone):
            raise EngineError(f"rank {number} sent {type(message).__name__}")
        return message

    def _explain(self, error: ChannelClosed) -> RankDied:
        """The exit status of the rank behind a closed socket, once the keeper has it."""
        self._died.wait(DEATH_NOTE_SECONDS)
        return self._death or error

    # -- keeper ---------------------------------------------------------------------------------------------------
    def _keep(self) -> None:
        try:
            for number in range(self._init.world):
                self._spawn(number)
        except OSError as error:
            self._spawn_error = error
        finally:
            self._spawned.set()
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.pidfd, selectors.EVENT_READ, rank)
                selector.register(rank.stderr, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    rank = key.data
                    if key.fd == rank.pidfd:
                        selector.unregister(rank.pidfd)
                        self._reap(rank)
                    elif not self._read_stderr(rank):
                        selector.unregister(rank.stderr)
                        rank.stderr.close()

    def _spawn(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    self._command(theirs.fileno()), pass_fds=(theirs.fileno(),), start_new_session=True,
                    env=rank_environment(self._init.threads), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                )
            except OSError:
                ours.close()
                raise
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        self._channels.append(Channel(ours))
        self._ranks.append(_Rank(number, process, os.pidfd_open(process.pid), process.stderr))

    def _read_stderr(self, rank: _Rank) -> bool:
        """Logs what is there; False at its end."""
        try:
            data = os.read(rank.stderr.fileno(), 1 << 16)  # what a pipe holds at most
        except BlockingIOError:
            return True
        *lines, rank.partial = (rank.partial + data).split(b"\n")
        if rank.partial and (not data or len(rank.partial) > MAX_STDERR_LINE):
            lines, rank.partial = [*lines, rank.partial], b""
        for line in lines:
            text = line[:MAX_STDERR_LINE].decode(errors="replace").rstrip()
            if text:
                rank.last_lines.append(text)
                _log.warning("rank %d: %s", rank.number, text)
        return bool(data)

    def _reap(self, rank: _Rank) -> None:
        status = rank.process.wait()
        os.close(rank.pidfd)
        if not rank.stderr.closed:
            self._read_stderr(rank)  # all that the pipe holds: its last words explain the death
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        words = f": {rank.last_lines[-1]}" if rank.last_lines else ""
        self._note_death(RankDied(f"rank {rank.number} (pid {rank.process.pid}) {how}{words}",
                                  hint="Its last words are in the log; SIGKILL is often the OOM killer: see dmesg."))

    def _note_death(self, death: RankDied) -> None:
        """Remembers the first death that nobody asked for, and tells it."""
        with self._lock:
            expected = self._closing or self._death is not None
            if not expected:
                self._death = death
            on_death = None if expected else self._on_death
        self._died.set()
        if not expected:
            _log.error("%s", death)
        if on_death is not None:
            on_death(death)
