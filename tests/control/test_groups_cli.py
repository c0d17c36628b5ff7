"""What the command says of a node of several engines."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from pdd.commands import preflight
from pdd.config_load import load
from pdd.control import schema
from tests.control import fake_daemon
from tests.control.test_cli import clean

Pdd = Callable[..., "subprocess.CompletedProcess[str]"]


def test_status_and_requests_tell_groups_apart_where_there_are_several(pdd: Pdd, daemon: fake_daemon.Running) -> None:
    one = schema.EngineGroup(index=0, ranks=1, running=1, pages=schema.Pages(total=32, free=24, running=8))
    daemon.source.groups = (one,)
    assert "group" not in clean(pdd("status"), 0).stdout
    daemon.source.groups = (one, schema.EngineGroup(index=1, waiting=2, waiting_for_kv=1, pages=schema.Pages(total=32, free=32)))
    assert clean(pdd("status"), 0).stdout.splitlines()[1:] == [
        "  group 0  running 1/32  waiting 0  wait kv 0  kv 25%",
        "  group 1  running 0/32  waiting 2  wait kv 1  kv 0%",
    ]
    assert "GROUP" not in clean(pdd("requests"), 0).stdout
    daemon.source.group_of = {"r-1": 1, "r-2": 0}
    header, first, second = clean(pdd("requests"), 0).stdout.splitlines()
    assert header.split()[:3] == ["ID", "GROUP", "AGE"]
    assert (first.split()[:2], second.split()[:2]) == (["r-1", "1"], ["r-2", "0"])
    assert "group             1" in clean(pdd("requests", "show", "r-1"), 0).stdout


@pytest.mark.parametrize(("sets", "told"), [
    (["engine.dp=3"], "engine.dp: warning: 3 ranks share the 2 CPUs"), (["engine.dp=2"], ""),
    (["engine.dp=2", "engine.tp=2"], "engine.tp: warning: 4 ranks share the 2 CPUs"),
])
def test_ranks_of_all_groups_are_held_against_the_cpus(monkeypatch: pytest.MonkeyPatch, sets: list[str], told: str) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    config, origins = load(env={}, assignments=sets, demo=True, search=False)
    found = "\n".join(map(str, preflight.problems(config, origins, demo=True, starting=True)))
    assert told in found
    assert bool(told) == ("share the" in found)
