"""Brings a rank up: loads its shard, sizes and makes its KV region, warms up, and describes the result to the daemon.

What is free is looked at when no rank has begun to load, and again when all have loaded: they take of the same memory. Each
says how many pages fit; the daemon chooses for all. It maps and registers the bytes of the KV region, too (kv_memory.py).
Warm-up steps run before the counter exists and clear what they wrote.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from pdd.engine.batch import NewRow, Row, Sampling, StepPlan
from pdd.engine.kv_memory import HostKv, KvMemory
from pdd.engine.machine import free_memory
from pdd.engine.rank_group import RankGroup
from pdd.engine.rank_protocol import RankFits, RankInit, RankProgress, RankReady
from pdd.engine.rank_runner import RankRunner
from pdd.errors import HOW_TO_INSTALL, ConfigError, LimitError, ModelError, NotInstalled
from pdd.kv.layout import KvLayout
from pdd.model.attention import Attention, LayerCounter
from pdd.model.backends import make_attention
from pdd.model.collectives import Collectives
from pdd.model.config import fingerprint, load_config
from pdd.model.folder import COPY_AGAIN, check_context
from pdd.model.shard import Shard
from pdd.model.tensor_parallel import check_tp, param_bytes
from pdd.model.transformer import Transformer, load_model
from pdd.topology import pinning
from pdd.units import show_bytes

_log = logging.getLogger("pdd.rank")
_PROGRESS_SECONDS = 0.1  # between two progress messages
_WARM_UP_TOKENS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class StartedRank:
    """A rank that is ready for step 0."""

    ready: RankReady
    runner: RankRunner
    fds: tuple[int, ...]  # of the KV region and, on rank 0, the counter; the caller sends and closes them
    memory: KvMemory  # the KV region, for as long as the runner lives


def start_rank(
    init: RankInit, report: Callable[[RankProgress], None], agree: Callable[[RankFits], int], group_fd: int = -1
) -> StartedRank:
    """Everything from RankInit to RankReady.

    Args:
        agree: tells what fits this rank; the answer is the number of pages of every rank.
        group_fd: of the memory that the ranks work together in, when there are several; the caller closes it.
    Raises:
        ModelError: the checkpoint cannot be read, or not run here.
        ConfigError: a size in `init` makes no sense with this model.
        LimitError: the memory that is free holds neither weights nor KV of that size.
        NotInstalled: the native core is missing.
    """
    started = time.monotonic()
    refused = [_set_threads(init)]
    model_dir = Path(init.model_dir)
    with _reading(model_dir):
        config = load_config(model_dir)
    check_tp(config, init.world)
    group = None if init.world == 1 else RankGroup(
        group_fd, init.rank, init.world, threads=torch.get_num_threads(), beside=init.beside
    )
    dtype = config.dtype if init.dtype == "auto" else init.dtype
    max_context = init.max_context or config.max_position
    check_context(max_context, config.max_position)
    with _reading(model_dir):
        identity = fingerprint(model_dir)
        weights = sum(param_bytes(config, Shard(rank, init.world), dtype) for rank in range(init.world))
        _check_weights_fit(init, weights, dtype, group)
        model = load_model(model_dir, config, dtype=dtype, max_context=max_context, shard=Shard(init.rank, init.world),
                           progress=_throttled("weights", report))
    if group is not None:
        group.ordered()
    one = config.kv_shape(dtype).layout_over(init.world, init.page_size, 1)
    num_pages = agree(RankFits(_num_pages(init, one, max_context, weights)))
    layout = dataclasses.replace(one, num_pages=num_pages)
    memory = HostKv(layout.region_bytes)
    refused.append(pinning.place_memory(memory.mapping, init.numa))
    report(RankProgress("kv", layout.region_bytes, layout.region_bytes))
    kv = memory.tensor(layout)
    attention, attention_name = make_attention(model, layout, kv)
    if init.warm_up:
        report(RankProgress("warm-up", 0, 1))
        _warm_up(model, attention, group, layout, kv, max_context, init.max_batch_tokens)
    counter, counter_fds = _make_counter(init.rank)
    ready = RankReady(
        rank=init.rank, num_layers=config.num_layers, num_pages=layout.num_pages, num_kv_heads=layout.num_kv_heads,
        page_size=layout.page_size, head_dim=layout.head_dim, dtype=dtype, total_kv_heads=config.num_kv_heads,
        vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids, max_context=max_context,
        family=config.family, fingerprint=identity, kv_bytes=layout.region_bytes,
        param_bytes=model.param_bytes, threads=torch.get_num_threads(), attention=attention_name,
        load_seconds=time.monotonic() - started, pid=os.getpid(), kv_kind=memory.kind, kv_device=memory.device,
        warnings=tuple(filter(None, refused)), tiles=layout.tiles)
    for warning in ready.warnings:
        _log.warning("%s [T023]", warning)
    runner = RankRunner(model, attention, layout, counter, max_context=max_context, ranks=group)
    return StartedRank(ready, runner, (memory.fd, *counter_fds), memory)


def _set_threads(init: RankInit) -> str | None:
    """Keeps this thread on its CPUs, and those of the forward pass, which are its children. Before anything is loaded, so
    that weights lie next to who reads them. Returns a warning."""
    refused = pinning.pin_thread(init.cpus)
    torch.set_num_threads(init.threads or max(1, len(os.sched_getaffinity(0)) // (init.world + init.beside)))
    torch.set_num_interop_threads(1)
    return refused


@contextlib.contextmanager
def _reading(model_dir: Path) -> Iterator[None]:
    """Makes every failure to read the checkpoint one that says what to do."""
    try:
        yield
    except ModelError as error:
        error.hint = error.hint or COPY_AGAIN
        raise
    except OSError as error:
        raise ModelError(f"the checkpoint in {model_dir} cannot be read: {error}", hint=COPY_AGAIN) from error


def _free(init: RankInit, taken: int = 0) -> tuple[int, str]:
    """(bytes that the ranks of this group may take now, what they are called). Other groups load meanwhile: what is free
    counts no further than to the group's share, of which its ranks have `taken` some."""
    free = free_memory()
    if not init.memory_bytes:
        return free, f"{show_bytes(free)} of memory are free"
    free = max(0, min(free, init.memory_bytes - taken))
    return free, f"{show_bytes(free)} are left of the memory that is free for each group"


