"""What loading a checkpoint takes: time against reading its file, and memory against what a rank keeps.

    python tests/bench/bench_load.py [--layers N] [--turns N] [--json OUT]

A random bfloat16 Llama of 2 GB. In turns the file is read by one thread, 8 MiB at a time, into one small buffer and into
memory of its own size, and is loaded by ranks, each a process of its own: with the file in the page cache, and with it dropped
from there before each turn. A rank's memory is what its peak is above what it had before it began to load, mapped pages of
the file included. Loading keeps what it reads, so the second way of reading is what it is held against.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import arguments, median, report

from pdd.engine.rank_process import rank_environment
from pdd.model.config import load_config
from pdd.model.safetensors_file import SINGLE_NAME, write_file
from pdd.model.tensors import tensors_of

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16"}
WORLDS = (1, 2)
_PIECE = 8 << 20


def write_model(directory: Path, layers: int) -> None:
    (directory / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    block = os.urandom(1 << 20)  # loading does not look at values
    tensors = []
    for spec in tensors_of(load_config(directory)):
        nbytes = 2 * spec.shape[0] * (spec.shape[1] if len(spec.shape) > 1 else 1)
        tensors.append((spec.name, "BF16", spec.shape, lambda nbytes=nbytes: (block * (nbytes // len(block) + 1))[:nbytes]))
    write_file(directory / SINGLE_NAME, tensors)


def child_reads(path: str, kept: str) -> dict[str, Any]:
    size = os.path.getsize(path)
    memory = memoryview(mmap.mmap(-1, size if kept == "kept" else _PIECE))
    start, at = time.perf_counter(), 0
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(memory[at : at + _PIECE]):
            at += count if kept == "kept" else 0
    return {"seconds": time.perf_counter() - start}


def child_loads(directory: str, rank: int, world: int) -> dict[str, Any]:
    import torch

    from pdd.model.layers import can_pack
    from pdd.model.shard import Shard
    from pdd.model.transformer import load_model

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    config = load_config(directory)
    can_pack(torch.bfloat16)  # loads and warms what is not of the checkpoint
    torch.ones(256, 256, dtype=torch.bfloat16) @ torch.ones(256, 256, dtype=torch.bfloat16)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    start = time.perf_counter()
    model = load_model(directory, config, dtype="bfloat16", max_context=2048, shard=Shard(rank, world))
    return {"seconds": time.perf_counter() - start, "peak_bytes": _status("VmHWM") - before, "shard_bytes": model.param_bytes}


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) << 10


def together(commands: list[list[str]]) -> list[dict[str, Any]]:
    """Runs children of this file at the same time; what each printed."""
    started = [subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, env=rank_environment())
               for words in commands]
    texts = [process.communicate(timeout=300)[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"a child failed: {commands}")
    return [json.loads(text) for text in texts]


def drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _row(state: str, what: str, size: int, seconds: float) -> dict[str, Any]:
    return {"file": state, "what": what, "seconds": seconds, "GB/s": size / seconds / 1e9}


def main() -> int:
    if sys.argv[1:2] == ["--child-reads"]:
        print(json.dumps(child_reads(sys.argv[2], sys.argv[3])))
        return 0
    if sys.argv[1:2] == ["--child-loads"]:
        print(json.dumps(child_loads(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
        return 0
    parser = arguments(__doc__.splitlines()[0], model=False)
    parser.add_argument("--layers", type=int, default=22, help="90 MB each")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    bounds: list[tuple[str, float, str, float]] = []
    with tempfile.TemporaryDirectory(prefix="pdd-bench-", dir=os.environ.get("TMPDIR", "/var/tmp")) as name:
        directory = Path(name)
        write_model(directory, options.layers)
        path = directory / SINGLE_NAME
        size = path.stat().st_size
        for state in ("cached", "dropped"):
            reads: dict[str, list[float]] = {"dropped": [], "kept": []}
            loads: dict[int, list[list[dict[str, Any]]]] = {world: [] for world in WORLDS}
            together([["--child-reads", str(path), "dropped"]])
            for _ in range(options.turns):
                for kind in (*reads, *WORLDS):
                    if state == "dropped":
                        drop_from_cache(path)
                    if isinstance(kind, str):
                        reads[kind] += [each["seconds"] for each in together([["--child-reads", str(path), kind]])]
                    else:
                        loads[kind].append(together([["--child-loads", name, str(rank), str(kind)] for rank in range(kind)]))
            for kind, label in (("dropped", "read"), ("kept", "read into memory")):
                rows.append(_row(state, label, size, median(reads[kind])))
            for world, turns in loads.items():
                seconds = median([max(rank["seconds"] for rank in turn) for turn in turns])
                memory = max(rank["peak_bytes"] / rank["shard_bytes"] for turn in turns for rank in turn)
                rows.append({**_row(state, f"load, {world} rank(s)", size, seconds), "of read": median(reads["dropped"]) / seconds,
                             "peak / shard": memory})
                bounds.append((f"speed of {world} rank(s) over reading into memory, {state}", median(reads["kept"]) / seconds,
                               ">=", 0.8))
                bounds.append((f"peak memory of {world} rank(s) over its shard, {state}", memory, "<=", 1.1))
    return report(f"load, {size / 1e9:.2f} GB", rows, bounds, options.json)


if __name__ == "__main__":
    sys.exit(main())
