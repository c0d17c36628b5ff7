"""What the ranks of a tensor-parallel group do together while a step runs. The engine makes it (engine/rank_group.py).

All ranks make the same calls in the same order with tensors of the same shape and type; a call returns when this rank's
result is there. A model of one rank gets None instead: it has nothing to add up.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Collectives(Protocol):
    """One rank's way to the others. Where one of them fails, a call does not return: the daemon ends the whole group."""

    @property
    def rank(self) -> int:
        """0 to `world` - 1."""

    @property
    def world(self) -> int:
        """Ranks of the group, at least 2."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replaces contiguous `x` by the sum of all ranks' `x`: the same bits on every rank."""

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., n]` of each rank to `[..., world * n]` in rank order."""

    def ordered(self) -> None:
        """Returns (on a GPU: what is queued after it runs) when every rank has come here, and so has done all before.

        For the last layer of a step that wants KV alone: its KV is appended on all ranks when rank 0 goes on."""
