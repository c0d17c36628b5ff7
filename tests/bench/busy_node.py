"""A daemon at a given rate of requests, for what its readers cost: `python busy_node.py RUN_DIR REQUESTS_PER_SECOND`.

Real: the node with its main loop, engine thread, scheduler, page pool, ledger, history, metrics and control sockets, all in
one process as in `pdd serve`. Synthetic: the ranks (a step is a sleep of 5 ms and an invented token), and the clients, who
call the service that the HTTP API calls; so nothing is parsed, tokenized or written to a network. Prints how many requests
ended in each second.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from pdd.config_load import load
from pdd.daemon.group import EngineGroup
from pdd.daemon.node import Node
from pdd.engine.batch import SampledRow, StepPlan, StepResult
from pdd.engine.executor import RankInfo
from pdd.engine.rank_protocol import RankReady
from pdd.engine.request import SamplingParams
from tests.cluster import free_port

STEP_SECONDS = 0.005
PROMPT = tuple(range(2, 66))
ANSWER = SamplingParams(max_tokens=4, temperature=0.0)
RANK = RankReady(
    rank=0, num_layers=30, num_pages=8192, num_kv_heads=3, page_size=16, head_dim=64, dtype="bfloat16", total_kv_heads=3,
    vocab_size=1000, eos_token_ids=(0,), max_context=2048, family="llama", fingerprint="f", kv_bytes=1, param_bytes=1,
    threads=1, load_seconds=0.0, pid=os.getpid(),
)


class Sleeping:
    """An executor without ranks."""

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(STEP_SECONDS)
        return StepResult(plan.step, tuple(SampledRow(row.row_id, (7,)) for row in plan.rows if row.sample), STEP_SECONDS)

    def close(self) -> None:
        """It has nothing to close."""


class BusyNode(Node):
    async def _load(self) -> None:
        executor: Any = Sleeping()
        self.groups = (EngineGroup(0, executor, (RankInfo(RANK, -1, None),)),)
        self._tokenizer: Any = None  # nobody brings text

    async def pour(self, per_second: int) -> None:
        """Requests at even distances, for ever; one that is late is not left out."""
        begin, ended, told = time.monotonic(), 0, 1
        running: set[asyncio.Task[None]] = set()

        async def one(number: int) -> None:
            nonlocal ended
            async for _ in self.service.generate(PROMPT, ANSWER, request_id=f"{number:024x}", given_id=None):
                pass
            ended += 1

        for number in itertools.count():
            late = time.monotonic() - begin - number / per_second
            if late < 0:
                await asyncio.sleep(-late)
            elif number % 16 == 0:
                await asyncio.sleep(0)
            task = asyncio.create_task(one(number))
            running.add(task)
            task.add_done_callback(running.discard)
            if time.monotonic() - begin >= told:
                print(ended, flush=True)
                ended, told = 0, told + 1


async def main(run_dir: str, per_second: int) -> None:
    config, origins = load(demo=True, search=False, env={}, assignments=[
        f"control.dir={run_dir}", "node.name=busy", f"api.listen=127.0.0.1:{free_port()}", "engine.max_batch_size=256",
        "kv.num_pages=8192",
    ])
    node = BusyNode(config, origins)
    await node.start()
    await node.pour(per_second)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
