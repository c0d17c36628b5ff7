"""The command as a user runs it: a process against a daemon on real sockets. Exit codes, forms, messages."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from pdd import cli
from pdd.commands.common import Globals
from pdd.commands.tree import program
from pdd.control import paths, schema
from pdd.errors import UsageError
from pdd.version import VERSION
from tests.control import fake_daemon

Pdd = Callable[..., "subprocess.CompletedProcess[str]"]
Daemon = fake_daemon.Running


def clean(result: subprocess.CompletedProcess[str], code: int) -> subprocess.CompletedProcess[str]:
    assert result.returncode == code, result.stderr + result.stdout
    assert "Traceback" not in result.stderr + result.stdout
    return result


# -- reading -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words", [["-i", "d0", "status"], ["status", "-i", "d0"], ["status", "--instance=d0"], ["status"]]
)
def test_status_line_wherever_the_instance_stands(pdd: Pdd, daemon: Daemon, words: list[str]) -> None:
    out = clean(pdd(*words), 0).stdout
    assert out.startswith("d0 decode ready  12.0s  running 1/64  waiting 2  wait kv 1  kv 22%")
    assert "\x1b" not in out  # a pipe gets no colors


@pytest.mark.parametrize("command", ["status", "requests", "peers", "transfers", "topology", "version", "top"])
def test_each_command_has_json_with_a_schema(pdd: Pdd, daemon: Daemon, command: str) -> None:
    for words in ([command, "--json"], ["--json", "-i", "d0", command]):
        document = json.loads(clean(pdd(*words), 0).stdout)
        expected = "status" if command == "top" else command
        assert document["schema"] == f"pdd.{expected}/1"


def test_status_says_what_keeps_pages_back(pdd: Pdd, daemon: Daemon) -> None:
    assert "!" not in clean(pdd("status"), 0).stdout
    daemon.source.fences = schema.Fences(pending=1, oldest_seconds=2e-4)  # as after each end of a link
    assert "!" not in clean(pdd("status"), 0).stdout
    daemon.source.fences = schema.Fences(pending=2, oldest_seconds=75.0, overdue=1, alarms=1, integrity_failures=3)
    lines = clean(pdd("status"), 0).stdout.splitlines()[1:]
    assert lines == [
        "! 1 link not fenced, the oldest for 1m15s, 0 pages in quarantine: the log says why; a restart frees them",
        "! the books of the page pool were wrong 3 times: restart this node",
    ]


def test_tables(pdd: Pdd, daemon: Daemon) -> None:
    assert "r-1  3.1s  wait_kv  p0    900    4  44/57  13 pages from p0" in clean(pdd("requests"), 0).stdout
    assert "p0    prefill  up     900us  tcp     512    40" in clean(pdd("peers"), 0).stdout
    assert "p0    in   tcp  eth0  up     4.1 kB" in clean(pdd("transfers"), 0).stdout


def test_one_request_is_shown_in_words(pdd: Pdd, daemon: Daemon) -> None:
    out = clean(pdd("requests", "show", "r-1"), 0).stdout.splitlines()
    for line in (
        "age               3.1s", "pages             44/57", "prefill           120ms", "hidden ratio      94%",
        "prompt            1 2 3", "transfer          57 pages, 228 units, 930 kB in 1 write via tcp",
        "prompt tokens     900", "attempts so far   0",
    ):
        assert line in out


def test_color_when_asked(pdd: Pdd, daemon: Daemon) -> None:
    assert "\x1b[32mready\x1b[0m" in clean(pdd("status", "--color", "always"), 0).stdout
    assert "\x1b" not in clean(pdd("status", "--color", "never"), 0).stdout


def test_reasons_and_state_come_first_when_not_ready(pdd: Pdd, daemon: Daemon) -> None:
    daemon.source.state = "loading"
    out = clean(pdd("status"), 0).stdout
    assert "d0 decode loading load 42%  12.0s  " in out
    assert "(it is loading)" not in out  # that is said
    daemon.source.progress = None
    assert "d0 decode loading load  12.0s  " in clean(pdd("status"), 0).stdout
    daemon.source.state = "not_ready"
    assert clean(pdd("status"), 0).stdout.rstrip().endswith("(it is not_ready)")


def test_a_drain_says_how_long_it_may_take(pdd: Pdd, daemon: Daemon) -> None:
    daemon.source.state, daemon.source.drain_seconds_left = "draining", 108.0
    out = clean(pdd("status"), 0).stdout
    assert out.startswith("d0 decode draining 1m48s left  12.0s  running")
    assert out.rstrip().endswith("(it is draining)")


def test_watch_prints_until_the_daemon_stops(daemon: Daemon) -> None:
    command = [sys.executable, "-m", "pdd.cli", "--run-dir", str(daemon.run_dir), "status", "--watch", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["state"] == "ready"
    daemon.source.state = "draining"
    daemon.changed()
    assert json.loads(process.stdout.readline())["state"] == "draining"
    daemon.stop()
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_top_without_a_terminal_is_one_picture(pdd: Pdd, daemon: Daemon) -> None:
    result = clean(pdd("top"), 0)
    assert result.stdout.count("pdd top") == 1
    assert "one picture" in result.stderr
    assert clean(pdd("top", "--count", "2", "--interval", "250ms", "-q"), 0).stdout.count("pdd top") == 2
    assert clean(pdd("top", "--once", "--ascii"), 0).stdout.isascii()


# -- waiting -----------------------------------------------------------------------------------------------------------
def test_wait_ready_waits_for_a_daemon_that_is_not_there_yet(pdd: Pdd, spawn: Any) -> None:
    results: list[subprocess.CompletedProcess[str]] = []
    waiter = threading.Thread(
        target=lambda: results.append(pdd("-i", "d9", "status", "--wait", "ready", "--timeout", "60s"))
    )
    waiter.start()
    time.sleep(1.0)
    spawn("d9")
    waiter.join()
    assert clean(results[0], 0).stdout.startswith("d9 decode ready")


def test_wait_ready_times_out_with_the_reason(pdd: Pdd, daemon: Daemon) -> None:
    daemon.source.state = "loading"
    result = clean(pdd("status", "--wait", "ready", "--timeout", "300ms"), 6)
    assert "not ready within 0.3 s: it is loading [E360]. it is loading" in result.stderr
    absent = clean(pdd("-i", "nope", "status", "--wait", "ready", "--timeout", "300ms"), 6).stderr
    assert "no daemon answers" in absent
    assert "journalctl -u pdd@nope" in absent


def test_a_timeout_that_no_clock_holds_is_a_mistake(pdd: Pdd) -> None:
    assert '--timeout: "1000000000000d" must be at most 7d [E200]' in clean(pdd("status", "--timeout", "1000000000000d"), 2).stderr


def test_wait_ready_gives_up_at_once_when_it_cannot_come(pdd: Pdd, daemon: Daemon) -> None:
    daemon.source.state = "stopping"
    clean(pdd("status", "--wait", "ready", "--timeout", "60s"), 5)


def test_a_stopped_daemon_is_told_within_two_seconds(pdd: Pdd, spawn: Any) -> None:
    process = spawn("d0")
    process.send_signal(signal.SIGSTOP)
    try:
        result, changed = clean(pdd("status"), 6), clean(pdd("drain"), 6)
    finally:
        process.send_signal(signal.SIGCONT)
    assert "did not answer within 2 s [E360]" in result.stderr
    assert "did not answer within 2 s; it may still do what it was told [E360]" in changed.stderr
    assert "`pdd status` says what it does when it answers again. `pdd resume` takes a drain back." in changed.stderr


# -- changing ----------------------------------------------------------------------------------------------------------
def test_drain_resume_cancel(pdd: Pdd, daemon: Daemon) -> None:
    assert json.loads(clean(pdd("drain", "--json", "--timeout", "7s"), 0).stdout)["state"] == "drained"
    assert daemon.source.drained_with == [7.0]
    assert "d0 decode ready" in clean(pdd("resume"), 0).stdout
    assert "d0 decode ready" in clean(pdd("resume"), 0).stdout  # again is no error
    assert "r-1 is cancelled" in clean(pdd("requests", "cancel", "r-1"), 0).stderr
    assert "r-1 is not live any more" in clean(pdd("requests", "cancel", "r-1"), 0).stderr
    assert "no request r/9? [E351]" in clean(pdd("requests", "cancel", "r/9?"), 5).stderr


def test_reload(pdd: Pdd, daemon: Daemon) -> None:
    assert clean(pdd("reload"), 0).stdout == "applied: log.level; needs restart: kv.page_size\n"
    assert clean(pdd("reload", "--dry-run"), 0).stdout.startswith("would be applied: log.level;")
    document = json.loads(clean(pdd("--json", "reload", "--dry-run"), 0).stdout)
    assert document["dry_run"]
    assert document["needs_restart"] == [{"key": "kv.page_size", "old": 16, "new": 32}]
    daemon.source.wrong_config = True
    refused = clean(pdd("reload"), 78)
    assert refused.stdout == ""
    assert refused.stderr == 'f:1:1  log.level: "loud" is not a level\n1 problem [E780]\n'


def test_ping_and_compare(pdd: Pdd, daemon: Daemon) -> None:
    assert clean(pdd("peers", "ping", "p0", "--count", "2"), 0).stdout == (
        "p0 (127.0.0.1:7700) via tcp: 900us  900us; the middle one 900us\n"
    )
    lines = clean(pdd("peers", "compare", "127.0.0.1:7700"), 7).stdout.splitlines()
    assert [line.split() for line in lines[1:]] == [["page_size", "32", "16", "no"], ["dtype", "bfloat16", "float32", "yes"]]
    assert "[E355]" in clean(pdd("peers", "ping", "p9"), 5).stderr
    clean(pdd("peers", "ping"), 2)


def test_check_of_the_running_node(pdd: Pdd, daemon: Daemon) -> None:
    assert clean(pdd("check", "--live"), 7).stdout == "FAIL D020 locked memory: 8 MB\n     D020 fix: raise it\n"
    assert clean(pdd("check", "--live", "--only", "fabric"), 0).stdout == ""


def test_the_settings_of_the_running_node(pdd: Pdd, daemon: Daemon) -> None:
    out = clean(pdd("config", "show", "--live", "--origin", env={"PDD_KV__PAGE_SIZE": "64"}), 0).stdout
    assert "kv.page_size = 32  # --set\n" in out
    assert "drain.timeout" not in out
    assert 'drain.timeout = "2m"\n' in clean(pdd("config", "show", "--live", "--defaults"), 0).stdout
    assert "give one of them" in clean(pdd("config", "show", "--live", "--set", "kv.page_size=1"), 2).stderr


def test_nodes_of_systemd_are_found_beside_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, system = tmp_path / "own", tmp_path / "system"
    monkeypatch.setattr(paths, "run_dirs", lambda: [own, system])
    monkeypatch.delenv("PDD_NODE__NAME", raising=False)
    (system / "d0").mkdir(parents=True)
    (system / "d0" / "status.sock").touch()
    assert Globals().instance_dir() == Globals(instances=("d0",)).instance_dir() == system / "d0"
    assert Globals(instances=("nope",)).instance_dir() == own / "nope"
    assert Globals(run_dir=own).instance_dir().parent == own
    (own / "d0").mkdir(parents=True)
    (own / "d0" / "status.sock").touch()
    assert Globals().instance_dir() == own / "d0"
    (own / "d1").mkdir()
    (own / "d1" / "status.sock").touch()
    with pytest.raises(UsageError, match=r"several instances in .*own and .*system: d0, d1"):
        Globals().instance_dir()
    with socket.socket(socket.AF_UNIX) as alive:  # the others left their sockets behind
        (own / "d1" / "status.sock").unlink()
        alive.bind(str(own / "d1" / "status.sock"))
        alive.listen()
        assert Globals().instance_dir() == own / "d1"


# -- errors ------------------------------------------------------------------------------------------------------------
def test_no_daemon(pdd: Pdd, tmp_path: Path) -> None:
    result = clean(pdd("-i", "d7", "status"), 3)
    assert result.stdout == ""
    assert result.stderr.startswith(f"pdd: no daemon at {tmp_path}/run/d7/status.sock [E301]. It is not running: ")


def test_errors_as_json(pdd: Pdd) -> None:
    for words, code, error_id in ((["-i", "d7", "status"], 3, "E301"), (["nonsense"], 2, "E200")):
        document = json.loads(clean(pdd("--json", *words), code).stderr)
        assert document["schema"] == "pdd.error/1"
        assert document["id"] == error_id


@pytest.mark.parametrize(
    "words",
    [
        "nonsense",
        "status --wait asleep",
        "status --nope",
        "--color blue status",
        "config",
        "requests show",
        "requests ls x",
        "requests nope",
        "--timeout five status",
        "top --interval 1h",
        "-i",
        "model import x",
    ],
)
def test_usage_errors_exit_2(pdd: Pdd, daemon: Daemon, words: str) -> None:
    assert "[E200]" in clean(pdd(*words.split()), 2).stderr


def test_several_instances_must_be_chosen_from(pdd: Pdd, spawn: Any) -> None:
    spawn("d0")
    spawn("p0")
    assert "several instances" in clean(pdd("status"), 2).stderr
    assert "d0, p0" in clean(pdd("status"), 2).stderr
    out = clean(pdd("version"), 0).stdout
    assert out.startswith(f"client     {VERSION}\ndaemon     several instances in ")
    assert json.loads(clean(pdd("version", "--json"), 0).stdout)["client"] == VERSION
    assert clean(pdd("status", env={"PDD_NODE__NAME": "p0"}), 0).stdout.startswith("p0 ")


def test_a_reader_that_leaves_is_no_error(daemon: Daemon) -> None:
    command = [sys.executable, "-m", "pdd.cli", "--run-dir", str(daemon.run_dir), "status", "--watch"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("d0 ")
    process.stdout.close()
    while process.poll() is None:
        daemon.source.uptime += 1
        daemon.changed()
        time.sleep(0.05)
    assert process.stderr.read() == ""
    assert process.returncode == cli.EXIT_UNREAD
    process.stderr.close()


@pytest.mark.parametrize("words", [
    "status", "status --json", "status --wait ready", "requests", "requests show r-1", "peers", "transfers", "topology",
    "topology --json", "topology --format dot", "top", "top --json", "top --json --count 3", "top --once", "version", "-V",
    "--help", "serve --help", "config --help", "config init", "config schema", "config show --set node.role=both",
    "config check",
])  # fmt: skip
def test_a_reader_that_is_gone_already_ends_any_command_quietly(daemon: Daemon, tmp_path: Path, words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PDD_NODE__ROLE": "both", "PDD_MODEL__PATH": str(tmp_path)}
    command = [sys.executable, "-m", "pdd.cli", "--run-dir", str(daemon.run_dir), *words.split()]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    os.close(writer)
    note = "pdd: no full screen here (no terminal, or TERM=dumb): one picture\n" if words == "top" else ""
    assert (result.returncode, result.stderr) == (cli.EXIT_UNREAD, note)


def test_an_error_that_nobody_reads_keeps_its_exit_code(daemon: Daemon) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for words, code in ((["-i", "nobody", "status"], 3), (["nonsense"], 2), (["config"], 2)):
        command = [sys.executable, "-m", "pdd.cli", "--run-dir", str(daemon.run_dir), *words]
        assert subprocess.run(command, stdout=writer, stderr=writer, check=False).returncode == code
    os.close(writer)


def test_interrupt(daemon: Daemon) -> None:
    command = [sys.executable, "-m", "pdd.cli", "--run-dir", str(daemon.run_dir), "status", "--watch"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert "Traceback" not in process.communicate(timeout=30)[1]
    assert process.returncode == 130


def test_a_bug_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("boom")

    monkeypatch.setattr("pdd.commands.look.topology", fail)
    assert cli.run(["topology"]) == 1
    error = capsys.readouterr().err
    assert "a bug in pdd: KeyError: 'boom' at " in error
    assert "[E001]" in error
    assert len(error.splitlines()) == 1


# -- without a daemon --------------------------------------------------------------------------------------------------
def test_version(pdd: Pdd, daemon: Daemon) -> None:
    assert clean(pdd("-V"), 0).stdout == f"pdd {VERSION}\n"
    assert json.loads(clean(pdd("version", "--json"), 0).stdout)["daemon"] == "0.1.0"
    absent = json.loads(clean(pdd("-i", "d7", "version", "--json"), 0).stdout)
    assert (absent["client"], absent["daemon"], absent["torch"]) == (VERSION, None, None)
    assert absent["installed"]["protocol"]
    told = dict(line.split(maxsplit=1) for line in clean(pdd("version"), 0).stdout.splitlines())
    assert told == {"client": VERSION, "daemon": "0.1.0", "protocol": "1", "libfabric": "2.5 (/lib/x)", "torch": "2.9",
                    "cuda": "-", "driver": "-"}  # the daemon's


def test_help_names_every_command(pdd: Pdd) -> None:
    for words in (["--help"], ["-h"]):
        out = clean(pdd(*words), 0).stdout
        for command in (
            "serve",
            "status",
            "requests",
            "peers",
            "transfers",
            "topology",
            "drain",
            "resume",
            "top",
            "config",
            "model",
        ):
            assert f"  {command} " in out


def every_command() -> Iterator[tuple[list[str], Any]]:
    def walk(command: Any, path: list[str]) -> Iterator[tuple[list[str], Any]]:
        yield path, command
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, [*path, name])

    return walk(typer.main.get_command(program.app), [])


@pytest.mark.parametrize(("path", "command"), [pytest.param(path, command, id=" ".join(path)) for path, command in every_command()])
def test_every_help_fits_a_screen_and_shows_words_of_ours(pdd: Pdd, path: list[str], command: Any) -> None:
    out = clean(pdd(*path, "--help", env={"COLUMNS": "80"}), 0).stdout
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= (24 if path else 40)
    assert re.findall(r"<\w.*?>|\.\.\.$", "\n".join(lines[1:]), re.M) == []  # Typer's types; texts that it cut
    assert all(re.fullmatch(r"[A-Z.:=]+", each.metavar) for each in command.params if each.metavar)


def test_help_names_the_global_options_that_mean_something_to_a_command(pdd: Pdd) -> None:
    """What prints a document takes --json; what asks a daemon takes -i and --timeout as well."""
    for words in ("status", "requests", "peers", "transfers", "top", "drain", "resume", "version"):
        out = clean(pdd(words, "--help"), 0).stdout
        assert "Here too: -i NAME, --json, --timeout TIME" in out
    for words in ("topology", "config check", "config show", "model import", "serve"):
        assert "--json" in clean(pdd(*words.split(), "--help"), 0).stdout.split("Here too: ")[1]


@pytest.mark.parametrize(("words", "last"), [((), "before there is one."), (("model",), "a model folder.")])
def test_help_without_a_command_is_whole(pdd: Pdd, words: tuple[str, ...], last: str) -> None:
    lines = clean(pdd(*words), 2).stderr.splitlines()
    assert lines[-2].endswith(last)
    assert "a command is missing [E200]" in lines[-1]


def test_global_options_and_nothing_else_are_taken_out() -> None:
    words = ["status", "-i", "d0", "--wait", "ready", "--timeout=5s", "--json"]
    assert cli.split(words) == ({"--instance": ["d0"], "--timeout": ["5s"], "--json": [""]}, ["status", "--wait", "ready"])
    assert cli.split(["serve", "--set", "a.b=c", "--", "-i", "x"]) == ({}, ["serve", "--set", "a.b=c", "--", "-i", "x"])
    with pytest.raises(UsageError, match="-i needs a value"):
        cli.split(["status", "-i"])


def test_config_check_prints_every_mistake_and_exits_78(pdd: Pdd, tmp_path: Path) -> None:
    file = tmp_path / "pdd.toml"
    file.write_text('[node]\nrole = "decod"\n[engine]\nmax_bath_size = 3\n')
    result = clean(pdd("config", "check", str(file), env={"PDD_ENGINE__MAX_BACTH": "1"}), 78)
    assert result.stdout.splitlines() == [
        f'{file}:2:1  node.role: "decod" is not a role; use "prefill", "decode" or "both"',
        f"{file}:4:1  engine.max_bath_size: no such setting; did you mean engine.max_batch_size?",
        f"{file}  model.path: required; the folder of the model (or start with --demo)",
        "environment  PDD_ENGINE__MAX_BACTH: no such setting; did you mean PDD_ENGINE__MAX_BATCH_SIZE?",
        "4 problems",
    ]
    document = json.loads(clean(pdd("--json", "config", "check", str(file)), 78).stdout)
    assert document["problems"][0]["line"] == 2
    assert document["problems"][1]["suggestion"] == "engine.max_batch_size"


def test_config_check_looks_at_what_the_settings_name(pdd: Pdd, tmp_path: Path, tiny_model: Path) -> None:
    """The file says where; a credential of systemd is passed over; a warning is printed and is no failure."""
    file, keys = tmp_path / "pdd.toml", tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o644)
    file.write_text(f"""[node]
