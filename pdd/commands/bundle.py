"""bundle: everything that a bug report needs, in one archive.

Asks the daemon for its documents and packs them with the dumps of the flight recorder, the settings file and the
journal of the unit. What cannot be had is named with its reason; a node that is dead still has files. Prompts are never
in it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pdd import config_sources
from pdd.commands.common import Globals, note, print_json
from pdd.commands.redact import Redactor
from pdd.control import dump_files, paths
from pdd.errors import ControlError, UsageError
from pdd.units import counted, show_bytes
from pdd.version import VERSION

_SECONDS = 5.0
_MOST_EXPLAINED = 16  # requests
_JOURNAL_LINES = 5000
_DOCUMENTS = (  # name, path, whether it is on the private socket alone
    ("version", "/version", False),
    ("status", "/v1/status", False),
    ("peers", "/v1/peers", False),
    ("transfers", "/v1/transfers", False),
    ("topology", "/v1/topology", False),
    ("requests", "/v1/requests", True),
    ("config", "/v1/config", True),
    ("logs", "/v1/logs", True),
    ("waterfall", "/v1/waterfall", True),
    ("flight", "/v1/flight", True),
)


class _Bundle:
    """What will be packed: names, contents, and why something is not in it."""

    def __init__(self, redactor: Redactor) -> None:
        self.redactor = redactor
        self.files: dict[str, bytes] = {}
        self.missing: list[dict[str, str]] = []

    def add_document(self, name: str, document: Any) -> None:
        cleaned = self.redactor.clean(document)
        self.files[f"{name}.json"] = json.dumps(cleaned, ensure_ascii=False, indent=1).encode()

    def add_text(self, name: str, text: str) -> None:
        self.files[name] = self.redactor.text(text).encode()

    def lacks(self, name: str, why: str) -> None:
        self.missing.append({"name": name, "why": why})


def bundle(options: Globals, out: Path | None, redact: bool) -> None:
    directory = options.instance_dir()
    name = directory.name
    path = out or Path(f"pdd-{name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar.gz")
    if path.exists():
        raise UsageError(f"--out: {path} is there already", hint="Choose another name.")
    made = _Bundle(Redactor(everything=redact))
    _ask(options, made)
    _add_dumps(made, directory)
    _add_settings(options, made)
    _add_journal(made, name)
    document = _write(path, name, made, redact)
    if options.json:
        print_json(document)
        return
    for entry in document["entries"]:
        print(f"{show_bytes(entry['bytes']):>8}  {entry['name']}")
    for lack in document["missing"]:
        print(f"       -  {lack['name']}: {lack['why']}")
    hidden = ", ".join(counted(number, what) for what, number in document["redactions"].items()) or "nothing"
    print(f"hidden: {hidden}" + ("" if redact else " (--no-redact)"))
    note(options, f"{path}: {show_bytes(document['bytes'])}; read it before you give it away")


# -- what goes in --------------------------------------------------------------------------------------------------------
def _ask(options: Globals, made: _Bundle) -> None:
    """The daemon's documents, as far as it answers."""
    client = options.client(_SECONDS)
    got: dict[str, Any] = {}

    def get(name: str, path: str, private: bool) -> None:
        try:
            got[name] = client.get(path, private=private)
        except ControlError as error:
            made.lacks(f"{name}.json", f"{error.message} [{error.id}]")

    for name, path, private in _DOCUMENTS:
        get(name, path, private)
    rows = (got.get("requests") or {}).get("requests") or []
    for row in sorted(rows, key=lambda row: -row["age_seconds"])[:_MOST_EXPLAINED]:
        get(f"explain/{row['id']}", f"/v1/requests/{quote(row['id'], safe='')}/explain", True)
    for document in got.values():
        made.redactor.meet(document)
    for name, document in got.items():
        made.add_document(name, document)
    try:
        made.add_text("metrics.txt", client.text("/v1/metrics"))
    except ControlError as error:
        made.lacks("metrics.txt", f"{error.message} [{error.id}]")


