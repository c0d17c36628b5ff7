"""What this machine has, and whether it fits a node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdd.commands.tree.base import Assignments, Command, also, app


@app.command(cls=Command, epilog=also("--json", "-q"))
def topology(
    ctx: typer.Context,
    action: Annotated[str, typer.Argument(metavar="ACTION", help="show, or check: the findings alone.")] = "show",
    source: Annotated[
        Path | None,
        typer.Option("--input", metavar="PATH", help="Another machine's: a directory, an export, hwloc's or NCCL's XML."),
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", metavar="FORM", help="tree, matrix, json, nccl-xml or dot.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write what was read as a .tar.gz for --input.")
    ] = None,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="ASCII characters only.")] = False,
    anonymous: Annotated[
        bool, typer.Option("--anonymize", help="Without host name, UUIDs, serials, GIDs and MAC addresses.")
    ] = False,
) -> None:
    """GPUs, NICs and NUMA nodes, and the NICs that each GPU uses."""
    from pdd.commands.machine import topology as run

    raise typer.Exit(run(ctx.obj, action, source, form, target, ascii_only, anonymous))


@app.command(cls=Command, epilog=also("-c FILE", "-i NAME", "--json", "-q"))
def check(
    ctx: typer.Context,
    only: Annotated[
        str, typer.Option("--only", metavar="LIST", help="These checks: ids such as D020, or groups such as fabric.")
    ] = "",
    strict: Annotated[bool, typer.Option("--strict", help="A warning counts as a failure.")] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="HOST:PORT", help="Try this node, or `pdd bench kv --listen --keep` there; repeatable."),
    ] = None,
    under_unit: Annotated[bool, typer.Option("--under-unit", help="From inside the sandbox of the unit pdd@NAME.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Ask the running node what it sees.")] = False,
    assignments: Assignments = None,
) -> None:
    """Whether machine and settings fit a node."""
    from pdd.commands.check import check as run

    raise typer.Exit(run(ctx.obj, only, strict, peer or [], under_unit, live, assignments or []))
