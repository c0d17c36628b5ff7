"""Runs the rank processes of a node: starts them, sends each step to all, gathers, and notices at once when one dies.

    start()    spawn -> RankInit -> RankFits of all -> KvSize, the least of them -> RankReady with fds
    execute()  RunStep to every rank, StepDone from every rank; they must agree, and rank 0's result counts
    close()    Shutdown, then SIGKILL

All ranks are listened to together (`gather.py`): the first failure ends the step, whichever rank it is of. A rank that
died without a word is taken for the cause of what others then say; ranks that answer late are all killed, and those
that the others waited for in their common memory (group_memory.py) are named.

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
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from pdd.engine import group_memory
from pdd.engine.agreement import check_ready, check_results
from pdd.engine.batch import StepPlan, StepResult
from pdd.engine.gather import DeathTold, Gathering, Message, RankGone, Take
from pdd.engine.rank_process import rank_command, rank_environment
from pdd.engine.rank_protocol import (
    Channel,
    ChannelClosed,
    KvSize,
    RankFailed,
    RankFits,
    RankInit,
    RankProgress,
    RankReady,
    RunStep,
    Shutdown,
    StepDone,
    encode_frame,
)
from pdd.errors import EngineError, LimitError, PddError, RankDied

START_TIMEOUT_SECONDS = 600.0  # a large checkpoint from a cold disk
SHUTDOWN_SECONDS = 2.0  # from Shutdown to SIGKILL
DEATH_NOTE_SECONDS = 1.0  # from a closed socket to the exit status that explains it
CAUSE_SECONDS = 0.2  # from what one rank says of its failure to the death of another that was the cause
MAX_STDERR_LINE = 4096  # bytes

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank that is ready. The executor owns the fds and closes them in `close`: map or duplicate them before."""

    ready: RankReady
    kv_fd: int  # of `ready.kv_bytes`, a memfd or what else `ready.kv_kind` says
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
        command: Callable[[int], list[str]] = rank_command, name: str = "",
    ) -> None:
        """`init.world` ranks are started; `init.rank` is filled in. `on_progress(rank, progress)` is called by `start`.

        `command` gives the argv of a rank that inherits an fd. `name`: for the log, where the node has other ranks.
        """
        self._init = init
        self._step_timeout = step_timeout
        self._start_timeout = start_timeout
        self._on_progress = on_progress
        self._command = command
        self._prefix = f"{name} " if name else ""
        self._channels: list[Channel] = []
        self._infos: tuple[RankInfo, ...] = ()
        self._ranks: list[_Rank] = []
        self._keeper = threading.Thread(target=self._keep, name="pdd-ranks", daemon=True)
        self._spawned = threading.Event()
        self._spawn_error: OSError | None = None
        self._lock = threading.Lock()  # of the five below; held for assignments only
        self._death: RankDied | None = None
        self._dead_rank: int | None = None
        self._on_death: Callable[[RankDied], object] | None = None
        self._closing = False
        self._died = threading.Event()
        self._death_fd: int | None = None  # an eventfd that says the same, for whoever waits for the ranks
        self._gathering: Gathering | None = None  # from `start` on
        self._group_fd: int | None = None  # of the memory of several ranks
        self._failed = False  # an exchange has: ranks may wait for one that is no more

    # -- daemon ---------------------------------------------------------------------------------------------------
    def start(self) -> tuple[RankInfo, ...]:
        """Starts the ranks and waits until all are ready; on failure nothing is left running.

        Raises:
            ModelError, ConfigError, LimitError: the ranks cannot run this model with these settings or this memory.
            RankDied: a rank ended, or did not get ready in time.
        """
        self._death_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        if self._init.world > 1:
            try:
                self._group_fd = group_memory.create(self._init.world)
            except OSError as error:
                raise LimitError(f"{self._init.world} ranks cannot have memory in common: {error.strerror}",
                                 hint="Look at the limits of open files and address space (ulimit -n, ulimit -v).") from error
        self._keeper.start()
        self._spawned.wait()
        try:
            if self._spawn_error is not None:
                raise EngineError(
                    f"a rank process cannot be started: {self._spawn_error}",
                    hint="Look at this service's limits of processes and memory (TasksMax, MemoryMax, ulimit -u).",
                ) from self._spawn_error
            self._gathering = Gathering(self._channels, self._death_fd)
            self._await_ready()
            check_ready([info.ready for info in self._infos])
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
            deadline = time.monotonic() + (0.0 if self._failed or self._death is not None else SHUTDOWN_SECONDS)
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
            with self._lock:  # a keeper that still lives would write into whatever has this number next
                death_fd, self._death_fd = self._death_fd, None
            group_fd, self._group_fd = self._group_fd, None
            for fd in (death_fd, group_fd):
                if fd is not None:
                    os.close(fd)

    # -- engine thread --------------------------------------------------------------------------------------------
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step on all ranks.

        Raises:
            RankDied: a rank ended, or did not answer within the step timeout and was killed.
            RanksDisagree: the ranks did not sample the same tokens.
            EngineError: a rank says that it failed.
        """
        results: dict[int, StepResult] = {}

        def take(rank: int, message: Message) -> bool:
            if not isinstance(message, StepDone) or message.result.step != plan.step or rank in results:
                raise self._refusal(rank, f"step {plan.step}", message)
            results[rank] = message.result
            return True

        frames = [encode_frame(RunStep(plan))] * len(self._channels)
        self._exchange(frames, take, f"step {plan.step}", time.monotonic() + self._step_timeout, self._step_timeout)
        if len(results) > 1:
            check_results([results[rank] for rank in range(len(results))])
        return results[0]

    # -- whoever waits for the ranks --------------------------------------------------------------------------------
    def _await_ready(self) -> None:
        deadline = time.monotonic() + self._start_timeout
        num_pages = min(self._await_fits(deadline).values())
        infos: dict[int, RankInfo] = {}

        def take(rank: int, message: Message) -> bool:
            if self._is_progress(rank, message):
                return False
            if not isinstance(message, RankReady) or rank in infos:
                raise self._refusal(rank, "KvSize", message)
            fds = self._channels[rank].take_fds()
            expected = 2 if rank == 0 else 1
            if len(fds) != expected:
                for fd in fds:
                    os.close(fd)
                raise EngineError(f"rank {rank} came with {len(fds)} descriptors instead of {expected}")
            infos[rank] = RankInfo(message, fds[0], fds[1] if rank == 0 else None)
            return True

        try:
            sizes = [encode_frame(KvSize(num_pages))] * self._init.world
            self._exchange(sizes, take, "its start", deadline, self._start_timeout)
        finally:
            self._infos = tuple(infos[rank] for rank in sorted(infos))  # `close` closes what has come

    def _await_fits(self, deadline: float) -> dict[int, int]:
        """Pages that fit, by rank: all have loaded."""
        fits: dict[int, int] = {}

        def take(rank: int, message: Message) -> bool:
            if self._is_progress(rank, message):
                return False
            if not isinstance(message, RankFits) or rank in fits:
                raise self._refusal(rank, "RankInit", message)
            fits[rank] = message.num_pages
            return True

        for rank, channel in enumerate(self._channels):
            with contextlib.suppress(ChannelClosed):  # which is heard below
                shared = () if self._group_fd is None else (self._group_fd,)
                channel.send(msgspec.structs.replace(self._init, rank=rank), shared)
        self._exchange([], take, "its start", deadline, self._start_timeout)
        return fits

    def _is_progress(self, rank: int, message: Message) -> bool:
        if not isinstance(message, RankProgress):
            return False
        if self._on_progress is not None:
            self._on_progress(rank, message)
        return True

    def _exchange(self, frames: list[bytes], take: Take, what: str, deadline: float, timeout: float) -> None:
        """Frames to all ranks and answers from all, or the first failure. `timeout`: what `deadline` was when it began."""
        try:
            self._exchange_or_fail(frames, take, what, deadline, timeout)
        except BaseException:
            self._failed = True
            raise

    def _exchange_or_fail(self, frames: list[bytes], take: Take, what: str, deadline: float, timeout: float) -> None:
        assert self._gathering is not None
        try:
            late = self._gathering.exchange(frames, take, deadline)
        except RankGone as gone:
            raise self._first_failure(gone.rank, None, gone) from gone
        except DeathTold:
            ended = RankDied("the ranks of this node were told to end")
            raise self._first_failure(self._dead_rank, None, ended) from None
        if late:
            awaited = late
            if self._group_fd is not None:
                awaited = group_memory.who_is_awaited(group_memory.arrivals(self._group_fd, self._init.world), late)
            others = [rank for rank in late if rank not in awaited]
            waited = f"; {_ranks(others)} waited for {'it' if len(awaited) == 1 else 'them'}" if others else ""
            hung = RankDied(
                f"{_ranks(awaited)} did not finish {what} within {timeout:g} s and {'was' if len(awaited) == 1 else 'were'} "
                f"killed{waited}",
                hint="Look at the load of this machine; engine.step_timeout bounds a step of engine.max_batch_tokens tokens.",
            )
            self._note_death(hung, awaited[0])
            for rank in late:
                self._ranks[rank].process.kill()
            raise hung

    def _refusal(self, rank: int, what: str, message: Message) -> PddError:
        """What a message that is no answer to `what` ends the node with."""
        if isinstance(message, RankFailed):
            said = message.to_error()
            return self._first_failure(rank, said, said)
        return EngineError(f"rank {rank} answered {what} with {message!r:.200}")

    def _first_failure(self, rank: int | None, said: PddError | None, sign: PddError) -> PddError:
        """The failure that `sign` was the first sign of: `rank` failed and `said` so, or is gone.

        Ranks work on each other: one that dies makes others fail, which may be heard first. So a rank that has died
        without a word is the cause of what others say, and of two that had their say the first heard is.
        """
        if said is None and rank is not None:
            said = self._last_words(rank)
        if said is None or len(self._channels) > 1:
            self._died.wait(DEATH_NOTE_SECONDS if said is None else CAUSE_SECONDS)
        death, dead = self._death, self._dead_rank
        if death is None or dead is None:
            return said or sign
        words = self._last_words(dead) if dead != rank else None
        if said is not None and (dead == rank or words is not None):
            return said
        return words or death

    def _last_words(self, rank: int) -> PddError | None:
        """Why a rank says that it failed, if it does."""
        assert self._gathering is not None
        try:
            while messages := self._gathering.read(rank):
                for message in messages:
                    if isinstance(message, RankFailed):
                        return message.to_error()
        except RankGone:
            return None
        return None

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
                _log.warning("%srank %d: %s", self._prefix, rank.number, text)
        return bool(data)

    def _reap(self, rank: _Rank) -> None:
        status = rank.process.wait()
        os.close(rank.pidfd)
        if not rank.stderr.closed:
            self._read_stderr(rank)  # all that the pipe holds: its last words explain the death
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        words = f": {rank.last_lines[-1]}" if rank.last_lines else ""
        death = RankDied(f"rank {rank.number} (pid {rank.process.pid}) {how}{words}",
                         hint="Its last words are in the log; SIGKILL is often the OOM killer: see dmesg.")
        self._note_death(death, rank.number)

    def _note_death(self, death: RankDied, rank: int) -> None:
        """Remembers the first death that nobody asked for, and tells it."""
        with self._lock:
            expected = self._closing or self._death is not None
            if not expected:
                self._death, self._dead_rank = death, rank
            on_death = None if expected else self._on_death
            self._died.set()
            if self._death_fd is not None:
                os.eventfd_write(self._death_fd, 1)
        if not expected:
            _log.error("%s%s", self._prefix, death)
        if on_death is not None:
            on_death(death)


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
