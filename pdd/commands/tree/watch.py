"""Watching a node, and what is told of one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdd.commands.common import duration
from pdd.commands.tree.base import OF_A_NODE, Command, also, app
from pdd.errors import UsageError


@app.command(cls=Command, epilog=OF_A_NODE)
def top(
    ctx: typer.Context,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture and exit; so too when stdout is no terminal.")
    ] = False,
    count: Annotated[int | None, typer.Option("--count", metavar="N", min=1, help="Print that many pictures and exit.")] = None,
    interval: Annotated[str | None, typer.Option("--interval", metavar="TIME", help="Time between pictures.")] = None,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="ASCII characters only.")] = False,
    tab: Annotated[str, typer.Option("--tab", metavar="NAME", help="The screen to begin with.")] = "overview",
    rows: Annotated[str, typer.Option("--filter", metavar="EXPR", help="Only rows of that screen that match.")] = "",
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FILE", help="Write what comes to FILE, for --replay.")
    ] = None,
    replay: Annotated[Path | None, typer.Option("--replay", metavar="FILE", help="Show a recording.")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="URL", help="A node elsewhere: ssh://[USER@]HOST[:PORT][/INSTANCE]; repeatable."),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Allow keys that change a node.")] = False,
) -> None:
    """One node or several live, on a full screen."""
    from pdd.commands.top import TopOptions
    from pdd.commands.top import top as run

    seconds = duration(interval, "--interval")
    run(ctx.obj, TopOptions(once, count, seconds, ascii_only, tab, rows, record, replay, host or (), admin))


@app.command(cls=Command, epilog=also("-i NAME", "--timeout TIME"))
def events(
    ctx: typer.Context,
    topic: Annotated[
        str, typer.Option("--topic", metavar="NAMES", help="status, transfers, requests, peers, topology, waterfall, logs.")
    ] = "",
    interval: Annotated[str | None, typer.Option("--interval", metavar="TIME", help="Time between lines.")] = None,
) -> None:
    """What the node says as it happens, one JSON object a line."""
    from pdd.commands.follow import events as run

    run(ctx.obj, [name for name in topic.split(",") if name], duration(interval, "--interval"))


@app.command(cls=Command, epilog=OF_A_NODE)
def logs(
    ctx: typer.Context,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what is logged from now on.")] = False,
    level: Annotated[str, typer.Option("--level", metavar="LEVEL", help="This and worse.")] = "debug",
    grep: Annotated[str | None, typer.Option("--grep", metavar="EXPR", help="Only lines that match.")] = None,
    since: Annotated[int, typer.Option("--since", metavar="SEQ", min=0, help="After the record of that number.")] = 0,
) -> None:
    """The node's latest log records."""
    from pdd.commands.follow import logs as run

    run(ctx.obj, follow, level, grep, since)


@app.command(cls=Command, epilog=also("-i NAME", "-c FILE", "--json", "-q"))
def bundle(
    ctx: typer.Context,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The .tar.gz to write.")] = None,
    redact: Annotated[
        bool, typer.Option("--redact/--no-redact", help="Hide credentials, clients' ids and hardware identities.")
    ] = True,
) -> None:
    """Pack what a bug report needs: documents, logs, dumps. Never prompts."""
    from pdd.commands.bundle import bundle as run

    run(ctx.obj, out, redact)


@app.command(cls=Command, epilog=OF_A_NODE)
def version(ctx: typer.Context) -> None:
    """Versions of this program and of the daemon."""
    from pdd.commands.look import version as run

    run(ctx.obj)


@app.command(cls=Command)
def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print the script that makes a shell complete pdd's words."""
    from pdd.commands.completion import script

    if shell not in ("bash", "zsh", "fish"):
        raise UsageError(f'"{shell}" is none of bash, zsh, fish')
    print(script(shell), end="")
