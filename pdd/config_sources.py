"""Where settings are read from: TOML files with positions, PDD_ variables, flags. No meaning of any key is known here.

tomllib gives values without positions, so `positions` scans the text once more for the line and column of each key. A
value that comes as text (variable, `--set`) stays text until `config_load` knows the type of its key.
"""

from __future__ import annotations

import dataclasses
import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

PREFIX = "PDD_"
FILE_VARIABLE = "PDD_CONFIG"
TEST_PREFIX = "PDD_TEST_"  # left to test suites
# What Kubernetes sets in every container of a namespace that has a service named pdd or pdd-something.
_SERVICE_LINK = re.compile(
    r"PDD_([A-Z0-9_]*_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?)?)"
)

_MOST_BYTES = 1 << 20  # of a file of settings

SourceKind = Literal["default", "file", "env", "flag"]


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where one value comes from. `place` is what a message shows: "pdd.toml:4:1", "environment", "--role"."""

    kind: SourceKind
    place: str = ""
    file: str | None = None
    line: int | None = None
    column: int | None = None
    written_as: str = ""  # the name the user wrote, when it is not section.key

    def __str__(self) -> str:
        return {"default": "default", "env": f"env {self.written_as}"}.get(self.kind, self.place)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One value as found. `is_text`: it still has to be read by the type of its key."""

    key: str  # section.key
    value: Any
    origin: Origin
    is_text: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One mistake, as `pdd config check` shows it."""

    place: str
    key: str
    message: str
    suggestion: str | None = None
    file: str | None = None
    line: int | None = None
    column: int | None = None
    level: Literal["error", "warning"] = "error"  # a node starts in spite of a warning
    id: str = "E780"
    hint: str = ""

    def __str__(self) -> str:
        hint = f"; did you mean {self.suggestion}?" if self.suggestion else f". {self.hint}" if self.hint else ""
        mark = "warning: " if self.level == "warning" else ""
        return f"{self.place}{'  ' if self.place else ''}{self.key}{': ' if self.key else ''}{mark}{self.message}{hint}"

    @classmethod
    def at(cls, origin: Origin, key: str, message: str, suggestion: str | None = None, index: int | None = None) -> Problem:
        """`index`: which entry of a list, from 0."""
        shown = origin.written_as if origin.kind == "env" else key
        entry = "" if index is None else f"[{index}]"
        return cls(origin.place, shown + entry, message, suggestion, origin.file, origin.line, origin.column)


def search_path(env: Mapping[str, str], *, is_root: bool) -> list[Path]:
    """Files that are tried, in order, when none is named. The variable, when set, is the only one."""
    if env.get(FILE_VARIABLE):
        return [Path(env[FILE_VARIABLE])]
    home = env.get("XDG_CONFIG_HOME") or (env.get("HOME", "") + "/.config" if env.get("HOME") else "")
    own = [Path(home) / "pdd" / "pdd.toml"] if home and not is_root else []
    return [*own, Path("/etc/pdd/pdd.toml")]


def with_drop_ins(path: Path) -> list[Path]:
    """The file and the conf.d/*.toml beside it, weakest first."""
    return [path, *sorted((path.parent / "conf.d").glob("*.toml"))]


def read_file(path: Path) -> tuple[list[Setting], list[Problem]]:
    """Every value of one TOML file. A table below a section stays one value: no setting is a table."""
    try:
        text = _text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        return [], [Problem(str(path), "", f"cannot be read: {reason}", file=str(path))]
    import tomllib  # here, because clients that find no file need none of it

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return [], [_syntax_problem(path, text, error)]
    places = positions(text)
    settings = []
    for section, table in document.items():
        entries = table.items() if isinstance(table, dict) else [("", table)]
        for key, value in entries:
            name = f"{section}.{key}" if key else section
            line, column = places.get((section, key) if key else (section,), (1, 1))
            settings.append(Setting(name, value, Origin("file", f"{path}:{line}:{column}", str(path), line, column)))
    return settings, []


def _text(path: Path) -> str:
    """The text of a file that may be anything; a pipe (`-c <(...)`) is read, too.

    Raises:
        OSError: it cannot be read, or is longer than any settings. UnicodeDecodeError
    """
    with path.open("rb") as file:
        contents = file.read(_MOST_BYTES + 1)
    if len(contents) > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"it is longer than {_MOST_BYTES >> 20} MiB")
    return contents.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def _syntax_problem(path: Path, text: str, error: ValueError) -> Problem:
    message = str(error)
    found = re.search(r"\(at line (\d+), column (\d+)\)", message)
    line, column = (int(found[1]), int(found[2])) if found else (text.count("\n") + 1, 1)
    reason = message.split(" (at ")[0]
    reason = _in_words(text, line, reason) or f"{reason[0].lower()}{reason[1:]}"
    return Problem(f"{path}:{line}:{column}", "", f"not TOML: {reason}", None, str(path), line, column)


def _in_words(text: str, number: int, reason: str) -> str | None:
    """What is wrong in line `number`, where that is a slip that is often made."""
    lines = text.split("\n")
    line, before = lines[number - 1] if number <= len(lines) else "", lines[: number - 1]
    header, pair = _TABLE.match(line), _KEY.match(line)
    if header and reason.startswith("Cannot declare"):
        return f"[{header[1]}] is there twice{_first(before, _path(header[1]))}"
    if pair is None:
        return None
    key, value = pair[1], line[pair.end() :].partition("#")[0].strip()
    if reason.startswith("Cannot overwrite"):
        section = next((found[1] for each in reversed(before) if (found := _TABLE.match(each))), "")
        return f"{key} is there twice{_first(before, (*_path(section), *_path(key)))}"
    if reason.startswith("Illegal character '\\n'"):
        return f"the text of {key} has no quote at its end"
    if not reason.startswith(("Invalid value", "Expected newline")):
        return None
    if not value:
        return f"{key} has no value"
    if value.lower() in ("true", "false"):
        return f"{key}: {value} is written {value.lower()}"
    return f'text needs quotes: {key} = "{value}"' if _BARE_TEXT.fullmatch(value) else None


def _path(name: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in name.split(".")) if name else ()


def _first(before: Sequence[str], path: tuple[str, ...]) -> str:
    """Where a key stands among the lines before."""
    place = positions("\n".join(before)).get(path)
    return "" if place is None else f", first in line {place[0]}"


_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_KEY = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")
_BARE_TEXT = re.compile(r"[^\s\"'\[\]{}=,]+")
_TABLE = re.compile(r"\s*\[\[?\s*([^\]\n]+?)\s*\]")
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}]|\n', re.S
)


def positions(text: str) -> dict[tuple[str, ...], tuple[int, int]]:
    """(line, column), from 1, of each key path in a valid TOML document: ("node", "role") → (4, 1)."""
    found: dict[tuple[str, ...], tuple[int, int]] = {}
    table: tuple[str, ...] = ()
    for line, offset in _statements(text):
        header = _TABLE.match(text, offset)
        pair = None if header else _KEY.match(text, offset)
        match = header or pair
        if match is None:
            continue
        start = match.start(1)
        path = _path(match[1])
        if header:
            table = path
        else:
            path = table + path
        column = start - (text.rfind("\n", 0, start) + 1) + 1
        for depth in range(1, len(path) + 1):
            found.setdefault(path[:depth], (line, column))
    return found


def _statements(text: str) -> Iterator[tuple[int, int]]:
    """(line, offset) of each line that is not inside a multi-line string, array or inline table."""
    line, depth = 1, 0
    yield line, 0
    for token in _TOKEN.finditer(text):
        piece = token[0]
        if piece in "[{":
            depth += 1
        elif piece in "]}":
            depth -= 1
        elif piece == "\n":
            line += 1
            if depth == 0:
                yield line, token.end()
        else:
            line += piece.count("\n")


def read_environment(env: Mapping[str, str]) -> tuple[list[Setting], list[str]]:
    """Values of PDD_SECTION__KEY variables, and names of PDD_ variables that have no such form."""
    settings, strange = [], []
    for name in sorted(env):
        if not name.startswith(PREFIX) or name == FILE_VARIABLE or name.startswith(TEST_PREFIX):
            continue
        section, separator, key = name.removeprefix(PREFIX).partition("__")
        if separator and section and key:
            origin = Origin("env", "environment", written_as=name)
            settings.append(Setting(f"{section}.{key}".lower(), env[name], origin, is_text=True))
        elif _SERVICE_LINK.fullmatch(name) is None:
            strange.append(name)
    return settings, strange


def variable_name(key: str) -> str:
    """PDD_ENGINE__MAX_BATCH_SIZE of "engine.max_batch_size"."""
    return PREFIX + key.upper().replace(".", "__", 1)


def from_flag(key: str, value: Any, flag: str) -> Setting:
    """A value that a flag of its own gives, already of the right type or text with a unit."""
    return Setting(key, value, Origin("flag", flag))


def from_assignment(assignment: str) -> Setting | Problem:
    """The value of one `--set section.key=value`."""
    key, equals, value = assignment.partition("=")
    if not equals or "." not in key:
        return Problem("--set", "", f'"{assignment}" is not an assignment; write --set section.key=value')
    return Setting(key.strip(), value, Origin("flag", "--set"), is_text=True)
