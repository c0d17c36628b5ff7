"""CPU sets as text: lists ("0-2,8") and masks ("0x0000ffff,,0x1"), both ways. Pure.

Text comes from files of other machines: what is no list or mask is empty, and no number makes a set of more than
MAX_CPUS.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_CPUS = 1 << 13  # as many as a Linux kernel can be built for

_MASK_GROUP = re.compile(r"(0x)?[0-9a-fA-F]{0,8}")


def parse_list(text: str) -> tuple[int, ...]:
    """(0, 1, 2, 8) of "0-2,8". Empty for an empty or unreadable list."""
    cpus: set[int] = set()
    left = MAX_CPUS  # a list names no CPU twice
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if _is_cpu(first) and (not dash or _is_cpu(last)):
            named = range(int(first), int(last or first) + 1)
            left -= len(named)
            if left < 0:
                return ()
            cpus.update(named)
    return tuple(sorted(cpus))


def _is_cpu(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6 and int(text) < MAX_CPUS


def parse_mask(text: str) -> tuple[int, ...]:
    """(0, 32) of "0x1,0x00000001": groups of 32 bits, highest first, an empty one is 0. Empty for anything else."""
    return tuple(bits(mask_value(text)))


def mask_value(text: str) -> int:
    """The mask as a number; 0 for what is none. An endless prefix ("0xf...f") stands for CPUs that do not exist."""
    groups = text.strip().removeprefix("0xf...f,").split(",")
    if len(groups) > MAX_CPUS // 32 or not all(_MASK_GROUP.fullmatch(group) for group in groups):
        return 0
    value = 0
    for group in groups:
        value = value << 32 | int(group.removeprefix("0x") or "0", 16)
    return value


def bits(value: int) -> list[int]:
    return [index for index, digit in enumerate(reversed(f"{value:b}")) if digit == "1"]


def as_list(cpus: Iterable[int]) -> str:
    """ "0-2,8" of (0, 1, 2, 8)."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def as_mask(cpus: Iterable[int]) -> str:
    """ "00000001,00000001" of (0, 32), as the kernel and NCCL write it."""
    value = sum(1 << cpu for cpu in cpus)
    groups = max(1, -(-value.bit_length() // 32))
    return ",".join(f"{value >> 32 * group & 0xFFFFFFFF:08x}" for group in reversed(range(groups)))
