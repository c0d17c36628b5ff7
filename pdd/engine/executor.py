"""Runs the rank processes of a node: starts them, sends each step to all, gathers, and notices at once when one dies.

    start()    spawn -> RankInit -> RankFits of all -> KvSize, the least of them -> RankReady with fds
    execute()  RunStep to every rank, StepDone from every rank; they must agree, and rank 0's result counts
    close()    Shutdown, then SIGKILL

All ranks are listened to together (`gather.py`): the first failure ends the step, whichever rank it is of. A rank that
died without a word is taken for the cause of what others then say; ranks that answer late are all killed, and those
that the others waited for in their common memory (group_memory.py) are named.

The processes themselves are the keeper's (`rank_keeper.py`), which also tells of a death while no step runs.

A rank that died or hangs is not restarted: nothing of the KV it held can be trusted. `start`, `watch` and `close`
belong to the daemon, `execute` to the engine thread, which must have ended before `close`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence

import msgspec

from pdd.engine import group_memory
from pdd.engine.agreement import check_ready, check_results
from pdd.engine.batch import StepPlan, StepResult
from pdd.engine.gather import DeathTold, Gathering, Message, RankGone, Take
from pdd.engine.rank_keeper import RankKeeper
from pdd.engine.rank_process import rank_command
from pdd.engine.rank_protocol import (
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
DEATH_NOTE_SECONDS = 1.0  # from a closed socket to the exit status that explains it
CAUSE_SECONDS = 0.2  # from what one rank says of its failure to the death of another that was the cause


@dataclasses.dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank that is ready. The executor owns the fds and closes them in `close`: map or duplicate them before."""

    ready: RankReady
    kv_fd: int  # of `ready.kv_bytes`, a memfd or what else `ready.kv_kind` says
    counter_fd: int | None  # memfd of the layer counter; rank 0 only


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
        self._keeper = RankKeeper(init.world, init.threads, command, f"{name} " if name else "")
        self._infos: tuple[RankInfo, ...] = ()
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
        if self._init.world > 1:
            try:
                self._group_fd = group_memory.create(self._init.world)
            except OSError as error:
                raise LimitError(f"{self._init.world} ranks cannot have memory in common: {error.strerror}",
                                 hint="Look at the limits of open files and address space (ulimit -n, ulimit -v).") from error
        try:
            death_fd = self._keeper.start()
            self._gathering = Gathering(self._keeper.channels, death_fd)
            self._await_ready()
            check_ready([info.ready for info in self._infos])
        except BaseException:
            self.close()
            raise
        return self._infos

    def watch(self, on_death: Callable[[RankDied], object]) -> None:
        """Has `on_death` called once, on the keeper's thread, when a rank ends; at once if one has."""
        self._keeper.watch(on_death)

    def close(self) -> None:
        """Ends the ranks. Idempotent; takes at most a few seconds. A `start` on another thread then raises RankDied."""
        first = self._keeper.begin_close()
        if first:
            for channel in self._keeper.channels:
                with contextlib.suppress(ChannelClosed):
                    channel.send(Shutdown())
            self._keeper.end(patient=not self._failed)
        self._keeper.join()
        if first:
            for channel in self._keeper.channels:
                channel.close()
            for info in self._infos:
                os.close(info.kv_fd)
                if info.counter_fd is not None:
                    os.close(info.counter_fd)
            self._keeper.close_death_fd()
            group_fd, self._group_fd = self._group_fd, None
            if group_fd is not None:
                os.close(group_fd)

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

        frames = [encode_frame(RunStep(plan))] * len(self._keeper.channels)
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
            fds = self._keeper.channels[rank].take_fds()
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

        for rank, channel in enumerate(self._keeper.channels):
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
            death = self._keeper.first_death
            raise self._first_failure(None if death is None else death[0], None, ended) from None
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
            self._keeper.note_death(hung, awaited[0])
            for rank in late:
                self._keeper.ranks[rank].process.kill()
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
        if said is None or len(self._keeper.channels) > 1:
            self._keeper.wait_for_death(DEATH_NOTE_SECONDS if said is None else CAUSE_SECONDS)
        if self._keeper.first_death is None:
            return said or sign
        dead, death = self._keeper.first_death
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



def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
