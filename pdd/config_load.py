"""Loads the settings of a node: merges the sources, checks all of them, and says everything that is wrong at once.

`load` returns the config and the origin of each key, or raises ConfigProblems with every mistake. The rules that involve
more than one setting (config_rules.py) also run when other settings are wrong, as far as the keys they look at are fine.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from pdd import config_sources as sources
from pdd import names
from pdd.config import Config, all_fields, sections, values
from pdd.config_rules import broken_rules
from pdd.config_sources import Origin, Problem, Setting
from pdd.config_types import text_form
from pdd.errors import ConfigError
from pdd.units import counted

Origins = dict[str, Origin]
_NEAR = 0.65  # difflib's ratio, from which on another name is suggested


class ConfigProblems(ConfigError):
    """Every mistake found in one load. `str()` is one line per mistake, then the count.

    `usable`: config and origins of what is not wrong, with defaults for the rest, where there is as much as that.
    `wrong`: the keys of that rest.
    """

    def __init__(self, problems: Sequence[Problem], usable: tuple[Config, Origins] | None = None,
                 wrong: Set[str] = frozenset()) -> None:
        count = counted(len(problems), "problem")
        super().__init__("\n".join([*(str(problem) for problem in problems), count]))
        self.problems = tuple(problems)
        self.usable = usable
        self.wrong = wrong


def load(
    file: Path | None = None,
    *,
    flags: Sequence[Setting] = (),
    assignments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    demo: bool = False,
    search: bool = True,
) -> tuple[Config, Origins]:
    """The config of this node and where each value came from.

    Args:
        file: the config file; it must exist. None: the first of `search_path` that does, if `search`.
        flags: values of flags that have a name of their own.
        assignments: texts of `--set`, in order; they win over `flags`.
        env: variables; None is the process's own.
        demo: no model path is needed, and the role defaults to both.
    Raises:
        ConfigProblems: everything that is wrong.
    """
    env = os.environ if env is None else env
    found, problems, files = _read_files(file, env, search)
    if problems:  # what else would be reported is what the unread part may well say
        raise ConfigProblems(problems)
    from_env, strange = sources.read_environment(env)
    problems += [_strange_variable(name) for name in strange]
    for assignment in assignments:
        entry = sources.from_assignment(assignment)
        if isinstance(entry, Problem):
            problems.append(entry)
        else:
            flags = [*flags, entry]
    defaults = [Setting("node.role", "both", Origin("default", "--demo"))] if demo else []
    winners: dict[str, Setting] = {}
    known = all_fields()
    unknown_sections: set[tuple[str, str]] = set()
    for setting in [*defaults, *found, *from_env, *flags]:
        if setting.key in known:
            winners[setting.key] = setting
        elif (problem := _unknown_key(setting, unknown_sections)) is not None:
            problems.append(problem)
    config, field_problems, wrong = _validate(winners, demo)
    problems += field_problems
    origins = {key: winners[key].origin if key in winners else Origin("default") for key in known}
    if problems:
        problems = [of_file(problem, files) for problem in problems]
        raise ConfigProblems(sorted(problems, key=reading_order), (config, origins), wrong)
    return config, origins


def explained(config: Config, origins: Mapping[str, Origin]) -> dict[str, Any]:
    """The pdd.config/1 document: each value, as TOML has it, and where it comes from."""
    fields = all_fields()
    settings = {}
    for key, value in values(config).items():
        form = text_form(fields[key])
        settings[key] = {"value": form.format(value) if form else value, "origin": str(origins.get(key, Origin("default")))}
    return {"schema": "pdd.config/1", "settings": settings}


def reading_order(problem: Problem) -> tuple[bool, str, bool, int]:
    return problem.file is None, problem.file or problem.place, problem.line is None, problem.line or 0


def of_file(problem: Problem, files: Sequence[Path]) -> Problem:
    """With the first of the files that were read, where it names no place: what is missing has none."""
    if problem.place or not files:
        return problem
    return dataclasses.replace(problem, place=str(files[0]), file=str(files[0]))


def _read_files(
    file: Path | None, env: Mapping[str, str], search: bool
) -> tuple[list[Setting], list[Problem], list[Path]]:
    """Settings, mistakes, and the files that were read, the weakest first."""
    if file is None and search:
        candidates = sources.search_path(env, is_root=os.geteuid() == 0)
        named = bool(env.get(sources.FILE_VARIABLE))
        file = next((path for path in candidates if named or path.is_file()), None)
    found: list[Setting] = []
    problems: list[Problem] = []
    files = sources.with_drop_ins(file) if file else []
    for path in files:
        settings, mistakes = sources.read_file(path)
        found += settings
        problems += mistakes
    return found, problems, files


# -- one setting -------------------------------------------------------------------------------------------------------
def _unknown_key(setting: Setting, unknown_sections: set[tuple[str, str]]) -> Problem | None:
    """A message for a key that is not there; one per unknown section and place, not one per key in it."""
    section, _, key = setting.key.partition(".")
    known = sections()
    is_env = setting.origin.kind == "env"
    if section in known and not key:
        return Problem.at(setting.origin, section, f"is a table; write [{section}]")
    if section in known:
        near = _near(key, list(known[section].model_fields))
        suggestion = f"{section}.{near}" if near else _only_one_named(key)
        if suggestion and is_env:
            suggestion = sources.variable_name(suggestion)
        return Problem.at(setting.origin, setting.key, "no such setting", suggestion)
    place = (setting.origin.file or setting.origin.place + setting.origin.written_as, section)
    if place in unknown_sections:
        return None
    unknown_sections.add(place)
    if is_env:
        return _strange_variable(setting.origin.written_as)
    suggestion = _near(section, list(known)) if key else _only_one_named(section)
    return Problem.at(setting.origin, section, "no such section", suggestion)


def _near(name: str, names: Sequence[str]) -> str | None:
    """The one of `names` that `name` is a slip of the pen for."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=_NEAR)
    return close[0] if close else None


