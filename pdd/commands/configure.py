"""config check, show, init, schema: the settings, without a daemon."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from pdd import config
from pdd.commands.common import Globals, print_json
from pdd.config_load import ConfigProblems, load
from pdd.errors import EXIT_CONFIG

_WIDTH = 100


def check(options: Globals, file: Path | None, assignments: Sequence[str]) -> int:
    """Prints every mistake; the exit code."""
    problems: Sequence[Any] = ()
    try:
        load(file or options.config, assignments=assignments)
    except ConfigProblems as error:
        problems = error.problems
        if not options.json:
            print(error)
    if options.json:
        fields = ("file", "line", "column", "key", "message", "suggestion")
        rows = [{name: getattr(problem, name) for name in fields} for problem in problems]
        print_json({"schema": "pdd.config_check/1", "file": str(file or options.config or ""), "problems": rows})
    elif not problems:
        print("no problems")
    return EXIT_CONFIG if problems else 0


def show(options: Globals, origin: bool, defaults: bool, assignments: Sequence[str]) -> None:
    """The settings that a `serve` from here would have."""
    loaded, origins = load(options.config, assignments=assignments)
    values = {key: value_of(loaded, key) for key in config.all_fields()}
    if options.json:
        settings = {key: {"value": value, "origin": str(origins[key])} for key, value in values.items()}
        print_json({"schema": "pdd.config/1", "settings": settings})
        return
    for key, field in config.all_fields().items():
        if defaults or origins[key].kind != "default":
            print(f"{key} = {toml_text(field, values[key])}{f'  # {origins[key]}' if origin else ''}")


def init() -> None:
    print(template(), end="")


def schema(options: Globals) -> None:
    print_json(json_schema())


def value_of(loaded: config.Config, key: str) -> Any:
    """The value of "section.key"."""
    section, name = key.split(".")
    return getattr(getattr(loaded, section), name)


# -- forms of the model ------------------------------------------------------------------------------------------------
def toml_text(field: Any, value: Any) -> str:
    """A value as it stands in TOML."""
    form = config.text_form(field)
    if form is not None:
        value = form.format(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
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
    ]
    for name, section in config.sections().items():
        lines += ["", "", f"# {section.__doc__}", f"[{name}]"]
        for key, field in section.model_fields.items():
            lines += ["", *textwrap.wrap(field.description or "", _WIDTH, initial_indent="# ", subsequent_indent="# ")]
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
            form = config.text_form(field)
            if form is not None and field.default is not PydanticUndefined:
                entry["default"] = form.format(field.default)
    for entry in document["properties"].values():
        entry.pop("default", None)  # a section's default repeats those of its keys, in the wrong form
    return document
