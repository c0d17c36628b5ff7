"""Which module imports which, from the source alone: nothing is imported to find out."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = (
    ("errors", "findings", "history", "address", "config", "config_types", "config_sources", "config_rules", "config_load",
     "config_credentials", "units", "metrics", "metrics_vllm", "log", "log_ring", "memfd", "installed", "names", "open_files",
     "sdnotify", "states", "version"),
    ("topology",),
    ("fabric", "kv"),
    ("model",),
    ("engine",),
    ("messenger",),
    ("control", "api"),
    ("doctor",),
    ("daemon",),
    ("tui", "bench"),
    ("cli", "commands", "__main__"),
)
# Parts of one layer are strangers, but for these, which are one thing in several files.
_ONE_THING = ({*LAYERS[0]}, {"cli", "commands", "__main__"})
# (importer, imported part): the only modules of that part it may see.
_NARROW = {
    ("model", "kv"): {"pdd.kv.layout"},
    ("messenger", "engine"): {"pdd.engine.request", "pdd.engine.batch"},
}
# The rank process is `python -m pdd.engine.worker`, with what only it imports.
_TORCH_PARTS = ("pdd.model.", "pdd.engine.worker", "pdd.engine.rank_group", "pdd.engine.rank_runner", "pdd.engine.rank_start", "pdd.engine.kv_memory",
                "pdd.engine.gpu_counter", "pdd.engine.sampler")
_LIGHT = ("pdd.cli", "pdd.commands", "pdd.tui", "pdd.control.client", "pdd.control.paths")
_TOO_HEAVY = ("torch", "starlette", "uvicorn", "httpx", "transformers")


@dataclasses.dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules(root: Path = ROOT) -> dict[str, str]:
    """Module name → source of everything in pdd/."""
    found = {}
    for path in sorted((root / "pdd").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def imports(name: str, source: str, known: set[str]) -> Iterator[Import]:
    """Every import statement, inside functions and under TYPE_CHECKING too. `from pdd import log` is pdd.log."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                yield Import(name, "." * node.level + base, node.lineno)
                continue
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(name, full if full in known or base in ("pdd",) else base, node.lineno)


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def layer_of(part: str) -> int | None:
    return next((level for level, parts in enumerate(LAYERS) if part in parts), None)


def violations(sources: dict[str, str]) -> list[str]:
    """What breaks the rules of the tree, one line each."""
    found = []
    known = set(sources)
    for name, source in sources.items():
        part = part_of(name)
        if part and layer_of(part) is None:
            found.append(f"{name} is in no layer")
        for each in imports(name, source, known):
            found += [f"{each}: {why}" for why in [_why_not(part, each)] if why]
    return found


def _why_not(part: str, each: Import) -> str | None:
    top = each.imported.split(".")[0]
    if each.imported.startswith("."):
        return "relative imports hide the layer"
    if top == "torch" and not f"{each.importer}.".startswith(_TORCH_PARTS):
        return "torch belongs to model and to the rank process"
    if top in _TOO_HEAVY and each.importer.startswith(_LIGHT):
        return f"{top} is too heavy for a client"
    if top != "pdd" or each.imported == "pdd":
        return None
    other = part_of(each.imported)
    mine, theirs = layer_of(part), layer_of(other)
    if mine is None or theirs is None or other == part:
        return None
    if theirs > mine:
        return "it is in a higher layer"
    if theirs == mine and not any({part, other} <= group for group in _ONE_THING):
        return "they are strangers of one layer"
    allowed = _NARROW.get((part, other))
    if allowed is not None and each.imported not in allowed:
        return f"only {', '.join(sorted(allowed))} may be seen from here"
    return None


def reachable(start: str, sources: dict[str, str]) -> dict[str, Import | None]:
    """Modules of pdd that importing `start` can bring in, however late, each with the import that does."""
    known = set(sources)
    found: dict[str, Import | None] = {name: None for name in known if name == start or name.startswith(f"{start}.")}
    waiting = list(found)
    while waiting:
        name = waiting.pop()
        for each in imports(name, sources[name], known):
            if each.imported in known and each.imported not in found:
                found[each.imported] = each
                waiting.append(each.imported)
    return found
