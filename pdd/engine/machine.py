"""The memory that is free for a rank. No torch.

Asked once, when a rank starts. Limits count as much as hardware: the memory of its cgroups (v2).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can take without swapping: what the kernel says is available, or what its cgroups leave
    when that is less. Page cache counts as free: it goes when it must."""
    available = int(_fields(root / "proc/meminfo")["MemAvailable:"]) * 1024
    return max(0, min([available, *_left_by_cgroups(root)]))


def _left_by_cgroups(root: Path) -> Iterator[int]:
    """What each limited cgroup, from this process' own up to the top, has left."""
    top = root / "sys/fs/cgroup"
    own = _fields(root / "proc/self/cgroup", separator="::").get("0", "/")
    for group in (top / own.lstrip("/"), *(top / own.lstrip("/")).parents):
        if not group.is_relative_to(top):
            return
        try:
            limit = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
            cache = int(_fields(group / "memory.stat").get("inactive_file", "0"))
        except OSError:
            continue  # no such limit here: cgroup v1, or the top of the machine
        if limit.isdigit():
            yield int(limit) - (used - cache)


def _fields(path: Path, separator: str | None = None) -> dict[str, str]:
    """First word → second word of each line that has two."""
    lines = (line.split(separator) for line in path.read_text().splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}
