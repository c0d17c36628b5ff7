"""Reload: what is live in the model has an owner, what differs is found, and only that is taken over."""

from __future__ import annotations

from pdd import config as model
from pdd.config import Config
from pdd.config_load import load
from pdd.daemon import reload, watchdog


def config(*assignments: str) -> Config:
    return load(assignments=["node.role=decode", "peers.static=127.0.0.1:1", *assignments], demo=True, search=False, env={})[0]


def test_every_live_setting_has_an_owner_and_no_other_has() -> None:
    live = {key for key, field in model.all_fields().items() if model.is_live(field)}
    assert live == reload.APPLY.keys()


def test_what_differs_and_what_of_it_is_taken_over() -> None:
    old, new = config(), config("log.level=debug", "kv.page_size=32", "drain.timeout=5s", "top.interval=2s")
    assert reload.changes(old, new) == ["kv.page_size", "log.level", "drain.timeout"]  # top reads its own
    now = reload.taken_over(old, new, ["log.level", "drain.timeout"])
    assert (now.log.level, now.drain.timeout, now.kv.page_size) == ("debug", 5.0, old.kv.page_size)
    assert reload.changes(now, new) == ["kv.page_size"]  # told again at the next reload
    assert reload.changes(old, config()) == []
    both = config("peers.max_attempts=7", "peers.heartbeat=100ms")
    now = reload.taken_over(old, both, ["peers.max_attempts"])
    assert (now.peers.max_attempts, now.peers.heartbeat) == (7, old.peers.heartbeat)  # not the whole section


def test_systemd_is_told_that_a_node_lives_while_engine_and_loop_do() -> None:
    dog = watchdog.Watchdog(pause=2.0)

    def look(now: float, turn_age: float = 0.0) -> str:
        return dog.look(now, turn_age, step_timeout=30.0, dead_after=5.0)

    assert look(100.0) == ""
    assert look(102.1) == ""
    assert "engine's turn has run for 31 s" in look(104.0, turn_age=31.0)
    assert look(106.0, turn_age=29.0) == ""
    assert "main loop came 7.0 s late" in look(115.0)
    assert look(117.0) == ""