def _add_dumps(made: _Bundle, directory: Path) -> None:
    """What the daemon has written when it failed, by its own rule of where."""
    import gzip

    folders = dump_files.directories(directory)
    found = {dump_files.stem(path): path for folder in folders for path in dump_files.kept(folder)}
    for name, path in sorted(found.items()):
        with _told(made, f"dumps/{path.name}", path):
            made.add_document(f"dumps/{name}", json.loads(gzip.decompress(path.read_bytes())))
    if not found:
        made.lacks("dumps/", f"there is none in {' or '.join(map(str, folders))}")


def _add_settings(options: Globals, made: _Bundle) -> None:
    """The files that a start from here would read: of a node that is dead, all there is."""
    candidates = [options.config] if options.config else config_sources.search_path(os.environ, is_root=os.geteuid() == 0)
    existing = next((path for path in candidates if path.is_file()), None)
    if existing is None:
        made.lacks("settings/", f"there is no file at {', '.join(map(str, candidates))}")
        return
    for path in config_sources.with_drop_ins(existing):
        with _told(made, f"settings/{path.name}", path):
            made.add_text(f"settings/{path.name}", path.read_text())


def _add_journal(made: _Bundle, name: str) -> None:
    """Of the unit, if there is one; a daemon's log outlives it there."""
    if shutil.which("journalctl") is None or not paths.SYSTEM_RUN_DIR.parent.joinpath("systemd/system").is_dir():
        made.lacks("journal.txt", "this machine has no journal")
        return
    command = ["journalctl", "--no-pager", "-o", "short-precise", "-n", str(_JOURNAL_LINES), "-u", f"pdd@{name}"]
    try:
        said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                              timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        made.lacks("journal.txt", f"journalctl: {error}")
        return
    made.add_text("journal.txt", said.stdout)


@contextlib.contextmanager
def _told(made: _Bundle, name: str, path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError) as error:  # not to be read, cut off, or no JSON
        made.lacks(name, f"{path} cannot be read: {error}")


# -- the archive ---------------------------------------------------------------------------------------------------------
def _write(path: Path, name: str, made: _Bundle, redact: bool) -> dict[str, Any]:
    """Mode 0600; whole or not at all."""
    document: dict[str, Any] = {
        "schema": "pdd.bundle/1", "path": str(path), "bytes": 0, "client": VERSION, "redacted": redact,
        "entries": [{"name": each, "bytes": len(body)} for each, body in sorted(made.files.items())],
        "missing": made.missing, "redactions": dict(sorted((+made.redactor.counts).items())),
    }
    part = path.with_name(f".{path.name}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with _removed_unless_done(part), os.fdopen(descriptor, "wb") as raw:
            with tarfile.open(fileobj=raw, mode="w:gz") as archive:
                add = _adder(archive, f"pdd-{name}")
                add("manifest.json", json.dumps(document, ensure_ascii=False, indent=1).encode())
                for each, body in sorted(made.files.items()):
                    add(each, body)
            raw.flush()
            os.link(part, path)  # never over a file that is there
            part.unlink()
    except FileExistsError:
        raise UsageError(f"--out: {path} is there already", hint="Choose another name.") from None
    except OSError as error:
        raise UsageError(f"--out: {path} cannot be written: {error.strerror or error}") from None
    return {**document, "bytes": path.stat().st_size}


@contextlib.contextmanager
def _removed_unless_done(part: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _adder(archive: tarfile.TarFile, folder: str) -> Callable[[str, bytes], None]:
    now = int(time.time())

    def add(name: str, body: bytes) -> None:
        info = tarfile.TarInfo(f"{folder}/{name}")
        info.size, info.mode, info.mtime = len(body), 0o600, now
        archive.addfile(info, io.BytesIO(body))

    return add
