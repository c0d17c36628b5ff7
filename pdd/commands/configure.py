"""config check, show, env, init, schema: the settings, without a daemon but for `show --live`."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from pdd import config
from pdd.commands import preflight
from pdd.commands.common import Globals, print_json
from pdd.config import Config
from pdd.config_load import ConfigProblems, Origins, explained, load, of_file, reading_order
from pdd.config_sources import Problem, variable_name
from pdd.config_types import text_form
from pdd.errors import EXIT_CONFIG
from pdd.units import counted

_WIDTH = 100


def check(options: Globals, file: Path | None, assignments: Sequence[str]) -> int:
    """Prints every mistake, in the settings and in what they name on this machine; the exit code."""
    problems: list[Problem] = []
    usable: tuple[Config, Origins] | None
    try:
        usable = load(file or options.config, assignments=assignments)
    except ConfigProblems as error:
        problems, usable = [*error.problems], error.usable
    if usable is not None:  # a wrong setting has its default here, so nothing is said about it twice
        found = [*problems, *preflight.problems(*usable)]
        if (named := file or options.config) is not None:
            found = [of_file(problem, [named]) for problem in found]
        problems = sorted(found, key=reading_order)
    if options.json:
        fields = ("file", "line", "column", "key", "message", "suggestion", "level", "id", "hint")
        rows = [{name: getattr(problem, name) for name in fields} for problem in problems]
        print_json({"schema": "pdd.config_check/1", "file": str(file or options.config or ""), "problems": rows})
    else:
        print("\n".join([*map(str, problems), counted(len(problems), "problem") if problems else "no problems"]))
    return EXIT_CONFIG if any(problem.level == "error" for problem in problems) else 0


def show(options: Globals, origin: bool, defaults: bool, live: bool, assignments: Sequence[str]) -> None:
    """The settings that a `serve` from here would have, or that the running node has.

    Raises:
        ConfigProblems: some are wrong or missing; the others were printed.
    """
    if live:
        _show(options, options.client().get("/v1/config", private=True), origin, defaults)
        return
    try:
        document = explained(*load(options.config, assignments=assignments))
    except ConfigProblems as error:
        if error.usable is not None:
            document = explained(*error.usable)
            document["settings"] = {key: each for key, each in document["settings"].items() if key not in error.wrong}
            _show(options, document, origin, defaults)
        raise
    _show(options, document, origin, defaults)


def _show(options: Globals, document: dict[str, Any], origin: bool, defaults: bool) -> None:
    if options.json:
        print_json(document)
        return
    for key, setting in document["settings"].items():
        if defaults or setting["origin"] != "default":
            print(f"{key} = {_toml(setting['value'])}{'  # ' + setting['origin'] if origin else ''}")


def env(options: Globals, defaults: bool, assignments: Sequence[str]) -> None:
    """As a shell and a unit's EnvironmentFile= read them."""
    document = explained(*load(options.config, assignments=assignments))
    variables = {
        variable_name(key): ",".join(setting["value"]) if isinstance(setting["value"], tuple | list)
        else _toml(setting["value"]).strip('"')
        for key, setting in document["settings"].items() if defaults or setting["origin"] != "default"
    }
    if options.json:
        print_json({"schema": "pdd.config_env/1", "variables": variables})
        return
    for name, value in variables.items():
        print(f"{name}={shlex.quote(value)}")


def init() -> None:
    print(template(), end="")


def schema(options: Globals) -> None:
    print_json(json_schema())


# -- forms of the model ------------------------------------------------------------------------------------------------
def toml_text(field: Any, value: Any) -> str:
    """A value as it stands in TOML."""
    form = text_form(field)
    return _toml(value if form is None else form.format(value))


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(f'"{item}"' for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def template() -> str:
    """etc/pdd.toml: every setting, explained and commented out at its default."""
    lines = [
        "# Settings of a pdd node. Every setting is here, commented out, with its default; pdd.toml(5) says more.",
        '# Durations are text with a unit ("500ms", "30s", "5m"), sizes too ("64KiB", "8MiB").',
        "# A bare number is seconds, or bytes.",
        "# `pdd config check FILE` finds all mistakes at once; an unknown setting is one.",
        "# Stronger than this file: conf.d/*.toml beside it, then PDD_SECTION__KEY variables, then flags.",
        "# [R]: `pdd reload` gives a new value to a running node; everything else needs a restart.",
    ]
    for name, section in config.sections().items():
        lines += ["", "", f"# {section.__doc__}", f"[{name}]"]
        for key, field in section.model_fields.items():
            text = f"{field.description}{' [R]' if config.is_live(field) else ''}"
            lines += ["", *textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")]
            lines.append(f"#{key} = {default_text(field)}")
    return "\n".join(lines) + "\n"


def default_text(field: Any) -> str:
    if field.default is PydanticUndefined:
        return '"node-1"' if field.default_factory else '"both"'
    return toml_text(field, field.default)


def json_schema() -> dict[str, Any]:
    """For editors: JSON Schema with defaults as they are written in TOML."""
    document = config.Config.model_json_schema()
    for section in config.sections().values():
        for key, field in section.model_fields.items():
            entry = document["$defs"][section.__name__]["properties"][key]
            form = text_form(field)
            if form is not None and field.default is not PydanticUndefined:
                entry["default"] = form.format(field.default)
    for entry in document["properties"].values():
        entry.pop("default", None)  # a section's default repeats those of its keys, in the wrong form
    return document
