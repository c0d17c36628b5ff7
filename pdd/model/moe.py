"""Layers of experts: a router that chooses for each token, and the experts that a rank keeps.

All ranks route alike, from the same hidden states; each adds up what its own experts give. Tokens are sorted by expert, and
an expert that has tokens is one product over exactly those: nothing is padded, and an expert without tokens costs nothing.
`Experts` is the seam for grouped kernels: another way to do all of a rank's experts at once.
"""

from __future__ import annotations

from typing import Protocol

import torch

from pdd.model.architecture import ModelConfig, Moe
from pdd.model.blocks import Mlp
from pdd.model.weights import Weights


class Experts(Protocol):
    """All experts of one layer that this rank keeps."""

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """The sum over each token's experts on this rank.

        Args:
            x: `[T, hidden]`.
            chosen: int64 `[T, top_k]` experts.
            shares: `[T, top_k]` what each contributes, of x's dtype.
        """


class ExpertLayer:
    """MlpBlock of routed experts and, where the model has one, the MLP that every token goes through."""

    def __init__(self, weights: Weights, config: ModelConfig, moe: Moe, at: str) -> None:
        self._router = Router(weights, moe, at + "gate.")
        self._experts: Experts = ExpertsInTurn(weights, moe, at + "experts.")
        self._shared = Mlp(weights, at + "shared_experts.") if moe.shared_size else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._experts(x, *self._router(x))
        return out if self._shared is None else out.add_(self._shared(x))


class Router:
    """Chooses `top_k` experts of each token and what each contributes."""

    def __init__(self, weights: Weights, moe: Moe, at: str) -> None:
        self._moe = moe
        self._weight = weights.tensor(at + "weight")  # [num_experts, hidden]
        self._bias = weights.tensor(at + "e_score_correction_bias") if moe.correction_bias else None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, hidden]` to experts and their shares, each `[T, top_k]`."""
        moe = self._moe
        logits = torch.nn.functional.linear(x.to(self._weight.dtype), self._weight).float()
        scores = logits.sigmoid() if moe.scoring == "sigmoid" else logits.softmax(dim=-1)
        chosen = self._eligible(scores).topk(moe.top_k, dim=-1).indices
        shares = scores.gather(1, chosen)
        if moe.normalised:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, (shares * moe.scale).to(x.dtype)

    def _eligible(self, scores: torch.Tensor) -> torch.Tensor:
        """What the choice goes by: scores with the bias, and -inf outside of the best groups.

        A group is as good as its two best experts. Source: DeepSeek-V3, "noaux_tc".
        """
        moe = self._moe
        if self._bias is not None:
            scores = scores + self._bias
        if moe.top_groups == moe.num_groups:
            return scores
        grouped = scores.view(len(scores), moe.num_groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(moe.top_groups, dim=-1).indices
        outside = torch.ones(grouped.shape[:2], dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(outside[..., None], float("-inf")).view(scores.shape)


class ExpertsInTurn:
    """Experts, one after the other: the specification, and the way on CPUs, where a product fills all cores by itself."""

    def __init__(self, weights: Weights, moe: Moe, at: str) -> None:
        self._kept = weights.shard.experts(moe.num_experts)
        self._num_experts = moe.num_experts
        self._mlps = [Mlp(weights, f"{at}{expert}.") for expert in self._kept]

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        top_k = chosen.shape[1]
        flat = chosen.reshape(-1)
        by_expert = flat.argsort(stable=True)
        ends = flat.bincount(minlength=self._num_experts).cumsum(0).tolist()
        tokens, weights = by_expert // top_k, shares.reshape(-1)[by_expert, None]
        out = torch.zeros_like(x)
        for expert, mlp in zip(self._kept, self._mlps, strict=True):
            begin, end = ends[expert - 1] if expert else 0, ends[expert]
            if begin < end:
                rows = tokens[begin:end]
                out.index_add_(0, rows, mlp(x[rows]).mul_(weights[begin:end]))
        return out
