"""What every command shares: the global options, the daemon behind them, and how things are printed.

Data goes to stdout, messages to stderr. Stdlib only, and nothing is imported before it is needed: this is the path of
`pdd status`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pdd import names, units
from pdd.control import paths
from pdd.errors import HOW_TO_INSTALL, NotInstalled, PddError, UsageError

if TYPE_CHECKING:
    from pdd.control.client import Client

_COLORS = {"red": "31", "green": "32", "yellow": "33", "dim": "2"}
_STATE_COLORS = {"ready": "green", "up": "green", "draining": "yellow", "suspect": "yellow", "connecting": "yellow",
                 "down": "red", "incompatible": "red", "auth": "red", "not_ready": "red"}


@dataclasses.dataclass(frozen=True, slots=True)
class Globals:
    """The options that may stand before or after any command."""

    config: Path | None = None
    instances: tuple[str, ...] = ()
    run_dir: Path | None = None
    sockets: tuple[Path, ...] = ()
    json: bool = False
    color: str = "auto"
    quiet: bool = False
    verbose: bool = False
    timeout: float | None = None

    @property
    def instance(self) -> str | None:
        """The one that was named. Raises UsageError for several, which only `pdd top` takes, and for what is no name."""
        for name in self.instances:
            _check_name("-i", name)
        return _only("-i", self.instances)

    @property
    def socket(self) -> Path | None:
        return _only("--socket", self.sockets)

    def client(self, timeout: float = 2.0) -> Client:
        """The chosen daemon. `timeout`: seconds to wait for an answer when --timeout does not say."""
        from pdd.control.client import Client

        return Client(self.instance_dir(), socket=self.socket, timeout=self.timeout or timeout)

    def instance_dir(self) -> Path:
        """RUN_DIR/NAME: of -i, else of PDD_NODE__NAME, else the only instance there is (the only one that answers, where
        others left their sockets behind), else that of the host name."""
        run_dirs, found = self._found()
        name = self.instance
        if name is None and (name := os.environ.get("PDD_NODE__NAME") or None):
            _check_name("PDD_NODE__NAME", name)
        if name is None and self.socket is None:
            host = socket.gethostname().split(".")[0]
            if len(found) > 1:
                found = {name: at for name, at in found.items() if paths.answers(at)} or found
            if len(found) > 1 and host not in found:
                places = " and ".join(map(str, run_dirs))
                raise UsageError(
                    f"several instances in {places}: {', '.join(sorted(found))}", hint="Choose one with -i NAME."
                )
            name = next(iter(found)) if len(found) == 1 else host
        return found.get(name or "", run_dirs[0] / (name or ""))

    def instance_dirs(self) -> list[Path]:
        """Of all that -i names, else of all that answer, else of the one that `instance_dir` finds."""
        run_dirs, found = self._found()
        if len(self.instances) > 1:
            for name in self.instances:
                _check_name("-i", name)
            return [found.get(name, run_dirs[0] / name) for name in self.instances]
        if not self.instances and not os.environ.get("PDD_NODE__NAME"):
            alive = [at for _, at in sorted(found.items()) if paths.answers(at)]
            if len(alive) > 1:
                return alive
        return [self.instance_dir()]

    def _found(self) -> tuple[list[Path], dict[str, Path]]:
        """Where nodes of this machine may be, and those that have a socket, by name."""
        configured_dir = None if self.run_dir else configured(self.config, "control.dir")
        chosen = self.run_dir or (Path(configured_dir) if configured_dir else None)
        run_dirs = [chosen] if chosen else paths.run_dirs()
        return run_dirs, {name: at / name for at in reversed(run_dirs) for name in paths.instances(at)}


def _check_name(where: str, name: str) -> None:
    if not names.is_name(name):
        raise UsageError(f'{where}: "{name}" is not a node name: {names.RULE}')


_Named = TypeVar("_Named")


def _only(option: str, given: tuple[_Named, ...]) -> _Named | None:
    if len(given) > 1:
        raise UsageError(f"{option} is given {len(given)} times", hint="Only `pdd top` looks at several nodes.")
    return given[0] if given else None


def configured(file: Path | None, key: str) -> str | None:
    """One setting for a client: its variable, else the config file; None when neither has it as text or true/false.

    The file is not checked here: a broken one is `pdd config check`'s business, and must not stop `pdd status`.
    """
    from pdd import config_sources

    if value := os.environ.get(config_sources.variable_name(key)):
        return value
    candidates = [file] if file else config_sources.search_path(os.environ, is_root=os.geteuid() == 0)
    existing = next((path for path in candidates if path.is_file()), None)
    found: object = None
    for path in config_sources.with_drop_ins(existing) if existing else ():
        for setting in config_sources.read_file(path)[0]:
            found = setting.value if setting.key == key else found
    if isinstance(found, bool):
        return "true" if found else "false"
    return found if isinstance(found, str) and found else None


def require_native() -> None:
    """Raises NotInstalled when the native core is not there."""
    try:
        importlib.import_module("pdd.fabric._native")
    except ImportError as error:
        raise NotInstalled(f"pdd's native core cannot be loaded: {error}", hint=HOW_TO_INSTALL) from None


# -- printing ----------------------------------------------------------------------------------------------------------
def print_json(document: Any) -> None:
    print(json.dumps(document, ensure_ascii=False), flush=True)


def note(options: Globals, message: str) -> None:
    """A message for people, on stderr; silent with -q."""
    if not options.quiet:
        print(message, file=sys.stderr, flush=True)


def paint(options: Globals, text: str, color: str | None) -> str:
    """`text` in a color, where the terminal and the user want one. Never the only sign of anything."""
    wanted = options.color == "always" or (
        options.color == "auto"
        and sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )
    return f"\x1b[{_COLORS[color]}m{text}\x1b[0m" if wanted and color else text


def paint_state(options: Globals, state: str) -> str:
    return paint(options, state, _STATE_COLORS.get(state))


def table(rows: Iterable[Sequence[object]], header: Sequence[str]) -> str:
    """Left-aligned columns, numbers right-aligned. A header alone when there are no rows."""
    texts = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    number = [bool(texts) and all(_is_number(row[i]) for row in texts) for i in range(len(header))]
    widths = [max(len(row[i]) for row in [list(header), *texts]) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, number, strict=True)
        )
        for row in [list(header), *texts]
    ]
    return "\n".join(line.rstrip() for line in lines)


def _is_number(text: str) -> bool:
    return text == "-" or text[:1].isdigit()


def duration(text: str | None, option: str) -> float | None:
    """Seconds of an option's value."""
    if text is None:
        return None
    try:
        seconds = units.parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if seconds > units.LONGEST_SECONDS:
        raise UsageError(f'{option}: "{text[:32]}" must be at most {units.format_duration(units.LONGEST_SECONDS)}')
    return seconds


def print_error(error: PddError, *, as_json: bool) -> None:
    """One line on stderr (a config's mistakes: one each), or a pdd.error/1 document."""
    if as_json:
        document = {
            "schema": "pdd.error/1",
            "id": error.id,
            "message": error.message,
            "hint": error.hint,
            "docs": "man:pdd-errors(7)",
        }
        print(json.dumps(document, ensure_ascii=False), file=sys.stderr)
        return
    if "\n" in error.message:
        print(f"{error.message} [{error.id}]", file=sys.stderr)
        return
    hint = f". {error.hint}" if error.hint else ""
    print(f"pdd: {error.message} [{error.id}]{hint}", file=sys.stderr)
