"""The words of a check's outcome, and what a check is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pdd.doctor.facts import Facts

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    level: str  # PASS, WARN, FAIL; SKIP: it does not apply here, or cannot be known, and the message says why
    message: str  # what is so
    observed: Any = None  # a value of JSON
    expected: Any = None
    fix: tuple[str, ...] = ()  # what to do, one way or place each


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    id: str  # stable, D and three digits
    group: str
    title: str
    judge: Callable[[Facts], Verdict]
