"""Man pages, etc/pdd.toml and the units say what the code does:

every option, command and setting, in both directions.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer.main

from pdd import config, units
from pdd.commands.configure import default_text, json_schema, template
from pdd.commands.tree import program
from pdd.config_load import load
from tests.tree.imports import ROOT

MAN = ROOT / "man"
UNIT = ROOT / "systemd" / "pdd@.service"


# -- pdd(1) ------------------------------------------------------------------------------------------------------------
def options_of_the_command() -> set[tuple[str, str]]:
    """(command path, option) of everything Typer knows; the path of global options is ""."""
    found = set()

    def walk(command: Any, path: str) -> None:
        found.add((path, ""))
        for parameter in command.params:
            if parameter.param_type_name == "option":
                found.update((path, option) for option in [*parameter.opts, *parameter.secondary_opts])
        for name, child in getattr(command, "commands", {}).items():
            walk(child, f"{path} {name}".strip())

    walk(typer.main.get_command(program.app), "")
    groups = {("bench", ""), ("config", ""), ("model", ""), ("plan", "")}
    return {(path, option) for path, option in found if option not in ("--help", "-h")} - groups


def options_of_the_page(text: str) -> set[tuple[str, str]]:
    """The same, from the lists of the mdoc source: an `.It Fl` belongs to the `.It Cm` around it."""
    found = {("", "")}
    stack: list[str] = []
    commands = {path for path, _ in options_of_the_command()}
    section = ""
    for line in text.splitlines():
        if line.startswith(".Sh"):
            section = line
        if line.startswith(".Bl"):
            stack.append(stack[-1] if stack else "")
        elif line.startswith(".El"):
            stack.pop()
        elif line.startswith(".It Cm") and section == ".Sh COMMANDS":
            words = line.replace("Op ", "").split(" Ar ")[0].split()[2:]
            path = " ".join(word for word in words if word != "Cm")
            path = path if path in commands else path.split()[0]
            stack[-1] = path
            found.add((path, ""))
        elif line.startswith(".It Fl"):
            found.update((stack[-1], option) for option in _flags(line))
    return {(path, option) for path, option in found if option not in ("--help", "-h")}


def _flags(line: str) -> Iterator[str]:
    for word in line.split(" Ar ")[0].split()[2:]:
        if word not in (",", "Fl"):
            yield f"-{word}"


def test_pdd_1_has_every_command_and_option_and_no_other() -> None:
    page = options_of_the_page((MAN / "pdd.1").read_text())
    assert page == options_of_the_command()


def test_a_missing_and_a_surplus_option_are_seen() -> None:
    text = (MAN / "pdd.1").read_text()
    assert options_of_the_page(text.replace(".It Fl -dry-run", ".It Fl -wet-run")) != options_of_the_command()
    assert options_of_the_page(text.replace(".It Cm resume", ".It Cm peers")) != options_of_the_command()


def test_every_exit_code_is_in_pdd_1() -> None:
    from pdd import cli, errors

    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    text = (MAN / "pdd.1").read_text().split(".Sh EXIT STATUS")[1]
    assert {int(code) for code in re.findall(r"^\.It (\d+)$", text, re.M)} == codes | {cli.EXIT_INTERRUPTED, cli.EXIT_UNREAD}


def test_every_error_code_is_in_pdd_1() -> None:
    text = (MAN / "pdd.1").read_text().split(".Sh DIAGNOSTICS")[1]
    source = "".join(path.read_text() for path in (ROOT / "pdd").rglob("*.py"))
    assert re.findall(r"^\.It (E\d+)$", text, re.M) == sorted(set(re.findall(r'"(E\d{3})"', source)))


# -- pdd.toml(5) and etc/pdd.toml --------------------------------------------------------------------------------------
def test_pdd_toml_5_has_every_setting_and_no_other() -> None:
    page = re.findall(r"^\.It Cm ([a-z_]+\.[a-z_]+)( Em R)?$", (MAN / "pdd.toml.5").read_text(), re.M)
    assert [key for key, _ in page] == list(config.all_fields())
    assert {key for key, mark in page if mark} == {key for key, field in config.all_fields().items() if config.is_live(field)}


def test_pdd_toml_5_has_every_default_and_every_choice() -> None:
    parts = re.split(r"^\.It Cm ", (MAN / "pdd.toml.5").read_text(), flags=re.M)[1:]
    entries = {part.split()[0]: re.split(r"^\.El", part.partition("\n")[2], flags=re.M)[0] for part in parts}
    for key, field in config.all_fields().items():
        default = default_text(field).strip('"')
        if default not in ("", "[]") and key not in ("node.role", "node.name"):
            told = re.search(r"^Default:? (\S+?)[.:]?( .*)?$", entries[key], re.M)
            assert told, key
            assert told[1] == default, key
        if get_origin(field.annotation) is Literal:
            assert set(get_args(field.annotation)) <= set(re.findall(r"\w+", entries[key])), key


def test_etc_pdd_toml_is_what_config_init_prints() -> None:
    assert (ROOT / "etc" / "pdd.toml").read_text() == template()


def test_etc_pdd_toml_explains_every_setting_and_its_values_are_the_defaults(tmp_path: Path) -> None:
    text = (ROOT / "etc" / "pdd.toml").read_text()
    keys = re.findall(r"^#([a-z_]+) = ", text, re.M)
    assert keys == [key.split(".")[1] for key in config.all_fields()]
    assert re.findall(r"^\[(\w+)\]$", text, re.M) == list(config.sections())
    file = tmp_path / "pdd.toml"
    file.write_text(re.sub(r"^#([a-z_]+ = )", r"\1", text, flags=re.M))
    loaded, _ = load(file, env={}, demo=True)
    plain, _ = load(env={"PDD_NODE__ROLE": "both", "PDD_NODE__NAME": "node-1"}, demo=True, search=False)
    assert loaded == plain


def test_the_schema_has_defaults_in_the_form_of_the_file() -> None:
    schema = json_schema()
    assert schema["$defs"]["Drain"]["properties"]["timeout"]["default"] == "2m"
    assert schema["additionalProperties"] is False


# -- linters -----------------------------------------------------------------------------------------------------------
def test_the_unit_is_valid(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("=pdd ", "=/bin/true "))  # verify wants the program to exist
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    ours = [line for line in result.stderr.splitlines() if UNIT.name in line]
    assert ours == []


def test_the_unit_is_shut_in(tmp_path: Path) -> None:
    """systemd's own measure of the sandbox, 0 (nothing is open) to 10; what is open is named in the unit with its reason."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=22"]  # tenths
    good = subprocess.run([*command, str(UNIT)], capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stdout[-400:] + good.stderr
    assert "Overall exposure level" in good.stdout
    open_unit = tmp_path / UNIT.name
    open_unit.write_text(re.sub(r"^(ProtectSystem|SystemCallFilter)=.*\n", "", UNIT.read_text(), flags=re.M))
    assert subprocess.run([*command, str(open_unit)], capture_output=True, check=False).returncode != 0


def test_the_unit_fits_the_daemon() -> None:
    settings = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if re.match(r"[A-Z]\w+=", line))
    assert settings["Type"] == "notify"
    assert settings["LimitMEMLOCK"] == "infinity"
    assert settings["RestartPreventExitStatus"].split() == ["77", "78"]
    assert float(settings["TimeoutStopSec"]) > config.Drain().timeout
    words = settings["ExecStart"].split()
    assert words[:2] == ["pdd", "serve"]
    known = {option for path, option in options_of_the_command() if path in ("", "serve")}
    assert {word for word in words if word.startswith("--")} <= known
    assert settings["ExecReload"].split()[0] == "pdd"  # waits until it is done, and its exit status says how
    assert settings["ExecReload"].split()[-1] == "reload"
    assert units.parse_duration(settings["TimeoutStartSec"].replace("min", "m")) > 0


def test_global_options_are_the_ones_that_are_read() -> None:
    from pdd import cli

    documented = {option for path, option in options_of_the_command() if path == "" and option}
    assert documented == {*cli._LONG, *cli._WITH_VALUE, *cli._WITHOUT_VALUE}
