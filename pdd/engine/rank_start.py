"""Brings a rank up: loads its shard, sizes and makes its KV region, warms up, and describes the result to the daemon.

The KV region is a sealed memfd: the daemon maps and registers the same bytes, and neither side can shrink it under the
other. Its pages are zero and take memory when first written. Warm-up steps run before the counter exists and clear what
they wrote.
"""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pdd.engine.batch import NewRow, Row, Sampling, StepPlan
from pdd.engine.rank_protocol import RankInit, RankProgress, RankReady
from pdd.engine.rank_runner import RankRunner
from pdd.errors import ConfigError, EngineError, ModelError
from pdd.kv.layout import KvLayout
from pdd.model.attention import Attention, LayerCounter, kv_tensor
from pdd.model.attn_torch import TorchAttention
from pdd.model.checkpoint import Shard
from pdd.model.config import ModelConfig, fingerprint, load_config
from pdd.model.llama import LlamaModel, load_model

_PROGRESS_SECONDS = 0.1  # between two progress messages
_WARM_UP_TOKENS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class StartedRank:
    """A rank that is ready for step 0."""

    ready: RankReady
    runner: RankRunner
    fds: tuple[int, ...]  # KV memfd and, on rank 0, counter memfd; the caller sends and closes them
    memory: mmap.mmap  # the KV region, for as long as the runner lives


def start_rank(init: RankInit, report: Callable[[RankProgress], None]) -> StartedRank:
    """Everything from RankInit to RankReady.

    Raises:
        ModelError: the checkpoint cannot be run here.
        ConfigError: a size in `init` cannot be met.
        EngineError: the native core is missing.
    """
    started = time.monotonic()
    if init.world != 1:
        raise ConfigError(f"tensor parallelism over {init.world} ranks is not supported yet; use 1")
    torch.set_num_threads(init.threads or len(os.sched_getaffinity(0)))
    torch.set_num_interop_threads(1)
    model_dir = Path(init.model_dir)
    config = load_config(model_dir)
    dtype = config.dtype if init.dtype == "auto" else init.dtype
    max_context = init.max_context or config.max_position
    if max_context > config.max_position:
        raise ConfigError(f"max_context {max_context} is more than the {config.max_position} tokens of the model")
    model = load_model(model_dir, config, dtype=dtype, max_context=max_context, shard=Shard(init.rank, init.world),
                       progress=_throttled("weights", report))
    layout = _layout(init, config, model, dtype, max_context)
    kv_fd, memory = _make_region(layout.region_bytes)
    report(RankProgress("kv", layout.region_bytes, layout.region_bytes))
    kv = kv_tensor(layout, memoryview(memory))
    attention, attention_name = make_attention(layout, kv, model.num_heads)
    if init.warm_up:
        report(RankProgress("warm-up", 0, 1))
        _warm_up(model, attention, layout, kv, max_context, init.max_batch_tokens)
    counter, counter_fd = _make_counter()
    ready = RankReady(
        rank=init.rank, num_layers=config.num_layers, num_pages=layout.num_pages, num_kv_heads=layout.num_kv_heads,
        page_size=layout.page_size, head_dim=layout.head_dim, dtype=dtype, total_kv_heads=config.num_kv_heads,
        vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids, max_context=max_context,
        family=config.family, fingerprint=fingerprint(model_dir), kv_bytes=layout.region_bytes,
        param_bytes=model.param_bytes, threads=torch.get_num_threads(), attention=attention_name,
        load_seconds=time.monotonic() - started, pid=os.getpid())
    runner = RankRunner(model, attention, layout, counter, max_context=max_context)
    return StartedRank(ready, runner, (kv_fd, counter_fd), memory)


def _layout(init: RankInit, config: ModelConfig, model: LlamaModel, dtype: str, max_context: int) -> KvLayout:
    one = KvLayout(num_layers=config.num_layers, num_pages=1, num_kv_heads=model.num_kv_heads,
                   page_size=init.page_size, head_dim=config.head_dim, dtype=dtype)
    num_pages = init.num_pages
    if num_pages == 0:
        budget = int(_memory_bytes() * init.memory_fraction)
        most = init.max_batch_size * one.num_pages_for(max_context)
        num_pages = min(budget // one.region_bytes, most)
        if num_pages < 1:
            raise ConfigError(f"memory_fraction {init.memory_fraction} of this machine's memory ({budget} bytes) does "
                              f"not hold one page of KV ({one.region_bytes} bytes)")
    layout = dataclasses.replace(one, num_pages=num_pages)
    if layout.region_bytes > _memory_bytes():  # the region is made all the same, and kills the node once it fills
        raise ConfigError(f"kv.num_pages = {num_pages} are {layout.region_bytes} bytes of KV; "
                          f"this machine has {_memory_bytes()} bytes of memory",
                          hint=f"set at most {_memory_bytes() // one.region_bytes}, or 0 for what fits")
    return layout


def _memory_bytes() -> int:
    """Memory of the machine, or of the cgroup when that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def _make_region(num_bytes: int) -> tuple[int, mmap.mmap]:
    """(memfd of exactly that size, its mapping here)."""
    fd = os.memfd_create("pdd-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return fd, mmap.mmap(fd, num_bytes)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"a KV region of {num_bytes} bytes cannot be made: {error.strerror}",
                          hint="Lower kv.memory_fraction or kv.num_pages.") from error


def make_attention(layout: KvLayout, kv: torch.Tensor, num_heads: int) -> tuple[Attention, str]:
    """(the fastest backend that is built and takes this geometry, its name for the daemon's status)."""
    try:
        from pdd.model.attn_native import NativeAttention, supports
    except ImportError:
        return TorchAttention(layout, kv, num_heads), "torch"
    if not supports(layout):
        return TorchAttention(layout, kv, num_heads), "torch"
    return NativeAttention(layout, kv, num_heads), "native"


def _make_counter() -> tuple[LayerCounter, int]:
    try:
        from pdd.fabric._native import Counter
    except ImportError as error:
        raise EngineError(f"pdd's native core is not built: {error}",
                          hint="Install the package (pip install .), or build it in place (make dev).") from error
    return Counter.create()


class _NoCounter:
    def bump(self) -> int:
        return 0


def _warm_up(model: LlamaModel, attention: Attention, layout: KvLayout, kv: torch.Tensor, max_context: int,
             max_batch_tokens: int) -> None:
    """One prefill and one decode step, so that the first real step does not pay for one-time set-up (JIT of
    kernels)."""
    length = min(_WARM_UP_TOKENS, max_context - 1, max_batch_tokens, layout.num_pages * layout.page_size - 1)
    if length < 1:
        raise ModelError("the KV region does not hold two tokens")
    runner = RankRunner(model, attention, layout, _NoCounter(), max_context=max_context)
    pages = tuple(range(layout.num_pages_for(length + 1)))
    runner.run(StepPlan(0, (), (NewRow(0, (0,), (), Sampling(temperature=0.0)),),
                        (Row(0, (0,) * length, 0, pages, sample=True),)))
    runner.run(StepPlan(1, (), (), (Row(0, (0,), length, (), sample=True),)))
    kv[:, : len(pages)] = 0


def _throttled(phase: str, report: Callable[[RankProgress], None]) -> Callable[[int, int], None]:
    last = 0.0

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done_bytes == total_bytes or now - last >= _PROGRESS_SECONDS:
            last = now
            report(RankProgress(phase, done_bytes, total_bytes))

    return progress
