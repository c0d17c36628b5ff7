"""Durations and sizes as people write them, and as people read them. Pure; stdlib only.

Parsers take text with a unit ("1m30s", "64MiB") and raise ValueError with a sentence that says how to
write it. Formatters go the other way and are kept narrow, for tables. No locale. A bare number is seconds, or
bytes.
"""

from __future__ import annotations

import math
import re

LONGEST_SECONDS = 7 * 86400.0  # poll(2) takes milliseconds in 31 bits: 24 days
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s|m|h|d)")
_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}
_BARE = re.compile(r"[0-9]+(\.[0-9]+)?")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(B|[KMGT]i?B)")


def parse_duration(text: str) -> float:
    """Seconds of "500ms", "30s", "1m30s", "2h", and of a bare "30"."""
    compact = text.strip()
    if _BARE.fullmatch(compact):
        return float(compact)
    parts = _DURATION.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise ValueError(
            f'"{text}" is not a duration; write a number and a unit, for example "500ms", "30s" or "1m30s"'
        )
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def parse_size(text: str) -> int:
    """Bytes of "64KiB", "8MiB", "1.5GB", and of a bare "4096"."""
    if text.strip().isdecimal():
        return int(text)
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'"{text}" is not a size; write a number and a unit, for example "64KiB", "8MiB" or "1GiB"')
    nbytes = float(match[1]) * _BYTES[match[2]]
    if nbytes == math.inf:
        raise ValueError(f'"{text[:16]}..." is more than any size')
    return int(nbytes)


def format_duration(seconds: float) -> str:
    """Text that parse_duration reads back: the largest unit that needs no fraction."""
    if seconds == 0:
        return "0s"
    for unit in ("d", "h", "m", "s", "ms"):
        count = seconds / _SECONDS[unit]
        if count >= 1 and abs(count - round(count)) < 1e-9:
            return f"{round(count)}{unit}"
    return f"{round(seconds * 1e6)}us"


def format_size(nbytes: int) -> str:
    """Text that parse_size reads back: the largest binary unit that needs no fraction."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes and nbytes % _BYTES[unit] == 0:
            return f"{nbytes // _BYTES[unit]}{unit}"
    return f"{nbytes}B"


def show_duration(seconds: float | None) -> str:
    """At most six characters: "3h12m", "1m05s", "12.4s", "4.1ms", "85us". "-" for unknown."""
    if seconds is None:
        return "-"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f}us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g}ms" if seconds < 0.0995 else f"{seconds * 1e3:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


def show_bytes(nbytes: float | None, suffix: str = "B") -> str:
    """Decimal units, three digits: "38.2 GB". `suffix="B/s"` for rates. "-" for unknown."""
    if nbytes is None:
        return "-"
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if nbytes >= scale:
            count = nbytes / scale
            return f"{count:.3g} {unit}{suffix}" if count < 999.5 else f"{count:.0f} {unit}{suffix}"
    return f"{nbytes:.0f} {suffix}"


def show_count(number: float, width: int | None = None) -> str:
    """A whole number in groups of three: "12 345"; where that is wider than `width`, as exact as fits: "12.3k", "1M"."""
    exact = f"{number:,.0f}".replace(",", " ")
    if width is None or len(exact) <= width:
        return exact
    unit, scale = next(((u, s) for u, s in (("G", 1e9), ("M", 1e6), ("k", 1e3)) if number >= 0.9995 * s), ("", 1.0))
    forms = [f"{number / scale:.{digits}f}{unit}" for digits in (2, 1, 0)]
    return next((form for form in forms if len(form) <= width), forms[-1])


def counted(number: int, noun: str) -> str:
    """A number of things: "1 request", "2 requests"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
