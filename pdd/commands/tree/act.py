"""Telling a running node what to do."""

from __future__ import annotations

from typing import Annotated

import typer

from pdd.commands.tree.base import OF_A_NODE, Command, app


@app.command(cls=Command, epilog=OF_A_NODE)
def drain(
    ctx: typer.Context,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it is drained, or at once.")] = True,
) -> None:
    """Let running work finish and take no new work."""
    from pdd.commands.act import drain as run

    run(ctx.obj, wait)


@app.command(cls=Command, epilog=OF_A_NODE)
def resume(ctx: typer.Context) -> None:
    """Take new work again after a drain."""
    from pdd.commands.act import resume as run

    run(ctx.obj)


@app.command(cls=Command, epilog=OF_A_NODE)
def reload(
    ctx: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
) -> None:
    """Read the settings again and apply what can be."""
    from pdd.commands.act import reload as run

    run(ctx.obj, dry_run)
