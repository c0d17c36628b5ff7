"""What the benchmarks share: percentiles, streams with the arrival time of every token, and the report.

A figure is a ratio measured in one run; absolute times are printed beside it for the log only.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.cluster import Node


def percentile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0..1), linear between neighbours."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


def cpu_seconds(pid: int) -> float:
    """Of a process, all threads, children left out; in hundredths of a second."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int | str = "self") -> int:
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass
class Stream:
    """Arrival times (seconds, monotonic) of one streamed completion."""

    start: float
    arrivals: list[float]
    request_id: str = ""

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.start

    def gaps(self, since: float = 0.0, until: float = float("inf")) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False) if since <= a and b <= until]


def stream(node: Node, model: str, prompt: Sequence[int], max_tokens: int, timeout: float = 300.0) -> Stream:
    """Streams one greedy completion of exactly `max_tokens` tokens. Arrival of a token = arrival of its SSE event."""
    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=timeout)
    # logprobs make every token an event of its own, also when its text is empty or half a character
    body = json.dumps({"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True,
                       "ignore_eos": True, "logprobs": 0})
    result = Stream(time.monotonic(), [])
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{node.name} answered {response.status}: {response.read()[:400]!r}")
    for raw in response:
        if raw.startswith(b"data: {"):
            now = time.monotonic()
            event = json.loads(raw[6:])
            if "error" in event:  # the benchmark ended it
                break
            result.request_id = event["id"]
            if event["choices"] and event["choices"][0]["logprobs"]:
                result.arrivals += [now] * len(event["choices"][0]["logprobs"]["tokens"])
    connection.close()
    return result


def model_name(node: Node) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=10)
    connection.request("GET", "/v1/models")
    name: str = json.load(connection.getresponse())["data"][0]["id"]
    return name


def prompt_of(length: int, seed: int, vocabulary: int = 40000) -> list[int]:
    """Token ids no two of which prompts share, so that no cache helps."""
    return [100 + (seed * 7919 + i * 104729 + i * i * 31) % (vocabulary - 200) for i in range(length)]


def arguments(description: str, *, model: bool = True) -> argparse.ArgumentParser:
    """`model`: whether one is needed; `make bench` names one to all."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=model, help="a Hugging Face folder")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures here")
    return parser


def report(name: str, rows: list[dict[str, Any]], bounds: list[tuple[str, float, str, float]], out: pathlib.Path | None) -> int:
    """Prints rows as a table and every bound as met or missed. Returns the exit code: 0 when all are met.

    bounds: (what, measured, "<=" or ">=", bound).
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[f"{row[c]:.4g}" if isinstance(row.get(c), float) else str(row.get(c, "")) for c in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    print(f"{name}  ({platform.machine()}, Python {platform.python_version()})")
    for line in [columns, *cells]:
        print("  " + "  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    met = True
    for what, measured, relation, bound in bounds:
        good = measured <= bound if relation == "<=" else measured >= bound
        met &= good
        print(f"  {'met   ' if good else 'MISSED'} {what}: {measured:.3g} {relation} {bound:g}")
    if out is not None:
        out.write_text(json.dumps({"benchmark": name, "rows": rows, "bounds": bounds}, indent=1) + "\n")
    sys.stdout.flush()
    return 0 if met else 1
