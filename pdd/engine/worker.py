"""The rank process: `python -m pdd.engine.worker --fd N`. Loads a model shard, then runs steps until told to stop.

Started by the daemon with one end of a socketpair (rank_protocol.py has the messages, rank_process.py how to start it). It
ends when the socket closes, is killed by the kernel when the thread that started it dies, and ignores the terminal's
SIGINT and SIGTERM: the daemon decides. Every failure is reported as RankFailed before the process exits; none is
silent.

torch is imported only after RankInit, when the environment that OpenMP reads at load time is set.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import traceback

from pdd.engine.rank_process import rank_environment
from pdd.engine.rank_protocol import (
    Channel,
    ChannelClosed,
    KvSize,
    ProtocolError,
    RankFailed,
    RankFits,
    RankInit,
    RunStep,
    Shutdown,
    StepDone,
)
from pdd.errors import EXIT_ENGINE_DIED, EXIT_OK, EngineError, ModelError, PddError, no_space

_PR_SET_PDEATHSIG = 1


def main(argv: list[str] | None = None) -> int:
    """Runs a rank; returns its exit code."""
    parser = argparse.ArgumentParser(prog="pdd.engine.worker", description="A rank of a pdd node; pdd serve starts it.")
    parser.add_argument("--fd", type=int, required=True, help="this end of the daemon's socketpair")
    arguments = parser.parse_args(argv)
    channel = Channel(socket.socket(fileno=arguments.fd))
    os.set_inheritable(arguments.fd, False)
    _die_with_parent()
    if _is_alone(arguments.fd):
        return EXIT_OK
    try:
        _serve(channel)
    except ChannelClosed:
        return EXIT_OK  # the daemon is gone, and with it whoever could be told
    except PddError as error:
        _report(channel, RankFailed(error.id, error.message, error.hint))
        return error.exit_code
    except Exception as error:  # the process border: whatever it is, the daemon must hear of it
        if (full := no_space(error)) is not None:
            _report(channel, RankFailed(full.id, full.message, full.hint))
            return full.exit_code
        traceback.print_exc()
        _report(channel, RankFailed(EngineError.id, f"rank failed: {type(error).__name__}: {error}",
                                    "The rank's traceback is in the daemon's log."))
        return EXIT_ENGINE_DIED
    return EXIT_OK


def _serve(channel: Channel) -> None:
    init = channel.receive()
    if not isinstance(init, RankInit):
        raise ProtocolError(f"the first message to a rank was {type(init).__name__}, not RankInit")
    group_fds = channel.take_fds()
    if len(group_fds) != (init.world > 1):
        raise ProtocolError(f"RankInit of {init.world} ranks came with {len(group_fds)} descriptors")
    os.environ.update(rank_environment(init.threads))
    try:
        from pdd.engine.rank_start import start_rank
    except ImportError as error:
        raise ModelError(f"the engine cannot be imported: {error}",
                         hint="Install the engine's dependencies: pip install 'pdd-node[engine]'.") from error

    def agree(fits: RankFits) -> int:
        channel.send(fits)
        answer = channel.receive()
        if not isinstance(answer, KvSize):
            raise ProtocolError(f"the answer to RankFits was {type(answer).__name__}, not KvSize")
        return answer.num_pages

    rank = start_rank(init, channel.send, agree, group_fds[0] if group_fds else -1)
    channel.send(rank.ready, rank.fds)
    for fd in (*rank.fds, *group_fds):
        os.close(fd)
    gc.collect()
    gc.freeze()  # weights and modules live as long as the process: never scan them again
    while True:
        message = channel.receive()
        if isinstance(message, RunStep):
            channel.send(StepDone(rank.runner.run(message.plan)))
        elif isinstance(message, Shutdown):
            return
        else:
            raise ProtocolError(f"a rank that is running got {type(message).__name__}")


def _die_with_parent() -> None:
    """SIGKILL on the parent thread's death (Linux), and no ending by the terminal's keys."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        # A parent that died before this call is seen by the closed socket: _is_alone.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _is_alone(fd: int) -> bool:
    """Whether the daemon died before it could take this process along. It may have asked for a model to be loaded."""
    poll = select.poll()
    poll.register(fd, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def _report(channel: Channel, failure: RankFailed) -> None:
    try:
        channel.send(failure)
    except ChannelClosed:
        print(f"rank failed after its daemon was gone: {failure.message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
