"""From facts to the document pdd.check/1: which checks, their outcomes, and how they count."""

from __future__ import annotations

from collections.abc import Sequence

from pdd.control.schema_check import CheckResult
from pdd.doctor.checks import CHECKS
from pdd.doctor.facts import Facts
from pdd.doctor.verdict import Check, Verdict
from pdd.errors import UsageError

PEER_IDS = ("D070", "D071", "D072", "D073", "D074")  # of another node, see peer.py
NEED_LIBRARY = frozenset({"D020", "D034", "D035"})  # that look at what libfabric offers
GROUPS = (*dict.fromkeys(check.group for check in CHECKS), "peer")


def chosen(wanted: Sequence[str]) -> frozenset[str]:
    """The ids that a list of ids and groups means; all when it is empty. Raises UsageError."""
    groups = {group: {check.id for check in CHECKS if check.group == group} for group in GROUPS} | {"peer": set(PEER_IDS)}
    ids = set[str]().union(*groups.values())
    found: set[str] = set()
    for word in wanted:
        if word.upper() in ids:
            found.add(word.upper())
        elif word in groups:
            found |= groups[word]
        else:
            raise UsageError(f'--only: "{word}" is no check and no group', hint=f"Groups: {', '.join(GROUPS)}.")
    return frozenset(found or ids)


def judge(facts: Facts, ids: frozenset[str]) -> list[CheckResult]:
    return [result(check, check.judge(facts)) for check in CHECKS if check.id in ids]


def result(check: Check, verdict: Verdict) -> CheckResult:
    return CheckResult(id=check.id, group=check.group, title=check.title, level=verdict.level, message=verdict.message,
                       observed=verdict.observed, expected=verdict.expected, fix=verdict.fix)