def _check_weights_fit(init: RankInit, weights: int, dtype: str, group: Collectives | None) -> None:
    """Refuses weights that the kernel would kill this process for: those of all ranks, which come together."""
    free, called = _free(init)
    if group is not None:
        group.ordered()  # no rank has begun to load while another looked
    if weights > free:
        raise LimitError(f"the weights take {show_bytes(weights)} as {dtype}; {called}",
                         hint="Free or add memory, raise the memory limit of the service, or choose a smaller model.")


def _num_pages(init: RankInit, one: KvLayout, max_context: int, weights: int) -> int:
    """What was asked for, or what fits when every rank takes as much of the same memory. `weights`: bytes of all ranks."""
    free, called = _free(init, weights)
    num_pages, all_ranks = init.num_pages, one.region_bytes * init.world
    who = "" if init.world == 1 else f" on each of {init.world} ranks"
    if num_pages == 0:
        most = init.max_batch_size * one.num_pages_for(max_context)
        num_pages = min(int(free * init.memory_fraction) // all_ranks, most)
        if num_pages < 1:
            raise LimitError(f"memory_fraction {init.memory_fraction} does not hold one page of KV "
                             f"({show_bytes(one.region_bytes)}){who}: {called}",
                             hint="Free or add memory, raise kv.memory_fraction, or lower kv.page_size.")
    elif num_pages * all_ranks > free:
        raise LimitError(f"{num_pages} pages of KV take {show_bytes(num_pages * one.region_bytes)}{who}; {called}",
                         hint=f"Lower kv.num_pages ({free // all_ranks} would fit), or set it to 0: as many as "
                              "kv.memory_fraction allows.")
    if min(num_pages * init.page_size, max_context) < 2:
        raise ConfigError(f"a node needs room for two tokens; num_pages {num_pages} of {init.page_size} tokens and "
                          f"max_context {max_context} give less", hint="Raise kv.num_pages, or model.max_context.")
    return num_pages


def _make_counter(rank: int) -> tuple[LayerCounter, tuple[int, ...]]:
    """(the counter, its descriptor): rank 0 counts for all ranks."""
    if rank > 0:
        return _NoCounter(), ()
    try:
        from pdd.fabric._native import Counter
    except ImportError as error:
        raise NotInstalled(f"pdd's native core cannot be loaded: {error}",
                           hint=HOW_TO_INSTALL) from error
    counter, fd = Counter.create()
    return counter, (fd,)


class _NoCounter:
    def bump(self) -> int:
        return 0


def _warm_up(model: Transformer, attention: Attention, group: Collectives | None, layout: KvLayout, kv: torch.Tensor,
             max_context: int, max_batch_tokens: int) -> None:
    """One prefill and one decode step, so that the first real step does not pay for one-time set-up (JIT of
    kernels)."""
    length = min(_WARM_UP_TOKENS, max_context - 1, max_batch_tokens, layout.num_pages * layout.page_size - 1)
    runner = RankRunner(model, attention, layout, _NoCounter(), max_context=max_context, ranks=group)
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
