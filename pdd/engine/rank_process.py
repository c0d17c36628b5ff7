"""How a rank process is started: its command line, and the environment that must be set before torch is imported."""

from __future__ import annotations

import os
import sys


def rank_command(fd: int) -> list[str]:
    """argv of a rank process that inherits descriptor `fd` (use `pass_fds=(fd,)` and `start_new_session=True`)."""
    return [sys.executable, "-m", "pdd.engine.worker", "--fd", str(fd)]


_MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def rank_environment(threads: int = 0) -> dict[str, str]:
    """This process' environment plus what must be set before torch is imported.

    Passive waiting: with spinning OpenMP barriers, any other busy process on the machine makes a decode step 25 times
    slower (45 ms to 1.2 s on two cores).

    glibc keeps what a step's temporaries used (else each step of 1,024 tokens faults 4,096 pages anew) and asks for huge
    pages: together 3 to 5 % of a prefill. What the operator has set stays.
    """
    env = {**_MALLOC, **os.environ}
    env.update(OMP_WAIT_POLICY="passive", GOMP_SPINCOUNT="0", KMP_BLOCKTIME="0")
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    return env
