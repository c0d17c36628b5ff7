"""Running a node, and looking at what it does."""

from __future__ import annotations

from typing import Annotated

import typer

from pdd.commands.tree.base import OF_A_NODE, Assignments, Command, also, app
from pdd.errors import UsageError


@app.command(cls=Command, epilog=also("-c FILE", "-i NAME", "--run-dir DIR", "-v", "--json (for the log)"))
def serve(
    ctx: typer.Context,
    role: Annotated[str | None, typer.Option("--role", metavar="ROLE", help="prefill, decode or both.")] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of this node.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="DIR", help="The model's folder.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", metavar="N", help="Ranks that compute together.")] = None,
    listen: Annotated[str | None, typer.Option("--listen", metavar="HOST:PORT", help="The HTTP port.")] = None,
    peer_listen: Annotated[
        str | None, typer.Option("--peer-listen", metavar="HOST:PORT", help="Where decoders connect.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option("--peer", metavar="HOST:PORT", help="A prefiller; repeatable.")
    ] = None,
    dp: Annotated[int | None, typer.Option("--dp", metavar="N", help="Replica groups behind one API.")] = None,
    assignments: Assignments = None,
    demo: Annotated[bool, typer.Option("--demo", help="Make a tiny random model and serve that.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything that needs no device, show the settings, stop.")
    ] = False,
) -> None:
    """Run a node in the foreground."""
    from pdd.commands.serve import serve as run

    flags = {
        "--role": role,
        "--name": name,
        "--model": model,
        "--tp": tp,
        "--listen": listen,
        "--peer-listen": peer_listen,
        "--peer": peer or None,
        "--dp": dp,
    }
    raise typer.Exit(run(ctx.obj, flags, assignments or [], demo, dry_run))


@app.command(cls=Command, epilog=also("-i NAME", "--json", "--timeout TIME", "-v"))
def status(
    ctx: typer.Context,
    wait: Annotated[str | None, typer.Option("--wait", metavar="STATE", help="Wait until ready or drained.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Print again whenever something changes.")] = False,
) -> None:
    """How the node is, in one line."""
    from pdd.commands.look import status as run

    if wait not in (None, "ready", "drained"):
        raise UsageError(f'--wait: "{wait}" is none of ready, drained')
    run(ctx.obj, wait, watch)


@app.command(cls=Command, epilog=OF_A_NODE)
def requests(
    ctx: typer.Context,
    action: Annotated[str, typer.Argument(metavar="ACTION", help="ls, show or cancel.")] = "ls",
    request_id: Annotated[str | None, typer.Argument(metavar="ID", help="For show and cancel.")] = None,
) -> None:
    """Live requests: list, look at one, end one."""
    from pdd.commands import look

    if action == "ls" and request_id is None:
        look.requests(ctx.obj)
    elif action in ("show", "cancel") and request_id is not None:
        (look.request if action == "show" else look.cancel)(ctx.obj, request_id)
    elif action in ("show", "cancel"):
        raise UsageError(f"{action} needs an ID", hint="`pdd requests` lists the live ones.")
    elif action == "ls":
        raise UsageError(f"ls takes no ID: write `pdd requests show {request_id}`")
    else:
        raise UsageError(f'"{action}" is none of ls, show, cancel', hint="See `pdd requests --help`.")


@app.command(cls=Command, epilog=OF_A_NODE)
def explain(
    ctx: typer.Context,
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Of a live or lately ended request; its beginning will do.")],
) -> None:
    """Why a request hangs, failed or took its time: its story."""
    from pdd.commands.explain import explain as run

    run(ctx.obj, request_id)


@app.command(cls=Command, epilog=OF_A_NODE)
def peers(
    ctx: typer.Context,
    action: Annotated[str, typer.Argument(metavar="ACTION", help="ls, ping or compare.")] = "ls",
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="For ping and compare: a name or HOST:PORT.")] = None,
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, max=100, help="Round trips of a ping.")] = 3,
) -> None:
    """The nodes this node works with: list, time, compare."""
    from pdd.commands import look

    if action == "ls" and name is None:
        look.peers(ctx.obj)
    elif action == "ping" and name is not None:
        look.ping(ctx.obj, name, count)
    elif action == "compare" and name is not None:
        raise typer.Exit(look.compare(ctx.obj, name))
    else:
        raise UsageError("write `pdd peers`, `pdd peers ping NAME` or `pdd peers compare NAME`")


@app.command(cls=Command, epilog=OF_A_NODE)
def transfers(ctx: typer.Context) -> None:
    """What was written to peers and counted from them."""
    from pdd.commands.look import transfers as run

    run(ctx.obj)
