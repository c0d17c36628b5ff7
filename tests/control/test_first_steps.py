"""What a newcomer meets: hints that work as they stand, names, and what is said of what is over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from pdd.commands.tree import program
from pdd.control import paths, schema
from pdd.control.client import Client
from pdd.errors import AccessDenied, DaemonNotRunning
from pdd.findings import finding
from tests.control import fake_daemon
from tests.control.test_cli import Daemon, Pdd, clean

RULE = "use 1 to 64 letters, digits, dots, hyphens and underscores, the first a letter or digit"


# -- names and places --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["../x", "", "a/b", "-x", "n" * 65, "d0\n"])
def test_what_is_no_name_is_refused_by_the_rule_of_node_name(pdd: Pdd, name: str) -> None:
    for words in (("status",), ("top", "--once"), ("-i", "d0", "top", "--once"), ("requests", "cancel", "x")):
        assert f'-i: "{name}" is not a node name: {RULE} [E200]' in clean(pdd(*words, f"--instance={name}"), 2).stderr
    assert f'"{name}" is not a valid name: {RULE}' in clean(pdd("serve", "--demo", "--dry-run", f"--name={name}"), 78).stderr
    if name:  # else it is as good as not set
        assert "PDD_NODE__NAME: " in clean(pdd("status", env={"PDD_NODE__NAME": name}), 2).stderr


def test_the_hint_starts_a_node_where_it_was_looked_for(
    pdd: Pdd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"`pdd serve --name d7 --run-dir {tmp_path}/run` starts it" in clean(pdd("-i", "d7", "status"), 3).stderr
    system, own = tmp_path / "system", tmp_path / "own"
    monkeypatch.setattr(paths, "SYSTEM_RUN_DIR", system)
    monkeypatch.setattr(paths, "default_run_dir", lambda: own)
    for place, hint in ((system, "systemctl status pdd@d7`, `pdd serve --name d7`."), (own, ": `pdd serve --name d7` starts")):
        with pytest.raises(DaemonNotRunning) as told:
            Client(place / "d7").get("/v1/status")
        assert hint in told.value.hint


@pytest.mark.parametrize(("group", "hint"), [
    (0, "Run as root, or set control.group for that node. `pdd status` works without that."),
    (54321, "Join 54321, then log in again."),
])
def test_nobody_is_told_to_join_the_group_of_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int, hint: str
) -> None:
    (tmp_path / paths.CONTROL).touch()
    real = os.stat

    def stat(path: Any, *rest: Any, **more: Any) -> os.stat_result:
        found = real(path, *rest, **more)
        return os.stat_result((*found[:5], group, *found[6:])) if str(path).endswith(paths.CONTROL) else found

    monkeypatch.setattr("pdd.control.client.os.stat", stat)
    monkeypatch.setattr(paths, "connect", lambda *_: (_ for _ in ()).throw(PermissionError()))
    with pytest.raises(AccessDenied) as told:
        Client(tmp_path).get("/v1/config", private=True)
    assert hint in told.value.hint


# -- serve and settings ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words", [("--model", "/m"), ("--set", "model.path=/m")])
def test_a_demo_beside_a_model_is_an_error(pdd: Pdd, words: tuple[str, ...]) -> None:
    told = clean(pdd("serve", "--demo", "--dry-run", *words), 2).stderr
    assert "--demo makes a model of its own: give either that or --model DIR [E200]" in told


def test_a_demo_says_that_the_model_of_the_file_is_not_used(pdd: Pdd, tmp_path: Path) -> None:
    file = tmp_path / "pdd.toml"
    file.write_text('[model]\npath = "/nowhere"\n')
    lines = clean(pdd("serve", "--demo", "--dry-run", "-c", str(file)), 0).stdout.splitlines()
    assert lines[0].endswith("model (demo)")
    assert f'  model.path = "/nowhere"  # {file}:2:1; not used: --demo' in lines


def test_config_show_prints_what_is_right_and_then_what_is_wrong(pdd: Pdd, tmp_path: Path) -> None:
    file = tmp_path / "pdd.toml"
    file.write_text('[kv]\npage_size = 32\nnum_pages = "x"\n[peers]\nstatic = ["127.0.0.1:7700", "nope"]\n')
    shown = clean(pdd("config", "show", "-c", str(file), "--origin"), 78)
    assert shown.stdout.splitlines() == [
        f"kv.page_size = 32  # {file}:2:1", f'peers.static = ["127.0.0.1:7700"]  # {file}:5:1',
    ]
    assert [line.split(": ")[0] for line in shown.stderr.splitlines()] == [
        f"{file}:3:1  kv.num_pages", f"{file}:5:1  peers.static[1]", f"{file}  node.role", f"{file}  model.path",
        "4 problems [E780]",
    ]
    everything = clean(pdd("config", "show", "-c", str(file), "--defaults"), 78).stdout
    assert not {"node.role", "kv.num_pages"} & {line.split(" = ")[0] for line in everything.splitlines()}
    assert "engine.tp = 1" in everything
    assert '"kv.page_size"' in clean(pdd("config", "show", "-c", str(file), "--json"), 78).stdout


# -- what is shown -----------------------------------------------------------------------------------------------------
def test_what_nothing_need_be_done_about_is_not_repeated_with_each_status(pdd: Pdd, daemon: Daemon) -> None:
    status = daemon.source.status()
    known = (finding("F010", "no RDMA NIC"), finding("T012", "mlx5_1 is down"))
    daemon.source.status = lambda: msgspec.structs.replace(status, findings=known)
    assert clean(pdd("status"), 0).stdout.splitlines()[1:] == ["! mlx5_1 is down  [T012]"]
    assert clean(pdd("-v", "status"), 0).stdout.splitlines()[1:] == ["! no RDMA NIC  [F010]", "! mlx5_1 is down  [T012]"]
    assert '"F010"' in clean(pdd("status", "--json"), 0).stdout


def test_a_request_that_is_over_took_its_time_and_has_no_age(pdd: Pdd, daemon: Daemon) -> None:
    over = schema.Request(id="r-9", state="finished", age_seconds=0.028, state_age_seconds=0.212, why="all KV came from p0")
    daemon.source.request = lambda wanted: over
    lines = clean(pdd("requests", "show", "r-9"), 0).stdout.splitlines()
    assert {"took              28ms", "finished          212ms ago"} <= {*lines}
    assert not [line for line in lines if line.split()[0] in ("age", "state")]


def test_cancel_and_show_say_that_an_id_is_missing(pdd: Pdd) -> None:
    assert "cancel needs an ID [E200]" in clean(pdd("requests", "cancel"), 2).stderr
    assert "show needs an ID [E200]" in clean(pdd("requests", "show"), 2).stderr


def _leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, each in getattr(command, "commands", {}).items():
        yield from _leaves(each, (*path, name))
    if not hasattr(command, "commands"):
        yield " ".join(path), command


def test_every_help_names_the_global_options_that_mean_something_to_it() -> None:
    """All but what only prints a form."""
    without = {name for name, command in _leaves(typer.main.get_command(program.app)) if "Here too: " not in (command.epilog or "")}
    assert without <= {"config init", "config schema", "config env", "completion"}


def test_a_clean_exit_leaves_nothing_that_looks_like_a_node(tmp_path: Path) -> None:
    with fake_daemon.running(tmp_path / "run"):
        assert paths.instances(tmp_path / "run") == ["d0"]
    assert paths.instances(tmp_path / "run") == []
