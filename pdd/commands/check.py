"""check: whether a machine and the settings of a node fit, judged one by one, with what to do. Needs no daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdd import config_load, config_sources
from pdd.address import Address, parse_address
from pdd.commands import preflight
from pdd.commands.common import Globals, configured, note, paint, print_json
from pdd.config import Config
from pdd.config_load import ConfigProblems
from pdd.config_sources import Problem
from pdd.errors import EXIT_CHECK, EXIT_OK, BenchPeerLost, DaemonNotRunning, PddError, UsageError

_TIMEOUT = 5.0  # seconds, of another node's answer
_LITTLE = 0.5  # share of the line rate, below which a rail is worth a look
_COLORS = {"pass": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
_SETTINGS_DIR = Path("/etc/pdd")
_BUS = Path("/run/dbus/system_bus_socket")


def check(options: Globals, only: str, strict: bool, peers: Sequence[str], under_unit: bool, live: bool,
          assignments: Sequence[str]) -> int:
    """Prints every outcome; EXIT_CHECK when one is a failure, or with `strict` a warning."""
    if under_unit:
        return _under_unit(options, only, strict, peers, assignments)
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    addresses = [_address(word) for word in peers]
    if live:
        rows = _live(options, wanted, addresses)
    else:
        import msgspec

        from pdd.doctor import gather, report
        from pdd.doctor.facts import Library

        ids = report.chosen(wanted)
        config, problems, source = _settings(options, assignments)
        library = None if ids & report.NEED_LIBRARY else Library()
        facts = gather.gather(config, problems, source, library=library)
        results = report.judge(facts, ids)
        for address in addresses:
            results += [each for each in _peer(options, address, config) if each.id in ids]
        rows = msgspec.to_builtins(results)
    if options.json:
        print_json({"schema": "pdd.check/1", "checks": rows})
    else:
        _print(options, rows)
    bad = ("fail", "warn") if strict else ("fail",)
    return EXIT_CHECK if any(row["level"] in bad for row in rows) else EXIT_OK


def _print(options: Globals, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        word = paint(options, row["level"].upper().ljust(4), _COLORS[row["level"]])
        print(f"{word} {row['id']} {row['title']}: {row['message']}")
        if row["level"] in ("fail", "warn"):
            for each in row["fix"]:
                print(f"     {row['id']} fix: {each}")
    counts = [(word, sum(row["level"] == word for row in rows)) for word in ("fail", "warn", "pass", "skip")]
    note(options, ", ".join(f"{count} {word}" for word, count in counts))


def _live(options: Globals, wanted: list[str], addresses: list[Address]) -> list[dict[str, Any]]:
    if addresses:
        raise UsageError("--live asks the running node, --peer looks from here: give one of them")
    from pdd.doctor.report import chosen

    ids = chosen(wanted)
    document = options.client(30.0).get("/v1/check", private=True)
    return [row for row in document["checks"] if row["id"] in ids]


def _settings(options: Globals, assignments: Sequence[str]) -> tuple[Config, list[Problem] | None, str]:
    """The settings that a node would start with here, what is wrong with them, and what to call them.

    The file is that of -c, else, with -i NAME, the one that systemd's unit gives that node.
    """
    file = options.config
    if file is None and options.instance is not None:
        named = _SETTINGS_DIR / f"{options.instance}.toml"
        file = named if named.is_file() else None
    flags = []
    if options.instance is not None:
        flags.append(config_sources.from_flag("node.name", options.instance, "-i"))
    if options.run_dir is not None:
        flags.append(config_sources.from_flag("control.dir", str(options.run_dir), "--run-dir"))
    found = file or next((path for path in config_sources.search_path(os.environ, is_root=os.geteuid() == 0)
                          if path.is_file()), None)
    given = bool(found or assignments or os.environ.get(config_sources.FILE_VARIABLE)
                 or config_sources.read_environment(os.environ)[0])
    if not given:
        config, _ = config_load.load(flags=flags, demo=True, search=False, env={})
        return config, None, ""
    source = str(found) if found else "the environment and --set"
    try:
        config, origins = config_load.load(file, flags=flags, assignments=assignments)
        problems = list[Problem]()
    except ConfigProblems as error:
        problems = [*error.problems]
        if error.usable is None:
            config, origins = config_load.load(flags=flags, demo=True, search=False, env={})
            return config, problems, source
        config, origins = error.usable
    return config, [*problems, *preflight.problems(config, origins)], source


# -- another node ------------------------------------------------------------------------------------------------------
def _address(word: str) -> Address:
    try:
        return parse_address(word)
    except ValueError as error:
        raise UsageError(f"--peer: {error}") from None


def _peer(options: Globals, address: Address, config: Config) -> list[Any]:
    """A serving node is called at; a `pdd bench kv --listen` there is written from, rail by rail."""
    from pdd.doctor.peer import call, result
    from pdd.messenger.handshake import WrongGreeting

    try:
        found = call(address, config, options.timeout or _TIMEOUT)
    except WrongGreeting as error:
        if error.kind != "bench_hello":
            return [result("D070", address, "fail", error.message, fix=("is this its peers.listen?",))]
        return [result("D070", address, "pass", "`pdd bench kv --listen` answers"), *_write_tests(options, address, config)]
    except PddError as error:
        return [result("D070", address, "fail", error.message, fix=(error.hint or "is this its peers.listen?",))]
    if not any(each.level == "fail" for each in found):
        how = "a serving node is not written to: run `pdd bench kv --listen HOST:PORT --keep` there, and give that port"
        found.append(result("D074", address, "skip", how))
    return found


def _write_tests(options: Globals, address: Address, config: Config) -> list[Any]:
    """One for each NIC that libfabric offers and that is no fallback; over tcp one, by the way to that address."""
    from pdd.doctor.gather import ask_library
    from pdd.doctor.peer import result

    offers = ask_library(config.fabric.library, config.fabric.provider).offers or ()
    best = offers[0][0] if offers else "tcp"
    rails = [("tcp", "tcp", "")]
    if best != "tcp":
        rails = [(best, domain, at or domain) for kind, domain, at in offers if kind == best]
    found = []
    for provider, name, place in rails:
        try:
            found.append(_write_test(options, address, provider, name, place))
        except PddError as error:
            fix = [error.hint] if error.hint else []
            fix += ["give --keep there: without it one test is served"] if isinstance(error, BenchPeerLost) and found else []
            found.append(result("D074", address, "fail", f"{name}: {error.message}", fix=tuple(fix)))
    return found


def _write_test(options: Globals, address: Address, provider: str, name: str, place: str) -> Any:
    from pdd.bench import cells, run
    from pdd.bench.node import FabricOptions
    from pdd.commands.bench import token_for
    from pdd.doctor.peer import result
    from pdd.units import show_bytes

    fabric = FabricOptions(provider=provider, library=configured(options.config, "fabric.library") or "",
                           nics=(place,) if place else ())
    plan = cells.parse("64KiB", "64", "scattered", 16)
    with run.dial(address, token_for(options, None, address), fabric, plan, options.timeout or _TIMEOUT) as reader:
        measured = run.measure(reader, plan, 1.0, 1, lambda cell, repeat: None)
    row, nics = measured.rows[0], "+".join(measured.reader.nics)
    line = "line rate not known" if row.line_ratio is None else f"{row.line_ratio:.0%} of line rate"
    slow = row.line_ratio is not None and row.line_ratio < _LITTLE
    rate = show_bytes(row.bytes_per_second, "B/s")
    message = f"{provider} {nics or name}: {rate}, {line}, {row.verified_pages} pages verified"
    fix = ("`pdd topology` shows the paths; look at MTU, flow control and who else uses the link",) if slow else ()
    return result("D074", address, "warn" if slow else "pass", message, observed=row.bytes_per_second, fix=fix)


# -- inside of the unit ------------------------------------------------------------------------------------------------
_NOT_PASSED = ("Type", "NotifyAccess", "Restart", "RestartSec", "RestartPreventExitStatus", "KillMode", "WatchdogSec",
               "WatchdogSignal", "TimeoutStartSec", "TimeoutStopSec")


def unit_command(unit: str, words: Sequence[str]) -> list[str]:
    """systemd-run with the [Service] properties of a unit file and its drop-ins, as `systemctl cat` prints them."""
    section, properties = "", []
    for line in unit.replace("\\\n", " ").splitlines():
        text = line.strip()
        if text.startswith("["):
            section = text
        elif section == "[Service]" and "=" in text and not text.startswith(("#", ";")):
            name = text.partition("=")[0]
            if name not in _NOT_PASSED and not name.startswith("Exec"):
                properties += ["-p", text]
    # The directory of a node that runs must not go when this does.
    kept = ["-p", "RuntimeDirectoryPreserve=yes"]
    return ["systemd-run", "--pipe", "--wait", "--quiet", "--collect", "--no-ask-password", *properties, *kept, *words]


def _under_unit(options: Globals, only: str, strict: bool, peers: Sequence[str], assignments: Sequence[str]) -> int:
    if not Path("/run/systemd/system").is_dir():
        raise UsageError("--under-unit: systemd does not run this machine, so there is no unit to look from inside of",
                         hint="`pdd check` looks from here, `pdd check --live` asks a running node what it sees.")
    if not _BUS.exists():  # systemd-run can wait for what it runs, and pass its output on, over the bus alone
        raise UsageError(f"--under-unit: systemd-run needs the system bus, and there is no {_BUS}",
                         hint="Install and start dbus (`systemctl start dbus`); `pdd check --live` needs none.")
    if options.instance is None:
        raise UsageError("--under-unit: which node? Give -i NAME, as in pdd@NAME")
    name = f"pdd@{options.instance}.service"
    shown = subprocess.run(["systemctl", "cat", name], capture_output=True, text=True, check=False)
    if shown.returncode != 0:
        raise DaemonNotRunning(f"systemd has no unit {name}: {shown.stderr.strip()}", hint="Install the unit first.")
    unit = shown.stdout.replace("%i", options.instance)
    words = [sys.executable, "-m", "pdd", "-c", str(options.config or _SETTINGS_DIR / f"{options.instance}.toml"),
             "-i", options.instance, "--run-dir", str(options.run_dir or "/run/pdd"), "check"]
    words += ["--only", only] if only else []
    words += ["--strict"] if strict else []
    words += [each for peer in peers for each in ("--peer", peer)] + [each for one in assignments for each in ("--set", one)]
    words += ["--json"] if options.json else []
    return subprocess.run(unit_command(unit, words), check=False).returncode
