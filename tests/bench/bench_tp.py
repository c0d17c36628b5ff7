"""What a second rank gains: decode steps of one rank with one thread, and of two ranks with one thread each, in turns.

    python tests/bench/bench_tp.py [--repeats N] [--json OUT]

Real rank processes behind the real executor, and a random model in which the products dominate (bf16, 210 M parameters).
Beside it what the ranks pay for working together: a sum over two ranks of the tensor that a step adds up twice a layer, by
our shared memory and by gloo over loopback, each in two processes that do nothing else. The step has one such sum more, for
the embedding.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from pdd.engine import group_memory
from pdd.engine.batch import NewRow, Row, Sampling, StepPlan
from pdd.engine.executor import RankExecutor
from pdd.engine.rank_process import rank_environment
from pdd.engine.rank_protocol import RankInit
from pdd.model.demo import write_demo_model
from tests.bench.bench_fabric import cpu_seconds, judge
from tests.bench.common import arguments, median, prompt_of

HIDDEN, LAYERS = 2048, 4
CONTEXT_TOKENS, BATCHES = 16, (1, 8)
STEPS = 8  # of a turn
BOUND = 0.75  # a step of two ranks over one of one
SUMS = 400


class Ranks:
    """Rows of equal length that are decoded on and on."""

    def __init__(self, model: pathlib.Path, tp: int) -> None:
        init = RankInit(str(model), world=tp, num_pages=256, max_context=2048, threads=1)
        self.executor = RankExecutor(init, step_timeout=60)
        ranks = [info.ready for info in self.executor.start()]
        self.param_bytes, self.pids = sum(rank.param_bytes for rank in ranks), [rank.pid for rank in ranks]
        self._step = self._next_row = 0

    def decode(self, batch: int) -> list[float]:
        """Seconds of each of a turn's steps; the first, which nobody should pay for twice, is left out."""
        rows = range(self._next_row, self._next_row + batch)
        self._next_row += batch
        pages = -(-(CONTEXT_TOKENS + STEPS + 1) // 16)
        greedy = Sampling(temperature=0.0)
        prompts = {row: tuple(prompt_of(CONTEXT_TOKENS, row, 8000)) for row in rows}
        new = tuple(NewRow(row, prompts[row], (), greedy) for row in rows)
        first = tuple(Row(row, prompts[row], 0, tuple(range(i * pages, (i + 1) * pages)), True) for i, row in enumerate(rows))
        result = self._run(StepPlan(self._step, (), new, first))
        seconds = []
        for at in range(CONTEXT_TOKENS, CONTEXT_TOKENS + STEPS + 1):
            plan = tuple(Row(sampled.row_id, sampled.tokens, at, (), True) for sampled in result.sampled)
            result = self._run(StepPlan(self._step, (), (), plan))
            seconds.append(result.seconds)
        self._run(StepPlan(self._step, tuple(rows), (), ()))
        return seconds[1:]

    def _run(self, plan: StepPlan):
        self._step += 1
        return self.executor.execute(plan)


def sum_seconds(rank: int, fd: int, store: str) -> None:
    """One of two processes: prints the median seconds of a sum, by batch, ours and then gloo's."""
    import torch
    import torch.distributed as dist

    from pdd.engine.rank_group import RankGroup

    torch.set_num_threads(1)
    group = RankGroup(fd, rank, 2)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    for add_up in (group.all_reduce, dist.all_reduce):
        for batch in BATCHES:
            x, seconds = torch.ones(batch, HIDDEN, dtype=torch.bfloat16), []
            for _ in range(SUMS):
                begun = time.perf_counter()
                add_up(x)
                seconds.append(time.perf_counter() - begun)
                x.fill_(1)
            print(median(seconds), flush=True)
    dist.destroy_process_group()


def measure_sums(directory: pathlib.Path) -> tuple[dict[int, float], dict[int, float]]:
    fd = group_memory.create(2)
    environment = {**rank_environment(1), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, __file__, "--sum", str(rank), str(fd), str(directory / "store")], pass_fds=(fd,),
                         env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    os.close(fd)
    ours, gloo = said[0][: len(BATCHES)], said[0][len(BATCHES) :]
    return dict(zip(BATCHES, map(float, ours), strict=True)), dict(zip(BATCHES, map(float, gloo), strict=True))


def main() -> int:
    parser = arguments(__doc__ or "", model=False)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdd-bench-") as name:
        directory = pathlib.Path(name)
        model = write_demo_model(
            directory / "model", num_layers=LAYERS, hidden_size=HIDDEN, intermediate_size=5632, num_heads=16, num_kv_heads=8,
            head_dim=128, vocab_size=8192, dtype="bfloat16",
        )
        ours, gloo = measure_sums(directory)
        ranks = {tp: Ranks(model, tp) for tp in (1, 2)}
        pids = [os.getpid(), *ranks[1].pids, *ranks[2].pids]
        seconds: dict[tuple[int, int], list[float]] = {}
        try:
            start, (everyone, own) = time.perf_counter(), cpu_seconds(pids)
            for _ in range(options.repeats):
                for batch in BATCHES:
                    for tp, each in ranks.items():
                        seconds.setdefault((tp, batch), []).append(median(each.decode(batch)))
            everyone_now, own_now = cpu_seconds(pids)
            foreign = ((everyone_now - everyone) - (own_now - own)) / (time.perf_counter() - start)
        finally:
            for each in ranks.values():
                each.executor.close()
    rows, bounds = [], []
    for batch in BATCHES:
        one, two = median(seconds[1, batch]), median(seconds[2, batch])
        ratio = median([b / a for a, b in zip(seconds[1, batch], seconds[2, batch], strict=True)])
        sums = (2 * LAYERS + 1) * ours[batch]
        rows.append({"batch": batch, "TP 1 ms": one * 1e3, "TP 2 ms": two * 1e3, "ratio": ratio,
                     "one sum us": ours[batch] * 1e6, "all sums of TP 2": sums / two, "gloo us": gloo[batch] * 1e6,
                     "weights GB/s, TP 1": ranks[1].param_bytes / one / 1e9, "TP 2": ranks[2].param_bytes / two / 1e9,
                     "foreign": foreign})
        bounds.append((f"a step of two ranks over one of one, batch {batch}", ratio, "<=", BOUND))
    return judge("tensor parallel", rows, bounds, options.json, foreign)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--sum"]:
        sum_seconds(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
        sys.exit(0)
    sys.exit(main())
