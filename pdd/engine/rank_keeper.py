"""Keeps the rank processes of a node: spawns them, reads their stderr into the log, and tells at once when one dies.

All on one thread of its own, so that a death is told while no step runs, too. The thread lives as long as the ranks:
the kernel kills a rank when the *thread* that started it ends, which also covers a daemon that was killed; so does the
closed socketpair.

It says nothing to ranks and hears nothing from them but their stderr: messages are the executor's.
"""

from __future__ import annotations

import collections
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

from pdd.engine.rank_process import rank_environment
from pdd.engine.rank_protocol import Channel
from pdd.errors import EngineError, RankDied

SHUTDOWN_SECONDS = 2.0  # from Shutdown to SIGKILL
MAX_STDERR_LINE = 4096  # bytes

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class KeptRank:
    """One process."""

    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    stderr: IO[bytes]
    partial: bytes = b""
    last_lines: collections.deque[str] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=5))


class RankKeeper:
    """`start`, `watch` and the three of the end belong to one thread; the rest may be asked from any."""

    def __init__(self, num_ranks: int, threads: int, command: Callable[[int], list[str]], prefix: str) -> None:
        """`threads`: of a rank, 0: as many as it likes. `command` gives the argv of a rank that inherits an fd. `prefix`: of
        lines in the log."""
        self._num_ranks = num_ranks
        self._threads = threads
        self._command = command
        self._prefix = prefix
        self.ranks: list[KeptRank] = []  # once started
        self.channels: list[Channel] = []  # to them, by rank; whoever speaks on them closes them
        self.death_fd: int | None = None  # an eventfd, readable once a rank has ended
        self._thread = threading.Thread(target=self._keep, name="pdd-ranks", daemon=True)
        self._spawned = threading.Event()
        self._spawn_error: OSError | None = None
        self._lock = threading.Lock()  # of `death_fd` and the three below; held for assignments only
        self._first_death: tuple[int, RankDied] | None = None
        self._on_death: Callable[[RankDied], object] | None = None
        self._closing = False
        self._died = threading.Event()

    def start(self) -> int:
        """Spawns the ranks, whose first messages are yet to come. Returns `death_fd`.

        Raises:
            EngineError: one cannot be started. Those that were run until `end`.
        """
        self.death_fd = death_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread.start()
        self._spawned.wait()
        if self._spawn_error is not None:
            raise EngineError(
                f"a rank process cannot be started: {self._spawn_error}",
                hint="Look at this service's limits of processes and memory (TasksMax, MemoryMax, ulimit -u).",
            ) from self._spawn_error
        return death_fd

    # -- deaths ---------------------------------------------------------------------------------------------------
    @property
    def first_death(self) -> tuple[int, RankDied] | None:
        """The rank that died first, unasked, and how."""
        return self._first_death

    def wait_for_death(self, seconds: float) -> bool:
        """Whether a rank has ended, at the latest by then."""
        return self._died.wait(seconds)

    def watch(self, on_death: Callable[[RankDied], object]) -> None:
        """Has `on_death` called once, on the keeper's thread or a killer's, when a rank ends; at once if one has."""
        with self._lock:
            self._on_death, death = on_death, self._first_death
        if death is not None:
            on_death(death[1])

    def note_death(self, death: RankDied, rank: int) -> None:
        """Remembers the first death that nobody asked for, and tells it."""
        with self._lock:
            expected = self._closing or self._first_death is not None
            if not expected:
                self._first_death = (rank, death)
            on_death = None if expected else self._on_death
            self._died.set()
            if self.death_fd is not None:
                os.eventfd_write(self.death_fd, 1)
        if not expected:
            _log.error("%s%s", self._prefix, death)
        if on_death is not None:
            on_death(death)

    # -- the end --------------------------------------------------------------------------------------------------
    def begin_close(self) -> bool:
        """From now on a rank that ends was asked to. True for the first call."""
        with self._lock:
            first, self._closing = not self._closing, True
        return first

    def end(self, *, patient: bool) -> None:
        """Waits for the ranks to end, if `patient` and none has died, and kills those that have not."""
        deadline = time.monotonic() + (SHUTDOWN_SECONDS if patient and self._first_death is None else 0.0)
        for rank in self.ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()

    def join(self) -> None:
        """Waits for the keeper's thread, which ends with the last rank; for a moment, and never for itself."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(SHUTDOWN_SECONDS)

    def close_death_fd(self) -> None:
        with self._lock:  # a keeper that still lives would write into whatever has this number next
            death_fd, self.death_fd = self.death_fd, None
        if death_fd is not None:
            os.close(death_fd)

    # -- the keeper's thread --------------------------------------------------------------------------------------
    def _keep(self) -> None:
        try:
            for number in range(self._num_ranks):
                self._spawn(number)
        except OSError as error:
            self._spawn_error = error
        finally:
            self._spawned.set()
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
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
                    env=rank_environment(self._threads), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                )
            except OSError:
                ours.close()
                raise
        assert process.stderr is not None
        os.set_blocking(process.stderr.fileno(), False)
        self.channels.append(Channel(ours))
        self.ranks.append(KeptRank(number, process, os.pidfd_open(process.pid), process.stderr))

    def _read_stderr(self, rank: KeptRank) -> bool:
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

    def _reap(self, rank: KeptRank) -> None:
        status = rank.process.wait()
        os.close(rank.pidfd)
        if not rank.stderr.closed:
            self._read_stderr(rank)  # all that the pipe holds: its last words explain the death
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        words = f": {rank.last_lines[-1]}" if rank.last_lines else ""
        death = RankDied(f"rank {rank.number} (pid {rank.process.pid}) {how}{words}",
                         hint="Its last words are in the log; SIGKILL is often the OOM killer: see dmesg.")
        self.note_death(death, rank.number)
