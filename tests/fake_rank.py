"""A rank process without a model: `python fake_rank.py FD BEHAVIOUR`. The real protocol; answers 7.

A behaviour is of all ranks, or of those that it names: "hang in step@0,die in step@1,die in step@3".
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time

from pdd.engine import group_memory
from pdd.engine.batch import SampledRow, StepResult
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
    StepDone,
)


def behaviour_of(rank: int, behaviours: str) -> str:
    for each in behaviours.split(","):
        what, _, which = each.partition("@")
        if which in ("", str(rank)):
            return what
    return "work"


def main(fd: int, behaviours: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    channel = Channel(socket.socket(fileno=fd))
    init = channel.receive()
    assert isinstance(init, RankInit)
    behaviour = behaviour_of(init.rank, behaviours)
    if behaviour == "die in start":
        print("no such\nfile or directory", file=sys.stderr, flush=True)
        os._exit(3)
    if behaviour.startswith("fail in start"):
        channel.send(RankFailed(behaviour.split()[-1], "not a checkpoint", "look again"))
        return
    if behaviour == "hang in start":
        time.sleep(1000)
    channel.send(RankProgress("weights", 1, 2))
    channel.send(RankFits(init.num_pages + init.rank if behaviour != "has room for 3" else 3))
    size = channel.receive()
    assert isinstance(size, KvSize)
    group_fds = channel.take_fds()
    assert len(group_fds) == (init.world > 1)
    fds = [os.memfd_create("kv")] + ([os.memfd_create("counter")] if init.rank == 0 else [])
    if behaviour == "no fds":
        fds = []
    channel.send(ready(init, size.num_pages, "other" if behaviour == "other model" else "f"), tuple(fds))
    if behaviour == "deaf":
        time.sleep(1000)
    while isinstance(message := channel.receive(), RunStep):
        plan = message.plan
        if behaviour == "die in step":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "die and leave a child":  # which keeps the channel open
            if os.fork():
                os.kill(os.getpid(), signal.SIGKILL)
            os.close(2)
            poll = select.poll()
            poll.register(fd, select.POLLHUP)
            poll.poll()
            os._exit(0)
        if behaviour == "hang in step":
            time.sleep(1000)
        if behaviour == "wait in step":  # as in a collective: it has come to the barrier, once more than those that hang
            os.pwrite(group_fds[0], (1).to_bytes(8, sys.byteorder), group_memory.LINE_BYTES * init.rank)
            time.sleep(1000)
        if behaviour == "fail in step":
            channel.send(RankFailed("E750", "out of memory"))
            return
        if behaviour == "answer wrongly":
            channel.send(StepDone(StepResult(plan.step + 1, (), 0.0)))
            continue
        token = 8 if behaviour == "disagree" else 7
        sampled = tuple(SampledRow(row.row_id, (token,), (0.1 if behaviour == "other logprobs" else 0.2,)) for row in plan.rows if row.sample)
        if behaviour == "lose a row":
            sampled = sampled[1:]
        channel.send(StepDone(StepResult(plan.step, sampled, 0.5 + init.rank)))
        if behaviour == "fail when told":
            signal.sigwait([signal.SIGUSR1])
            channel.send(RankFailed("E750", "the device fell off the bus"))
            return
        if behaviour == "answer and die":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "answer twice":
            channel.send(StepDone(StepResult(plan.step, sampled, 0.5)))
    if behaviour == "ignore shutdown":
        time.sleep(1000)


def ready(init: RankInit, num_pages: int, fingerprint: str) -> RankReady:
    return RankReady(
        rank=init.rank, num_layers=2, num_pages=num_pages, num_kv_heads=1, page_size=init.page_size, head_dim=4,
        dtype="bfloat16", total_kv_heads=init.world, vocab_size=99, eos_token_ids=(2,), max_context=64, family="llama",
        fingerprint=fingerprint, kv_bytes=1, param_bytes=1, threads=1, load_seconds=0.0, pid=os.getpid(),
    )


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2])
    except ChannelClosed:
        sys.exit(0)
