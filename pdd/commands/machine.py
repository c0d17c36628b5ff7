"""topology: what a machine has, what is chosen on it, and what an operator should know of it.

Of this machine the choice is that of the node that runs here, as it says itself; without one, what a node with default
settings would choose.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from pdd.commands.common import Globals, note, print_json
from pdd.errors import EXIT_CHECK, EXIT_OK, PddError, UsageError

ACTIONS = ("show", "check")


def topology(options: Globals, action: str = "show", path: Path | None = None, form: str | None = None,
             target: Path | None = None, ascii_only: bool = False, anonymous: bool = False) -> int:
    """Prints one form or the findings, or writes an export to `target`. Returns the exit code."""
    from pdd.topology import show

    if action not in ACTIONS:
        raise UsageError(f'topology: "{action}" is none of {", ".join(ACTIONS)}')
    if form is not None and form not in show.FORMATS:
        raise UsageError(f'--format: "{form}" is none of {", ".join(show.FORMATS)}')
    if form is not None and (target is not None or (options.json and form != "json")):
        raise UsageError("--format does not go with " + ("--export" if target is not None else "--json"))
    if action == "check":
        if form is not None or target is not None or anonymous:
            raise UsageError("topology check takes --input alone")
        return _check(options, path)
    if target is not None:
        _export(options, target, path, anonymous)
        return EXIT_OK
    machine, document = _read(options, path, anonymous)
    print(show.show(machine, form or ("json" if options.json else "tree"), document=document, ascii_only=ascii_only,
                    width=_width()), flush=True)
    return EXIT_OK


def _export(options: Globals, target: Path, path: Path | None, anonymous: bool) -> None:
    from pdd.topology import source

    entries = source.export(target, path, anonymous=anonymous)
    if options.json:
        print_json({"schema": "pdd.topology_export/1", "path": str(target), "entries": entries})
    else:
        note(options, f"{target}: {entries} entries; read it with `pdd topology --input {target}`")


def _check(options: Globals, path: Path | None) -> int:
    """Findings alone; EXIT_CHECK when one is a warning or worse."""
    from pdd.findings import LEVELS

    findings = _read(options, path, anonymous=False)[1]["findings"]
    if options.json:
        print_json({"schema": "pdd.topology_check/1", "findings": findings})
    else:
        for each in findings:
            print(f"{each['level'].upper():4} {each['id']} {each['message']}")
        if not findings:
            note(options, "nothing found")
    return EXIT_CHECK if any(LEVELS.index(each["level"]) >= LEVELS.index("warn") for each in findings) else EXIT_OK


def _read(options: Globals, path: Path | None, anonymous: bool) -> tuple[Any, dict[str, Any]]:
    """(topology, its document)."""
    from pdd.topology import report, source
    from pdd.topology.anonymize import Anonymizer
    from pdd.topology.placement import Wanted, plan_placement

    machine = source.load(path)
    if anonymous:
        machine = Anonymizer().topology(machine)
    if path is not None or anonymous:  # no node is of another machine, and what one says has names in it
        return machine, report.document(machine)
    document = report.document(machine, plan_placement(machine, Wanted()))
    running = _of_the_node(options)
    if running is not None:
        document["placement"] = running
        document["findings"] += report.stale(machine, running)
    return machine, document


def _of_the_node(options: Globals) -> list[dict[str, Any]] | None:
    """What the node that runs here chose when it started; None: there is none, or none that answers."""
    try:
        found: list[dict[str, Any]] | None = options.client().get("/v1/topology").get("placement")
    except PddError as error:
        if options.verbose:
            note(options, f"no node was asked for its choice: {error.message}")
        return None
    return found


def _width() -> int:
    """Columns of the screen; 0, endless, where there is none."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        return 0
    return shutil.get_terminal_size().columns
