"""Writes docs/api/NAME.json, the JSON Schema of every document of the control API and the command line.

Run it after a change of a schema in pdd/control/ or of pdd/commands/documents.py; a test fails until it was.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import msgspec

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pdd.bench import result as bench  # noqa: E402
from pdd.commands import documents as printed  # noqa: E402
from pdd.control import schema as api  # noqa: E402
from pdd.control import schema_check as checks  # noqa: E402
from pdd.control import schema_events, stories  # noqa: E402
from pdd.kv import dry_run_report  # noqa: E402

DOCUMENTS: dict[str, Any] = {
    "status": api.Status,
    "requests": api.Requests,
    "request": api.OneRequest,
    "cancel": api.Cancelled,
    "peers": api.Peers,
    "transfers": api.TransferList,
    "logs": api.Logs,
    "ping": checks.Ping,
    "compare": checks.Comparison,
    "config_env": printed.Variables,
    "check": checks.CheckReport,
    "reload": checks.Reload,
    "stacks": api.Stacks,
    "waterfall": api.Waterfall,
    "explain": stories.Explain,
    "flight": stories.Flight,
    "version": api.Version | printed.Versions,
    "events": schema_events.EventLine,
    "problem": api.Problem,
    "error": printed.Error,
    "config": printed.Settings,
    "config_check": printed.ConfigCheck,
    "model_check": printed.ModelCheck,
    "model_import": printed.ModelImport,
    "recording": printed.Recording | printed.Recorded,
    "bundle": printed.Bundle,
    "topology_check": printed.TopologyCheck,
    "topology_export": printed.TopologyExport,
    "topology": printed.Topology,
    "bench_kv": bench.Report,
    "plan_transfer": dry_run_report.Report,
}


def schema_text(name: str) -> str:
    """The JSON Schema (2020-12) of one document, as it stands in docs/api."""
    kinds = DOCUMENTS[name]
    alike = ("version", "recording")  # two shapes that msgspec cannot tell apart by itself
    parts = kinds.__args__ if name in alike else (kinds,)
    shapes, components = msgspec.json.schema_components(parts, ref_template="#/$defs/{name}")
    found = shapes[0] if len(shapes) == 1 else {"anyOf": list(shapes)}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"pdd.{name}/1"}
    return json.dumps({**head, **found, "$defs": components}, indent=1) + "\n"


def main() -> None:
    directory = ROOT / "docs" / "api"
    directory.mkdir(parents=True, exist_ok=True)
    for name in DOCUMENTS:
        (directory / f"{name}.json").write_text(schema_text(name))


if __name__ == "__main__":
    main()
