"""The ranks of one node as `Collectives`: sums and gathers through memory that all of them map (group_memory.py).

A tensor goes in pieces of a slot: each rank copies its own piece to its slot, all meet at the barrier, each reads the slots
of all. So there is one barrier a piece: the next piece uses the other turn's slots, and the one after that can only begin
when every rank has come to a barrier behind its reading of these. Sums are taken in rank order, in float32, and rounded
once: the same bits on every rank.

A sum of [8, 576] float32 over two ranks of one thread each takes 20 us, 34 us when none looks before it sleeps (2 cores of an
idle machine, 2026-12-01); gloo over loopback took 465 us there, and 3.6 ms for one in ten. Ranks are processes of one host.
"""

from __future__ import annotations

import mmap
import os

import torch

from pdd.engine import group_memory
from pdd.errors import HOW_TO_INSTALL, NotInstalled

# A wait looks for so long before it sleeps: waking an idle core takes as long. Nothing where ranks share cores: who waits
# would keep the rank that it waits for from running.
SPIN_SECONDS = 100e-6


class RankGroup:
    """Collectives of rank `rank` of `world`. Keeps its own mapping of `fd`, which the caller closes."""

    def __init__(self, fd: int, rank: int, world: int, *, threads: int = 1, beside: int = 0) -> None:
        """
        Args:
            threads: of each rank's forward pass.
            beside: ranks of other groups that run on the same CPUs.

        Raises:
            NotInstalled: the native core is missing.
        """
        try:
            from pdd.fabric._native import Barrier
        except ImportError as error:
            raise NotInstalled(f"pdd's native core cannot be loaded: {error}", hint=HOW_TO_INSTALL) from error
        fits = (world + beside) * threads <= len(os.sched_getaffinity(0))
        self._rank, self._world = rank, world
        self._barrier = Barrier(fd, rank, world, spin=SPIN_SECONDS if fits else 0.0)
        self._mapping = mmap.mmap(fd, group_memory.num_bytes(world))
        memory = torch.frombuffer(self._mapping, dtype=torch.uint8, offset=group_memory.header_bytes(world))
        self._slots = memory.view(group_memory.TURNS, world, group_memory.SLOT_BYTES)
        self._views: dict[torch.dtype, torch.Tensor] = {}  # of the slots
        self._turn = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world(self) -> int:
        return self._world

    def all_reduce(self, x: torch.Tensor) -> None:
        for piece in x.view(-1).split(group_memory.SLOT_BYTES // x.element_size()):
            given = self._exchange(piece)
            if self._world == 2:
                torch.add(given[0], given[1], out=piece)
                continue
            total = given[0].to(torch.float32, copy=True)  # never the slot itself
            for each in given[1:]:
                total += each
            piece.copy_(total)

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1)
        gathered = flat.new_empty(self._world, len(flat))
        size = group_memory.SLOT_BYTES // x.element_size()
        for begin in range(0, len(flat), size):
            piece = flat[begin : begin + size]
            gathered[:, begin : begin + len(piece)] = self._exchange(piece)
        return gathered.view(self._world, *x.shape).movedim(0, -2).reshape(*x.shape[:-1], self._world * x.shape[-1])

    def ordered(self) -> None:
        self._barrier.wait()

    def _exchange(self, piece: torch.Tensor) -> torch.Tensor:
        """`[n]` of each rank to `[world, n]`, which is there until the exchange after the next."""
        slots = self._views.get(piece.dtype)
        if slots is None:
            slots = self._views[piece.dtype] = self._slots.view(piece.dtype)
        given = slots[self._turn, :, : len(piece)]
        self._turn = (self._turn + 1) % group_memory.TURNS
        given[self._rank].copy_(piece)
        self._barrier.wait()
        return given