role = "both"
[model]
path = "{tmp_path}/none"
[peers]
token_credential = "peer-token"
[api]
api_keys_credential = "{tmp_path}/nokeys"
[fabric]
library = "/nowhere/libfabric.so.1"
[control]
group = "no-such-group"
""")
    lines = clean(pdd("config", "check", str(file)), 78).stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        f"{file}:4:1  model.path", f"{file}:8:1  api.api_keys_credential", f"{file}:10:1  fabric.library",
        f"{file}:12:1  control.group", "4 problems",
    ]
    rows = json.loads(clean(pdd("--json", "config", "check", str(file)), 78).stdout)["problems"]
    assert [(row["id"], row["level"], row["line"]) for row in rows] == [
        ("E781", "error", 4), ("E780", "error", 8), ("E780", "error", 10), ("E780", "error", 12),
    ]
    sets = ("--set", f"model.path={tiny_model}", "--set", f"api.api_keys_credential={keys}", "--set", "fabric.library=",
            "--set", "control.group=")
    out = clean(pdd("config", "check", str(file), *sets), 0).stdout
    assert out == f"--set  api.api_keys_credential: warning: {keys} can be read by every user (mode 0644). `chmod 600` it.\n1 problem\n"
    keys.chmod(0o600)
    assert clean(pdd("config", "check", str(file), *sets), 0).stdout == "no problems\n"
    assert "model.max_context: max_context 4097 is more than the 4096" in clean(
        pdd("config", "check", str(file), *sets, "--set", "model.max_context=4097"), 78).stdout
    assert "engine.tp: this model cannot run on 3 ranks: num_attention_heads (4) does not divide over 3 ranks" in clean(
        pdd("config", "check", str(file), *sets, "--set", "engine.tp=3"), 78).stdout
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})
    try:
        crowded = clean(pdd("config", "check", str(file), *sets, "--set", "engine.tp=2"), 0).stdout
        replicas = clean(pdd("config", "check", str(file), *sets, "--set", "engine.dp=2"), 0).stdout
    finally:
        os.sched_setaffinity(0, everywhere)
    assert replicas == crowded.replace("engine.tp", "engine.dp")
    assert crowded == "--set  engine.tp: warning: 2 ranks share the 1 CPU that this process may use\n1 problem\n"


@pytest.mark.parametrize(("places", "wrong"), [
    ("127.0.0.1,lo,::1", {}),
    ("192.0.2.7,127.0.0.1,nonet9", {0: "192.0.2.7 is no address of this machine", 2: "this machine has no NIC nonet9"}),
])
def test_config_check_tries_where_the_fabric_is_bound(pdd: Pdd, tiny_model: Path, places: str, wrong: dict[int, str]) -> None:
    words = ("--set", "node.role=both", "--set", f"model.path={tiny_model}", "--set", f"fabric.bind={places}")
    rows = json.loads(clean(pdd("--json", "config", "check", *words), 78 if wrong else 0).stdout)["problems"]
    assert {int(row["key"][-2]): row["message"] for row in rows} == wrong


def test_config_check_says_what_is_missing_beside_wrong_settings(pdd: Pdd, tmp_path: Path) -> None:
    words = ("--set", "node.role=decod", "--set", f"model.path={tmp_path}/none", "--set", "control.group=no-such-group")
    out = clean(pdd("config", "check", *words), 78).stdout
    for part in ('node.role: "decod" is not a role', "model.path: model folder", "control.group: there is no group"):
        assert part in out
    out = clean(pdd("config", "check", *words, "--set", "model.path=3", "--set", "api.max_body=x"), 78).stdout
    assert out.count("api.max_body") == 1


def test_config_env_is_what_the_environment_would_say(pdd: Pdd) -> None:
    words = ("--set", "node.role=decode", "--set", "model.path=/a b", "--set", "peers.static=127.0.0.1:1,[::1]:2",
             "--set", "scheduler.local_prefill_fallback=true", "--set", "drain.timeout=90s")
    lines = clean(pdd("config", "env", *words), 0).stdout.splitlines()
    assert lines == ["PDD_NODE__ROLE=decode", "PDD_MODEL__PATH='/a b'", "PDD_SCHEDULER__LOCAL_PREFILL_FALLBACK=true",
                     "PDD_PEERS__STATIC='127.0.0.1:1,[::1]:2'", "PDD_DRAIN__TIMEOUT=90s"]
    env = dict(line.replace("'", "").split("=", 1) for line in lines)
    shown = json.loads(clean(pdd("--json", "config", "show", env=env), 0).stdout)["settings"]
    assert shown["peers.static"]["value"] == ["127.0.0.1:1", "[::1]:2"]
    assert "PDD_KV__PAGE_SIZE=16" in clean(pdd("config", "env", "--defaults", *words), 0).stdout


def test_config_show_says_where_values_come_from(pdd: Pdd, tmp_path: Path) -> None:
    file = tmp_path / "pdd.toml"
    file.write_text('[node]\nrole = "both"\n[model]\npath = "/m"\n')
    words = ("config", "show", "-c", str(file), "--origin", "--set", "kv.num_pages=64")
    out = clean(pdd(*words, env={"PDD_DRAIN__TIMEOUT": "90s"}), 0).stdout
    assert f'node.role = "both"  # {file}:2:1' in out
    assert "kv.num_pages = 64  # --set" in out
    assert 'drain.timeout = "90s"  # env PDD_DRAIN__TIMEOUT' in out
    assert "kv.page_size" not in out
    assert "kv.page_size = 16  # default" in clean(pdd(*words, "--defaults"), 0).stdout


@pytest.mark.parametrize(("module", "what"), [("pdd.fabric._native", "native core cannot be loaded"), ("torch", "needs torch")])
def test_an_incomplete_installation_is_not_an_engine_that_died(
    module: str, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """78, which systemd does not restart; not 75, which it does for ever."""
    from pdd import cli

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == module else object())
    monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    assert cli.run(["serve", "--role", "both", "--demo", "--dry-run"]) == 78
    error = capsys.readouterr().err
    assert what in error
    assert "[E783]. In pdd's source tree: pip install" in error


def test_serve_dry_run_takes_flags_over_everything(pdd: Pdd, tmp_path: Path, tiny_model: Path) -> None:
    words = "serve --role decode --name d0 --listen 127.0.0.1:8001 --peer 127.0.0.1:7700 --peer 127.0.0.1:7701"
    more = ("--model", str(tiny_model), "--set", "engine.max_batch_tokens=32", "--dry-run", "--json")
    document = json.loads(clean(pdd(*words.split(), *more, env={"PDD_NODE__ROLE": "both"}), 0).stdout)
    value = {key: entry["value"] for key, entry in document["settings"].items()}
    assert value["node.role"] == "decode"
    assert value["peers.static"] == ["127.0.0.1:7700", "127.0.0.1:7701"]
    assert value["engine.max_batch_tokens"] == 32
    assert value["control.dir"] == str(tmp_path / "run")
    assert document["settings"]["node.role"]["origin"] == "--role"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--role", "decode"], "model.path: required"),
        (["--model", "/nowhere"], "node.role: required"),
        (["--role", "both", "--model", "/nowhere"], "model.path: model folder /nowhere does not exist [E781]. Set model.path"),
        (["--role", "both", "--model", "/nowhere", "--set", "control.group=no-such"], "2 problems [E780]"),
        (["--demo", "--set", "fabric.library=/nowhere"], "fabric.library: no usable libfabric"),
        (["--demo", "--set", "fabric.provider=tcp", "--set", "fabric.require=efa"], "fabric.require: efa is required and"),
        (["--demo", "--set", "peers.token_credential=peer-token"], "a bare name is a credential of systemd"),
        (["--role", "prefill", "--demo"], "peers.listen: required for role prefill"),
        (["--role", "decode", "--demo"], "peers.static: role decode needs a prefiller"),
        (["--role", "both", "--demo", "--listen", "0.0.0.0:80"], "0.0.0.0:80 is not loopback"),
        (["--role", "decode", "--demo", "--peer", "10.0.0.1:7700"], "10.0.0.1:7700 is not loopback"),
        (["--demo", "--set", "nope"], '"nope" is not an assignment'),
        (["--demo", "--set", "api.api_keys_credential=/nokeys"], "api.api_keys_credential: /nokeys cannot be read"),
    ],
)
def test_serve_refuses_wrong_settings_with_78(pdd: Pdd, words: list[str], message: str) -> None:
    assert message in clean(pdd("serve", *words, "--dry-run"), 78).stderr


def test_serve_demo_needs_nothing_else(pdd: Pdd) -> None:
    assert 'node.role = "both"' not in clean(pdd("serve", "--demo", "--dry-run"), 0).stderr


def test_topology_of_a_copied_tree(pdd: Pdd, tmp_path: Path) -> None:
    node = tmp_path / "copy/sys/devices/system/node/node0"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("0-7\n")
    document = json.loads(clean(pdd("topology", "--json", "--input", str(tmp_path / "copy")), 0).stdout)
    assert document["numa"] == [{"node": 0, "cpus": "0-7", "package": None}]
    assert "numa0 cpus 0-7" in clean(pdd("topology", "--ascii", "--input", str(tmp_path / "copy")), 0).stdout
