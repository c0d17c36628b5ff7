"""Looks at nodes all the time while a test hurts them: the books must balance at every look, and no counter may fall."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tests.cluster import Node, page_sum_holds

_TOTALS = ("_total", "_bucket", "_sum", "_count")


class Scrapes:
    """Use: `with Scrapes(nodes) as seen: …`, then `seen.assert_clean()`. A node that is down is not looked at."""

    def __init__(self, nodes: Sequence[Node], period: float = 0.02) -> None:
        self.num_looks = 0
        self.mistakes: list[str] = []
        self._nodes = nodes
        self._period = period
        self._last: dict[str, tuple[str, dict[str, float]]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(20)

    def assert_clean(self) -> None:
        assert not self.mistakes, self.mistakes[:5]
        assert self.num_looks >= 2 * len(self._nodes), "hardly any look: the test proves nothing"

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            for node in self._nodes:
                try:
                    status = node.status()
                    with urllib.request.urlopen(f"{node.url}/metrics", timeout=3) as answer:
                        values = _values(answer.read().decode())
                    if node.status()["boot_id"] != status["boot_id"]:
                        continue
                except Exception:  # down, stopped or not up yet
                    continue
                self._judge(node.name, status, values)

    def _judge(self, name: str, status: dict, values: dict[str, float]) -> None:
        self.num_looks += 1
        if not page_sum_holds(status):
            self.mistakes.append(f"{name}: the parts of {status['pages']} do not add up")
        pages = sum(value for key, value in values.items() if key.startswith("pdd_kv_pages{"))
        if pages != values["pdd_kv_pool_pages"]:
            self.mistakes.append(f"{name}: {pages} pages in states, {values['pdd_kv_pool_pages']} in the pool")
        if not 0 <= values["pdd_kv_cache_usage_ratio"] <= 1 or any(value < 0 for value in values.values()):
            self.mistakes.append(f"{name}: a value is out of range")
        boot, before = self._last.get(name, ("", {}))
        if boot == status["boot_id"]:
            fallen = [key for key, value in values.items() if _is_total(key) and value < before.get(key, 0)]
            self.mistakes.extend(f"{name}: {key} fell from {before[key]} to {values[key]}" for key in fallen)
        self._last[name] = (status["boot_id"], values)


def _is_total(key: str) -> bool:
    return key.partition("{")[0].endswith(_TOTALS)


def _values(text: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {key: float(value) for key, _, value in lines}
