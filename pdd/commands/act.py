"""drain, resume, reload, model import: what changes something."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from pdd.commands.common import Globals, note, print_json
from pdd.commands.look import status_line
from pdd.errors import HOW_TO_INSTALL, DaemonNotRunning, NotInstalled, RefusedInState, TimedOut
from pdd.units import counted, show_bytes

_POLL_SECONDS = 0.2
_RELOAD_SECONDS = 30.0  # a model folder and a libfabric are looked at


def drain(options: Globals, wait: bool) -> None:
    """Starts the drain and waits for its end. The deadline is the daemon's: it fails what is left by then."""
    client = options.client()
    client.timeout = 2.0
    body = {} if options.timeout is None else {"timeout_seconds": options.timeout}
    try:
        document = client.post("/v1/drain", body)
    except TimedOut as error:
        raise TimedOut(error.message, hint=f"{error.hint} `pdd resume` takes a drain back.") from None
    shown = ""
    while wait and document["state"] != "drained":
        if document["state"] == "ready":
            raise RefusedInState("the node was resumed while it drained")
        left = (
            f"draining: {counted(document['running'] + document['waiting'] + document['waiting_for_kv'], 'request')}, "
            f"{counted(document['transfers']['attempts'] + document['transfers']['prefills'], 'transfer')} left"
        )
        if left != shown and not options.json:
            note(options, left)
            shown = left
        time.sleep(_POLL_SECONDS)
        try:
            document = client.get("/v1/status")
        except DaemonNotRunning:  # it was stopped as well: nothing is left to drain
            document = {**document, "state": "drained"}
    _print(options, document)


def resume(options: Globals) -> None:
    _print(options, options.client().post("/v1/resume"))


def reload(options: Globals, dry_run: bool) -> None:
    document = options.client(_RELOAD_SECONDS).post("/v1/reload", {"dry_run": dry_run})
    if options.json:
        print_json(document)
        return
    word = "would be applied" if document["dry_run"] else "applied"
    found = [(word, document["applied"]), ("needs restart", document["needs_restart"])]
    told = [f"{name}: {', '.join(each['key'] for each in changed)}" for name, changed in found if changed]
    if document.get("reread"):  # a daemon of before it has none
        word = "would be read again" if document["dry_run"] else "read again"
        told.append(f"{word}: the file of {', '.join(document['reread'])}")
    print("; ".join(told) or "nothing has changed")


def _print(options: Globals, document: dict[str, Any]) -> None:
    if options.json:
        print_json(document)
    else:
        print(status_line(options, document))


def model_import(options: Globals, source: str, directory: Path) -> None:
    try:
        from pdd.model.gguf_import import import_model
    except ImportError as error:
        raise NotInstalled(f"importing a model needs {error.name}", hint=HOW_TO_INSTALL) from None
    bar = sys.stderr.isatty() and not options.quiet and not options.json

    def progress(phase: str, done: int, total: int) -> None:
        if bar:
            share = f"{done / total:4.0%} of {show_bytes(total)}" if total else show_bytes(done)
            print(f"\r{phase:12} {share}\x1b[K", end="", file=sys.stderr, flush=True)

    try:
        imported = import_model(source, directory, progress)
    finally:
        if bar:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if options.json:
        print_json({"schema": "pdd.model_import/1", "directory": str(directory), "sha256": imported.sha256})
    else:
        print(f"{directory}  sha256 {imported.sha256}")