def _only_one_named(name: str) -> str | None:
    """The setting of that name, if it is in exactly one section."""
    found = [key for key in all_fields() if key.split(".")[1] == name]
    return found[0] if len(found) == 1 else None


def _strange_variable(name: str) -> Problem:
    wanted = name.removeprefix(sources.PREFIX).lower()  # the common prefix must not make all names alike
    near = _near(wanted.replace("__", ".", 1), list(all_fields())) or _only_one_named(wanted)
    return Problem("environment", name, "no such setting", sources.variable_name(near) if near else None)


def _typed(setting: Setting, field: Any) -> Any:
    """The value of a text setting by the type of its key. What does not parse stays text for the model to refuse."""
    if not setting.is_text or text_form(field) is not None:
        return setting.value
    text = setting.value
    try:
        if get_origin(field.annotation) is tuple:
            return _list(text)
        if field.annotation is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        if field.annotation in (int, float):
            return field.annotation(text)
    except ValueError:
        return text
    return text


def _list(text: str) -> Any:
    """The list of `["a", "b"]` or `a,b`. A bare `[::1]:7700` is one address, not an array."""
    try:
        return tomllib.loads(f"value = {text}")["value"] if text.startswith("[") else _split(text)
    except tomllib.TOMLDecodeError:
        return _split(text)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _validate(winners: Mapping[str, Setting], demo: bool) -> tuple[Config, list[Problem], Set[str]]:
    """The config, where wrong settings have their defaults, what is wrong, and the keys of those settings."""
    known = all_fields()
    values = {key: _typed(setting, known[key]) for key, setting in winners.items()}
    origins = {key: setting.origin for key, setting in winners.items()}
    try:
        config = Config.model_validate(_nested(values))
    except ValidationError as error:
        problems: dict[tuple[str, int | None], Problem] = {}
        for item in error.errors(include_url=False):
            key = ".".join(str(part) for part in item["loc"][:2])
            index = next((part for part in item["loc"][2:3] if isinstance(part, int)), None)
            problem = Problem.at(origins.get(key, Origin("default")), key, _explain(key, known[key], item), index=index)
            problems.setdefault((key, index), problem)
        wrong = {key for key, index in problems if index is None}
        entries = {key: _good_entries(values[key], {index for other, index in problems if other == key})
                   for key, _ in problems if key not in wrong}
        rest = {key: value for key, value in values.items() if key not in wrong}
        rest |= {key: [values[key][index] for index in good] for key, good in entries.items()}
        rest.setdefault("node.role", "both")  # stands in for the wrong one, whose rules are skipped below
        usable = Config.model_validate(_nested(rest))
        more = [rule for rule in broken_rules(usable, origins, demo, entries) if not rule.keys & wrong]
        # What a rule says of a list as a whole is not known while entries of it are wrong.
        told = [rule.problem for rule in more if rule.is_of_entry or not rule.keys & entries.keys()]
        return usable, [*problems.values(), *told], wrong
    return config, [rule.problem for rule in broken_rules(config, origins, demo, {})], frozenset()


def _good_entries(entries: Sequence[Any], wrong: set[int | None]) -> list[int]:
    """The places in a list of what is right in it."""
    return [index for index in range(len(entries)) if index not in wrong]


def _nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tree: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    for key, value in values.items():
        section, name = key.split(".", 1)
        tree[section][name] = value
    return tree


def _explain(key: str, field: Any, item: Any) -> str:
    """One sentence for one mistake that pydantic found."""
    name = key.split(".")[1]
    value = item.get("input")
    shown = f'"{value}"' if isinstance(value, str) else repr(value)
    if get_origin(field.annotation) is Literal:
        choices = [f'"{choice}"' for choice in get_args(field.annotation)]
        use = f"use {', '.join(choices[:-1])} or {choices[-1]}"
        if item["type"] == "missing":
            return f"required; {use}"
        return f"{shown} is not a{'n' if name[0] in 'aeiou' else ''} {name}; {use}"
    kinds = {
        "int_type": "a whole number",
        "int_parsing": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "text",
        "tuple_type": "a list of texts",
        "int_from_float": "a whole number",
    }
    if item["type"] in kinds:
        return f"{shown} is not {kinds[item['type']]}"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    if item["type"] == "string_pattern_mismatch":
        return f"{shown} is not a valid {name}: {names.RULE}"
    bound = next(iter(item.get("ctx", {}).values()), None)
    form = text_form(field)
    limit = form.format(bound) if form and bound else bound
    words = {
        "greater_than_equal": "at least",
        "greater_than": "more than",
        "less_than_equal": "at most",
        "less_than": "less than",
    }
    if item["type"] in words:
        shown = form.format(value) if form and not isinstance(value, str) else str(value)
        return f"{shown} must be {words[item['type']]} {limit}"
    return str(item["msg"])
