"""Settings files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdd.commands.tree.base import Assignments, Command, also, config_app
from pdd.errors import UsageError


@config_app.command("check", cls=Command, epilog=also("-c FILE", "--json"))
def config_check(
    ctx: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The file; else the one that serve would read.")
    ] = None,
    assignments: Assignments = None,
) -> None:
    """Find every mistake in the settings and in what they name."""
    from pdd.commands.configure import check

    raise typer.Exit(check(ctx.obj, file, assignments or []))


@config_app.command("show", cls=Command, epilog=also("-c FILE", "--json", "-i NAME (with --live)"))
def config_show(
    ctx: typer.Context,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    defaults: Annotated[bool, typer.Option("--defaults", help="Show settings that are at their default too.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Of the running node, not of a start from here.")] = False,
    assignments: Assignments = None,
) -> None:
    """Print the settings that serve would use, or that a node uses."""
    from pdd.commands.configure import show

    if live and assignments:
        raise UsageError("--set says what would be, --live what is: give one of them")
    show(ctx.obj, origin, defaults, live, assignments or [])


@config_app.command("env", cls=Command, epilog=also("-c FILE", "--json"))
def config_env(
    ctx: typer.Context,
    defaults: Annotated[bool, typer.Option("--defaults", help="Settings that are at their default, too.")] = False,
    assignments: Assignments = None,
) -> None:
    """Print the settings as PDD_ variables."""
    from pdd.commands.configure import env

    env(ctx.obj, defaults, assignments or [])


@config_app.command("init", cls=Command)
def config_init() -> None:
    """Print a settings file with every setting explained."""
    from pdd.commands.configure import init

    init()


@config_app.command("schema", cls=Command)
def config_schema(ctx: typer.Context) -> None:
    """Print the JSON Schema of the settings file."""
    from pdd.commands.configure import schema

    schema(ctx.obj)
