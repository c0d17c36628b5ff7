"""Rotary position embedding: tables of angles, and the turn itself."""

from __future__ import annotations

import math

import torch

from pdd.model.architecture import RopeScaling


def rope_tables(dim: int, theta: float, scaling: RopeScaling | None, max_context: int,
                dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each `[max_context, 1, dim]`. The first half of sin is negated, so that
    rotate(x) = x * cos + swap_halves(x) * sin."""
    frequencies = 1.0 / theta ** (torch.arange(0, dim // 2, dtype=torch.float32) / (dim // 2))
    amplitude = 1.0
    if scaling is not None:
        frequencies = _STRETCH[scaling.kind](frequencies, theta, scaling)
        amplitude = scaling.amplitude
    angles = torch.arange(max_context, dtype=torch.float32)[:, None] * frequencies[None, :]
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    return torch.cat([cos, cos], dim=-1)[:, None, :].to(dtype), torch.cat([-sin, sin], dim=-1)[:, None, :].to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of `[num_tokens, num_heads, dim]` by rows of the tables `[num_tokens, 1, dim]`."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def _linear(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    return frequencies / scaling.factor


def _llama3(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are stretched, short ones kept, the middle interpolated."""
    wavelengths = 2 * math.pi / frequencies
    long, short = (scaling.original_max_position / scaling.low_freq_factor,
                   scaling.original_max_position / scaling.high_freq_factor)
    smooth = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return torch.where(wavelengths > long, frequencies / scaling.factor,
                       torch.where(wavelengths < short, frequencies, blended))


def _yarn(frequencies: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Dimensions that turn often over the original context are kept, those that turn seldom stretched, with a ramp
    between. Source: the yarn paper (arXiv 2309.00071), section 3.2, as transformers computes it."""
    half = len(frequencies)

    def dimension(rotations: float) -> float:
        return half * math.log(scaling.original_max_position / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


_STRETCH = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}
